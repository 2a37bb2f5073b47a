"""Packing: against loops over the sequences, and attention that never leaves the sequence that it is in."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses import FakeTensorMode
from transformers import PreTrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from regard.modeling.attention import MultiHeadAttention, eager_attention_forward
from regard.modeling.cpu import SequenceBounds, attend_packed
from regard.modeling.cpu import attention as kernels
from regard.modeling.packing import (
    check_packed,
    count_predicted,
    pack,
    position_ids_of,
    select_positions,
    sequence_bounds,
    take_bounds,
)

WIDTH, HEADS = 15, 3
LENGTHS = {
    "ragged": (4, 1, 7, 2),
    "equal": (5, 5, 5),
    "runs": (3, 3, 6, 1, 1, 1, 4),
    "single": (6,),
    "single token": (1,),
}
each_length = pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
every_kernel = pytest.mark.parametrize("kernel", ["eager", "sdpa"])


def spans_of(lengths: tuple[int, ...]) -> list[range]:
    """The places of each sequence in the row."""
    ends = [0, *itertools.accumulate(lengths)]
    return [range(*span) for span in itertools.pairwise(ends)]


def bounds_for(lengths: tuple[int, ...]) -> SequenceBounds:
    return sequence_bounds(torch.tensor(lengths))


# SequenceBounds, positions, counts


@each_length
def test_bounds_are_where_sequences_begin_and_end(lengths):
    bounds = bounds_for(lengths)
    assert bounds.cu_seq_lens_q.tolist() == [0, *itertools.accumulate(lengths)]
    assert bounds.cu_seq_lens_k.equal(bounds.cu_seq_lens_q)
    # What variable-length kernels take.
    assert bounds.cu_seq_lens_q.dtype == bounds.cu_seq_lens_k.dtype == torch.int32
    assert (bounds.max_length_q, bounds.max_length_k) == (max(lengths), max(lengths))
    assert all(type(longest) is int for longest in bounds[2:])


@each_length
def test_positions_start_again_in_each_sequence(lengths):
    expected = [position for length in lengths for position in range(length)]
    assert position_ids_of(bounds_for(lengths), sum(lengths)).tolist() == expected


def test_labels_are_counted_by_sequence():
    labels = torch.tensor([[7, -100, 0, 3], [-100, -100, -100, -100], [1, 1, -100, 5]])
    assert count_predicted(labels).tolist() == [3, 0, 3]
    for lengths in LENGTHS.values():
        labels = torch.randint(0, 3, (1, sum(lengths))).masked_fill(torch.rand(1, sum(lengths)) < 0.5, -100)
        expected = [sum(labels[0, place] != -100 for place in span) for span in spans_of(lengths)]
        assert count_predicted(labels, bounds_for(lengths).cu_seq_lens_q).tolist() == expected


def test_bounds_are_taken_out_of_the_arguments():
    bounds, options = bounds_for((4, 1, 7)), {"output_attentions": False}
    given = {**bounds._asdict(), **options}
    taken = take_bounds(given)
    assert all(map(torch.equal, taken[:2], bounds[:2]))
    assert taken[2:] == bounds[2:]
    assert given == options
    # One tensor is enough.
    given = {"cu_seq_lens_q": torch.tensor([0, 4, 5, 12])}
    alone = take_bounds(given)
    assert alone.cu_seq_lens_k.tolist() == [0, 4, 5, 12]
    assert alone[2:] == (7, 7)
    assert given == {}
    assert take_bounds(options) is None
    assert options == {"output_attentions": False}


def test_what_makes_no_sense_packed():
    check_packed(torch.ones(1, 7), None, False)
    refused = [
        ((torch.ones(2, 7), None, False), r"\(`cu_seq_lens_q`\) must be a single row, got 2"),
        ((torch.ones(1, 7), torch.ones(1, 7), False), "do not pass an `attention_mask`"),
        ((torch.ones(1, 7), None, True), "returns no attention weights"),
    ]
    for arguments, message in refused:
        with pytest.raises(ValueError, match=message):
            check_packed(*arguments)


# Packing a padded batch

MASKS = {
    "right": [[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]],
    "left": [[1, 1, 1, 1], [0, 0, 1, 1], [0, 1, 1, 1]],
    "anywhere": [[0, 1, 0, 1], [1, 0, 1, 1], [0, 1, 1, 0]],
    "none": [[1, 1, 1, 1]] * 3,
}


@pytest.mark.parametrize("kind", [torch.long, torch.bool, torch.float32], ids=str)
@pytest.mark.parametrize("token", [1, 3])
@pytest.mark.parametrize("padding", MASKS)
def test_packing_drops_the_padding(padding, token, kind):
    """As transformers reads a mask: what isn't zero is a token."""
    mask = (token * torch.tensor(MASKS[padding])).to(kind)
    tensors = {
        "ids": torch.arange(12).view(3, 4),
        "embeddings": torch.randn(3, 4, 7),
        "positions": torch.arange(4).unsqueeze(0),
        "left out": None,
    }
    packed, bounds = pack(tensors, mask, 3, 4)
    places = [(row, column) for row in range(3) for column in range(4) if mask[row, column]]
    assert packed.keys() == tensors.keys() - {"left out"}
    assert packed["ids"].tolist() == [[4 * row + column for row, column in places]]
    assert packed["positions"].tolist() == [[column for _, column in places]]
    assert packed["embeddings"].equal(torch.stack([tensors["embeddings"][place] for place in places]).unsqueeze(0))
    lengths = [sum(row) for row in MASKS[padding]]
    assert bounds.cu_seq_lens_q.tolist() == [0, *itertools.accumulate(lengths)]
    assert bounds.max_length_q == max(lengths)
    if padding == "none":
        unmasked, whole = pack(tensors, None, 3, 4)
        assert all(unmasked[name].equal(packed[name]) for name in packed)
        assert whole.cu_seq_lens_q.equal(bounds.cu_seq_lens_q)


