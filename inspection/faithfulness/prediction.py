"""One prediction of a model as a function of the inputs that may be erased.

The kind of model decides what is predicted, and which attention should explain it:

- A masked language model predicts a masked token, with the attention of its position. The mask is one of the text's
  own, or if the text has none, a random token is masked.
- A sequence classifier predicts a class, with the attention of the first token, [CLS].
- A causal language model predicts the token after the text, with the attention of the last token.
- An encoder-decoder predicts a random token of the target from the target tokens before it, with the decoder's
  attention to the source at that step. If no target is given, the model generates one.
- A captioner predicts a random token of the caption in the same way, with the attention over the image.

The prediction is always the model's most probable one, whether right or wrong.

Dimension letters: N variants of the input, L length, E width of the model, K keys, P inputs that may be erased.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...modeling.losses import shift_right
from ...tokenization.processor import ImageSource
from ..maps.image_weights import cell_names
from ..maps.text_weights import decoder_start, generate_ids, token_limit
from ..maps.tokens import encoded_tokens, printable

# A text, a pair of texts, an image, or an image and its caption.
Example = str | ImageSource | tuple[str, str] | tuple[ImageSource, str]

# How many variants run in one batch.
BATCH = 64


@dataclass(frozen=True, eq=False)
class Prediction:
    """A model's prediction for one example, and the inputs that may be erased.

    Erasing an input replaces it by a baseline. For a token that is the embedding of the mask token, or if the
    tokenizer has none, the mean of all embeddings; the position embedding stays. For a cell of an image it is the mean
    colour of the image on the pixels of the cell. The backbone sees beyond a cell, so neighbouring cells still show a
    trace of it. Special tokens and the masked token itself cannot be erased.

    Args:
        model: the model that predicts.
        arguments: the arguments of the model, without the one whose parts are erased.
        input_name: name of that one: "inputs_embeds" or "pixel_values".
        values: its value, (1, L, E) or (1, channels, height, width).
        baseline: the value of erased inputs, broadcastable to `values`.
        key_numbers: the number of the key that each position belongs to, (L,) or (height, width).
        erasable_keys: the numbers of the keys that may be erased, (P,).
        labels: readable names of these keys.
        kind: the kind of attention: "self", "cross" or "image".
        query: the row of the attention weights that belongs to the prediction.
        row: the position of the prediction in the model's scores; None if they have no positions.
        predicted: the most probable token or class.
    """

    model: Any
    arguments: dict[str, Any]
    input_name: str
    values: Tensor
    baseline: Tensor
    key_numbers: Tensor
    erasable_keys: Tensor
    labels: tuple[str, ...]
    kind: str
    query: int
    row: int | None
    predicted: int = -1

    @property
    def keys(self) -> int:
        """The number of keys, K."""
        return int(self.key_numbers.max()) + 1

    def erase(self, masks: Tensor) -> Tensor:
        """Returns the values with some inputs erased: masks (N, P), True for erased inputs, give (N, ...)."""
        keys = torch.zeros(len(masks), self.keys, dtype=torch.bool, device=self.values.device)
        keys[:, self.erasable_keys] = masks.to(keys.device)
        here = keys[:, self.key_numbers].unsqueeze(self._feature_dim)
        return torch.where(here, self.baseline.to(self.values), self.values)

    def sum_by_input(self, attributions: Tensor) -> Tensor:
        """Sums attributions of the shape of `values` over the numbers that belong to each input, (P,)."""
        summed = attributions.sum(dim=self._feature_dim)
        keys = summed.new_zeros(self.keys)
        return keys.index_add_(0, self.key_numbers.flatten(), summed.flatten())[self.erasable_keys]

    @property
    def _feature_dim(self) -> int:
        return 1 if self.input_name == "pixel_values" else -1

    def run(self, values: Tensor, **options: Any) -> Any:
        """Returns the model's outputs for variants (N, ...) of the values.

        Args:
            values: the variants.
            **options: further arguments of the model.
        """
        rows = len(values)
        given = {
            name: value.expand(rows, *value.shape[1:]) if isinstance(value, Tensor) else value
            for name, value in self.arguments.items()
        }
        return self.model(**{self.input_name: values}, **given, **options, return_dict=True)

    def distribution(self, values: Tensor) -> Tensor:
        """Returns the probability of each token or class, (N, classes), for variants (N, ...) of the values."""
        return torch.cat([self.probabilities(self.run(part)) for part in values.split(BATCH)])

    def probability(self, values: Tensor) -> Tensor:
        """Returns the probability of `predicted`, (N,), for variants (N, ...) of the values."""
        return self.distribution(values)[:, self.predicted]

    def probabilities(self, outputs: Any) -> Tensor:
        """Returns the probability of each token or class in outputs of the model, (N, classes)."""
        scores = scores_of(outputs)
        assert scores is not None
        return (scores if self.row is None else scores[:, self.row]).float().softmax(dim=-1)


def scores_of(outputs: Any) -> Tensor | None:
    """Returns the scores in the outputs of a model, or None if it has no output layer."""
    return outputs.get("prediction_logits", outputs.get("logits"))


@torch.no_grad()
def make_prediction(
    model: PreTrainedModel, processor: Any, example: Example, name: str, rng: np.random.Generator, max_tokens: int
) -> Prediction:
    """Makes a model's prediction for one example.

    Args:
        model: the model, in evaluation mode, with its output layer.
        processor: its tokenizer or processor.
        example: a text, a pair of texts, an image, or an image and its caption.
        name: name of the example in errors.
        rng: generator that draws the position of the prediction.
        max_tokens: the most tokens of a text; longer texts are cut.

    Raises:
        ValueError: if the model cannot read the example, the example has fewer than two inputs that may be erased, or
            the model makes none of the predictions above.
    """
    if hasattr(model, "feature_grid"):
        prediction = _predict_from_image(model, processor, example, name, rng)
    else:
        prediction = _predict_from_text(model, processor, example, name, rng, max_tokens)
    if len(prediction.erasable_keys) < 2:
        raise ValueError(
            f"{name} ({printable(str(example))[:40]!r}) has too few tokens: it must have at least two that can be "
            "erased, not counting special and masked tokens"
        )
    predicted = int(prediction.distribution(prediction.values)[0].argmax())
    return replace(prediction, predicted=predicted)


def _predict_from_text(
    model: Any, tokenizer: Any, example: Example, name: str, rng: np.random.Generator, max_tokens: int
) -> Prediction:
    kind = type(model).__name__
    if model.main_input_name != "input_ids":
        raise ValueError(
            f"a {kind} reads no text: of the models that take images only regard's captioners are allowed"
        )
    texts = (example,) if isinstance(example, str) else example
    if not (isinstance(texts, tuple) and len(texts) in (1, 2) and all(isinstance(text, str) for text in texts)):
        raise ValueError(f"{name} is a {type(example).__name__}: a {kind} reads a text, or a pair of texts")
    is_encoder_decoder, generates = model.config.is_encoder_decoder, model.can_generate()
    if len(texts) == 2 and generates and not is_encoder_decoder:
        raise ValueError(f"{name} is a pair of texts: a {kind} continues one text")
    read: Any = texts[:1] if is_encoder_decoder else texts
    encoding = tokenizer(
        *read,
        truncation=True,
        max_length=min(max_tokens, token_limit(model, tokenizer)),
        return_offsets_mapping=tokenizer.is_fast,
        return_tensors="pt",
    ).to(model.device)
    tokens = encoded_tokens(tokenizer, encoding, read)
    ids = encoding["input_ids"]
    arguments = {key: encoding[key] for key in ("attention_mask", "token_type_ids") if key in encoding}
    special = special_ids(tokenizer)
    free = [place for place, token in enumerate(ids[0].tolist()) if token not in special]
    if not free:
        raise ValueError(f"{name} ({texts[0]!r}) has too few tokens: none can be erased")
    query, row, attention = 0, None, "self"
    if is_encoder_decoder:
        if not generates:
            raise ValueError(f"a {kind} predicts no token: load it with its output layer")
        arguments.pop("token_type_ids", None)
        target = texts[1] if len(texts) == 2 else None
        arguments |= _target_prefix(model, tokenizer, dict(arguments, input_ids=ids), target, name, rng, max_tokens)
        query = row = arguments["decoder_input_ids"].shape[1] - 1
        attention = "cross"
    elif generates:
        arguments |= {"use_cache": False}
        arguments.pop("token_type_ids", None)
        query = row = ids.shape[1] - 1
    else:
        scores = scores_of(model(input_ids=ids, **arguments, return_dict=True))
        size = model.get_input_embeddings().weight.shape[0]
        if scores is not None and scores.shape[-1] == size and scores.dim() == 3:
            query = row = _mask_one(tokenizer, ids, free, kind, rng)
            free = [place for place in free if place != query]
        elif not _predicts_class(model, scores):
            raise ValueError(
                f"a {kind} cannot be tested: it must predict masked tokens, the next token, a text or a class"
            )
    embed = (model.get_encoder() if is_encoder_decoder else model).get_input_embeddings()
    mask = tokenizer.mask_token_id
    table = embed(torch.arange(embed.weight.shape[0], device=ids.device)) if mask is None else None
    return Prediction(
        model,
        arguments,
        "inputs_embeds",
        embed(ids),
        embed(torch.tensor([[mask]], device=ids.device)) if table is None else table.mean(dim=0)[None, None],
        torch.arange(ids.shape[1], device=ids.device),
        torch.tensor(free, dtype=torch.long, device=ids.device),
        tuple(tokens[place].label for place in free),
        attention,
        query,
        row,
    )


def special_ids(tokenizer: Any) -> set[int]:
    """Returns the ids of the tokens that cover no text; the unknown token does cover text."""
    names = ("bos_token_id", "eos_token_id", "sep_token_id", "cls_token_id", "pad_token_id", "mask_token_id")
    known = {getattr(tokenizer, name) for name in names} - {None}
    return known | (set(tokenizer.all_special_ids) - {tokenizer.unk_token_id})


def _mask_one(tokenizer: Any, ids: Tensor, free: list[int], kind: str, rng: np.random.Generator) -> int:
    """Masks a random token in place, unless one is masked already, and returns the position of the mask."""
    if tokenizer.mask_token_id is None:
        raise ValueError(f"`processor` has no mask token, but a {kind} predicts masked tokens: give its own tokenizer")
    masked = (ids[0] == tokenizer.mask_token_id).nonzero()[:, 0].tolist()
    place = int(rng.choice(masked or free))
    ids[0, place] = tokenizer.mask_token_id
    return place


def _predicts_class(model: Any, scores: Tensor | None) -> bool:
    several = getattr(model.config, "problem_type", None) in ("regression", "multi_label_classification")
    return scores is not None and scores.dim() == 2 and scores.shape[-1] > 1 and not several


def _target_prefix(
    model: Any,
    tokenizer: Any,
    inputs: dict[str, Tensor],
    target: str | None,
    name: str,
    rng: np.random.Generator,
    max_tokens: int,
) -> dict[str, Any]:
    """Returns the decoder's arguments for the target up to a random token, which is to be predicted."""
    if target is None:
        labels = generate_ids(model, inputs)
    elif hasattr(model, "feature_grid"):
        labels = torch.tensor(tokenizer(labels=target)["labels"], device=model.device)
    else:
        most = min(max_tokens, token_limit(model, tokenizer))
        encoding = tokenizer(text_target=target, truncation=True, max_length=most, return_tensors="pt")
        labels = encoding["input_ids"].to(model.device)
    special = special_ids(getattr(tokenizer, "tokenizer", tokenizer))
    words = [place for place, token in enumerate(labels[0].tolist()) if token not in special]
    if not words:
        written = "the model generated none" if target is None else repr(target)
        raise ValueError(f"{name} has a target without tokens: {written}")
    place = int(rng.choice(words))
    return {"decoder_input_ids": shift_right(labels[:, : place + 1], decoder_start(model), None), "use_cache": False}


