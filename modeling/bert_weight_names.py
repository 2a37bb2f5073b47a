"""The on-disk format of the BERT family: stock BERT's tensor names and shapes.

In memory the names are this package's, and query, key and value are one matrix. transformers applies the mapping
below when it loads a checkpoint and the reverse when it saves one. So any stock BERT checkpoint loads, and a saved
one becomes a stock checkpoint by rewriting its `config.json`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    ConversionOps,
    PrefixChange,
    WeightConverter,
    WeightRenaming,
)

# Parts of a name on disk and in memory. They are replaced from top to bottom, so a longer part precedes a shorter one.
_ENCODER = {
    "word_embeddings": "tokens",
    "position_embeddings": "positions",
    "token_type_embeddings": "segments",
    "embeddings.LayerNorm": "embeddings.norm",
    "encoder.layer": "encoder.blocks",
    "attention.output.dense": "self_attention.output",
    "attention.output.LayerNorm": "self_attention_slot.after",
    "intermediate.dense": "feed_forward.up",
    "output.dense": "feed_forward.down",
    "output.LayerNorm": "feed_forward_slot.after",
}
_MASKED_LM_HEAD = {
    "cls.predictions.transform.dense": "masked_lm_head.dense",
    "cls.predictions.transform.LayerNorm": "masked_lm_head.norm",
    "cls.predictions.decoder.weight": "masked_lm_head.decoder.weight",
}
_NEXT_SENTENCE_HEAD = {"cls.seq_relationship": "next_sentence_head"}


class LoadOnlyRenaming(PrefixChange):
    """A renaming without a reverse, for names that are read but never written.

    It derives from `PrefixChange`, which transformers ignores when it saves.
    """

    __slots__ = ()

    def __init__(self, source: str, target: str) -> None:
        WeightRenaming.__init__(self, source, target)


class ReadPredictionBias(ConversionOps):
    """Picks the bias that stock BERT would use.

    Stock BERT has two names for it. With tied embeddings both are the same tensor, and only `cls.predictions.bias` is
    saved. Without, `cls.predictions.decoder.bias` is used, and the other one is saved but not used.
    """

    def convert(
        self,
        input_dict: dict[str, list[Tensor]],
        source_patterns: list[str],
        target_patterns: list[str],
        **kwargs: Any,
    ) -> dict[str, list[Tensor]]:
        """Returns the bias in use; the one or two tensors are in the order of their names."""
        tensors = input_dict[source_patterns[0]]
        return {target_patterns[0]: tensors[:1] if kwargs["config"].tie_word_embeddings else tensors[-1:]}

    @property
    def reverse_op(self) -> ConversionOps:
        """The operation that writes what this one reads."""
        return WritePredictionBias()


class WritePredictionBias(ConversionOps):
    """Writes the bias under the one or two names that stock BERT reads."""

    def convert(
        self,
        input_dict: dict[str, list[Tensor]],
        source_patterns: list[str],
        target_patterns: list[str],
        **kwargs: Any,
    ) -> dict[str, list[Tensor]]:
        """Returns the bias under each name that it is saved under."""
        bias = input_dict[source_patterns[0]][0]
        names = {"cls.predictions.bias": [bias]}
        if not kwargs["config"].tie_word_embeddings:
            names["cls.predictions.decoder.bias"] = [bias.clone()]
        return names

    @property
    def reverse_op(self) -> ConversionOps:
        """The operation that reads what this one writes."""
        return ReadPredictionBias()


def _renamings(names: dict[str, str]) -> list[WeightConverter | WeightRenaming]:
    # The first BERT checkpoints call the parameters of a norm gamma and beta.
    old_names = [
        LoadOnlyRenaming("LayerNorm.gamma", "LayerNorm.weight"),
        LoadOnlyRenaming("LayerNorm.beta", "LayerNorm.bias"),
    ]
    return [*old_names, *(WeightRenaming(disk, memory) for disk, memory in names.items())]


def named_as_in_memory(state: Mapping[str, Tensor], is_tied: bool) -> dict[str, Tensor]:
    """Converts a state from its names and shapes on disk to those in memory.

    `from_pretrained` converts by itself; this function serves callers that read a file and call `load_state_dict`, as
    `Trainer` does.

    Args:
        state: a state with either kind of names; those in memory are kept.
        is_tied: whether the output layer shares the token embeddings, which decides between two biases.

    Raises:
        ValueError: if the state contains a query, key or value without the two others.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in state.items():
        for disk, memory in {**_ENCODER, **_MASKED_LM_HEAD, **_NEXT_SENTENCE_HEAD}.items():
            name = name.replace(disk, memory)
        found[name] = tensor
    biases = [found.pop(f"cls.predictions.{name}", None) for name in ("bias", "decoder.bias")]
    bias = biases[0] if is_tied or biases[1] is None else biases[1]
    if bias is not None:
        found["masked_lm_head.decoder.bias"] = bias
    for query in [name for name in found if ".attention.self.query." in name]:
        names = [query.replace(".query.", f".{part}.") for part in ("query", "key", "value")]
        if not found.keys() >= set(names):
            raise ValueError(f"`{query}` comes without its key and value: load the whole checkpoint at once")
        parts = [found.pop(name) for name in names]
        found[query.replace("attention.self.query", "self_attention.query_key_value")] = torch.cat(parts)
    return found


def register_bert_weights() -> None:
    """Registers the encoder's mapping for the model type, and for each pretrained class that of its heads."""
    encoder = [
        *_renamings(_ENCODER),
        WeightConverter(
            [f"attention.self.{name}" for name in ("query", "key", "value")],
            "self_attention.query_key_value",
            operations=[Concatenate(dim=0)],
        ),
    ]
    masked_lm = [
        *_renamings(_MASKED_LM_HEAD),
        WeightConverter(
            "cls.predictions.(?:decoder.)?bias", "masked_lm_head.decoder.bias", operations=[ReadPredictionBias()]
        ),
    ]
    next_sentence = _renamings(_NEXT_SENTENCE_HEAD)
    mappings = {
        "regard_bert": encoder,
        "RegardBertForPreTraining": [*masked_lm, *next_sentence],
        "RegardBertForMaskedLM": masked_lm,
        "RegardBertForNextSentencePrediction": next_sentence,
    }
    for name, mapping in mappings.items():
        # Code published beside a checkpoint registers the same mapping again if this package is imported too.
        register_checkpoint_conversion_mapping(name, mapping, overwrite=True)