def test_what_can_not_be_packed():
    tensors = {"ids": torch.ones(2, 3, dtype=torch.long)}
    for shape in ((2, 1, 3, 3), (3, 2), (1, 3), (3,)):
        with pytest.raises(ValueError, match=r"`attention_mask` of shape .* cannot be packed: it must be \(2, 3\)"):
            pack(tensors, torch.ones(shape), 2, 3)
    with pytest.raises(ValueError, match="row 1 is nothing but padding, which cannot be packed"):
        pack(tensors, torch.tensor([[0, 1, 0], [0, 0, 0]]), 2, 3)


# Selecting positions

# For `ragged`, whose sequences begin at 0, 4, 5 and 12.
CHOICES = {
    "some": [1, 2, 6, 7, 13],
    "none of most": [6, 8, 11],
    "many of one": [5, 6, 7, 8, 9, 10, 11],
    "firsts": [0, 4, 5, 12],
    "all": list(range(14)),
    "none": [],
    "in any order": [13, 2, 0, 9, 1, 6],
}
each_choice = pytest.mark.parametrize("places", CHOICES.values(), ids=CHOICES)


@each_choice
def test_the_selection_has_each_position_and_each_first_token(places):
    lengths = LENGTHS["ragged"]
    spans, bounds = spans_of(lengths), bounds_for(lengths)
    (positions, selected), indices = select_positions(torch.tensor(places, dtype=torch.long), bounds)
    firsts = [span.start for span in spans]
    assert positions.tolist() == sorted(firsts + places)
    assert positions[indices].tolist() == firsts + places
    # Where a first token is predicted as well, it is there twice, and each index occurs once.
    assert sorted(indices.tolist()) == list(range(len(firsts) + len(places)))
    counts = [1 + sum(place in span for place in places) for span in spans]
    assert selected.cu_seq_lens_q.tolist() == [0, *itertools.accumulate(counts)]
    assert selected.cu_seq_lens_q.dtype == torch.int32
    assert selected.cu_seq_lens_k.equal(bounds.cu_seq_lens_k)
    assert selected.max_length_k == max(lengths)
    assert max(counts) <= selected.max_length_q <= max(lengths) + 1


# Attention


def make_attention(kernel: str, causal: bool = False, width: int = WIDTH) -> MultiHeadAttention:
    config = PreTrainedConfig(
        hidden_size=width,
        num_attention_heads=HEADS,
        attention_probs_dropout_prob=0.0,
        attn_implementation=kernel,
    )
    return MultiHeadAttention(config, is_causal=causal)


def one_by_one(attention, hidden_states, spans, places=None) -> torch.Tensor:
    """The output for each sequence by itself, at the selected places if there are any."""
    outputs = []
    for span in spans:
        output, _ = attention(hidden_states[:, span.start : span.stop])
        kept = slice(None) if places is None else [place - span.start for place in places if place in span]
        outputs.append(output[:, kept])
    return torch.cat(outputs, dim=1)


