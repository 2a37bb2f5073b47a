"""The configuration of the encoder-decoder Transformer."""

# No `from __future__ import annotations` here: it turns types into strings, and `strict` does not check those.

from collections.abc import Collection
from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

from .base import NORM_POSITIONS, POSITION_TYPES, RegardConfig


@strict
class RegardTransformerConfig(RegardConfig):
    """Configuration of the `RegardTransformer*` classes.

    Vaswani et al. (2017), https://arxiv.org/abs/1706.03762

    Args:
        vocab_size: number of tokens, shared by source and target.
        hidden_size: width of every layer; a multiple of `num_attention_heads`.
        num_hidden_layers: number of encoder blocks.
        num_decoder_layers: number of decoder blocks; as many as the encoder's if None.
        num_attention_heads: heads per block.
        intermediate_size: width of the feed-forward layers.
        hidden_act: activation of the feed-forward layers, a name from transformers' `ACT2FN`.
        hidden_dropout_prob: dropout after the embeddings and after each sub-layer.
        attention_probs_dropout_prob: dropout of the attention weights.
        max_position_embeddings: the longest source and the longest target, in tokens.
        position_embedding_type: "learned" or "sinusoidal".
        norm_position: "post" (a norm after each sub-layer, as published) or "pre".
        scale_embedding: whether token embeddings are multiplied by the square root of the width.
        label_smoothing: share of the target probability that is spread over the whole vocabulary.
        initializer_range: standard deviation of the initial weights.
        layer_norm_eps: epsilon of the layer normalisations.
        use_cache: whether generation keeps the keys and values of earlier tokens, and those of the source.
        pad_token_id: id of the padding token.
        bos_token_id: id of the token that starts a text.
        eos_token_id: id of the token that ends a text, or a list of ids.
        decoder_start_token_id: id of the decoder's first input.
        tie_word_embeddings: whether encoder, decoder and output layer share the token embeddings.

    Raises:
        ValueError: for the reasons of `RegardConfig`.
    """

    model_type = "regard_transformer"
    keys_to_ignore_at_inference = ["cache", "past_key_values"]
    choices: ClassVar[dict[str, Collection[str]]] = {
        "hidden_act": ACT2FN,
        "position_embedding_type": POSITION_TYPES,
        "norm_position": NORM_POSITIONS,
    }

    vocab_size: int = 8192
    hidden_size: int = 512
    num_hidden_layers: int = 6
    num_decoder_layers: int | None = None
    num_attention_heads: int = 8
    intermediate_size: int = 2048
    hidden_act: str = "relu"
    hidden_dropout_prob: float | int = 0.1
    attention_probs_dropout_prob: float | int = 0.1
    max_position_embeddings: int = 512
    position_embedding_type: str = "sinusoidal"
    norm_position: str = "post"
    scale_embedding: bool = True
    label_smoothing: float | int = 0.0
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-5
    use_cache: bool = True
    is_encoder_decoder: bool = True
    pad_token_id: int | None = 0
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    decoder_start_token_id: int = 1
    tie_word_embeddings: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        if self.num_decoder_layers is None:
            self.num_decoder_layers = self.num_hidden_layers
        super().__post_init__(**kwargs)

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> PreTrainedConfig:
        """Returns the text configuration, for the decoder with its number of layers, which caches read."""
        config = super().get_text_config(decoder=decoder, encoder=encoder)
        if decoder and config is not self:
            config.num_hidden_layers = config.num_decoder_layers
        return config
