"""Stock models out of the common: hybrids, and those without plain embeddings or whose rows don't sum to one."""

from __future__ import annotations

import re
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from regard.inspection.maps.attention_map import AttentionMap, attention_map
from tests.inspection.conftest import SMALL, TEXT


def _make(name: str, tokenizer: Any, **config: Any) -> Any:
    config_class = getattr(transformers, f"{re.split('For[CS]|Model', name)[0]}Config")
    torch.manual_seed(0)
    return getattr(transformers, name)(config_class(vocab_size=len(tokenizer), **{**SMALL, **config})).eval()


def _make_hybrid(tokenizer: Any, layers: int) -> Any:
    """Every third layer attends."""
    recurrent = {"attn_layer_period": 3, "attn_layer_offset": 2, "mamba_d_state": 4, "mamba_dt_rank": 4}
    heads = {"num_key_value_heads": 2, "num_experts": 2, "intermediate_size": 16}
    return _make("JambaForCausalLM", tokenizer, num_hidden_layers=layers, **recurrent, **heads)


def test_a_hybrid_of_which_no_layer_attends_is_refused(tokenizers: dict[str, Any]) -> None:
    tokenizer = tokenizers["bytes"]
    with pytest.raises(ValueError, match="a JambaForCausalLM returned no attention weights"):
        attention_map(_make_hybrid(tokenizer, 2), tokenizer, TEXT)


@pytest.mark.parametrize("says_none", [False, True])
def test_layers_of_a_hybrid_that_attend_are_shown(
    tokenizers: dict[str, Any], monkeypatch: pytest.MonkeyPatch, says_none: bool
) -> None:
    tokenizer = tokenizers["bytes"]
    model = _make_hybrid(tokenizer, 6)
    forward = model.base_model.forward

    # Some models leave layers that don't attend out of their output; others have a None in their place.
    def with_none(input_ids: torch.Tensor, use_cache: bool | None = None, **options: Any) -> Any:
        outputs = forward(input_ids, use_cache=use_cache, **options)
        second, fifth = outputs["attentions"]
        outputs["attentions"] = (None, None, second, None, None, fifth)
        return outputs

    if says_none:
        monkeypatch.setattr(model.base_model, "forward", with_none)
    found = attention_map(model, tokenizer, TEXT)
    model.set_attn_implementation("eager")
    inputs = tokenizer(TEXT, return_tensors="pt")
    with torch.no_grad():
        given = model.base_model(**inputs, use_cache=False, output_attentions=True).attentions
    expected = torch.cat([layer for layer in given if layer is not None])
    assert found.layers == 2
    assert found.numbers == (2, 5)
    assert [found.layer_name(layer) for layer in range(2)] == ["0 (2 of the model)", "1 (5 of the model)"]
    assert "layer 1 (5 of the model)" in found.figure().get_suptitle()
    np.testing.assert_array_equal(found.weights, expected.numpy())
    np.testing.assert_allclose(found.weights.sum(-1), 1, atol=1e-5)