def _predict_from_image(
    model: Any, processor: Any, example: Example, name: str, rng: np.random.Generator
) -> Prediction:
    if not hasattr(processor, "image_processor"):
        raise ValueError(f"`processor` is a {type(processor).__name__}: a captioner needs its processor")
    image, caption = example if isinstance(example, tuple) else (example, None)
    if not isinstance(image, ImageSource):
        raise ValueError(f"{name} is a {type(image).__name__}: a {type(model).__name__} needs an image")
    pixels = processor(images=image, return_tensors="pt")["pixel_values"].to(model.device)
    height, width = pixels.shape[-2:]
    grid = model.feature_grid(height, width)
    arguments = _target_prefix(model, processor, {"pixel_values": pixels}, caption, name, rng, max_tokens=64)
    place = arguments["decoder_input_ids"].shape[1] - 1
    rows, columns = (
        torch.arange(size, device=pixels.device) * count // size
        for size, count in zip((height, width), grid, strict=True)
    )
    return Prediction(
        model,
        arguments,
        "pixel_values",
        pixels,
        pixels.mean(dim=(-1, -2), keepdim=True),
        rows[:, None] * grid[1] + columns,
        torch.arange(grid[0] * grid[1], device=pixels.device),
        tuple(cell_names(grid)),
        "image",
        place,
        place,
    )
