"""Where heads look, measured: heads with a planted offset are found, and the figures are those of an explicit loop."""

import math

import pytest
import torch
from PIL import Image
from torch.testing import assert_close

import regard
from regard.inspection.steps.head_distances import head_distances, plot_head_distances

OFFSETS = (-3, -1, 0, 2)
WIDTH, HEADS = 32, len(OFFSETS)


def planted() -> regard.RegardTransformerForConditionalGeneration:
    """An encoder of one layer that reads positions alone, and whose heads look so many places away."""
    config = regard.RegardTransformerConfig(
        vocab_size=20,
        hidden_size=WIDTH,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        intermediate_size=8,
        max_position_embeddings=40,
    )
    model = regard.RegardTransformerForConditionalGeneration(config)
    attention = model.model.encoder.stack.blocks[0].self_attention
    half, pairs = WIDTH // 2, WIDTH // HEADS // 2
    with torch.no_grad():
        model.get_input_embeddings().weight.zero_()
        attention.query_key_value.weight.zero_()
        attention.query_key_value.bias.zero_()
        for head, offset in enumerate(OFFSETS):
            for pair in range(pairs):
                # Sine and cosine of a position's angle; the query's are turned on by the angle of the offset.
                angle = offset * 10000 ** (-pair / half)
                turn = torch.tensor([[math.cos(angle), math.sin(angle)], [-math.sin(angle), math.cos(angle)]])
                rows = head * 2 * pairs + 2 * pair + torch.arange(2)
                columns = torch.tensor([pair, half + pair])
                attention.query_key_value.weight[rows[:, None], columns] = 120 * turn
                attention.query_key_value.weight[WIDTH + rows[:, None], columns] = torch.eye(2)
    return model


def texts(*lengths: int) -> list[dict]:
    return [{"input_ids": torch.randint(5, 20, (1, length))} for length in lengths]


def test_planted_heads_are_found():
    measured = head_distances(planted(), texts(20, 13), max_offset=5)
    assert measured.offsets.tolist() == list(range(-5, 6))
    assert (measured.texts, measured.tokens) == (2, 33)
    for head, offset in enumerate(OFFSETS):
        row = measured.weights[0, head]
        assert measured.offsets[row.argmax()] == offset
        # Each query that has a key there gives it all its weight.
        assert float(row[offset + 5]) == pytest.approx(1, abs=1e-3)
    assert float(measured.mean_distance[0, 2]) == pytest.approx(0, abs=1e-2)


def small(family: str):
    sizes = {"vocab_size": 30, "hidden_size": 12, "num_hidden_layers": 3, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 9, "max_position_embeddings": 16}
    if family == "bert":
        model = regard.RegardBertForMaskedLM(regard.RegardBertConfig(**sizes))
    else:
        model = regard.RegardDecoderForCausalLM(regard.RegardDecoderConfig(**sizes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.4)
    return model.train()


@pytest.mark.parametrize("family", ["bert", "decoder"])
def test_the_figures_are_those_of_an_explicit_loop(family):
    model, reach = small(family), 4
    given = texts(9, 3, 12)
    measured = head_distances(model, given, max_offset=reach)
    assert model.training
    model.eval()
    sums, counts = torch.zeros(3, 2, 2 * reach + 1), torch.zeros(2 * reach + 1)
    distance, uniform, tokens = torch.zeros(3, 2), 0.0, 0
    for text in given:
        attentions = model(**text, output_attentions=True).attentions
        length = text["input_ids"].shape[1]
        tokens += length
        for query in range(length):
            keys = range(query + 1) if family == "decoder" else range(length)
            uniform += sum(abs(key - query) for key in keys) / len(keys)
            for key in keys:
                weights = torch.stack([layer[0, :, query, key] for layer in attentions]).detach()
                distance += weights * abs(key - query)
                if abs(key - query) <= reach:
                    sums[..., key - query + reach] += weights
                    counts[key - query + reach] += 1
    seen = counts > 0
    assert_close(measured.weights[..., seen].float(), sums[..., seen] / counts[seen])
    assert bool(measured.weights[..., ~seen].isnan().all())
    assert bool(seen.all()) == (family == "bert")
    assert_close(measured.mean_distance.float(), distance / tokens)
    assert measured.uniform_distance == pytest.approx(uniform / tokens)


@pytest.mark.parametrize("family", ["bert", "decoder"])
def test_the_picture_is_drawn(family, tmp_path):
    measured = head_distances(small(family), texts(9, 3))
    plot_head_distances(measured, tmp_path / "heads.png")
    with Image.open(tmp_path / "heads.png") as image:
        assert min(image.size) > 200
        assert len(image.convert("L").getcolors()) > 20
    plot_head_distances(measured, tmp_path / "heads.svg")
    drawn = (tmp_path / "heads.svg").read_text(encoding="utf-8")
    assert "<svg" in drawn


def test_what_cannot_be_measured():
    model = small("bert")
    with pytest.raises(ValueError, match=r"^`texts` is empty: give at least one text$"):
        head_distances(model, [])
    with pytest.raises(ValueError, match=r"^`max_offset` \(0\) must be at least 1 and at most 10,000$"):
        head_distances(model, texts(5), max_offset=0)
    padded = {"input_ids": torch.tensor([[7, 8, 0]]), "attention_mask": torch.tensor([[1, 1, 0]])}
    for text in ({"input_ids": torch.full((2, 4), 7)}, padded, {"pixel_values": torch.zeros(1, 3, 8, 8)}):
        with pytest.raises(ValueError, match=r"^each of `texts` must hold the `input_ids` of one text, without pad"):
            head_distances(model, [text])
    recurrent = regard.RegardRecurrentForConditionalGeneration(regard.RegardRecurrentConfig(vocab_size=30))
    with pytest.raises(ValueError, match=r"^`model` has no self-attention: its RegardRecurrentEncoder returned "):
        head_distances(recurrent, texts(5))