def test_the_state_of_a_layer_is_no_weights(tokenizers: dict[str, Any]) -> None:
    """MiniMax gives the states of its linear layers where others give weights; here their shape is the same."""
    tokenizer = tokenizers["bytes"]
    layers = {"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
    heads = {"num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 2, "intermediate_size": 16}
    model = _make("MiniMaxForCausalLM", tokenizer, **layers, **heads, block_size=4)
    found = attention_map(model, tokenizer, "abcdefg")
    assert found.weights.shape == (1, 4, 8, 8)
    assert found.numbers == (1,)
    np.testing.assert_allclose(found.weights.sum(-1), 1, atol=1e-5)


@pytest.mark.parametrize("broken", ["missing", "none"])
def test_without_embeddings_the_ids_are_not_checked(
    tokenizers: dict[str, Any], monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    tokenizer = tokenizers["pieces"]
    model = _make("BertModel", tokenizer, num_hidden_layers=2)
    expected = attention_map(model, tokenizer, TEXT).weights

    def no_embeddings() -> None:
        if broken == "missing":
            raise NotImplementedError

    monkeypatch.setattr(model, "get_input_embeddings", no_embeddings)
    np.testing.assert_array_equal(attention_map(model, tokenizer, TEXT).weights, expected)


def test_rows_of_a_model_with_sinks_sum_to_less_than_one(tokenizers: dict[str, Any]) -> None:
    tokenizer = tokenizers["bytes"]
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size": 16}
    heads = {"num_key_value_heads": 2, "head_dim": 8}
    model = _make("GptOssForCausalLM", tokenizer, num_hidden_layers=2, **experts, **heads)
    sums = attention_map(model, tokenizer, TEXT).weights.sum(-1)
    assert sums.min() > 0
    assert sums.max() < 1


def test_scores_are_refused(tokenizers: dict[str, Any]) -> None:
    tokenizer = tokenizers["pieces"]
    groups = {f"{name}_groups": 1 for name in ("q", "k", "v", "post_attention", "intermediate", "output")}
    model = _make("SqueezeBertModel", tokenizer, num_hidden_layers=2, embedding_size=16, **groups)
    with pytest.raises(ValueError, match="a SqueezeBertModel returned numbers that are not weights"):
        attention_map(model, tokenizer, TEXT)


def test_layers_of_the_stack_for_texts_inside_a_model_that_sees(tokenizers: dict[str, Any]) -> None:
    tokenizer = tokenizers["bytes"]
    text = {"vocab_size": len(tokenizer), "num_key_value_heads": 2, "layer_types": ["conv", "full_attention", "conv"]}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Lfm2VlConfig(
        text_config={"model_type": "lfm2", **SMALL, "num_hidden_layers": 3, **text},
        vision_config={"model_type": "siglip2_vision_model", **vision},
    )
    found = attention_map(transformers.Lfm2VlModel(config), tokenizer, TEXT)
    assert found.numbers == (1,)


def test_rows_that_sum_to_more_than_one_are_no_weights(
    tokenizers: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = tokenizers["pieces"]
    model = _make("BertModel", tokenizer)
    forward = model.forward

    def with_twice(**inputs: Any) -> Any:
        outputs = forward(**inputs)
        outputs["attentions"] = tuple(2 * layer for layer in outputs["attentions"])
        return outputs

    monkeypatch.setattr(model, "forward", with_twice)
    with pytest.raises(ValueError, match=r"^a BertModel returned numbers that are not weights: .* to more than one$"):
        attention_map(model, tokenizer, TEXT)


@pytest.mark.parametrize(
    ("name", "config", "reason"),
    [
        ("BrosModel", {}, "`input_ids` alone, or not on these values (ValueError: You have to specify bbox)"),
        ("XmodModel", {"languages": ["en_XX", "de_DE"]}, "Input language unknown."),
    ],
)
def test_what_a_model_says_that_needs_more(
    tokenizers: dict[str, Any], name: str, config: dict[str, Any], reason: str
) -> None:
    model = _make(name, tokenizers["pieces"], num_hidden_layers=1, **config)
    kernel = model.config._attn_implementation
    with pytest.raises(ValueError, match=f"a {name} cannot run on .*{re.escape(reason)}"):
        attention_map(model, tokenizers["pieces"], TEXT)
    assert model.config._attn_implementation == kernel


def test_a_lack_of_memory_is_told_as_such(tokenizers: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**inputs: Any) -> None:
        raise torch.OutOfMemoryError("full")

    model = _make("BertModel", tokenizers["pieces"])
    monkeypatch.setattr(model, "forward", fail)
    with pytest.raises(torch.OutOfMemoryError, match="full"):
        attention_map(model, tokenizers["pieces"], TEXT)


def test_weights_that_are_no_numbers(tokenizers: dict[str, Any]) -> None:
    model = _make("BertModel", tokenizers["pieces"])
    with torch.no_grad():
        model.encoder.layer[0].attention.self.query.weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="a BertModel returned numbers that are not weights: some are neg"):
        attention_map(model, tokenizers["pieces"], TEXT)


def test_a_model_without_a_limit_of_positions(tokenizers: dict[str, Any]) -> None:
    heads = {"d_model": 16, "n_head": 4, "n_layer": 2, "d_inner": 16}
    model = transformers.XLNetModel(transformers.XLNetConfig(vocab_size=len(tokenizers["pieces"]), **heads))
    assert attention_map(model, tokenizers["pieces"], TEXT).layers == 2


@pytest.mark.skipif(find_spec("peft") is None, reason="peft, an optional package, is not installed")
def test_a_prompt_that_was_learned(tokenizers: dict[str, Any]) -> None:
    from peft import LoraConfig, PromptTuningConfig, get_peft_model

    tokenizer = tokenizers["pieces"]
    model = _make("BertForSequenceClassification", tokenizer, num_hidden_layers=2)
    tuned = get_peft_model(model, PromptTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=3))
    with pytest.raises(ValueError, match="with a learned prompt cannot be inspected"):
        attention_map(tuned, tokenizer, TEXT)
    model = _make("BertForSequenceClassification", tokenizer, num_hidden_layers=2)
    expected = attention_map(model, tokenizer, TEXT).weights
    # Adapters begin with no effect.
    adapted = get_peft_model(model, LoraConfig(task_type="SEQ_CLS", target_modules=["query"]))
    np.testing.assert_allclose(attention_map(adapted, tokenizer, TEXT).weights, expected, atol=1e-6)


def test_one_target_is_generated_whatever_the_model_is_set_to(tokenizers: dict[str, Any]) -> None:
    tokenizer = tokenizers["characters"]
    small = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "decoder_start_token_id": 0}
    model = _make("BartForConditionalGeneration", tokenizer, **small, bos_token_id=0, eos_token_id=1, pad_token_id=2)
    model.generation_config.update(num_beams=2, max_new_tokens=4)
    expected = attention_map(model, tokenizer, "the bank")
    model.generation_config.update(num_return_sequences=2, return_dict_in_generate=True)
    found = attention_map(model, tokenizer, "the bank")
    np.testing.assert_array_equal(found.weights, expected.weights)
    assert found.layers == 2


# Models that see


SIGHT = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 8, "image_size": (32, 48)}


