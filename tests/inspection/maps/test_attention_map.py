"""Maps of models, ours and stock: the weights are those that the model itself gives, and the model stays as it was."""

import re
import warnings

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from regard import spatial_maps
from regard.inspection.maps.attention_map import attention_map
from regard.tokenization.words import train_words
from tests.inspection.conftest import MODELS, TEXT

STACKS = [name for name, (kind, _) in MODELS.items() if kind != "characters"]
PAIRS = [name for name, (kind, _) in MODELS.items() if kind == "characters"]
KINDS = [
    (name, kind)
    for name in PAIRS
    for kind in (("alignment",) if "Recurrent" in name else ("cross", "encoder", "decoder"))
]
KERNELS = ["eager", "sdpa"]


def set_kernel(model, kernel):
    if model._supports_sdpa:
        model.set_attn_implementation(kernel)
    return model


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", STACKS)
def test_weights_of_a_stack_are_the_models_own(make_model, name, kernel):
    model, tokenizer = make_model(name)
    found = attention_map(set_kernel(model, kernel), tokenizer, TEXT)
    inputs = tokenizer(TEXT, return_tensors="pt")
    expected = set_kernel(model, "eager").base_model(**inputs, output_attentions=True).attentions
    assert found.kind == "self"
    assert found.weights.shape == (3, 4, *[inputs["input_ids"].shape[1]] * 2)
    np.testing.assert_array_equal(found.weights, torch.cat(expected).detach().numpy())
    np.testing.assert_allclose(found.weights.sum(-1), 1, atol=1e-5)
    assert [token.piece for token in found.queries] == tokenizer.convert_ids_to_tokens(inputs["input_ids"][0])
    assert found.keys == found.queries


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_weights_of_an_encoder_decoder_are_the_models_own(make_model, name, kind, kernel):
    model, tokenizer = make_model(name)
    source, target = "the bank", "river"
    found = attention_map(set_kernel(model, kernel), tokenizer, source, target=target, kind=kind)
    inputs = tokenizer(source, return_tensors="pt")
    labels = tokenizer(target, return_tensors="pt")["input_ids"]
    outputs = set_kernel(model, "eager")(**inputs, labels=labels, output_attentions=True)
    expected = getattr(outputs, {"alignment": "cross"}.get(kind, kind) + "_attentions")
    np.testing.assert_allclose(found.weights, torch.cat(expected).detach().numpy(), atol=1e-6)
    np.testing.assert_allclose(found.weights.sum(-1), 1, atol=1e-5)
    start = tokenizer.convert_ids_to_tokens([model.config.decoder_start_token_id])
    read, written = [*"the␣bank", "</s>"], [*"river", "</s>"]
    queries = {"encoder": read, "decoder": [*start, *written[:-1]]}.get(kind, written)
    keys = {"decoder": queries}.get(kind, read)
    assert [token.label for token in found.queries] == queries
    assert [token.label for token in found.keys] == keys
    assert found.kind == kind


def test_three_source_words_and_four_of_the_target(make_model, tokenizers):
    tokenizer = train_words(["a small red bird", "der kleine rote vogel"])
    tokenizer.backend_tokenizer.post_processor = None
    for name in PAIRS:
        model, _ = make_model(name)
        found = attention_map(model, tokenizer, "small red bird", target="der kleine rote vogel")
        assert found.weights.shape[2:] == (4, 3)
        assert [token.label for token in found.queries] == ["der", "kleine", "rote", "vogel"]
        assert [token.label for token in found.keys] == ["small", "red", "bird"]


