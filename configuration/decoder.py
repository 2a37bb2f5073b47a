"""The configuration of the decoder-only family."""

# No `from __future__ import annotations` here: it turns types into strings, and `strict` does not check those.

from collections.abc import Collection
from typing import ClassVar

from huggingface_hub.dataclasses import strict
from transformers.activations import ACT2FN

from .base import NORM_POSITIONS, POSITION_TYPES, RegardConfig


@strict
class RegardDecoderConfig(RegardConfig):
    """Configuration of the `RegardDecoder*` classes, a causal language model.

    Radford et al. (2019), "Language models are unsupervised multitask learners".

    Args:
        vocab_size: number of tokens.
        hidden_size: width of every layer; a multiple of `num_attention_heads`.
        num_hidden_layers: number of Transformer blocks.
        num_attention_heads: heads per block.
        intermediate_size: width of the feed-forward layer.
        hidden_act: activation of the feed-forward layer, a name from transformers' `ACT2FN`.
        hidden_dropout_prob: dropout after the embeddings and after each sub-layer.
        attention_probs_dropout_prob: dropout of the attention weights.
        max_position_embeddings: the longest sequence, in tokens.
        position_embedding_type: "learned" or "sinusoidal".
        norm_position: "pre" (a norm before each sub-layer, and one after the last) or "post".
        initializer_range: standard deviation of the initial weights.
        layer_norm_eps: epsilon of the layer normalisations.
        use_cache: whether generation keeps the keys and values of earlier tokens.
        pad_token_id: id of the padding token; None if there is none.
        bos_token_id: id of the token that starts a text.
        eos_token_id: id of the token that ends a text, or a list of ids.
        tie_word_embeddings: whether the output layer shares the token embeddings.

    Raises:
        ValueError: for the reasons of `RegardConfig`.
    """

    model_type = "regard_decoder"
    keys_to_ignore_at_inference = ["cache", "past_key_values"]
    choices: ClassVar[dict[str, Collection[str]]] = {
        "hidden_act": ACT2FN,
        "position_embedding_type": POSITION_TYPES,
        "norm_position": NORM_POSITIONS,
    }

    vocab_size: int = 8192
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu"
    hidden_dropout_prob: float | int = 0.1
    attention_probs_dropout_prob: float | int = 0.1
    max_position_embeddings: int = 1024
    position_embedding_type: str = "learned"
    norm_position: str = "pre"
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-5
    use_cache: bool = True
    pad_token_id: int | None = 0
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    tie_word_embeddings: bool = True