def _picture() -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8))


def _sees(name: str, **config: Any) -> Any:
    torch.manual_seed(0)
    config_class = getattr(transformers, f"{name.removesuffix('ForImageClassification').removesuffix('Model')}Config")
    return getattr(transformers, name)(config_class(**{**SIGHT, **config}))


@pytest.mark.parametrize(
    ("name", "config", "before"),
    [
        ("ViTForImageClassification", {}, ["[CLS]"]),
        ("DeiTModel", {}, ["[CLS]", "extra 1"]),
        ("Dinov2WithRegistersModel", {"num_register_tokens": 2, "image_size": 32}, ["[CLS]", "extra 1", "extra 2"]),
        ("YolosModel", {"num_detection_tokens": 5}, ["[CLS]"]),
        ("SiglipVisionModel", {"image_size": 48}, []),
        # Its base model, by its name, is its encoder, which takes no image.
        ("DINOv3ViTModel", {"image_size": 48, "num_register_tokens": 1}, ["[CLS]", "extra 1"]),
    ],
)
def test_maps_over_the_patches_of_an_image(name: str, config: dict[str, Any], before: list[str]) -> None:
    size = (48, 48) if name == "SiglipVisionModel" else (32, 48)
    processor = transformers.ViTImageProcessorPil(size={"height": size[0], "width": size[1]})
    model = _sees(name, **config).train()
    kernel = model.config._attn_implementation
    found = attention_map(model, processor, image=_picture())
    assert model.training
    assert model.config._attn_implementation == kernel
    rows, columns = size[0] // 8, size[1] // 8
    assert (found.kind, found.grid) == ("image", (rows, columns))
    places = [f"row {row + 1}, column {column + 1}" for row in range(rows) for column in range(columns)]
    assert [key.label for key in found.keys] == places
    assert [query.label for query in found.queries] == [*before, *places]
    model.eval().set_attn_implementation("eager")
    pixels = processor(_picture(), return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        given = torch.cat(model(pixels, output_attentions=True).attentions)
    start, stop = len(before), len(before) + len(places)
    np.testing.assert_array_equal(found.weights, given[:, :, :stop, start:stop].numpy())
    assert found.image is not None
    assert found.image.size == (60, 40)


def _check_patches(found: AttentionMap, given: tuple[torch.Tensor, ...], before: int) -> None:
    np.testing.assert_array_equal(found.weights, torch.cat(given)[..., before:].numpy())
    assert found.grid == (4, 6)
    assert found.kind == "image"


@pytest.mark.parametrize("name", ["CLIPModel", "ChineseCLIPModel", "VisionTextDualEncoderModel"])
def test_of_a_model_with_two_stacks_the_one_that_is_asked(tokenizers: dict[str, Any], name: str) -> None:
    """For a text the one for texts, for an image that for images; by tokenizer, image processor or both in one."""
    tokenizer = tokenizers["pieces"]
    text = {**SMALL, "num_hidden_layers": 2, "vocab_size": len(tokenizer)}
    sight = {**SIGHT, "intermediate_size": 16, "image_size": 48}
    torch.manual_seed(0)
    if name == "VisionTextDualEncoderModel":
        model = transformers.VisionTextDualEncoderModel(
            vision_model=transformers.ViTModel(transformers.ViTConfig(**sight)),
            text_model=transformers.BertModel(transformers.BertConfig(**text)),
        )
    else:
        config_class = getattr(transformers, f"{name.removesuffix('Model')}Config")
        model = getattr(transformers, name)(config_class(text_config=text, vision_config=sight))
    model.train()
    image_processor = transformers.ViTImageProcessorPil(size={"height": 48, "width": 48})
    both = SimpleNamespace(tokenizer=tokenizer, image_processor=image_processor)
    model.config.name_or_path = "two/stacks"
    of_text = attention_map(model, tokenizer, TEXT)
    assert of_text.title == "two/stacks"
    of_image = attention_map(model, image_processor, image=_picture())
    np.testing.assert_array_equal(attention_map(model, both, TEXT).weights, of_text.weights)
    np.testing.assert_array_equal(attention_map(model, both, image=_picture()).weights, of_image.weights)
    assert all(module.training for module in model.modules())
    assert (of_text.kind, of_text.layers) == ("self", 2)
    assert (of_image.kind, of_image.grid) == ("image", (6, 6))
    kernels = [module.config._attn_implementation for module in model.modules() if hasattr(module, "config")]
    assert set(kernels) == {"sdpa"}
    # Layers of parts that were made before have configurations of their own.
    for module in model.eval().modules():
        if hasattr(module, "config"):
            module.config._attn_implementation = "eager"
    inputs = tokenizer(TEXT, return_tensors="pt")
    pixels = image_processor(_picture(), return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        given = model(**inputs, pixel_values=pixels, output_attentions=True)
    np.testing.assert_allclose(of_text.weights, torch.cat(given.text_model_output.attentions), atol=1e-6)
    expected = torch.cat(given.vision_model_output.attentions)[..., 1:]
    np.testing.assert_allclose(of_image.weights, expected, atol=1e-6)


def test_the_patches_of_a_model_for_texts_and_images_with_a_head(tokenizers: dict[str, Any]) -> None:
    config = transformers.CLIPConfig(vision_config={**SIGHT, "intermediate_size": 16, "image_size": 48})
    found = attention_map(
        transformers.CLIPForImageClassification(config),
        transformers.ViTImageProcessorPil(size={"height": 48, "width": 48}),
        image=_picture(),
    )
    assert found.grid == (6, 6)
    assert [query.label for query in found.queries][:2] == ["[CLS]", "row 1, column 1"]


@pytest.mark.parametrize("target", [None, "the river"])
@pytest.mark.parametrize("stack", ["ViT", "DonutSwin"])
def test_a_stock_captioner(tokenizers: dict[str, Any], stack: str, target: str | None) -> None:
    tokenizer = tokenizers["bytes"]
    if stack == "ViT":
        vision = transformers.ViTConfig(**SIGHT)
    else:
        # Its grid is coarser by half after each stage but the last.
        windows = {"depths": [1, 1], "num_heads": [2, 2], "window_size": 2, "embed_dim": 16, "image_size": [32, 48]}
        vision = transformers.DonutSwinConfig(patch_size=4, **windows)
    text = transformers.GPT2Config(
        n_embd=16, n_layer=2, n_head=2, n_positions=12, vocab_size=len(tokenizer), add_cross_attention=True
    )
    config = transformers.VisionEncoderDecoderConfig(encoder=vision.to_dict(), decoder=text.to_dict())
    torch.manual_seed(0)
    model = transformers.VisionEncoderDecoderModel(config).eval()
    model.config.decoder_start_token_id = model.generation_config.decoder_start_token_id = 0
    model.config.pad_token_id = model.generation_config.pad_token_id = 0
    model.generation_config.max_new_tokens = 4
    image_processor = transformers.ViTImageProcessorPil(size={"height": 32, "width": 48})
    processor = SimpleNamespace(tokenizer=tokenizer, image_processor=image_processor)
    found = attention_map(model, processor, image=_picture(), target=target)
    pixels = image_processor(_picture(), return_tensors="pt")["pixel_values"]
    model.set_attn_implementation("eager")
    if target is None:
        labels = model.generate(pixels, do_sample=False)[:, 1:]
    else:
        labels = tokenizer(target, return_tensors="pt")["input_ids"]
    assert [query.piece for query in found.queries] == tokenizer.convert_ids_to_tokens(labels[0])
    with torch.no_grad():
        given = model(pixels, labels=labels, output_attentions=True)
    _check_patches(found, given.cross_attentions, before=1 if stack == "ViT" else 0)
    decoder = attention_map(model, processor, image=_picture(), target=target, kind="decoder")
    np.testing.assert_array_equal(decoder.weights, torch.cat(given.decoder_attentions).numpy())
    with pytest.raises(ValueError, match=r"`target` has .* tokens, but the model has room for 12"):
        attention_map(model, processor, image=_picture(), target="x" * 13)
    with pytest.raises(ValueError, match="a captioner needs its processor, which has an `image_processor` and a `tok"):
        attention_map(model, image_processor, image=_picture())


def test_a_picture_shows_the_first_of_many_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard.inspection.maps.attention_map.MOST_PANELS", 5)
    processor = transformers.ViTImageProcessorPil(size={"height": 32, "width": 48})
    found = attention_map(_sees("ViTModel"), processor, image=_picture())
    figure = found.figure()
    titles = [axes.get_title() for axes in figure.axes if axes.get_title()]
    assert len(titles) == 6
    assert titles[1].startswith("[CLS]")
    assert "the first 5 of 25 queries" in figure.get_suptitle().replace("\n", " ")
    assert "row 4, column 6" in found.to_html()


def test_what_a_model_that_sees_is_refused(tokenizers: dict[str, Any]) -> None:
    model = _sees("ViTModel")
    processor = transformers.ViTImageProcessorPil(size={"height": 32, "width": 48})
    with pytest.raises(ValueError, match=r"^`text` is not allowed here: a ViTModel takes an `image`$"):
        attention_map(model, processor, TEXT)
    with pytest.raises(ValueError, match=r"^`image` is missing: a ViTModel needs an image to look at$"):
        attention_map(model, processor)
    with pytest.raises(ValueError, match=r"^`processor` is a .*: a ViTModel needs its image processor$"):
        attention_map(model, tokenizers["bytes"], image=_picture())
    windows = {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4, "patch_size": 4}
    swin = transformers.SwinModel(transformers.SwinConfig(image_size=32, **windows))
    with pytest.raises(ValueError, match="returned no weights over the 4 × 6 patches of the image: its attention"):
        attention_map(swin, processor, image=_picture())
    detr = transformers.DetrConfig(
        use_timm_backbone=False,
        backbone_config=transformers.ResNetConfig(
            embedding_size=8, hidden_sizes=[8], depths=[1], out_features=["stage1"]
        ),
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
    )
    with pytest.raises(ValueError, match=r"^a DetrModel returned no attention weights"):
        attention_map(transformers.DetrModel(detr), processor, image=_picture())
    several = transformers.PvtV2Config(depths=[1] * 4, hidden_sizes=[8] * 4, num_attention_heads=[1, 1, 1, 1])
    with pytest.raises(ValueError, match=r"^a PvtV2Model returned no attention weights"):
        attention_map(transformers.PvtV2Model(several), processor, image=_picture())
