"""One prediction of a model as a function of the inputs that may be erased.

What the prediction is, and whose attention is asked about it, depends on what the model does:

- A masked language model: a masked token, and what its place attends to. A mask in the text is taken, or else a token
  that the seed draws is masked.
- A sequence classifier: the class, and what the first token, [CLS], attends to.
- A causal language model: the token after the text, and what the text's last token attends to.
- An encoder-decoder: a token of the target that the seed draws, after those before it, and what the decoder attends to
  in the source as it predicts it. A target that is not given the model writes itself.
- A captioner: a word in the same way, and the places of the image.

In each case it is the model's own prediction, the most probable one, right or wrong.

Dimension letters: N variants of the input, L length, E width of the model, K keys, P inputs that may be erased.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...modeling.losses import shift_right
from ...tokenization.processor import ImageSource
from ..maps.text_weights import decoder_start, most_tokens, written_labels
from ..maps.tokens import encoded_tokens, printable

# A text, a pair of texts, an image, or an image and its caption.
Example = str | ImageSource | tuple[str, str] | tuple[ImageSource, str]

# So many variants are run at a time.
BATCH = 64


@dataclass(frozen=True, eq=False)
class Prediction:
    """What a model predicts of one example.

    Erasing an input puts a baseline in its place. Of a token that is the embedding of the mask token, where the
    tokenizer has one, or else the mean of all embeddings; its position stays. Of a place of an image it is the mean
    colour of the image, on the pixels that lie over the place: the backbone sees further than these, so that some of
    what was there shows at the places around it. Special tokens can't be erased, nor can the masked token itself.

    Args:
        model: whose prediction it is.
        arguments: of the model, beside the one whose parts are erased.
        name: of that one, "inputs_embeds" or "pixel_values".
        values: its value, (1, L, E) or (1, channels, height, width).
        baseline: what stands where everything is erased, broadcastable to `values`.
        owners: the key that each position belongs to, (L,) or (height, width).
        places: the keys that may be erased, (P,).
        labels: what these are, for a reader.
        kind: of the attention: "self", "cross" or "image".
        query: the row of the weights whose prediction it is.
        row: of the scores; None if there is one for the whole.
        predicted: the most probable token or class.
    """

    model: Any
    arguments: dict[str, Any]
    name: str
    values: Tensor
    baseline: Tensor
    owners: Tensor
    places: Tensor
    labels: tuple[str, ...]
    kind: str
    query: int
    row: int | None
    predicted: int = -1

    def erased(self, masks: Tensor) -> Tensor:
        """The values with some inputs erased: masks (N, P), True where one is, give (N, ...)."""
        keys = torch.zeros(len(masks), int(self.owners.max()) + 1, dtype=torch.bool, device=self.values.device)
        keys[:, self.places] = masks.to(keys.device)
        here = keys[:, self.owners].unsqueeze(self._features)
        return torch.where(here, self.baseline.to(self.values), self.values)

    def by_input(self, attributions: Tensor) -> Tensor:
        """The sum of what each input's numbers got, (P,), of as many numbers as `values` has."""
        summed = attributions.sum(dim=self._features)
        keys = summed.new_zeros(int(self.owners.max()) + 1)
        return keys.index_add_(0, self.owners.flatten(), summed.flatten())[self.places]

    @property
    def _features(self) -> int:
        return 1 if self.name == "pixel_values" else -1

    def run(self, values: Tensor, **options: Any) -> Any:
        """The model's output for some variants of the input."""
        rows = len(values)
        given = {
            name: value.expand(rows, *value.shape[1:]) if isinstance(value, Tensor) else value
            for name, value in self.arguments.items()
        }
        return self.model(**{self.name: values}, **given, **options, return_dict=True)

    def distribution(self, values: Tensor) -> Tensor:
        """The probability of each token or class, (N, classes), for variants (N, ...) of the input."""
        return torch.cat([self.probabilities(self.run(part)) for part in values.split(BATCH)])

    def probability(self, values: Tensor) -> Tensor:
        """The probability of what is predicted of the example itself, (N,)."""
        return self.distribution(values)[:, self.predicted]

    def probabilities(self, outputs: Any) -> Tensor:
        """The probability of each token or class that an output of the model gives."""
        scores = scores_of(outputs)
        assert scores is not None
        return (scores if self.row is None else scores[:, self.row]).float().softmax(dim=-1)


def scores_of(outputs: Any) -> Tensor | None:
    """The scores that a model's output holds; None if it has none."""
    return outputs.get("prediction_logits", outputs.get("logits"))


@torch.no_grad()
def studied(
    model: PreTrainedModel, processor: Any, example: Example, name: str, rng: np.random.Generator, max_tokens: int
) -> Prediction:
    """The prediction that is studied of one example; the model must be in evaluation mode.

    Args:
        model: see `faithfulness`.
        processor: see there.
        example: see there.
        name: of the example, in errors.
        rng: draws the place of the prediction.
        max_tokens: see `faithfulness`.

    Raises:
        ValueError: for an example that the model does not read, or with less than two inputs that may be erased; or
            for a model that predicts nothing of the above.
    """
    if hasattr(model, "feature_grid"):
        found = _of_image(model, processor, example, name, rng)
    else:
        found = _of_text(model, processor, example, name, rng, max_tokens)
    if len(found.places) < 2:
        raise ValueError(
            f"{name} ({printable(str(example))[:40]!r}) has too few tokens: there must be two or more that can be "
            "erased, special and masked ones not counted"
        )
    predicted = int(found.distribution(found.values)[0].argmax())
    return replace(found, predicted=predicted)


