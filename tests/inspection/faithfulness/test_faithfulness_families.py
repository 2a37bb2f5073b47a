"""Every family is tested with the attention of its maps, and what can't be tested is told in one line."""

import copy
from importlib.util import find_spec

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

import regard
from regard.configuration import extras
from regard.inspection.faithfulness.faithfulness import faithfulness
from regard.inspection.maps.attention_map import attention_map
from tests.inspection.conftest import MODELS, SMALL, TEXT

TAUS = [f"tau_{pair}" for pair in ("attention_leave_one_out", "attention_gradients", "leave_one_out_gradients")]
STACKS = ["GPT2LMHeadModel", "LlamaForCausalLM", "RegardDecoderForCausalLM"]
PAIRS = [name for name, (kind, _) in MODELS.items() if kind == "characters"]


def check(found, examples: int) -> None:
    """That all that was asked for is there, and can be."""
    assert len(found.examples) == examples
    for example in found.examples:
        inputs = len(example.inputs)
        assert (
            example.attention.shape == example.leave_one_out.shape == example.integrated_gradients.shape == (inputs,)
        )
        assert 0 < example.probability <= 1
        assert 0 <= example.attention.sum() <= 1 + 1e-5
        assert all(-1 <= example.measures[name] <= 1 or np.isnan(example.measures[name]) for name in TAUS)
        assert example.measures["completeness_error"] < 0.01
        assert 0 <= example.measures["layer_distance"] <= 1
        assert np.abs(example.leave_one_out).max() > 0
        assert np.abs(example.integrated_gradients).max() > 0
        assert example.measures["all_distance"] > 0
    assert "Verdict: " in found.summary()


@pytest.mark.parametrize("name", STACKS)
def test_the_next_token(make_model, name):
    model, tokenizer = make_model(name)
    found = faithfulness(model, tokenizer, [TEXT, "of the bank"])
    check(found, 2)
    assert (found.kind, found.layer, found.heads) == ("self", 2, 4)
    maps = attention_map(model, tokenizer, TEXT)
    assert found.examples[0].inputs == tuple(key.label for key in maps.keys[1:])
    # The first token is special.
    np.testing.assert_allclose(found.examples[0].attention, maps.matrix()[-1, 1:], atol=1e-6)
    with torch.no_grad():
        scores = model(**tokenizer(TEXT, return_tensors="pt")).logits[0, -1]
    assert found.examples[0].predicted == int(scores.argmax())
    assert found.examples[0].probability == pytest.approx(float(scores.softmax(-1).max()), rel=1e-4)


@pytest.mark.parametrize("name", ["RegardBertForMaskedLM", "RegardBertForPreTraining", "BertForMaskedLM"])
def test_a_masked_token(make_model, name, tokenizers):
    tokenizer = tokenizers["pieces"]
    if name == "RegardBertForMaskedLM":
        model, _ = make_model(name)
    else:
        library = regard if name.startswith("Regard") else transformers
        config_class = regard.RegardBertConfig if library is regard else transformers.BertConfig
        model = getattr(library, name)(config_class(vocab_size=len(tokenizer), num_hidden_layers=3, **SMALL)).eval()
    check(faithfulness(model, tokenizer, [TEXT, ("the river", "of the bank")]), 2)
    # A mask that is in the text is the one.
    masked = f"the river {tokenizer.mask_token} hashes of the bank"
    found = faithfulness(model, tokenizer, [masked, masked])
    maps = attention_map(model, tokenizer, masked)
    place = [token.piece for token in maps.keys].index(tokenizer.mask_token)
    others = [number for number, token in enumerate(maps.keys) if token.piece not in tokenizer.all_special_tokens]
    for example in found.examples:
        np.testing.assert_allclose(example.attention, maps.matrix()[place, others], atol=1e-6)


@pytest.mark.parametrize("library", ["regard", "stock"])
def test_a_class(tokenizers, library):
    tokenizer = tokenizers["pieces"]
    fields = {"vocab_size": len(tokenizer), "num_hidden_layers": 2, "num_labels": 3, **SMALL}
    if library == "regard":
        model = regard.RegardBertForSequenceClassification(regard.RegardBertConfig(**fields))
    else:
        model = transformers.BertForSequenceClassification(transformers.BertConfig(**fields))
    found = faithfulness(model.eval(), tokenizer, [TEXT, ("the river", "of the bank")], head="max")
    check(found, 2)
    maps = attention_map(model, tokenizer, TEXT)
    np.testing.assert_allclose(found.examples[0].attention, maps.matrix(head="max")[0, 1:-1], atol=1e-6)


