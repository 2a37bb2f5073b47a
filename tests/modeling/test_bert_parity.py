"""Stock BERT and ours are one model on one format: weights, outputs, losses and gradients, in both directions."""

import json
from collections import OrderedDict

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import BertConfig
from transformers.core_model_loading import revert_weight_conversion

from regard import (
    RegardBertForMaskedLM,
    RegardBertForPreTraining,
    RegardBertForSequenceClassification,
    RegardBertModel,
)

MODEL_TYPES = ["regard_bert"]

every_kernel = pytest.mark.parametrize("kernel", ["eager", "sdpa"])
with_prediction_head = pytest.mark.parametrize("our_class", [RegardBertForMaskedLM, RegardBertForPreTraining])
tied_and_untied = pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])

# Untied, stock BERT saves this bias but computes with `cls.predictions.decoder.bias`.
IDLE = "cls.predictions.bias"


def stock_class(our_class: type) -> type:
    return getattr(transformers, our_class.__name__.removeprefix("Regard"))


@pytest.fixture
def stock_model(tiny_fields, randomize):
    """A tiny model of the stock class that one of ours stands for, with random weights."""

    def make(our_class, kernel="sdpa", **fields):
        config = BertConfig(**(tiny_fields(our_class) | fields), attn_implementation=kernel)
        return randomize(stock_class(our_class)(config)).eval()

    return make


def make_stock_folder(folder) -> None:
    """Rewrites `config.json`, and nothing else, from ours to stock."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    assert config["model_type"] == "regard_bert"
    config["model_type"] = "bert"
    config["architectures"] = [name.removeprefix("Regard") for name in config["architectures"]]
    path.write_text(json.dumps(config))


def on_disk(folder) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def assert_equal_tensors(actual: dict, expected: dict) -> None:
    assert actual.keys() == expected.keys()
    different = [name for name in expected if not actual[name].equal(expected[name])]
    assert different == []


def at_tokens(outputs, mask) -> list[torch.Tensor]:
    """Every output; of those that have one entry for each token, the entries at real tokens."""
    real = mask.bool()
    return [
        value[real] if value.shape[:2] == real.shape else value
        for value in outputs.to_tuple()
        if isinstance(value, torch.Tensor)
    ]


def gradients_by_stock_name(model) -> dict[str, torch.Tensor]:
    named = OrderedDict(model.named_parameters(remove_duplicate=False))
    gradients = {name: parameter.grad for name, parameter in named.items() if parameter.grad is not None}
    return gradients if model.config.model_type == "bert" else revert_weight_conversion(model, gradients)


@every_kernel
@tied_and_untied
def test_a_stock_model_becomes_ours(model_class, kernel, tied, stock_model, make_inputs, tmp_path):
    stock = stock_model(model_class, kernel, tie_word_embeddings=tied)
    stock.save_pretrained(tmp_path)
    ours, report = model_class.from_pretrained(tmp_path, attn_implementation=kernel, output_loading_info=True)
    assert not any(report.values())
    assert ours.config._attn_implementation == kernel
    ours.eval()

    inputs = make_inputs(model_class, labels=True)
    outputs = [model(**inputs) for model in (stock, ours)]
    assert outputs[0].keys() == outputs[1].keys()
    expected, actual = (at_tokens(output, inputs["attention_mask"]) for output in outputs)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)
    losses = [output.get("loss") for output in outputs]
    if losses[0] is None:
        losses = [output.last_hidden_state.square().sum() + output.pooler_output.sum() for output in outputs]
    torch.testing.assert_close(*losses, atol=1e-5, rtol=1e-6)
    for loss in losses:
        loss.backward()
    expected, actual = map(gradients_by_stock_name, (stock, ours))
    if "MaskedLM" in model_class.__name__ or "PreTraining" in model_class.__name__:
        # One bias, which stock BERT has under two names.
        (expected if tied else actual).pop("cls.predictions.decoder.bias" if tied else IDLE)
    assert actual.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(actual[name], expected[name], atol=1e-5, rtol=1e-4, msg=name)
    assert expected


def test_the_fused_projection_is_query_then_key_then_value(stock_model, tmp_path):
    stock = stock_model(RegardBertModel)
    stock.save_pretrained(tmp_path)
    ours = RegardBertModel.from_pretrained(tmp_path)
    for stock_layer, our_block in zip(stock.encoder.layer, ours.encoder.blocks, strict=True):
        fused, separate = our_block.self_attention.query_key_value, stock_layer.attention.self
        parts = zip(fused.weight.chunk(3), fused.bias.chunk(3), strict=True)
        for (weight, bias), linear in zip(parts, (separate.query, separate.key, separate.value), strict=True):
            assert weight.equal(linear.weight)
            assert bias.equal(linear.bias)


@tied_and_untied
def test_our_model_becomes_stock(model_class, tied, make_model, make_inputs, tmp_path):
    ours = make_model(model_class, tie_word_embeddings=tied)
    ours.save_pretrained(tmp_path)
    make_stock_folder(tmp_path)
    stock, report = stock_class(model_class).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())
    stock.eval()
    inputs = make_inputs(model_class, labels=True)
    expected, actual = (at_tokens(model(**inputs), inputs["attention_mask"]) for model in (ours, stock))
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)

    # The file is one that stock BERT would write, name for name, shape for shape, bit for bit.
    ours_on_disk = on_disk(tmp_path)
    stock.save_pretrained(tmp_path / "stock")
    assert_equal_tensors(ours_on_disk, on_disk(tmp_path / "stock"))
    # And once more through ours.
    again = model_class.from_pretrained(tmp_path / "stock")
    assert_equal_tensors(dict(again.state_dict()), dict(ours.state_dict()))


@with_prediction_head
@tied_and_untied
def test_the_prediction_bias_is_the_one_that_stock_computes_with(our_class, tied, stock_model, tmp_path):
    stock = stock_model(our_class, tie_word_embeddings=tied)
    with torch.no_grad():
        stock.cls.predictions.bias.fill_(3.0)
        stock.cls.predictions.decoder.bias.fill_(5.0)
    stock.save_pretrained(tmp_path)
    assert ("cls.predictions.decoder.bias" in on_disk(tmp_path)) == (not tied)
    ours = our_class.from_pretrained(tmp_path)
    assert ours.masked_lm_head.decoder.bias.equal(stock.cls.predictions.decoder.bias)
    assert (ours.masked_lm_head.decoder.bias == 5.0).all()
    assert (ours.masked_lm_head.decoder.weight is ours.bert.embeddings.tokens.weight) == tied


@with_prediction_head
def test_an_untied_checkpoint_with_one_bias_loads(our_class, stock_model, tmp_path):
    """Old checkpoints have no `cls.predictions.decoder.bias`."""
    stock = stock_model(our_class, tie_word_embeddings=False)
    stock.save_pretrained(tmp_path)
    tensors = on_disk(tmp_path)
    del tensors["cls.predictions.decoder.bias"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    ours, report = our_class.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())
    assert ours.masked_lm_head.decoder.bias.equal(stock.cls.predictions.bias)


@pytest.mark.parametrize("our_class", [RegardBertModel, RegardBertForPreTraining])
def test_the_first_checkpoints_names_are_read_and_not_written(our_class, stock_model, tmp_path):
    stock = stock_model(our_class)
    stock.save_pretrained(tmp_path)
    tensors = on_disk(tmp_path)

    def old_name(name: str) -> str:
        return name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")

    old = {old_name(name): tensor for name, tensor in tensors.items()}
    assert len(old.keys() - tensors.keys()) >= 10
    save_file(old, tmp_path / "model.safetensors", {"format": "pt"})
    ours, report = our_class.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())
    ours.save_pretrained(tmp_path / "again")
    assert_equal_tensors(on_disk(tmp_path / "again"), tensors)


def test_a_base_checkpoint_gets_a_head_and_keeps_stock_names(model_class, stock_model, tmp_path):
    """The names of a head that was not in the loaded file are stock's as well."""
    base = stock_model(RegardBertModel)
    base.save_pretrained(tmp_path)
    ours, report = model_class.from_pretrained(tmp_path, output_loading_info=True)
    missing = report["missing_keys"]
    assert not any(name.startswith("bert.") and "pooler" not in name for name in missing)
    assert bool(missing) == (model_class is not RegardBertModel)
    ours.save_pretrained(tmp_path / "again")
    stock_model(model_class).save_pretrained(tmp_path / "stock")
    tensors, expected = on_disk(tmp_path / "again"), on_disk(tmp_path / "stock")
    assert {name: tensor.shape for name, tensor in tensors.items()} == {
        name: tensor.shape for name, tensor in expected.items()
    }
    prefix = "" if model_class is RegardBertModel else "bert."
    for name, tensor in on_disk(tmp_path).items():
        if prefix + name in tensors:
            assert tensors[prefix + name].equal(tensor), name


