"""Planted tasks: where attention is the cause it is found to be, and where it can't be the verdict says so."""

import math
import random
from itertools import pairwise

import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text
from tokenizers.processors import TemplateProcessing

import regard
from regard.inspection.faithfulness import report as faithfulness_report
from regard.inspection.faithfulness.faithfulness import Faithfulness, faithfulness
from regard.inspection.faithfulness.report import Estimate, estimate, reasons_against, report_lines
from regard.inspection.maps.attention_map import attention_map
from regard.tokenization.words import train_words
from tests.inspection.conftest import MODELS, TEXT

WORDS = [f"word{number}" for number in range(20)]
KEYS = ["good", "bad"]
LENGTH = 15


@pytest.fixture(scope="module")
def tokenizer():
    made = train_words([" ".join(WORDS + KEYS)])
    made.add_special_tokens({"cls_token": "[CLS]", "mask_token": "[MASK]"})
    made.backend_tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A", special_tokens=[("[CLS]", made.cls_token_id)]
    )
    return made


def texts(number: int, seed: int, none: float = 0.0) -> tuple[list[str], list[int], list[int]]:
    """Texts with one key word among others, where it is, and which; a share has none, which is a third class."""
    rng = np.random.default_rng(seed)
    places, labels = rng.integers(LENGTH, size=number), rng.integers(2, size=number)
    labels[rng.random(number) < none] = 2
    drawn = [rng.choice(WORDS, LENGTH).tolist() for _ in range(number)]
    for words, place, label in zip(drawn, places, labels, strict=True):
        if label < 2:
            words[place] = KEYS[label]
    return [" ".join(words) for words in drawn], places.tolist(), labels.tolist()