@pytest.mark.parametrize("name", PAIRS)
def test_a_token_of_the_target(make_model, name):
    model, tokenizer = make_model(name)
    found = faithfulness(model, tokenizer, [("the bank", "river"), ("of the hashes", "bank"), "a river"])
    check(found, 3)
    assert found.kind == ("alignment" if "Recurrent" in name else "cross")
    maps = attention_map(model, tokenizer, "the bank", target="river")
    assert found.layer == maps.layers - 1
    end = len(found.examples[0].inputs)
    assert [key.label for key in maps.keys[:end]] == list(found.examples[0].inputs)
    rows = np.abs(maps.matrix()[:-1, :end] - found.examples[0].attention).max(axis=1)
    assert rows.min() < 1e-6


@pytest.mark.parametrize("name", ["RegardTransformerForConditionalGeneration", "BartForConditionalGeneration"])
def test_a_target_has_no_more_tokens_than_the_model_has_room_for(make_model, name):
    """The place of the prediction is drawn of these, so of several seeds one would lie behind them."""
    model, tokenizer = make_model(name)
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.model_max_length = 60
    example = ("the river", "bank " * 60)
    for seed in range(3):
        check(faithfulness(model, tokenizer, [example, example], max_tokens=300, seed=seed), 2)


def test_the_inputs_are_named_as_in_a_map(make_model):
    """By their characters, where a token of bytes is a part of one."""
    model, tokenizer = make_model("GPT2LMHeadModel")
    example = faithfulness(model, tokenizer, ["河 a\n", TEXT]).examples[0]
    assert example.inputs == ("河 1/3", "河 2/3", "河 3/3", "␣", "a", "⏎")


