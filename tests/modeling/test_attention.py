"""The motif (score, normalize, combine), each against an explicit loop in float64."""

import math

import pytest
import torch

from regard.modeling.attention import (
    ALIGNMENTS,
    AdditiveAlignment,
    Alignment,
    attend,
    combine,
    make_alignment,
    normalize,
)

B, Q, K, VALUE_WIDTH = 3, 5, 7, 4
# Query and key width: what the alignment allows.
WIDTHS = {"dot": (11, 11), "scaled_dot": (13, 13), "bilinear": (11, 13), "additive": (13, 11)}

# One query and one key, from the papers.
SCORE_OF_ONE_PAIR = {
    "dot": lambda p, q, k: sum(a * b for a, b in zip(q, k, strict=True)),
    "scaled_dot": lambda p, q, k: sum(a * b for a, b in zip(q, k, strict=True)) / math.sqrt(len(q)),
    "bilinear": lambda p, q, k: (q[:, None] * p["key.weight"] * k[None, :]).sum(),
    "additive": lambda p, q, k: sum(
        p["score.weight"][0, i]
        * torch.tanh((p["query.weight"][i] * q).sum() + p["query.bias"][i] + (p["key.weight"][i] * k).sum())
        for i in range(len(p["query.bias"]))
    ),
}

every_alignment = pytest.mark.parametrize("name", sorted(ALIGNMENTS))
every_type = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)


def test_every_alignment_has_a_reference():
    assert ALIGNMENTS.keys() == SCORE_OF_ONE_PAIR.keys() == WIDTHS.keys()


def random_case(name: str, dtype: torch.dtype = torch.float64) -> tuple[Alignment, torch.Tensor, torch.Tensor]:
    query_width, key_width = WIDTHS[name]
    alignment = make_alignment(name, query_width, key_width).to(dtype)
    query = torch.randn(B, Q, query_width, dtype=dtype, requires_grad=True)
    keys = torch.randn(B, K, key_width, dtype=dtype, requires_grad=True)
    return alignment, query, keys


def random_mask() -> torch.Tensor:
    """Some keys hidden in every row; in the second row of the first example all of them."""
    mask = torch.rand(B, Q, K) < 0.6
    mask[..., 2] = True
    mask[..., 3] = False
    mask[0, 1] = False
    return mask


def additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)


def attend_in_loops(name, parameters, query, keys, values, mask):
    """Context vectors and weights, one number after another."""
    contexts, weights = [], []
    for b in range(len(query)):
        for q in range(query.shape[1]):
            seen = [k for k in range(keys.shape[1]) if mask[b, q, k]]
            exponentials = [SCORE_OF_ONE_PAIR[name](parameters, query[b, q], keys[b, k]).exp() for k in seen]
            row = [torch.zeros((), dtype=query.dtype)] * keys.shape[1]
            context = torch.zeros(values.shape[-1], dtype=query.dtype)
            for k, exponential in zip(seen, exponentials, strict=True):
                row[k] = exponential / sum(exponentials)
                context = context + row[k] * values[b, k]
            contexts.append(context)
            weights.append(torch.stack(row))
    return torch.stack(contexts).view(*query.shape[:2], -1), torch.stack(weights).view(*query.shape[:2], -1)


@every_alignment
def test_attend_equals_an_explicit_loop(name):
    alignment, query, keys = random_case(name)
    values = torch.randn(B, K, VALUE_WIDTH, dtype=torch.float64, requires_grad=True)
    mask = random_mask()
    context, weights = attend(alignment, query, alignment.project_keys(keys), values, mask)
    expected_context, expected_weights = attend_in_loops(
        name, dict(alignment.named_parameters()), query, keys, values, mask
    )
    torch.testing.assert_close(context, expected_context)
    torch.testing.assert_close(weights, expected_weights)

    inputs = [query, keys, values, *alignment.parameters()]
    direction = torch.randn_like(context)
    gradients = torch.autograd.grad((context * direction).sum(), inputs)
    expected_gradients = torch.autograd.grad((expected_context * direction).sum(), inputs)
    torch.testing.assert_close(gradients, expected_gradients)


