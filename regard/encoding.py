"""Encoding of texts as vectors by a BERT, without computation on padding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from .inspection.maps.eager_mode import evaluation_mode
from .modeling.bert import RegardBertModel, RegardBertPreTrainedModel
from .modeling.cpu import SequenceBounds, fast_inference
from .modeling.packing import sequence_bounds

POOLINGS = ("mean", "first", "pooler")


@torch.inference_mode()
def encode_texts(
    model: RegardBertPreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    *,
    pooling: str = "mean",
    max_length: int | None = None,
    batch_tokens: int = 4096,
) -> Tensor:
    """Encodes texts as vectors, in evaluation mode.

    Texts of similar length are encoded together, the shortest first.

    Args:
        model: a BERT with any head; afterwards, its modules are in the same modes as before.
        tokenizer: the model's tokenizer.
        texts: the texts to encode.
        pooling: how a text's hidden states become one vector: "mean", their mean, special tokens included; "first",
            the hidden state of the classification token; or "pooler", the output of the pooler.
        max_length: number of tokens that longer texts are cut to; None: the number of positions of the model.
        batch_tokens: largest number of tokens to encode at once; a longer text is encoded by itself.

    Returns:
        One vector for each text, in the order of the texts, (texts, width of the model), on the model's device.

    Raises:
        ValueError: if the model is of another family or lacks the pooler, `pooling`, `max_length` or `batch_tokens` is
            out of range, or one of `texts` is not a string.
    """
    encoder = _encoder(model, pooling)
    limit = encoder.config.max_position_embeddings
    least = tokenizer.num_special_tokens_to_add()
    if max_length is not None and not least < max_length <= limit:
        raise ValueError(f"`max_length` ({max_length}) must be more than {least} and at most {limit}")
    if batch_tokens < 1:
        raise ValueError(f"`batch_tokens` ({batch_tokens}) must be at least 1")
    if isinstance(texts, str):
        raise ValueError("`texts` is a single text: give a list of texts")
    for place, text in enumerate(texts):
        if not isinstance(text, str):
            raise ValueError(f"`texts` holds a {type(text).__name__} at place {place}: it must hold texts")
    if not texts:
        return torch.empty(0, encoder.config.hidden_size, device=encoder.device)
    rows = tokenizer(list(texts), truncation=True, max_length=max_length or limit)["input_ids"]
    order = sorted(range(len(rows)), key=lambda place: len(rows[place]))
    with evaluation_mode(model), fast_inference():
        vectors = [
            _encode_batch(encoder, [rows[place] for place in places], pooling)
            for places in _batches(rows, order, batch_tokens)
        ]
    return torch.cat(vectors)[torch.tensor(order, device=encoder.device).argsort()]


def _encoder(model: Any, pooling: str) -> RegardBertModel:
    if pooling not in POOLINGS:
        raise ValueError(f"`pooling` ({pooling!r}) must be one of {', '.join(POOLINGS)}")
    encoder = getattr(model, "base_model", None)
    if not isinstance(encoder, RegardBertModel):
        raise ValueError(f"`model` is a {type(model).__name__}: it must be a BERT of regard's")
    if pooling == "pooler" and encoder.pooler is None:
        raise ValueError(f"`pooling` is 'pooler', but a {type(model).__name__} has none: take 'mean' or 'first'")
    return encoder


def _batches(rows: list[list[int]], order: list[int], batch_tokens: int) -> Iterator[list[int]]:
    """Splits row indices, in the given order, into batches of at most `batch_tokens` tokens or of a single row."""
    batch: list[int] = []
    tokens = 0
    for place in order:
        if batch and tokens + len(rows[place]) > batch_tokens:
            yield batch
            batch, tokens = [], 0
        batch.append(place)
        tokens += len(rows[place])
    yield batch


def _encode_batch(encoder: RegardBertModel, rows: list[list[int]], pooling: str) -> Tensor:
    lengths = torch.tensor([len(row) for row in rows])
    bounds = sequence_bounds(lengths)
    ends = bounds.cu_seq_lens_q.to(encoder.device)
    bounds = SequenceBounds(ends, ends, *bounds[2:])
    input_ids = torch.tensor([token for row in rows for token in row], device=encoder.device).unsqueeze(0)
    # Without segment ids, the model would warn about a text that contains two separators.
    outputs = encoder(input_ids, token_type_ids=torch.zeros_like(input_ids), return_dict=True, **bounds._asdict())
    if pooling == "pooler":
        return outputs.pooler_output
    hidden_states = outputs.last_hidden_state[0]
    if pooling == "first":
        return hidden_states.index_select(0, ends[:-1])
    return torch.segment_reduce(hidden_states, "mean", lengths=lengths.to(encoder.device), axis=0)