def test_a_model_without_a_limit_of_its_length(tokenizers):
    """XLNet has a -1 for it."""
    tokenizer = tokenizers["pieces"]
    sizes = {"d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 20, "initializer_range": 0.5}
    model = transformers.XLNetLMHeadModel(transformers.XLNetConfig(vocab_size=len(tokenizer), **sizes))
    found = faithfulness(model, tokenizer, [TEXT, TEXT])
    assert len(found.examples[0].inputs) >= len(TEXT.split())


@pytest.fixture
def pictures():
    rng = np.random.default_rng(0)
    return [Image.fromarray(rng.integers(256, size=(70, 90, 3), dtype=np.uint8)) for _ in range(2)]


@pytest.mark.parametrize("fields", [{}, {"decoder_type": "transformer"}, {"freeze_backbone": True}])
def test_a_word_of_a_caption(make_captioner, pictures, fields):
    model, processor = make_captioner(**fields)
    found = faithfulness(model, processor, [(pictures[0], "a small red bird"), pictures[1]])
    check(found, 2)
    assert (found.kind, model.config.freeze_backbone) == ("image", "freeze_backbone" in fields)
    maps = attention_map(model, processor, image=pictures[0], target="a small red bird")
    rows = np.abs(maps.matrix() - found.examples[0].attention).max(axis=1)
    assert rows.min() < 1e-6
    assert found.examples[0].inputs == tuple(key.text for key in maps.keys)


def test_erased_places_of_an_image_hold_its_mean_colour(make_captioner, pictures):
    from regard.inspection.faithfulness.prediction import make_prediction

    model, processor = make_captioner()
    prediction = make_prediction(model, processor, (pictures[0], "a bird"), "example 0", np.random.default_rng(0), 64)
    height, width = prediction.values.shape[2:]
    rows, columns = model.feature_grid(height, width)
    mask = torch.zeros(1, rows * columns, dtype=torch.bool)
    mask[0, columns + 2] = True
    changed = (prediction.erase(mask) != prediction.values)[0].all(dim=0)
    expected = torch.zeros(height, width, dtype=torch.bool)
    expected[height // rows : 2 * height // rows, 2 * width // columns : 3 * width // columns] = True
    assert torch.equal(changed, expected)
    whole = prediction.erase(torch.ones_like(mask))
    assert float(whole.std(dim=(-1, -2)).max()) < 1e-6
    assert whole.mean(dim=(-1, -2)) == pytest.approx(prediction.values.mean(dim=(-1, -2)), abs=1e-6)


# What won't do


def refused(*args, **kwargs) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        faithfulness(*args, **kwargs)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_a_layer_or_a_head_that_is_not_there(make_model):
    model, tokenizer = make_model("RegardDecoderForCausalLM")
    assert "`layer` (3) must be 0 to 2" in refused(model, tokenizer, [TEXT, TEXT], layer=3)
    assert "`head` (4) must be 0 to 3" in refused(model, tokenizer, [TEXT, TEXT], head=4)
    assert "`head` ('sum') must be" in refused(model, tokenizer, [TEXT, TEXT], head="sum")


def test_too_few_examples_or_tokens(make_model):
    model, tokenizer = make_model("RegardBertForMaskedLM")
    assert refused(model, tokenizer, [TEXT]) == "`examples` must hold at least two: the verdict is about their mean"
    assert refused(model, tokenizer, TEXT).startswith("`examples` must hold at least two")
    assert refused(model, tokenizer, [TEXT, "bank"]).startswith("example 1 ('bank') has too few tokens")
    assert refused(model, tokenizer, [TEXT, ""]).startswith("example 1 ('') has too few tokens")
    assert refused(model, tokenizer, [TEXT, TEXT], max_tokens=2) == "`max_tokens` (2) must be at least 3"
    model, tokenizer = make_model("RegardRecurrentForConditionalGeneration")
    assert "has a target without tokens" in refused(model, tokenizer, [("the bank", ""), ("the bank", "")])


def test_examples_of_another_kind(make_model, make_captioner, pictures):
    model, tokenizer = make_model("RegardDecoderForCausalLM")
    assert "a RegardDecoderForCausalLM continues one text" in refused(model, tokenizer, [("a", "b")] * 2)
    assert "example 0 is a Image: a RegardDecoder" in refused(model, tokenizer, pictures)
    model, processor = make_captioner()
    assert refused(model, processor, [3, 4]).startswith("example 0 is a int: a RegardCaptioner")
    assert "a captioner needs its processor" in refused(model, tokenizer, pictures)


def test_models_that_cannot_be_tested(make_model, tokenizers):
    for name, fields, told in (
        ("BertModel", {}, "a BertModel cannot be tested"),
        ("RegardRecurrentForConditionalGeneration", {"alignment": "none"}, "returned no attention weights"),
    ):
        model, tokenizer = make_model(name, **fields)
        assert told in refused(model, tokenizer, [TEXT, TEXT])
    model, tokenizer = make_model("BartForConditionalGeneration")
    assert "load it with its output layer" in refused(model.model, tokenizer, ["the bank", "river"])
    model, _ = make_model("RegardBertForMaskedLM")
    assert "`processor` has no mask token" in refused(model, tokenizer, ["the bank", "river"])
    config = transformers.MambaConfig(vocab_size=300, hidden_size=16, num_hidden_layers=1, state_size=4)
    mamba = transformers.MambaForCausalLM(config).eval()
    assert "returned no attention weights" in refused(mamba, tokenizers["bytes"], [TEXT, TEXT])
    fields = {"vocab_size": 300, "n_embd": 16, "n_layer": 2, "n_head": 4, "num_labels": 2, "pad_token_id": 0}
    last = transformers.GPT2ForSequenceClassification(transformers.GPT2Config(**fields)).eval()
    assert "the first token attends to no other" in refused(last, tokenizers["bytes"], [TEXT, TEXT])
    for labels in ({"num_labels": 1}, {"num_labels": 3, "problem_type": "multi_label_classification"}):
        config = transformers.BertConfig(vocab_size=len(tokenizers["pieces"]), num_hidden_layers=1, **SMALL, **labels)
        several = transformers.BertForSequenceClassification(config).eval()
        assert "cannot be tested" in refused(several, tokenizers["pieces"], [TEXT, TEXT])


def test_layers_that_do_not_attend_are_left_out(make_model, monkeypatch):
    """Some hybrid models have a None in their place."""
    model, tokenizer = make_model("GPT2LMHeadModel")
    expected = faithfulness(model, tokenizer, [TEXT, TEXT], layer=0)
    forward = model.forward

    def with_none(**inputs):
        outputs = forward(**inputs)
        if outputs.get("attentions"):
            outputs["attentions"] = (*outputs["attentions"][:1], None, *outputs["attentions"][1:])
        return outputs

    monkeypatch.setattr(model, "forward", with_none)
    found = faithfulness(model, tokenizer, [TEXT, TEXT], layer=-3)
    assert found.lines == expected.lines


def test_weights_that_are_no_numbers(make_model):
    model, tokenizer = make_model("GPT2LMHeadModel")
    with torch.no_grad():
        model.transformer.h[0].attn.c_attn.weight.fill_(float("nan"))
    with pytest.raises(ValueError, match=r"^a GPT2LMHeadModel returned attention weights that are NaN$"):
        faithfulness(model, tokenizer, [TEXT, TEXT])


@pytest.mark.skipif(find_spec("peft") is None, reason="peft, an optional package, is not installed")
def test_a_prompt_that_was_learned(make_model):
    """It stands before the text, so that the places of the inputs would be others."""
    from peft import PromptTuningConfig, get_peft_model

    model, tokenizer = make_model("GPT2LMHeadModel")
    tuned = get_peft_model(model, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    length = len(tokenizer(TEXT)["input_ids"])
    with pytest.raises(
        ValueError, match=f" attends to {length + 3} keys, but there are {length} inputs: attention to"
    ):
        faithfulness(tuned, tokenizer, [TEXT, TEXT])


@pytest.mark.parametrize("missing", [("captum",), ("captum", "scipy")])
def test_packages_that_are_missing(make_model, monkeypatch, missing):
    model, tokenizer = make_model("RegardDecoderForCausalLM")
    plain = extras.find_spec
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name in missing else plain(name))
    assert refused(model, tokenizer, [TEXT, TEXT]) == (
        f"tests of faithfulness need {' and '.join(missing)}: pip install 'regard[faithfulness]'"
    )