def test_the_alignments_differ_where_they_should():
    """Dot and scaled dot differ by the scale alone, the two with weights by their weights."""
    query, keys = torch.randn(B, Q, 11), torch.randn(B, K, 11)
    dot, scaled = (make_alignment(name, 11, 11)(query, keys) for name in ("dot", "scaled_dot"))
    torch.testing.assert_close(dot, scaled * math.sqrt(11))
    for name in ("bilinear", "additive"):
        one, other = make_alignment(name, 11, 11), make_alignment(name, 11, 11)
        assert not torch.allclose(one(query, one.project_keys(keys)), other(query, other.project_keys(keys)))


@every_alignment
def test_keys_are_projected_once_for_any_number_of_queries(name):
    alignment, query, keys = random_case(name)
    state = dict(vars(alignment))
    projected = alignment.project_keys(keys)
    whole = alignment(query, projected)
    # Another memory in between: what is passed in counts, nothing is remembered.
    alignment(query, alignment.project_keys(torch.randn_like(keys)))
    for step in range(Q):
        torch.testing.assert_close(alignment(query[:, step : step + 1], projected), whole[:, step : step + 1])
    assert vars(alignment) == state


def test_the_width_of_the_additive_alignment_is_free():
    alignment = AdditiveAlignment(11, 13, alignment_size=9)
    projected = alignment.project_keys(torch.randn(B, K, 13))
    assert projected.shape == (B, K, 9)
    assert alignment(torch.randn(B, Q, 11), projected).shape == (B, Q, K)


@pytest.mark.parametrize("name", ["dot", "scaled_dot"])
def test_dot_products_of_unequal_widths_are_refused(name):
    with pytest.raises(
        ValueError, match=r"one width, got 11 and 13: make them equal, or use 'bilinear' or 'additive'"
    ):
        make_alignment(name, 11, 13)


def test_an_unknown_alignment_is_answered_with_the_real_ones():
    with pytest.raises(ValueError, match=r"`alignment` \('dott'\) must be one of") as error:
        make_alignment("dott", 11, 11)
    assert all(name in str(error.value) for name in ALIGNMENTS)


def test_rows_of_weights_sum_to_one_and_hidden_keys_get_exactly_zero():
    mask = random_mask()
    weights = normalize(torch.randn(B, Q, K), mask)
    assert (weights[~mask] == 0).all()
    assert (weights[mask] > 0).all()
    torch.testing.assert_close(weights.sum(dim=-1), mask.any(dim=-1).float())
    without_mask = normalize(torch.randn(B, Q, K))
    torch.testing.assert_close(without_mask.sum(dim=-1), torch.ones(B, Q))


def test_a_row_that_sees_nothing_is_zero_and_leaves_the_others_alone():
    scores = torch.randn(B, Q, K, requires_grad=True)
    mask = random_mask()
    mask[2, 4] = False
    weights = normalize(scores, mask)
    assert (weights[2, 4] == 0).all()

    direction = torch.randn(B, Q, K)
    (gradient,) = torch.autograd.grad((weights * direction).sum(), scores)
    assert gradient.isfinite().all()
    assert (gradient[2, 4] == 0).all()
    # Nothing of that row enters the others: the same numbers come out when it is not there at all.
    others = normalize(scores[:, :4], mask[:, :4])
    (expected,) = torch.autograd.grad((others * direction[:, :4]).sum(), scores)
    torch.testing.assert_close(weights[:, :4], others)
    torch.testing.assert_close(gradient[:, :4], expected[:, :4])


@every_type
def test_a_boolean_and_an_additive_mask_do_the_same(dtype):
    scores = torch.randn(B, Q, K).to(dtype)
    mask = random_mask()
    assert normalize(scores, additive(mask, dtype)).equal(normalize(scores, mask))