@pytest.mark.parametrize("name", PAIRS)
def test_a_target_that_is_not_given_is_generated(make_model, name):
    model, tokenizer = make_model(name)
    generated = model.generate(**tokenizer("the bank", return_tensors="pt"), do_sample=False)[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = attention_map(model, tokenizer, "the bank")
    assert [token.piece for token in found.queries] == tokenizer.convert_ids_to_tokens(generated[1:])
    assert found.weights.shape[2:] == (len(generated) - 1, len("the bank") + 1)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_left_as_it_was(make_model, name, fails, monkeypatch):
    model, tokenizer = make_model(name)
    model.train()
    parts = list(model.children())
    parts[0].eval()
    set_kernel(model, "sdpa")
    modes = [module.training for module in model.modules()]
    kernels = [module.config._attn_implementation for module in model.modules() if hasattr(module, "config")]
    seen = []

    def look(*args):
        seen.append((model.config._attn_implementation, model.training, torch.is_grad_enabled()))
        if fails:
            raise ValueError("no")

    model.base_model.register_forward_pre_hook(look)
    if fails:
        with pytest.raises(ValueError, match="no"):
            attention_map(model, tokenizer, TEXT[:20])
    else:
        attention_map(model, tokenizer, TEXT[:20])
    assert seen[-1] == ("eager", False, False)
    assert [module.training for module in model.modules()] == modes
    assert [module.config._attn_implementation for module in model.modules() if hasattr(module, "config")] == kernels
    if model._supports_sdpa:
        assert set(kernels) == {"sdpa"}


def test_pairs_of_texts(make_model):
    model, tokenizer = make_model("RegardBertForMaskedLM")
    found = attention_map(model, tokenizer, "the river", text_pair="the bank")
    inputs = tokenizer("the river", "the bank", return_tensors="pt")
    assert inputs["token_type_ids"].any()
    expected = model.base_model(**inputs, output_attentions=True).attentions
    np.testing.assert_array_equal(found.weights, torch.cat(expected).detach().numpy())


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_never_shown(make_model, side):
    model, tokenizer = make_model("RegardDecoderForCausalLM")
    expected = attention_map(model, tokenizer, "the river").weights
    tokenizer.padding_side = side
    tokenizer.backend_tokenizer.enable_padding(direction=side, length=30, pad_token="<pad>")
    try:
        found = attention_map(model, tokenizer, "the river")
    finally:
        tokenizer.backend_tokenizer.no_padding()
        tokenizer.padding_side = "right"
    np.testing.assert_array_equal(found.weights, expected)
    assert "<pad>" not in [token.piece for token in found.keys]


# Captioners


@pytest.fixture
def picture():
    return Image.fromarray(np.random.default_rng(0).integers(256, size=(70, 90, 3), dtype=np.uint8))


@pytest.mark.parametrize("decoder", ["recurrent", "transformer"])
def test_where_a_captioner_looks(make_captioner, picture, decoder):
    model, processor = make_captioner(decoder_type=decoder)
    kernels = [module.config._attn_implementation for module in model.modules() if hasattr(module, "config")]
    found = attention_map(model, processor, image=picture, target="a small red bird")
    after = [module.config._attn_implementation for module in model.modules() if hasattr(module, "config")]
    assert after == kernels
    assert "sdpa" in kernels
    inputs = processor(images=picture, labels="a small red bird", return_tensors="pt")
    outputs = model(**inputs, output_attentions=True)
    maps = spatial_maps(outputs.cross_attentions, found.grid)[:, 0].detach().numpy()
    assert (found.kind, found.grid) == ("image", model.feature_grid(40, 56))
    np.testing.assert_allclose(found.weights.reshape(maps.shape), maps, atol=1e-6)
    assert [token.text for token in found.queries] == ["a", "small", "red", "bird", "</s>"]
    assert [token.word for token in found.queries] == [0, 1, 2, 3, 4]
    columns = found.grid[1]
    assert found.keys[columns].text == "row 2, column 1"
    assert np.array_equal(np.asarray(found.image), np.asarray(picture))


def test_a_caption_that_is_not_given_is_generated(make_captioner, picture):
    model, processor = make_captioner()
    generated = model.generate(**processor(images=picture, return_tensors="pt"))[0, 1:]
    found = attention_map(model, processor, image=picture)
    assert [token.piece for token in found.queries] == processor.tokenizer.convert_ids_to_tokens(generated)


def test_the_decoder_of_a_captioner(make_captioner, picture):
    model, processor = make_captioner(decoder_type="transformer")
    found = attention_map(model, processor, image=picture, target="a bird", kind="decoder")
    assert [token.text for token in found.queries] == ["<s>", "a", "bird"]
    assert found.image is None
    assert np.triu(found.weights, 1).max() == 0


def test_of_a_cropped_image_what_was_seen_is_shown(make_captioner, picture):
    model, processor = make_captioner()
    image_processor = transformers.CLIPImageProcessorPil(
        size={"shortest_edge": 60}, crop_size={"height": 40, "width": 56}
    )
    processor.image_processor = image_processor
    found = attention_map(model, processor, image=picture, target="a bird")
    scaled = picture.resize((77, 60), Image.Resampling.BICUBIC)
    cropped = np.asarray(scaled.crop((10, 10, 66, 50)), dtype=float)
    assert found.image.size == (56, 40)
    assert np.abs(np.asarray(found.image, dtype=float) - cropped).mean() < 3


# What won't do


def refused(*args, **kwargs) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        attention_map(*args, **kwargs)
    text = str(caught.value)
    assert "\n" not in text
    return text


# To the other, which reads bytes, a space is a token.
@pytest.mark.parametrize(("name", "text"), [("BertModel", ""), ("BertModel", "  \n"), ("GPT2LMHeadModel", "")])
def test_a_text_without_tokens(make_model, name, text):
    model, tokenizer = make_model(name)
    assert refused(model, tokenizer, text) == f"`text` ({text!r}) has no tokens: give at least one word"


@pytest.mark.parametrize(
    "name", ["BertModel", "GPT2LMHeadModel", "BartForConditionalGeneration", "RegardBertForMaskedLM"]
)
def test_a_text_that_is_too_long(make_model, name):
    model, tokenizer = make_model(name)
    assert re.search(
        r"`text` has \d+ tokens, but the model has room for 60: shorten it", refused(model, tokenizer, "the " * 80)
    )
    attention_map(model, tokenizer, "the " * 3, **({"target": "a"} if "Bart" in name else {}))


def test_a_target_that_is_too_long(make_model):
    model, tokenizer = make_model("RegardTransformerForConditionalGeneration")
    assert "`target` has 81 tokens" in refused(model, tokenizer, "the", target="t" * 80)


def test_another_models_tokenizer(make_model, tokenizers):
    model, _ = make_model("BertModel", vocab_size=20)
    assert "use the model's own tokenizer" in refused(model, tokenizers["pieces"], TEXT)


def test_several_texts(make_model):
    model, tokenizer = make_model("BertModel")
    assert refused(model, tokenizer, ["a", "b"]) == "`text` is a list: give one text at a time, as a string"


def test_a_target_without_a_decoder(make_model):
    for name in ("BertModel", "RegardDecoderForCausalLM"):
        model, tokenizer = make_model(name)
        assert refused(model, tokenizer, "a", target="b") == (
            f"`target` is not allowed here: a {name} has no separate decoder"
        )


def test_a_kind_that_the_model_has_not(make_model):
    model, tokenizer = make_model("BertModel")
    assert refused(model, tokenizer, "a", kind="cross") == "`kind` ('cross') must be 'self' for this BertModel"
    model, tokenizer = make_model("T5ForConditionalGeneration")
    assert "must be 'cross' or 'encoder' or 'decoder'" in refused(model, tokenizer, "a", target="b", kind="self")


def test_models_without_attention(make_model, tokenizers, picture):
    model, tokenizer = make_model("RegardRecurrentForConditionalGeneration", alignment="none")
    assert "returned no attention weights" in refused(model, tokenizer, "a", target="b")
    config = transformers.MambaConfig(vocab_size=300, hidden_size=16, num_hidden_layers=1, state_size=4)
    assert "returned no attention weights" in refused(transformers.MambaModel(config), tokenizers["bytes"], "a")
    cnn = transformers.ResNetModel(transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1]))
    processor = transformers.ViTImageProcessorPil(size={"height": 32, "width": 32})
    assert "returned no attention weights" in refused(cnn, processor, image=picture)


def test_images_for_those_that_see(make_model, make_captioner, picture):
    model, tokenizer = make_model("BertModel")
    assert "does not take an `image`" in refused(model, tokenizer, image=picture)
    assert "`text` is missing" in refused(model, tokenizer)
    model, processor = make_captioner()
    assert "`image` is missing" in refused(model, processor)
    assert "`text` is not allowed here" in refused(model, processor, "a", image=picture)
    assert "needs its processor" in refused(model, tokenizer, image=picture)
    assert "no token of the vocabulary" in refused(model, processor, image=picture, target="zzz")


def test_a_model_that_cannot_generate(make_model):
    model, tokenizer = make_model("BartForConditionalGeneration")
    assert "`target` is missing" in refused(model.model, tokenizer, "a")
