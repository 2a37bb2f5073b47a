"""The measures on their own: numbers worked out by hand, other ways of computing them, and properties."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing import assert_close

from regard.inspection.faithfulness import erasure as faithfulness_erasure
from regard.inspection.faithfulness.erasure import (
    comprehensiveness,
    descending_order,
    erased_probability,
    erasure_curves,
    erasure_masks,
    integrated_gradients,
    leave_one_out,
    number_of_inputs,
    rank_correlation,
    sufficiency,
)
from regard.inspection.faithfulness.prediction import Prediction, make_prediction
from regard.inspection.faithfulness.weights import attention_weights, shuffle_weights, shuffled_distributions
from regard.inspection.maps.eager_mode import eager_attention
from regard.modeling import attention
from tests.inspection.conftest import TEXT


class Logistic(nn.Module):
    """Two classes; the score of the second is the sum of all numbers, that of the first 0."""

    def forward(self, inputs_embeds, return_dict):
        total = inputs_embeds.sum(dim=(1, 2))
        return {"logits": torch.stack([torch.zeros_like(total), total], dim=1)}


def logistic(values: list[float], baseline: float = 0.0) -> Prediction:
    """The second class of inputs with these values, the first of which is special."""
    return Prediction(
        model=Logistic(),
        arguments={},
        input_name="inputs_embeds",
        values=torch.tensor(values)[None, :, None],
        baseline=torch.tensor([[[baseline]]]),
        key_numbers=torch.arange(len(values)),
        erasable_keys=torch.arange(1, len(values)),
        labels=tuple("abcdefgh"[: len(values) - 1]),
        kind="self",
        query=0,
        row=None,
        predicted=1,
    )


def sigmoid(score: float) -> float:
    return 1 / (1 + np.exp(-score))


def test_comprehensiveness_and_sufficiency_by_hand():
    # Four inputs of 2, -1, 0.5 and 1, beside a special one of 0.3, dropped in the order 3, 0, 1, 2. Of four, 1, 5, 10
    # and 20% are one input, and 50% are two.
    prediction = logistic([0.3, 2.0, -1.0, 0.5, 1.0])
    whole = sigmoid(2.8)
    dropped = [sigmoid(1.8)] * 4 + [sigmoid(-0.2)]
    kept = [sigmoid(1.3)] * 4 + [sigmoid(3.3)]
    order = np.array([[3, 0, 1, 2]])
    assert comprehensiveness(prediction, order)[0] == pytest.approx(whole - np.mean(dropped), abs=1e-6)
    assert sufficiency(prediction, order)[0] == pytest.approx(whole - np.mean(kept), abs=1e-6)
    assert leave_one_out(prediction) == pytest.approx(
        [whole - sigmoid(score) for score in (0.8, 3.8, 2.3, 1.8)], abs=1e-6
    )
    # 0, 1, 5, 10, 20, 35, 50, 75 and 100%.
    numbers = [2.8, 1.8, 1.8, 1.8, 1.8, -0.2, -0.2, 0.8, 0.3]
    np.testing.assert_allclose(erasure_curves(prediction, order)[0], [sigmoid(score) for score in numbers], atol=1e-6)


def test_a_share_is_rounded_up_without_an_error_of_floating_point():
    assert [number_of_inputs(share, 20) for share in (0, 1, 5, 6, 10, 35, 100)] == [0, 1, 1, 2, 2, 7, 20]
    masks = erasure_masks(np.array([[2, 0, 1], [0, 1, 2]]), (0, 33, 34, 100))
    assert masks.int().tolist() == [
        [[0, 0, 0], [0, 0, 1], [1, 0, 1], [1, 1, 1]],
        [[0, 0, 0], [1, 0, 0], [1, 1, 0], [1, 1, 1]],
    ]
    assert descending_order(np.array([0.1, 0.5, 0.1, 0.7])).tolist() == [3, 1, 0, 2]


@pytest.mark.parametrize("scale", [1.0, 40.0])
def test_integrated_gradients_are_those_of_the_formula(scale):
    # On the straight way the sum alone decides, so each input gets its share of the sum, of the whole difference.
    # Scaled, nearly all of that comes within a small part of the way.
    values = [0.3 - 0.6 * scale, 2.0 * scale, -1.0 * scale, 0.5 * scale]
    prediction = logistic(values, baseline=0.1)
    found, error = integrated_gradients(prediction)
    steps = np.array(values[1:]) - 0.1
    difference = sigmoid(sum(values)) - sigmoid(values[0] + 0.3)
    np.testing.assert_allclose(found, steps / steps.sum() * difference, atol=2e-3)
    assert error < 2e-3
    assert abs(found.sum() - difference) == pytest.approx(error, abs=1e-6)


def test_too_few_steps_are_told_by_the_error(monkeypatch):
    prediction = logistic([-60.0, 40.0, 30.0, 50.0])
    monkeypatch.setattr(faithfulness_erasure, "STEPS", 2)
    monkeypatch.setattr(faithfulness_erasure, "DEPTH", 0)
    assert integrated_gradients(prediction)[1] > 0.1


def test_tau_counts_pairs():
    first, second = np.array([0.1, 0.4, 0.3, 0.2]), np.array([5.0, 9.0, 6.0, 7.0])
    signs = [np.sign((first[i] - first[j]) * (second[i] - second[j])) for i in range(4) for j in range(i)]
    assert rank_correlation(first, second) == pytest.approx(np.mean(signs))
    assert np.isnan(rank_correlation(first, np.ones(4)))


# Predictions of real models


def look(make_model, name: str, example=TEXT, **fields) -> Prediction:
    model, tokenizer = make_model(name, **fields)
    model.set_attn_implementation("eager")
    return make_prediction(model, tokenizer, example, "example 0", np.random.default_rng(0), 64)


def test_erasing_is_embedding_another_token(make_model):
    prediction = look(make_model, "RegardBertForMaskedLM")
    model, tokenizer = make_model("RegardBertForMaskedLM")
    model = prediction.model
    ids = tokenizer(TEXT, return_tensors="pt")["input_ids"]
    ids[0, prediction.query] = tokenizer.mask_token_id
    place = int(prediction.erasable_keys[2])
    mask = torch.zeros(2, len(prediction.erasable_keys), dtype=torch.bool)
    mask[1, 2] = True
    found = prediction.distribution(prediction.erase(mask))
    with torch.no_grad():
        expected = [model(input_ids=ids).logits[0, prediction.query].softmax(-1)]
        ids[0, place] = tokenizer.mask_token_id
        expected.append(model(input_ids=ids).logits[0, prediction.query].softmax(-1))
    assert_close(found, torch.stack(expected))
    assert not torch.allclose(found[0], found[1], atol=1e-4)
    assert int(expected[0].argmax()) == prediction.predicted


def test_without_a_mask_token_the_mean_of_all_embeddings_stands_for_what_is_erased(make_model):
    prediction = look(make_model, "RegardDecoderForCausalLM")
    table = prediction.model.get_input_embeddings().weight.detach()
    mask = torch.zeros(1, len(prediction.erasable_keys), dtype=torch.bool)
    mask[0, 1] = True
    erased = prediction.erase(mask)[0]
    assert_close(erased[prediction.erasable_keys[1]], table.mean(dim=0))
    others = torch.arange(len(erased)) != prediction.erasable_keys[1]
    assert_close(erased[others], prediction.values[0, others])


def test_special_tokens_and_the_masked_one_stay(make_model):
    prediction = look(make_model, "RegardBertForMaskedLM")
    length = prediction.values.shape[1]
    assert {0, length - 1, prediction.query} | set(prediction.erasable_keys.tolist()) == set(range(length))
    assert len(prediction.erasable_keys) == length - 3
    everything = prediction.erase(torch.ones(1, len(prediction.erasable_keys), dtype=torch.bool))
    for place in (0, length - 1, prediction.query):
        assert_close(everything[0, place], prediction.values[0, place])


@pytest.mark.parametrize(
    "name", ["RegardBertForMaskedLM", "RegardDecoderForCausalLM", "RegardRecurrentForConditionalGeneration"]
)
def test_erasing_nothing_changes_nothing(make_model, name):
    prediction = look(make_model, name)
    with eager_attention(prediction.model):
        nothing = torch.zeros(3, len(prediction.erasable_keys), dtype=torch.bool)
        whole = prediction.probability(prediction.values)
        np.testing.assert_allclose(erased_probability(prediction, nothing), float(whole), rtol=1e-5)
        assert torch.equal(prediction.erase(nothing), prediction.values.expand_as(prediction.erase(nothing)))


# Shuffled weights


def test_shuffled_rows_hold_the_same_weights_and_masks_are_kept():
    generator = torch.Generator().manual_seed(0)
    allowed = torch.rand(5, 3, 7, 9, generator=generator) < 0.6
    weights = torch.rand(5, 3, 7, 9, generator=generator).masked_fill(~allowed, 0.0)
    changed = shuffle_weights(weights, allowed, generator)
    assert bool((changed[~allowed] == 0).all())
    assert_close(changed.sum(-1), weights.sum(-1))
    assert torch.equal(changed.sort(dim=-1).values, weights.sort(dim=-1).values)
    several = allowed.sum(-1) > 3
    assert bool((changed != weights).any(-1)[several].float().mean() > 0.9)
    # Each place is as likely as another.
    one = torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0]).expand(4000, 5)
    may = torch.tensor([True, True, False, True, True]).expand(4000, 5)
    share = shuffle_weights(one, may, generator).mean(dim=0)
    assert share[2] == 0
    assert_close(share[[0, 1, 3, 4]], torch.full((4,), 0.25), atol=0.04, rtol=0)


@pytest.mark.parametrize("head", [None, 1])
def test_the_shuffled_pass_is_that_of_permuted_weights_in_the_attention(make_model, monkeypatch, head):
    prediction = look(make_model, "RegardDecoderForCausalLM")
    layer = 1
    calls = attention_weights(prediction).softmaxes[layer]
    found = shuffled_distributions(prediction, calls, 5, torch.Generator().manual_seed(3), head)

    seen, plain = [], attention.combine

    def combine(weights, values):
        seen.append(weights)
        if len(seen) == layer + 1:
            # Under the causal mask each query sees itself and those before it, whose weights are never 0.
            permuted = shuffle_weights(weights, weights > 0, torch.Generator().manual_seed(3))
            if head is not None:
                kept, permuted = permuted, weights.clone()
                permuted[:, head] = kept[:, head]
            weights = permuted
        return plain(weights, values)

    monkeypatch.setattr(attention, "combine", combine)
    with torch.no_grad():
        logits = prediction.run(prediction.values.expand(5, -1, -1)).logits[:, prediction.row]
    assert len(seen) == 3
    assert_close(found, logits.softmax(-1))
    monkeypatch.undo()
    assert (found - prediction.distribution(prediction.values)).abs().max() > 1e-4


def test_shuffling_no_layer_changes_nothing(make_model):
    prediction = look(make_model, "RegardBertForMaskedLM")
    found = shuffled_distributions(prediction, (), 3, torch.Generator())
    assert_close(found, prediction.distribution(prediction.values).expand_as(found))


def test_shuffled_weights_see_neither_the_future_nor_padding(make_model):
    prediction = look(make_model, "RegardDecoderForCausalLM")
    # Seen from the middle of the text.
    prediction = replace(prediction, row=5)
    calls = [number for layer in attention_weights(prediction).softmaxes for number in layer]

    def shuffled(given: Prediction) -> torch.Tensor:
        return shuffled_distributions(given, calls, 4, torch.Generator().manual_seed(0))

    other = prediction.values.clone()
    other[:, 6:] = torch.randn_like(other[:, 6:])
    assert_close(shuffled(replace(prediction, values=other)), shuffled(prediction))
    other[:, :5] = torch.randn_like(other[:, :5])
    assert not torch.allclose(shuffled(replace(prediction, values=other)), shuffled(prediction), atol=1e-3)

    padded = look(make_model, "RegardBertForMaskedLM")
    mask = torch.ones_like(padded.arguments["attention_mask"])
    mask[:, -3:] = 0
    padded = replace(padded, arguments={**padded.arguments, "attention_mask": mask}, row=2)
    calls = [number for layer in attention_weights(padded).softmaxes for number in layer]
    other = padded.values.clone()
    other[:, -3:] = torch.randn_like(other[:, -3:])
    assert_close(shuffled(replace(padded, values=other)), shuffled(padded))


@pytest.mark.parametrize("alignment", ["dot", "scaled_dot", "bilinear", "additive"])
def test_each_step_of_a_recurrent_decoder_is_shuffled(make_model, alignment):
    sizes = {"encoder_hidden_size": 8} if "dot" in alignment else {}
    prediction = look(
        make_model, "RegardRecurrentForConditionalGeneration", ("the bank", "river"), alignment=alignment, **sizes
    )
    found = attention_weights(prediction)
    assert found.kind == "alignment"
    steps = prediction.arguments["decoder_input_ids"].shape[1]
    assert found.softmaxes == (tuple(range(steps)),)
    whole = prediction.distribution(prediction.values)
    for calls in (found.softmaxes[0], found.softmaxes[0][:1]):
        changed = shuffled_distributions(prediction, calls, 6, torch.Generator().manual_seed(0))
        assert (changed - whole).abs().max() > 1e-6
