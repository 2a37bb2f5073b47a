"""The base of all configurations, and the checks that they share."""

# No `from __future__ import annotations` here: it turns types into strings, and `strict` does not check those.

import difflib
import math
from collections.abc import Collection
from dataclasses import fields
from typing import Any, ClassVar, Literal

import torch
from huggingface_hub.dataclasses import strict
from transformers import GenerationConfig, PreTrainedConfig
from transformers.utils import logging

logger = logging.get_logger(__name__)

# Keyword arguments that are not fields, but that transformers passes to a configuration or saves with it.
_ECOSYSTEM_KEYS = frozenset(
    """attn_implementation experts_implementation output_attentions num_labels per_layer_config name_or_path
    _name_or_path _commit_hash torch_dtype auto_map custom_pipelines quantization_config
    _attn_implementation_internal _experts_implementation_internal _output_attentions""".split()
)

# The lowest value of each size, for the families that have it.
_LEAST = {
    "vocab_size": 1,
    "hidden_size": 1,
    "num_hidden_layers": 1,
    "num_decoder_layers": 1,
    "num_attention_heads": 1,
    "intermediate_size": 1,
    "max_position_embeddings": 1,
    "type_vocab_size": 1,
    "initializer_range": 0,
    "layer_norm_eps": 0,
    "chunk_size_feed_forward": 0,
}

# The names of what the models are built from.
POSITION_TYPES = ("learned", "sinusoidal")
NORM_POSITIONS = ("pre", "post")


@strict
class RegardConfig(PreTrainedConfig):
    """Base of the families' configurations, which checks each field.

    Raises:
        ValueError: if a field is unknown or has a value that is not allowed, or if the checkpoint is of another
            architecture. The error names the field, its value and what is allowed, or for an unknown field the nearest
            real one.
    """

    # Model types whose checkpoints the family reads, besides its own.
    compatible_model_types: ClassVar[frozenset[str]] = frozenset()
    # The allowed values of fields that hold a name.
    choices: ClassVar[dict[str, Collection[str]]] = {}

    # Fields of `PreTrainedConfig`, which does not check their types.
    transformers_version: str | None = None
    architectures: list[str] | None = None
    output_hidden_states: bool | None = False
    return_dict: bool | None = True
    dtype: str | torch.dtype | None = None
    chunk_size_feed_forward: int = 0
    is_encoder_decoder: bool = False
    id2label: dict | None = None
    label2id: dict | None = None
    problem_type: Literal["regression", "single_label_classification", "multi_label_classification"] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        model_type = kwargs.pop("model_type", None)
        allowed = sorted({self.model_type, *self.compatible_model_types})
        if model_type and model_type not in allowed:
            readable = " or ".join(map(repr, allowed))
            raise ValueError(f"`model_type` is {model_type!r}, but {type(self).__name__} reads {readable}")
        self._refuse_unknown_fields(kwargs)
        self._check_inherited(kwargs)
        super().__post_init__(**kwargs)
        # The strict decorator calls this too, but wraps the error in another one of several lines.
        self.validate_architecture()

    @classmethod
    def knows(cls, name: str) -> bool:
        """Whether a configuration may contain `name`: a field, or a key that transformers itself passes or saves."""
        generation = GenerationConfig._get_default_generation_params()
        return name in _ECOSYSTEM_KEYS or name in generation or name in {field.name for field in fields(cls)}

    def _refuse_unknown_fields(self, kwargs: dict[str, Any]) -> None:
        unknown = sorted(name for name in kwargs if not self.knows(name))
        if not unknown:
            return
        names = sorted(field.name for field in fields(self))
        nearest = difflib.get_close_matches(unknown[0], names, n=1)
        hint = f"did you mean `{nearest[0]}`?" if nearest else f"its fields are {', '.join(names)}"
        message = f"{type(self).__name__} has no field `{unknown[0]}`: {hint}"
        if self.transformers_version is None:
            raise ValueError(message)
        # A saved configuration may come from a later version, or contain an attribute that a user has added.
        logger.warning(f"{message} (kept as saved, and not used)")

    def _check_inherited(self, kwargs: dict[str, Any]) -> None:
        """Checks values that `PreTrainedConfig` does not check, and that would fail with errors of all kinds."""
        for name, value in (("dtype", self.dtype), ("torch_dtype", kwargs.get("torch_dtype"))):
            found = getattr(torch, value, None) if isinstance(value, str) else value
            if value is not None and not isinstance(found, torch.dtype):
                raise ValueError(f"`{name}` ({value!r}) must be a data type of torch, such as 'float32'")
        if kwargs.get("num_labels") is None:
            kwargs.pop("num_labels", None)
        elif not (type(kwargs["num_labels"]) is int and kwargs["num_labels"] >= 1):
            raise ValueError(f"`num_labels` ({kwargs['num_labels']!r}) must be a whole number of at least 1")
        for key in self.id2label or ():
            if not (isinstance(key, int) or (isinstance(key, str) and key.isdecimal())):
                raise ValueError(f"`id2label` has the key {key!r}, but its keys must be the numbers of labels")

    def validate_architecture(self) -> None:
        """Checks each field by itself; the attention checks that its heads divide the width."""
        for field in fields(self):
            name, value = field.name, getattr(self, field.name)
            if value is None:
                continue
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"`{name}` ({value}) must be a finite number")
            if name in _LEAST and value < _LEAST[name]:
                raise ValueError(f"`{name}` ({value}) must be at least {_LEAST[name]}")
            if name in _LEAST and value >= 2**31:
                raise ValueError(f"`{name}` ({value}) must be less than 2**31")
            if isinstance(value, int) and not -(2**63) <= value < 2**63:
                raise ValueError(f"`{name}` ({value}) must be a number of at most 64 bits")
            if name.endswith(("_dropout", "_dropout_prob", "label_smoothing")) and not 0 <= value < 1:
                raise ValueError(f"`{name}` ({value}) must be at least 0 and less than 1")
            # `eos_token_id` can be a list of ids; transformers itself only warns about ids outside the vocabulary.
            if name.endswith("_token_id") and isinstance(value, int) and not 0 <= value < self.vocab_size:
                raise ValueError(f"`{name}` ({value}) must be an id of the vocabulary, 0 to {self.vocab_size - 1}")

        for name, allowed in self.choices.items():
            value = getattr(self, name)
            if value not in allowed:
                nearest = difflib.get_close_matches(str(value), allowed, n=1)
                hint = f" (did you mean {nearest[0]!r}?)" if nearest else ""
                raise ValueError(f"`{name}` ({value!r}) must be one of {', '.join(sorted(allowed))}{hint}")