@every_kernel
@each_length
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
def test_packed_sequences_attend_as_each_alone(kernel, lengths, causal):
    attention = make_attention(kernel, causal)
    hidden_states = torch.randn(1, sum(lengths), WIDTH, requires_grad=True)
    output, weights = attention(hidden_states, bounds=bounds_for(lengths))
    expected = one_by_one(attention, hidden_states, spans_of(lengths))
    assert weights is None
    torch.testing.assert_close(output, expected)
    direction, inputs = torch.randn_like(output), [hidden_states, *attention.parameters()]
    gradients = [torch.autograd.grad((each * direction).sum(), inputs) for each in (output, expected)]
    torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-5)


@every_kernel
@each_choice
def test_selected_queries_attend_to_their_whole_sequence(kernel, places):
    lengths = LENGTHS["ragged"]
    attention, bounds = make_attention(kernel), bounds_for(lengths)
    hidden_states = torch.randn(1, sum(lengths), WIDTH, requires_grad=True)
    (positions, selected), _ = select_positions(torch.tensor(places, dtype=torch.long), bounds)
    output, _ = attention(hidden_states, bounds=selected, queries=positions)
    expected = one_by_one(attention, hidden_states, spans_of(lengths), positions.tolist())
    torch.testing.assert_close(output, expected)
    direction, inputs = torch.randn_like(output), [hidden_states, *attention.parameters()]
    gradients = [torch.autograd.grad((each * direction).sum(), inputs) for each in (output, expected)]
    torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-5)


@every_kernel
@pytest.mark.parametrize("lengths", [LENGTHS["ragged"], LENGTHS["equal"], LENGTHS["runs"]], ids=str)
def test_no_sequence_sees_another(kernel, lengths):
    """What changes in one changes no other in the least, and no gradient crosses."""
    attention, bounds = make_attention(kernel), bounds_for(lengths)
    hidden_states = torch.randn(1, sum(lengths), WIDTH, requires_grad=True)
    output, _ = attention(hidden_states, bounds=bounds)
    for span in spans_of(lengths):
        inside = torch.zeros(sum(lengths), dtype=torch.bool)
        inside[list(span)] = True
        changed, _ = attention(hidden_states + 9 * inside[:, None], bounds=bounds)
        assert changed[:, ~inside].equal(output[:, ~inside])
        assert not torch.allclose(changed[:, inside], output[:, inside])
        (gradient,) = torch.autograd.grad(output[:, inside].square().sum(), hidden_states, retain_graph=True)
        assert (gradient[:, ~inside] == 0).all()
        assert (gradient[:, inside] != 0).all()


def test_equally_long_sequences_in_a_row_are_attended_to_together(monkeypatch):
    def watched(module, query, key, value, attention_mask, **options):
        assert attention_mask is None
        shapes.append((query.shape[0], query.shape[2], key.shape[2]))
        return eager_attention_forward(module, query, key, value, attention_mask, **options)

    shapes = []
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "watched", watched)
    attention, lengths = make_attention("watched"), LENGTHS["runs"]
    hidden_states = torch.randn(1, sum(lengths), WIDTH)
    attention(hidden_states, bounds=bounds_for(lengths))
    assert shapes == [(2, 3, 3), (1, 6, 6), (3, 1, 1), (1, 4, 4)]
    shapes.clear()
    # Equally long and of as many queries.
    (positions, selected), _ = select_positions(torch.tensor([1, 4, 5, 8, 16]), bounds_for(lengths))
    attention(hidden_states, bounds=selected, queries=positions)
    assert shapes == [(1, 2, 3), (1, 3, 3), (1, 2, 6), (3, 1, 1), (1, 2, 4)]


