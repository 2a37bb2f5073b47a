"""Stock models out of the common: hybrids, and those without plain embeddings or whose rows don't sum to one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from regard.inspection.attention import attention_map
from tests.inspection.conftest import SMALL, TEXT


def _make(name: str, tokenizer: Any, **config: Any) -> Any:
    config_class = getattr(transformers, f"{name.removesuffix('ForCausalLM').removesuffix('Model')}Config")
    torch.manual_seed(0)
    return getattr(transformers, name)(config_class(vocab_size=len(tokenizer), **{**SMALL, **config})).eval()


def _make_hybrid(tokenizer: Any, layers: int) -> Any:
    """Every third layer attends."""
    recurrent = {"attn_layer_period": 3, "attn_layer_offset": 2, "mamba_d_state": 4, "mamba_dt_rank": 4}
    heads = {"num_key_value_heads": 2, "num_experts": 2, "intermediate_size": 16}
    return _make("JambaForCausalLM", tokenizer, num_hidden_layers=layers, **recurrent, **heads)


def test_a_hybrid_of_which_no_layer_attends_is_refused(tokenizers: dict[str, Any]) -> None:
    tokenizer = tokenizers["bytes"]
    with pytest.raises(ValueError, match="a JambaForCausalLM gave no attention weights"):
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
        outputs["attentions"] = (None, *outputs["attentions"])
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
    np.testing.assert_array_equal(found.weights, expected.numpy())
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
    with pytest.raises(ValueError, match="a SqueezeBertModel gave numbers that are no weights"):
        attention_map(model, tokenizer, TEXT)


@pytest.mark.parametrize("target", [None, "the river"])
def test_a_stock_captioner_is_refused(tokenizers: dict[str, Any], target: str | None) -> None:
    vision = transformers.ViTConfig(**SMALL, num_hidden_layers=1, image_size=32, patch_size=8)
    text = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=4, vocab_size=300, add_cross_attention=True)
    config = transformers.VisionEncoderDecoderConfig(encoder=vision.to_dict(), decoder=text.to_dict())
    model = transformers.VisionEncoderDecoderModel(config)
    image = Image.new("RGB", (32, 32))
    with pytest.raises(ValueError, match="a VisionEncoderDecoderModel can't be shown an `image`"):
        attention_map(model, tokenizers["bytes"], image=image, target=target)


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
    with pytest.raises(ValueError, match=r"^a BertModel gave numbers that are no weights: .* sums to more than one$"):
        attention_map(model, tokenizer, TEXT)


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
        given = torch.cat(model.base_model(pixels, output_attentions=True).attentions)
    start, stop = len(before), len(before) + len(places)
    np.testing.assert_array_equal(found.weights, given[:, :, :stop, start:stop].numpy())
    assert found.image is not None
    assert found.image.size == (60, 40)


def test_a_picture_shows_the_first_of_many_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard.inspection.maps.MOST_PANELS", 5)
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
    with pytest.raises(ValueError, match=r"^`text` is not to be given: a ViTModel looks at an `image`$"):
        attention_map(model, processor, TEXT)
    with pytest.raises(ValueError, match=r"^`image` is missing: give what the ViTModel shall look at$"):
        attention_map(model, processor)
    with pytest.raises(ValueError, match=r"^`processor` is a .*: a ViTModel needs its image processor$"):
        attention_map(model, tokenizers["bytes"], image=_picture())
    windows = {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4, "patch_size": 4}
    swin = transformers.SwinModel(transformers.SwinConfig(image_size=32, **windows))
    with pytest.raises(
        ValueError, match="gave no weights over the 8 × 12 patches of the image: its attention is in w"
    ):
        attention_map(swin, processor, image=_picture())
