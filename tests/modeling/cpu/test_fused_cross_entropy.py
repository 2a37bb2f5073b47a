"""The cross-entropy from hidden states: that of all scores at once, whatever is held in memory of them."""

import pytest
import torch
from torch.nn import functional as F

from regard.modeling.cpu import fused_cross_entropy as module
from regard.modeling.cpu.fused_cross_entropy import summed_loss

P, E, V = 13, 7, 37


def leaves(positions: int = P, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> list[torch.Tensor]:
    """Hidden states, weight and bias."""
    shapes = ((positions, E), (V, E), (V,))
    return [(scale * torch.randn(shape)).to(dtype).requires_grad_() for shape in shapes]


def plain_loss(hidden_states, weight, bias, labels) -> torch.Tensor:
    return F.cross_entropy(F.linear(hidden_states, weight, bias).float(), labels, reduction="sum")


def loss_and_gradients(function, given, labels, factor: float = 1.0) -> list[torch.Tensor]:
    loss = function(*given, labels)
    return [loss.detach(), *torch.autograd.grad(factor * loss, given)]


ALL = 11 * torch.arange(P) % V
LABELS = {
    "all": ALL,
    "some": ALL.masked_fill(torch.arange(P) % 3 == 0, -100),
    "first and last class": torch.tensor([0, V - 1] * 6 + [0]),
    "one": torch.full((P,), -100).masked_fill(torch.arange(P) == 5, 11),
    "none": torch.full((P,), -100),
}
# Scores in memory at once, and rows of the weight's gradient: one part, several, unequal ones, one position each.
PARTS = {"whole": (2**22, 2**12), "parts": (4 * V, 10), "unequal": (5 * V, V - 1), "single": (1, 1)}


@pytest.mark.parametrize("labels", LABELS.values(), ids=LABELS)
@pytest.mark.parametrize("parts", PARTS)
def test_equals_the_cross_entropy_of_all_scores(parts, labels, monkeypatch):
    scores, rows = PARTS[parts]
    monkeypatch.setattr(module, "_SCORES", scores)
    monkeypatch.setattr(module, "_ROWS", rows)
    given = leaves()
    for factor in (1.0, -2.5):
        ours, theirs = (loss_and_gradients(each, given, labels, factor) for each in (summed_loss, plain_loss))
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    if (labels == -100).all():
        assert all((each == 0).all() for each in ours)


def test_a_layer_may_have_no_bias():
    hidden_states, weight, _ = leaves()
    ours, theirs = (
        loss_and_gradients(lambda *given, loss=each: loss(*given[:2], None, given[2]), [hidden_states, weight], ALL)
        for each in (summed_loss, plain_loss)
    )
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_no_more_scores_are_in_memory_than_is_said(monkeypatch):
    def watched(scores, labels):
        sizes.append(scores.numel())
        return whole(scores, labels)

    sizes, whole = [], module._loss_and_gradient
    monkeypatch.setattr(module, "_loss_and_gradient", watched)
    for limit in (V, 3 * V, 3 * V + 1, 6 * V, 100 * V):
        monkeypatch.setattr(module, "_SCORES", limit)
        sizes.clear()
        summed_loss(*leaves(), LABELS["all"])
        assert sum(sizes) == P * V
        assert max(sizes) <= limit
        # Nor are there more parts than it takes.
        assert len(sizes) <= -(-P // (limit // V)) + 1


def test_of_no_positions_the_loss_is_zero():
    loss, *gradients = loss_and_gradients(summed_loss, leaves(0), torch.empty(0, dtype=torch.long))
    assert loss == 0
    assert [gradient.shape for gradient in gradients] == [(0, E), (V, E), (V,)]
    assert all((gradient == 0).all() for gradient in gradients)


def test_scores_of_any_size_neither_overflow_nor_vanish():
    given, labels = leaves(scale=100.0), LABELS["some"]
    assert F.linear(*given).max() > 1e4
    ours, theirs = (loss_and_gradients(each, given, labels) for each in (summed_loss, plain_loss))
    assert all(each.isfinite().all() for each in ours)
    torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-5)


def test_what_is_not_trained_gets_no_gradient():
    for frozen in range(3):
        given = leaves()
        given[frozen].requires_grad_(False)
        expected = torch.autograd.grad(
            plain_loss(*given, LABELS["some"]), [tensor for tensor in given if tensor.requires_grad]
        )
        summed_loss(*given, LABELS["some"]).backward()
        assert given[frozen].grad is None
        gradients = tuple(tensor.grad for tensor in given if tensor.requires_grad)
        torch.testing.assert_close(gradients, expected, atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        assert not summed_loss(*leaves(), LABELS["some"]).requires_grad


def test_what_is_given_is_left_as_it_is():
    given = leaves()
    before = [tensor.detach().clone() for tensor in given]
    labels = LABELS["some"].clone()
    loss_and_gradients(summed_loss, given, labels, factor=3.0)
    assert all(map(torch.equal, given, before))
    assert labels.equal(LABELS["some"])


def test_gradients_are_given_once():
    """They are scaled in place: a second time must be refused, rather than scaled twice."""
    given = leaves()
    loss = summed_loss(*given, LABELS["all"])
    torch.autograd.grad(loss, given, torch.tensor(3.0), retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, given)


def test_a_shared_weight_gets_both_gradients():
    """As where the output layer shares the token embeddings."""
    results = []
    _, weight, bias = leaves()
    ids, labels = torch.randint(0, V, (P,)), LABELS["some"]
    for function in (summed_loss, plain_loss):
        hidden = F.embedding(ids, weight).tanh()
        results.append(torch.autograd.grad(0.5 * function(hidden, weight, bias, labels), [weight, bias]))
    torch.testing.assert_close(*results, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_other_precisions_sum_the_loss_in_float32(dtype):
    given, labels = leaves(dtype=dtype), LABELS["some"]
    ours, theirs = (loss_and_gradients(each, given, labels) for each in (summed_loss, plain_loss))
    assert [each.dtype for each in ours] == [torch.float32, *[dtype] * 3]
    tolerance = 0.05 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(ours[0], theirs[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ours[1:], theirs[1:], atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("parts", ["whole", "parts"])
def test_autocast_is_close(parts, monkeypatch):
    scores, rows = PARTS[parts]
    monkeypatch.setattr(module, "_SCORES", scores)
    monkeypatch.setattr(module, "_ROWS", rows)
    given, labels = leaves(), LABELS["some"]
    exact = loss_and_gradients(summed_loss, given, labels)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = loss_and_gradients(summed_loss, given, labels)
    assert [each.dtype for each in rounded] == [torch.float32] * 4
    assert not rounded[0].equal(exact[0])
    torch.testing.assert_close(rounded, exact, atol=0.05, rtol=0.02)


def test_compiled_is_the_same():
    given, labels = leaves(), LABELS["some"]
    compiled = torch.compile(summed_loss, fullgraph=True, backend="aot_eager")
    ours, theirs = (loss_and_gradients(each, given, labels, 0.5) for each in (compiled, plain_loss))
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