def test_flash_kernels_are_given_the_bounds(monkeypatch):
    def fake(module, query, key, value, attention_mask, **options):
        given.append((query, key, value, attention_mask, options))
        return query.transpose(1, 2), None

    given = []
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "flash_attention_fake", fake)
    attention, lengths = make_attention("flash_attention_fake"), LENGTHS["ragged"]
    hidden_states, bounds = torch.randn(1, 14, WIDTH), bounds_for(lengths)
    (positions, selected), _ = select_positions(torch.tensor([1, 7]), bounds)
    attention(hidden_states, bounds=bounds, extra="passed on")
    attention(hidden_states, bounds=selected, queries=positions, extra="passed on")
    for (query, key, value, mask, options), expected, queries in zip(given, (bounds, selected), (14, 6), strict=True):
        assert query.shape == (1, HEADS, queries, WIDTH // HEADS)
        assert key.shape == value.shape == (1, HEADS, 14, WIDTH // HEADS)
        assert mask is None
        assert options == {"extra": "passed on", "scaling": 5**-0.5, "dropout": 0.0, **expected._asdict()}
    projected = attention.query_key_value(hidden_states)[..., :WIDTH].view(1, 14, HEADS, -1).transpose(1, 2)
    torch.testing.assert_close(given[0][0], projected)
    torch.testing.assert_close(given[1][0], projected[:, :, positions])


# PyTorch's kernels for sequences of different lengths, which run elsewhere, have a plain one here to compare with


pytorch_warns = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")


def heads_of(length: int) -> torch.Tensor:
    return torch.randn(1, length, HEADS, 5).transpose(1, 2).requires_grad_()


@pytorch_warns
@each_choice
def test_jagged_attention_is_the_same(places):
    whole = bounds_for(LENGTHS["ragged"])
    (positions, selected), _ = select_positions(torch.tensor(places, dtype=torch.long), whole)
    module = SimpleNamespace(config=PreTrainedConfig(attn_implementation="eager"), training=False, is_causal=False)
    for bounds, queries in ((selected, len(positions)), (whole, 14)):
        inputs = [heads_of(queries), heads_of(14), heads_of(14)]
        expected, _ = attend_packed(eager_attention_forward, module, *inputs, bounds, scaling=0.3)
        output = kernels._attend_jagged(*inputs, bounds, scaling=0.3, dropout=0.0)
        torch.testing.assert_close(output, expected)
        direction = torch.randn_like(output)
        gradients = [torch.autograd.grad((each * direction).sum(), inputs) for each in (output, expected)]
        torch.testing.assert_close(*gradients)


@pytorch_warns
@each_choice
def test_jagged_attention_knows_the_shortest_and_the_longest(places, monkeypatch):
    """Lengths that hold: its kernels rely on the longest, and are left out where a sequence may be empty."""

    def watched(values, offsets, min_seqlen, max_seqlen):
        told.append((min_seqlen, max_seqlen, offsets.diff()))
        return whole(values, offsets, min_seqlen=min_seqlen, max_seqlen=max_seqlen)

    told, whole = [], torch.nested.nested_tensor_from_jagged
    monkeypatch.setattr(torch.nested, "nested_tensor_from_jagged", watched)
    (positions, bounds), _ = select_positions(torch.tensor(places, dtype=torch.long), bounds_for(LENGTHS["ragged"]))
    kernels._attend_jagged(heads_of(len(positions)), heads_of(14), heads_of(14), bounds, scaling=0.3)
    assert len(told) == 3
    for shortest, longest, lengths in told:
        assert 1 <= shortest <= lengths.min()
        assert longest >= lengths.max()


@pytest.mark.parametrize(
    ("device", "kernel", "dtype", "width", "jagged"),
    [
        ("cuda", "sdpa", torch.float32, 8, True),
        ("cuda", "sdpa", torch.bfloat16, 64, True),
        ("cuda", "sdpa", torch.float64, 8, False),
        ("cuda", "sdpa", torch.float32, 5, False),
        ("cuda", "eager", torch.float32, 8, False),
        ("mps", "sdpa", torch.float32, 8, False),
        ("cpu", "sdpa", torch.float32, 8, False),
    ],
    ids=str,
)
def test_jagged_attention_is_used_where_it_has_a_kernel(device, kernel, dtype, width, jagged, monkeypatch):
    for way in ("_attend_jagged", "_attend_each"):
        monkeypatch.setattr(kernels, way, lambda *given, way=way, **options: (way, given[-4:], options))
    module = SimpleNamespace(config=PreTrainedConfig(attn_implementation=kernel), is_causal=True)
    bounds = bounds_for((4, 3))
    with FakeTensorMode():
        heads = torch.empty(1, HEADS, 7, width, device=device, dtype=dtype)
        (way, given, options), weights = attend_packed(print, module, heads, heads, heads, bounds, scaling=0.3)
    assert way == ("_attend_jagged" if jagged else "_attend_each")
    assert all(part is heads for part in given[:3])
    assert given[3] is bounds
    # Attention functions are given the module, which tells them.
    assert options == {"scaling": 0.3, **({"is_causal": True} if jagged else {})}
    assert weights is None