def _of_text(
    model: Any, tokenizer: Any, example: Example, name: str, rng: np.random.Generator, max_tokens: int
) -> Prediction:
    kind = type(model).__name__
    if model.main_input_name != "input_ids":
        raise ValueError(f"a {kind} reads no text: of models that see, captioners of ours can be looked into")
    texts = (example,) if isinstance(example, str) else example
    if not (isinstance(texts, tuple) and len(texts) in (1, 2) and all(isinstance(text, str) for text in texts)):
        raise ValueError(f"{name} is a {type(example).__name__}: a {kind} reads a text, or a pair of texts")
    translates, continues = model.config.is_encoder_decoder, model.can_generate()
    if len(texts) == 2 and continues and not translates:
        raise ValueError(f"{name} is a pair of texts: a {kind} goes on from one text")
    read: Any = texts[:1] if translates else texts
    encoding = tokenizer(
        *read,
        truncation=True,
        max_length=min(max_tokens, most_tokens(model, tokenizer)),
        return_offsets_mapping=tokenizer.is_fast,
        return_tensors="pt",
    ).to(model.device)
    tokens = encoded_tokens(tokenizer, encoding, read)
    ids = encoding["input_ids"]
    arguments = {key: encoding[key] for key in ("attention_mask", "token_type_ids") if key in encoding}
    special = special_ids(tokenizer)
    free = [place for place, token in enumerate(ids[0].tolist()) if token not in special]
    if not free:
        raise ValueError(f"{name} ({texts[0]!r}) has too few tokens: none that can be erased")
    query, row, attention = 0, None, "self"
    if translates:
        if not continues:
            raise ValueError(f"a {kind} predicts no token: load it with its output layer")
        arguments.pop("token_type_ids", None)
        target = texts[1] if len(texts) == 2 else None
        arguments |= _begun_target(model, tokenizer, dict(arguments, input_ids=ids), target, name, rng, max_tokens)
        query = row = arguments["decoder_input_ids"].shape[1] - 1
        attention = "cross"
    elif continues:
        arguments |= {"use_cache": False}
        arguments.pop("token_type_ids", None)
        query = row = ids.shape[1] - 1
    else:
        scores = scores_of(model(input_ids=ids, **arguments, return_dict=True))
        size = model.get_input_embeddings().weight.shape[0]
        if scores is not None and scores.shape[-1] == size and scores.dim() == 3:
            query = row = _mask_one(tokenizer, ids, free, kind, rng)
            free = [place for place in free if place != query]
        elif not _tells_classes(model, scores):
            raise ValueError(
                f"a {kind} can't be looked into: it must predict masked tokens, the next token, a text or a class"
            )
    embed = (model.get_encoder() if translates else model).get_input_embeddings()
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
    """Ids of tokens that stand for no text; an unknown word is text."""
    names = ("bos_token_id", "eos_token_id", "sep_token_id", "cls_token_id", "pad_token_id", "mask_token_id")
    known = {getattr(tokenizer, name) for name in names} - {None}
    return known | (set(tokenizer.all_special_ids) - {tokenizer.unk_token_id})


def _mask_one(tokenizer: Any, ids: Tensor, free: list[int], kind: str, rng: np.random.Generator) -> int:
    """Masks a token in place, where none is masked yet, and tells which."""
    if tokenizer.mask_token_id is None:
        raise ValueError(f"`processor` has no mask token, and a {kind} predicts masked tokens: give it its tokenizer")
    masked = (ids[0] == tokenizer.mask_token_id).nonzero()[:, 0].tolist()
    place = int(rng.choice(masked or free))
    ids[0, place] = tokenizer.mask_token_id
    return place


def _tells_classes(model: Any, scores: Tensor | None) -> bool:
    several = getattr(model.config, "problem_type", None) in ("regression", "multi_label_classification")
    return scores is not None and scores.dim() == 2 and scores.shape[-1] > 1 and not several


def _begun_target(
    model: Any,
    tokenizer: Any,
    inputs: dict[str, Tensor],
    target: str | None,
    name: str,
    rng: np.random.Generator,
    max_tokens: int,
) -> dict[str, Any]:
    """The decoder's arguments up to the token that is predicted."""
    if target is None:
        labels = written_labels(model, inputs)
    elif hasattr(model, "feature_grid"):
        labels = torch.tensor(tokenizer(labels=target)["labels"], device=model.device)
    else:
        most = min(max_tokens, most_tokens(model, tokenizer))
        encoding = tokenizer(text_target=target, truncation=True, max_length=most, return_tensors="pt")
        labels = encoding["input_ids"].to(model.device)
    special = special_ids(getattr(tokenizer, "tokenizer", tokenizer))
    words = [place for place, token in enumerate(labels[0].tolist()) if token not in special]
    if not words:
        written = "the model writes none" if target is None else repr(target)
        raise ValueError(f"{name} has a target without tokens: {written}")
    place = int(rng.choice(words))
    return {"decoder_input_ids": shift_right(labels[:, : place + 1], decoder_start(model), None), "use_cache": False}


def _of_image(model: Any, processor: Any, example: Example, name: str, rng: np.random.Generator) -> Prediction:
    if not hasattr(processor, "image_processor"):
        raise ValueError(f"`processor` is a {type(processor).__name__}: a captioner needs its processor")
    image, caption = example if isinstance(example, tuple) else (example, None)
    if not isinstance(image, ImageSource):
        raise ValueError(f"{name} is a {type(image).__name__}: a {type(model).__name__} looks at an image")
    pixels = processor(images=image, return_tensors="pt")["pixel_values"].to(model.device)
    height, width = pixels.shape[-2:]
    grid = model.feature_grid(height, width)
    arguments = _begun_target(model, processor, {"pixel_values": pixels}, caption, name, rng, max_tokens=64)
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
        tuple(f"row {row + 1}, column {column + 1}" for row, column in product(*map(range, grid))),
        "image",
        place,
        place,
    )
