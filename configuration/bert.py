"""The configuration of the BERT family."""

# No `from __future__ import annotations` here: it turns types into strings, and `strict` does not check those.
from collections.abc import Collection
from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers.activations import ACT2FN

from .base import RegardConfig

# Settings of stock BERT that change the computation, with the only value that this family supports.
_STOCK_ONLY = {"position_embedding_type": "absolute", "is_decoder": False, "add_cross_attention": False}


@strict
class RegardBertConfig(RegardConfig):
    """Configuration of the `RegardBert*` classes, with the field names of transformers' `BertConfig`.

    It also reads the `config.json` of a stock BERT checkpoint. Devlin et al. (2019), https://arxiv.org/abs/1810.04805

    Args:
        vocab_size: number of word pieces.
        hidden_size: width of every layer; a multiple of `num_attention_heads`.
        num_hidden_layers: number of Transformer blocks.
        num_attention_heads: heads per block; adding heads does not change the width.
        intermediate_size: width of the feed-forward layer.
        hidden_act: activation of the feed-forward layer and the prediction head, a name from transformers' `ACT2FN`.
        hidden_dropout_prob: dropout after the embeddings and after each sub-layer.
        attention_probs_dropout_prob: dropout of the attention weights.
        max_position_embeddings: the longest sequence, in tokens.
        type_vocab_size: number of segments.
        initializer_range: standard deviation of the initial weights.
        layer_norm_eps: epsilon of the layer normalisations.
        classifier_dropout: dropout before a classification head; `hidden_dropout_prob` if None.
        pad_token_id: id of the padding token; None if there is none.
        sep_token_id: id of the separator. If it is set, the model warns about pairs that come without segment ids.
        tie_word_embeddings: whether the prediction head shares the token embeddings.

    Raises:
        ValueError: for the reasons of `RegardConfig`.
    """

    model_type = "regard_bert"
    compatible_model_types: ClassVar[frozenset[str]] = frozenset({"bert"})
    choices: ClassVar[dict[str, Collection[str]]] = {"hidden_act": ACT2FN}

    vocab_size: int = 30522
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu"
    hidden_dropout_prob: float | int = 0.1
    attention_probs_dropout_prob: float | int = 0.1
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-12
    classifier_dropout: float | int | None = None
    pad_token_id: int | None = 0
    sep_token_id: int | None = None
    tie_word_embeddings: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        stock_only = {name: kwargs.pop(name, value) for name, value in _STOCK_ONLY.items()}
        # Checked afterwards, since the error for a model of another type is clearer than that for its values.
        super().__post_init__(**kwargs)
        for name, value in _STOCK_ONLY.items():
            if stock_only[name] != value:
                raise ValueError(f"`{name}` of a BERT must be {value!r} to be read as {self.model_type}")

    @classmethod
    def get_config_dict(cls, *args: Any, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Reads a saved configuration, and converts that of a stock BERT to this family."""
        config_dict, unused = super().get_config_dict(*args, **kwargs)
        # The first checkpoints do not name their type, and contain fields that no BERT reads, such as `pooler_type`.
        if config_dict.get("model_type", "bert") in list(cls.compatible_model_types):
            config_dict = {
                name: value for name, value in config_dict.items() if cls.knows(name) or name in _STOCK_ONLY
            }
            config_dict["model_type"] = cls.model_type
        return config_dict, unused