def test_a_checkpoint_with_a_head_loads_into_the_base(model_class, stock_model, tmp_path):
    stock = stock_model(model_class)
    stock.save_pretrained(tmp_path)
    ours = RegardBertModel.from_pretrained(tmp_path)
    base = stock if model_class is RegardBertModel else stock.bert
    ids = torch.randint(5, 40, (2, 7))
    torch.testing.assert_close(ours.eval()(ids)[0], base(ids)[0], atol=1e-5, rtol=0)


def test_only_what_the_checkpoint_lacks_is_initialised(make_model, tmp_path):
    model = make_model(RegardBertForSequenceClassification)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    model.save_pretrained(tmp_path)
    tensors = on_disk(tmp_path)
    lacking = [
        "classifier.bias",
        "bert.encoder.layer.1.output.dense.bias",
        "bert.embeddings.LayerNorm.weight",
    ]
    for name in lacking:
        del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    loaded, report = RegardBertForSequenceClassification.from_pretrained(tmp_path, output_loading_info=True)
    initial = {
        "classifier.bias": 0.0,
        "bert.encoder.blocks.1.feed_forward.down.bias": 0.0,
        "bert.embeddings.norm.weight": 1.0,
    }
    assert report["missing_keys"] == set(initial)
    for name, parameter in loaded.named_parameters():
        assert (parameter == initial.get(name, 0.5)).all(), name