@pytest.fixture(scope="module")
def planted(tokenizer):
    """A classifier of one layer and one head, trained on texts whose class is that of their key word."""
    torch.manual_seed(0)
    config = regard.RegardBertConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=1,
        intermediate_size=16,
        max_position_embeddings=24,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=3,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = regard.RegardBertForSequenceClassification(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(200):
        given, _, labels = texts(64, 1000 + step, none=0.3)
        ids = tokenizer(given, return_tensors="pt")["input_ids"]
        # A word that is erased is none that it has not seen.
        hidden = (torch.rand(ids.shape) < 0.1) & (ids != tokenizer.cls_token_id)
        hidden &= ~torch.isin(ids, torch.tensor(tokenizer.convert_tokens_to_ids(KEYS)))
        loss = model(input_ids=ids.masked_fill(hidden, tokenizer.mask_token_id), labels=torch.tensor(labels)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


GIVEN, PLACES, LABELS = texts(12, 1)


@pytest.fixture(scope="module")
def found(planted, tokenizer) -> Faithfulness:
    return faithfulness(planted, tokenizer, GIVEN)


def test_the_cause_that_was_planted_is_found(found):
    for example, words, place, label in zip(found.examples, GIVEN, PLACES, LABELS, strict=True):
        assert list(example.inputs) == words.split()
        assert example.predicted == label
        for scores in (example.attention, example.leave_one_out, example.integrated_gradients):
            assert scores.argmax() == place


def test_the_verdict_on_the_planted_cause(found):
    gain = found.estimates["comprehensiveness_gain"]
    assert gain.low > 0.5
    assert found.estimates["layer_distance"].low > 0.5
    assert reasons_against(found.estimates) == []
    assert "attention points at inputs that matter" in found.summary()
    assert "does not prove" in found.summary()
    assert "not a causal explanation" not in found.summary()


def test_a_better_order_is_more_comprehensive_and_sufficient(found):
    for example in found.examples:
        of = example.measures
        assert of["comprehensiveness_leave_one_out"] > of["comprehensiveness_random"] > of["comprehensiveness_least"]
        assert of["sufficiency_leave_one_out"] < of["sufficiency_random"] < of["sufficiency_least"]
        assert of["completeness_error"] < 1e-3
        assert min(of["comprehensiveness_gain"], of["sufficiency_gain"]) > 0.5
        curves = example.curves
        assert {name: float(curve[0]) for name, curve in curves.items()} == {
            name: pytest.approx(example.probability) for name in curves
        }
        # With everything erased no order differs from another.
        assert np.ptp([curve[-1] for curve in curves.values()]) == pytest.approx(0, abs=1e-6)


def test_the_first_of_two_layers_and_a_head_of_its_own(make_model):
    model, tokenizer = make_model("RegardDecoderForCausalLM")
    whole = faithfulness(model, tokenizer, [TEXT, "the bank"], layer=0, head=2)
    assert (whole.layer, whole.head, whole.heads) == (0, 2, 4)
    other = faithfulness(model, tokenizer, [TEXT, "the bank"], layer=-3, head=-2)
    for one, same in zip(whole.examples, other.examples, strict=True):
        assert one.measures == same.measures
    assert (
        faithfulness(model, tokenizer, [TEXT, "the bank"], layer=0).estimates["layer_distance"]
        != (whole.estimates["layer_distance"])
    )


def test_weights_that_cannot_matter(tokenizer):
    """What attention gives is multiplied by zero, and its weights are sharp: each looks at one token nearly."""
    config = regard.RegardDecoderConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=1,
        intermediate_size=24,
        max_position_embeddings=24,
    )
    model = regard.RegardDecoderForCausalLM(config).eval()
    attention = model.decoder.stack.blocks[0].self_attention
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
        attention.output.weight.zero_()
        attention.output.bias.zero_()
        attention.query_key_value.weight.mul_(3)
    found = faithfulness(model, tokenizer, GIVEN)
    assert found.estimates["largest_weight"].mean > 0.5
    assert found.estimates["layer_distance"].high < 1e-6
    assert found.estimates["all_distance"].high < 1e-6
    assert "not a causal explanation" in found.summary()
    assert "shuffling the weights moves less than 5% of the output's distribution" in found.summary()
    # The last token alone is read, through the residual connection.
    for example in found.examples:
        assert np.abs(example.leave_one_out[:-1]).max() < 1e-6 < abs(example.leave_one_out[-1])


# The rule of the verdict, and its numbers


def figures(**given: Estimate) -> dict[str, Estimate]:
    names = {name for _, name in faithfulness_report._ROWS}
    return dict.fromkeys(names, Estimate(0.5, 0.1, 0.4, 0.6, 9)) | given


@pytest.mark.parametrize(
    ("gain", "moved", "told"),
    [
        ((0.01, 0.2), (0.1, 0.3), "points at inputs that matter"),
        (
            (-0.01, 0.2),
            (0.1, 0.3),
            "not a causal explanation: dropping the most attended inputs changes the prediction",
        ),
        ((-0.01, 0.2), (0.1, 0.3), "changes the prediction no more than dropping random ones."),
        ((-0.2, -0.1), (0.1, 0.3), "changes the prediction less than dropping random ones."),
        ((0.01, 0.2), (0.01, 0.04), "not a causal explanation: shuffling the weights moves less than 5%"),
        ((0.01, 0.2), (0.01, 0.06), "points at inputs that matter"),
        ((-0.01, 0.2), (0.01, 0.04), "dropping random ones, and shuffling the weights moves less than 5%"),
        ((math.nan, math.nan), (0.1, 0.3), "not a causal explanation"),
    ],
)
def test_the_rule_of_the_verdict(gain, moved, told):
    lines = report_lines(
        figures(
            comprehensiveness_gain=Estimate(sum(gain) / 2, 0.1, *gain, 9),
            layer_distance=Estimate(sum(moved) / 2, 0.1, *moved, 9),
        ),
        9,
        "a model",
    )
    assert lines[0] == "a model"
    text = "\n".join(lines)
    assert told in text
    assert ("not a causal explanation" in text) != ("points at inputs that matter" in text)


@pytest.mark.parametrize(("head", "shuffled"), [("mean", "layer"), (-1, "head")])
def test_it_is_told_what_is_shuffled(make_model, head, shuffled):
    found = faithfulness(*make_model("RegardBertForMaskedLM"), [TEXT, TEXT], head=head)
    assert sum(line.startswith(f"shuffled weights of the {shuffled}: distance  ") for line in found.lines) == 1
    assert [label.get_text() for label in found.figure().axes[2].get_xticklabels()] == [
        f"this {shuffled}",
        "all layers",
    ]


def test_an_estimate_and_its_interval():
    values = np.random.default_rng(0).normal(2.0, 3.0, size=400)
    found = estimate([*values, math.nan], seed=1)
    assert found.count == 400
    assert found.mean == pytest.approx(values.mean())
    assert found.deviation == pytest.approx(values.std(ddof=1))
    # As wide as the normal distribution says.
    half = 1.96 * found.deviation / 20
    assert (found.high - found.low) / 2 == pytest.approx(half, rel=0.1)
    assert (found.high + found.low) / 2 == pytest.approx(found.mean, abs=0.1 * half)
    assert estimate([*values, math.nan], seed=1) == found
    assert estimate([*values, math.nan], seed=2) != found
    assert (str(estimate([math.nan])), estimate([math.nan]).count) == ("undefined", 0)


def test_the_picture_is_drawn_and_nothing_in_it_is_cut(found):
    figure = found.figure()
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    shown = {text.get_text() for text in figure.findobj(Text)}
    assert {"Erasure", "Kendall's tau", "most attended first", "this layer"} <= shown
    drawn, (width, height) = figure.get_tightbbox(canvas.get_renderer()), figure.get_size_inches()
    assert drawn.x0 >= 0
    assert drawn.y0 >= 0
    assert drawn.x1 <= width
    assert drawn.y1 <= height
    for axes in figure.axes:
        labels = [label.get_window_extent() for label in axes.get_xticklabels() if label.get_text()]
        for one, following in pairwise(labels):
            assert one.x1 <= following.x0, axes.get_title()


# Randomness


def test_the_seed_alone_decides_and_examples_do_not_depend_on_each_other(make_model):
    model, tokenizer = make_model("RegardBertForMaskedLM")
    first = faithfulness(model, tokenizer, [TEXT, "the bank of the river", TEXT])
    torch.manual_seed(7)
    again = faithfulness(model, tokenizer, ["of hashes of", "the bank of the river", TEXT])
    for one, same in zip(first.examples[1:], again.examples[1:], strict=True):
        assert one.measures == same.measures
    # Each example has draws of its own, here of the masked token.
    assert len({example.inputs for example in faithfulness(model, tokenizer, [TEXT] * 6).examples}) > 1
    other = faithfulness(model, tokenizer, [TEXT, "the bank of the river", TEXT], seed=1)
    assert other.examples[2].measures != first.examples[2].measures


def state_of(model) -> list:
    return [
        [module.training for module in model.modules()],
        [module.config._attn_implementation for module in model.modules() if hasattr(module, "config")],
        [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()],
        [parameter.requires_grad for parameter in model.parameters()],
        [parameter.grad is None for parameter in model.parameters()],
        getattr(model.config, "freeze_backbone", None),
        torch.get_rng_state().tolist(),
        np.random.get_state()[1].tolist(),  # noqa: NPY002
        random.getstate(),
        torch.is_grad_enabled(),
    ]


TESTED = [name for name in MODELS if name not in ("BertModel", "BertForMultipleChoice")]


@pytest.mark.parametrize("name", TESTED)
@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_left_as_it_was(make_model, name, fails):
    model, tokenizer = make_model(name)
    model.train()
    next(model.children()).eval()
    if model._supports_sdpa:
        model.set_attn_implementation("sdpa")
    runs = []

    def look(*given):
        runs.append(model.training)
        # Amid the shuffled passes.
        if fails and len(runs) > 40:
            raise RuntimeError("no")

    model.register_forward_pre_hook(look)
    examples = ["the bank river", "returns the hashes"]
    # transformers puts hooks of its own on a model that is first asked for its weights.
    attention_map(model, tokenizer, "the bank")
    runs.clear()
    before = state_of(model)
    if fails:
        with pytest.raises(RuntimeError, match="no"):
            faithfulness(model, tokenizer, examples * 3)
    else:
        faithfulness(model, tokenizer, examples)
    assert state_of(model) == before
    assert not any(runs)