@every_type
def test_a_mask_broadcasts_over_the_queries(dtype):
    scores, padding = torch.randn(B, Q, K).to(dtype), random_mask()[:, :1]
    assert normalize(scores, padding).equal(normalize(scores, padding.expand(B, Q, K)))
    assert normalize(scores, additive(padding, dtype)).equal(normalize(scores, padding))


@every_type
def test_the_sum_of_two_additive_masks_hides_what_either_hides(dtype):
    """Two lowest numbers add up to -inf, a row of which is NaN after a softmax."""
    scores = torch.randn(B, Q, K).to(dtype).requires_grad_()
    first, second = random_mask(), torch.rand(B, Q, K) < 0.7
    second[0, 1] = False  # as the first: this row is -inf throughout
    total = additive(first, dtype) + additive(second, dtype)
    assert total.isinf().any()
    weights = normalize(scores, total)
    assert weights.equal(normalize(scores, first & second))
    weights.square().sum().backward()
    assert scores.grad.isfinite().all()


def test_an_additive_mask_can_be_a_bias():
    scores, bias, mask = torch.randn(B, Q, K), torch.randn(B, Q, K) * 5, random_mask()
    expected = normalize(scores + bias, mask)
    torch.testing.assert_close(normalize(scores, bias + additive(mask, torch.float32)), expected)
    assert not torch.allclose(normalize(scores, mask), expected)


@every_type
@every_alignment
def test_every_alignment_is_finite_in_every_type_under_padding(name, dtype):
    alignment, query, keys = random_case(name, dtype)
    # The extremes of what fits: dot products reach the thousands.
    query, keys = query * 20, keys * 20
    values = torch.randn(B, K, VALUE_WIDTH).to(dtype)
    padding = torch.tensor([[True] * 7, [True] * 3 + [False] * 4, [False] * 7])[:, None]
    context, weights = attend(alignment, query, alignment.project_keys(keys), values, padding)
    assert context.dtype == weights.dtype == dtype
    assert context.isfinite().all()
    assert (weights[1, :, 3:] == 0).all()
    assert (weights[2] == 0).all()
    torch.testing.assert_close(weights[:2].float().sum(dim=-1), torch.ones(2, Q), atol=0.01, rtol=0)
    inputs = [query, keys, *alignment.parameters()]
    assert all(g.isfinite().all() for g in torch.autograd.grad(context.float().square().sum(), inputs))


@every_alignment
def test_what_stands_at_a_hidden_key_does_not_matter(name):
    alignment, query, keys = random_case(name)
    values, mask = torch.randn(B, K, VALUE_WIDTH, dtype=torch.float64), random_mask()
    other_keys, other_values = keys.clone(), values.clone()
    other_keys[:, 3], other_values[:, 3] = 50.0, -50.0
    context = attend(alignment, query, alignment.project_keys(keys), values, mask)[0]
    assert attend(alignment, query, alignment.project_keys(other_keys), other_values, mask)[0].equal(context)
    # Without the mask it does.
    seen = attend(alignment, query, alignment.project_keys(other_keys), other_values)[0]
    assert not torch.allclose(seen, attend(alignment, query, alignment.project_keys(keys), values)[0])


def test_combine_is_the_weighted_sum_of_the_values():
    weights, values = torch.rand(2, B, Q, K).double(), torch.randn(2, B, K, VALUE_WIDTH).double()
    expected = torch.zeros(2, B, Q, VALUE_WIDTH).double()
    for k in range(K):
        expected += weights[..., k : k + 1] * values[..., k : k + 1, :]
    torch.testing.assert_close(combine(weights, values), expected)


def test_an_alignment_that_does_not_score_says_so():
    class Silent(Alignment):
        pass

    with pytest.raises(NotImplementedError, match="Silent"):
        Silent()(torch.randn(B, Q, 11), torch.randn(B, K, 11))
