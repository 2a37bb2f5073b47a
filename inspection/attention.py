"""Attention maps of any model that gives its weights, ours or stock."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import BaseImageProcessor, PreTrainedModel

from ..modeling.base import shift_right
from ..tokenization.processor import ImageSource, open_image, to_rgb
from .kernels import weights_shown
from .maps import AttentionMap
from .tokens import Token, decoded_tokens, encoded_tokens, special_token

# How many a model writes that does not say.
NEW_TOKENS = 20
# How much more than one a row of weights may sum to: those of half precision are rounded.
SLACK = 0.05


class _Look(NamedTuple):
    """What one kind of attention of a model came to."""

    weights: Sequence[Any] | None
    queries: tuple[Token, ...]
    keys: tuple[Token, ...]


def attention_map(
    model: PreTrainedModel,
    processor: Any,
    text: str | None = None,
    *,
    text_pair: str | None = None,
    target: str | None = None,
    image: ImageSource | None = None,
    kind: str | None = None,
) -> AttentionMap:
    """Has a model look at one text, or at one image, and gives its attention weights.

    The model may be on any kernel and in training: for the look it is on the eager one and in evaluation mode, then as
    it was. One text has no padding, so none is ever in a map.

    Args:
        model: any model of transformers that reads text, or an image in patches (ViT), and gives attention weights, or
            a captioner of ours.
        processor: its tokenizer, its image processor, or the captioner's processor.
        text: what the model reads; of an encoder-decoder the source.
        text_pair: a second text, for a model that reads pairs.
        target: what the decoder of an encoder-decoder, or of a captioner, writes; what it generates if not given.
        image: what a captioner or a vision model looks at: an image, an array or a file.
        kind: which weights. A model of one stack has "self"; an encoder-decoder "cross" (the one that it gives if not
            told otherwise), "encoder" and "decoder", a recurrent one "alignment"; a captioner "image", and with a
            Transformer decoder "decoder".

    Raises:
        ValueError: for a model without such weights; for a text that has no tokens or more than the model has
            positions, or for several texts; or for an input that the model does not take.
    """
    captions = hasattr(model, "feature_grid")
    sees = model.main_input_name == "pixel_values" and not model.config.is_encoder_decoder
    name = type(model).__name__
    _check_text("text", text, not (captions or sees), f"a {name} looks at an `image`")
    _check_text("text_pair", text_pair, not (captions or sees), f"a {name} looks at an `image`")
    _check_text("target", target, captions or model.config.is_encoder_decoder, f"a {name} has no decoder beside it")
    shown, grid = None, None
    with weights_shown(model):
        if captions:
            looks, shown, grid = _look_at_image(model, processor, image, target)
        elif sees:
            looks, shown, grid = _look_at_patches(model, processor, image)
        elif image is not None or model.main_input_name != "input_ids":
            raise ValueError(
                f"a {name} can't be shown an `image`: of models that see, captioners of ours and single stacks can"
            )
        elif text is None:
            raise ValueError(f"`text` is missing: give what the {name} shall read")
        elif model.config.is_encoder_decoder:
            looks = _look_at_pair(model, processor, text, text_pair, target)
        else:
            looks = _look_at_text(model, processor, text, text_pair)
    kind, look = _choose(looks, kind, name)
    found = AttentionMap(_stack(look, name), look.queries, look.keys, kind, model.config.name_or_path or name)
    return replace(found, image=shown, grid=grid) if kind == "image" else found


def _check_text(name: str, text: str | None, fits: bool, reason: str) -> None:
    if text is None:
        return
    if not isinstance(text, str):
        raise ValueError(f"`{name}` is a {type(text).__name__}: give one text, and several one by one")
    if not fits:
        raise ValueError(f"`{name}` is not to be given: {reason}")


def _choose(looks: dict[str, _Look], kind: str | None, name: str) -> tuple[str, _Look]:
    # A layer of a hybrid model that does not attend, but is recurrent for one, has none.
    attending = {
        key: look._replace(weights=[layer for layer in look.weights or () if layer is not None])
        for key, look in looks.items()
    }
    there = {key: look for key, look in attending.items() if look.weights}
    if not there:
        raise ValueError(
            f"a {name} gave no attention weights: it has none, or does not tell them (where it has a choice, load it "
            "with attn_implementation='eager')"
        )
    if kind is not None and kind not in there:
        raise ValueError(f"`kind` ({kind!r}) must be {' or '.join(map(repr, there))} for this {name}")
    # The first is what its family is known for.
    kind = kind or next(iter(there))
    return kind, there[kind]


def _stack(look: _Look, name: str) -> np.ndarray:
    assert look.weights is not None
    shapes = {tuple(layer.shape) for layer in look.weights}
    (shape, *others) = shapes
    if others or shape[-2:] != (len(look.queries), len(look.keys)):
        raise ValueError(
            f"a {name} gave weights of the shapes {', '.join(map(str, sorted(shapes)))}, but every layer's must be "
            f"(1, heads, {len(look.queries)}, {len(look.keys)}), a weight for each pair of tokens"
        )
    weights = torch.cat(tuple(look.weights)).float().cpu().numpy()
    # Less than one is right where a head has a sink beside the tokens.
    if weights.min() < 0 or weights.sum(axis=-1).max() > 1 + SLACK:
        raise ValueError(
            f"a {name} gave numbers that are no weights: they are negative, or a row sums to more than one"
        )
    return weights


# Text


def _look_at_text(model: Any, tokenizer: Any, text: str, text_pair: str | None) -> dict[str, _Look]:
    inputs, tokens = _encode(model, tokenizer, "text", text, text_pair)
    # The stack under the head, since heads differ in what they take.
    outputs = model.base_model(**inputs, **_no_cache(model), output_attentions=True, return_dict=True)
    return {"self": _Look(outputs.get("attentions"), tokens, tokens)}


def _look_at_pair(
    model: Any, tokenizer: Any, text: str, text_pair: str | None, target: str | None
) -> dict[str, _Look]:
    inputs, source = _encode(model, tokenizer, "text", text, text_pair)
    if target is None:
        labels, written = _generate(model, tokenizer, inputs)
    else:
        encoded, written = _encode(model, tokenizer, "target", target)
        labels = encoded["input_ids"]
    start = decoder_start(model)
    decoder_inputs = shift_right(labels, start, None)
    outputs = model.base_model(**inputs, decoder_input_ids=decoder_inputs, output_attentions=True, return_dict=True)
    read = (special_token(tokenizer, start), *written[:-1])
    looks = {
        "cross": _Look(outputs.get("cross_attentions"), written, source),
        "encoder": _Look(outputs.get("encoder_attentions"), source, source),
        "decoder": _Look(outputs.get("decoder_attentions"), _numbered(read), _numbered(read)),
    }
    if looks["encoder"].weights is None and looks["decoder"].weights is None:
        # Attention before there was any within a text.
        looks = {"alignment": looks["cross"]}
    return looks


def _encode(
    model: Any, tokenizer: Any, name: str, text: str, text_pair: str | None = None
) -> tuple[dict[str, Tensor], tuple[Token, ...]]:
    texts = [text] if text_pair is None else [text, text_pair]
    given = {"text_target": text} if name == "target" else {"text": text, "text_pair": text_pair}
    encoding = tokenizer(
        **given,
        padding=False,
        truncation=False,
        return_offsets_mapping=tokenizer.is_fast,
        verbose=False,
    )
    encoding = encoding.convert_to_tensors("pt", prepend_batch_axis=True)
    tokens = encoded_tokens(tokenizer, encoding, texts)
    if all(token.span is None for token in tokens):
        raise ValueError(f"`{name}` ({text!r}) has no tokens: give a word or more")
    _check_length(model, tokenizer, name, len(tokens))
    _check_ids(model, name, encoding["input_ids"])
    taken = ("input_ids", "attention_mask", *_segments(model))
    return {key: encoding[key].to(model.device) for key in taken if key in encoding}, tokens


def _segments(model: Any) -> tuple[str, ...]:
    # A tokenizer may tell segments apart that a model does not.
    return tuple({"token_type_ids"} & inspect.signature(model.base_model.forward).parameters.keys())


def _no_cache(model: Any) -> dict[str, bool]:
    # One look needs no cache, and that of a stack with recurrent layers can't always be made.
    return dict.fromkeys({"use_cache"} & inspect.signature(model.base_model.forward).parameters.keys(), False)


def _check_length(model: Any, tokenizer: Any, name: str, length: int) -> None:
    limit = getattr(model.config, "max_position_embeddings", None)
    if limit is None:
        return
    # Some models number positions from the second or later; their tokenizers know.
    limit = min(limit, tokenizer.model_max_length)
    if length > limit:
        raise ValueError(f"`{name}` has {length} tokens, and the model has room for {limit}: shorten it")


def _check_ids(model: Any, name: str, ids: Tensor) -> None:
    try:
        size = model.get_input_embeddings().weight.shape[0]
    except (NotImplementedError, AttributeError):
        # Some models make their embeddings in other ways, out of hashes for one: there is no such limit to check.
        return
    if int(ids.max()) >= size:
        raise ValueError(
            f"`{name}` has the id {int(ids.max())}, and the model has {size} tokens: give it its own tokenizer"
        )


# A decoder beside it


def _generate(model: Any, tokenizer: Any, inputs: dict[str, Tensor]) -> tuple[Tensor, tuple[Token, ...]]:
    if not model.can_generate():
        raise ValueError(f"`target` is missing, and a {type(model).__name__} can't generate one: give it")
    labels = written_labels(model, inputs)
    return labels, decoded_tokens(tokenizer, labels[0].tolist())


def written_labels(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """What a model itself writes, (1, target), without the token that its decoder starts with."""
    options = model.generation_config
    # transformers would take as many, and warn of it.
    length = {} if options.max_new_tokens or options.max_length else {"max_new_tokens": NEW_TOKENS}
    return model.generate(**inputs, do_sample=False, **length)[:, 1:]


def decoder_start(model: Any) -> int:
    """The token that a model's decoder starts with.

    Raises:
        ValueError: if its configurations do not tell.
    """
    owners = (model.config, getattr(model, "generation_config", None))
    starts = [getattr(owner, "decoder_start_token_id", None) for owner in owners]
    start = next((each for each in starts if each is not None), None)
    if start is None:
        raise ValueError(
            "the model's configuration must have a `decoder_start_token_id`, which its decoder begins with"
        )
    return start


def _numbered(tokens: tuple[Token, ...]) -> tuple[Token, ...]:
    """Tokens whose words are told from each other although one was put in front."""
    return tuple(replace(token, word=token.word + 1) if place else token for place, token in enumerate(tokens))


# Images


def _look_at_image(
    model: Any, processor: Any, image: ImageSource | None, target: str | None
) -> tuple[dict[str, _Look], Image.Image, tuple[int, int]]:
    if image is None:
        raise ValueError(f"`image` is missing: give what the {type(model).__name__} shall look at")
    if not hasattr(processor, "image_processor"):
        raise ValueError(f"`processor` is a {type(processor).__name__}: a captioner needs its processor")
    pixel_values = processor(images=image, return_tensors="pt")["pixel_values"].to(model.device)
    tokenizer = processor.tokenizer
    if target is None:
        labels, written = _generate(model, tokenizer, {"pixel_values": pixel_values})
    else:
        ids = processor(labels=target)["labels"][0]
        encoding = tokenizer(target, add_special_tokens=False, return_offsets_mapping=tokenizer.is_fast, verbose=False)
        encoding = encoding.convert_to_tensors("pt", prepend_batch_axis=True)
        end = special_token(tokenizer, ids[-1])
        words = encoded_tokens(tokenizer, encoding, [target])
        written = (*words, replace(end, word=words[-1].word + 1))
        _check_length(model, tokenizer, "target", len(ids))
        labels = torch.tensor([ids], device=model.device)
    start = decoder_start(model)
    decoder_inputs = shift_right(labels, start, None)
    outputs = model(pixel_values, decoder_input_ids=decoder_inputs, output_attentions=True, return_dict=True)
    grid = model.feature_grid(*pixel_values.shape[-2:])
    places = _places(grid)
    read = _numbered((special_token(tokenizer, start), *written[:-1]))
    looks = {
        "image": _Look(outputs.cross_attentions, written, places),
        "decoder": _Look(outputs.decoder_attentions, read, read),
    }
    return looks, _as_seen(processor.image_processor, image, pixel_values[0]), grid


def _look_at_patches(
    model: Any, processor: Any, image: ImageSource | None
) -> tuple[dict[str, _Look], Image.Image, tuple[int, int]]:
    name = type(model).__name__
    if image is None:
        raise ValueError(f"`image` is missing: give what the {name} shall look at")
    if not isinstance(processor, BaseImageProcessor):
        raise ValueError(f"`processor` is a {type(processor).__name__}: a {name} needs its image processor")
    pixel_values = processor(to_rgb(open_image(image)), return_tensors="pt")["pixel_values"].to(model.device)
    outputs = model.base_model(pixel_values, output_attentions=True, return_dict=True)
    weights = [layer for layer in outputs.get("attentions") or () if layer is not None]
    side = getattr(model.config, "patch_size", None)
    sides = (side, side) if isinstance(side, int) else tuple(side or (1, 1))
    grid = (pixel_values.shape[-2] // sides[0], pixel_values.shape[-1] // sides[1])
    places = _places(grid)
    # Those of a detector stand behind the patches; [CLS] and registers before them.
    before = min((layer.shape[-1] for layer in weights), default=len(places))
    before -= len(places) + getattr(model.config, "num_detection_tokens", 0)
    if before < 0:
        raise ValueError(
            f"a {name} gave no weights over the {grid[0]} × {grid[1]} patches of the image: its attention is in "
            "windows, or over something else"
        )
    stop = before + len(places)
    names = ["[CLS]", *(f"extra {number}" for number in range(1, before))][:before]
    extra = tuple(Token(each, each, None, number, each) for number, each in enumerate(names))
    queries = (*extra, *(replace(place, word=place.word + before) for place in places))
    seen = [layer[..., :stop, before:stop] for layer in weights]
    return {"image": _Look(seen, queries, places)}, _as_seen(processor, image, pixel_values[0]), grid


def _places(grid: tuple[int, int]) -> tuple[Token, ...]:
    names = [f"row {row + 1}, column {column + 1}" for row, column in product(*map(range, grid))]
    return tuple(Token(name, name, None, number, name) for number, name in enumerate(names))


def _as_seen(image_processor: Any, image: ImageSource, pixels: Tensor) -> Image.Image:
    """The image at its own size; if only a part of it was seen, that part at the size that the model saw."""
    if not any(getattr(image_processor, name, None) for name in ("do_center_crop", "do_pad")):
        return to_rgb(open_image(image))
    if getattr(image_processor, "do_normalize", False):
        mean, std = (
            torch.tensor(getattr(image_processor, name), device=pixels.device)[:, None, None]
            for name in ("image_mean", "image_std")
        )
        pixels = pixels * std + mean
    return Image.fromarray((pixels.clamp(0, 1) * 255).byte().permute(1, 2, 0).cpu().numpy())
