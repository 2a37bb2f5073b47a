"""The configuration of the recurrent encoder-decoder."""

# No `from __future__ import annotations` here: it turns types into strings, and `strict` does not check those.

from collections.abc import Collection
from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict

from ..families.choices import ALIGNMENT_NAMES, RNN_TYPES
from .base import RegardConfig


@strict
class RegardRecurrentConfig(RegardConfig):
    """Configuration of the `RegardRecurrent*` classes.

    Bahdanau et al. (2015), https://arxiv.org/abs/1409.0473; Luong et al. (2015), https://arxiv.org/abs/1508.04025

    Args:
        vocab_size: number of tokens, shared by source and target.
        hidden_size: width of the token embeddings and of the decoder's state.
        encoder_hidden_size: width of each direction of the encoder; half of `hidden_size` if None, so that the keys
            are as wide as the queries.
        num_hidden_layers: number of layers of the encoder, and of the decoder.
        rnn_type: "gru" or "lstm".
        alignment: how the decoder's state is matched with the source: "dot", "scaled_dot", "bilinear", "additive", or
            "none" for one fixed vector of the whole source.
        hidden_dropout_prob: dropout of the embeddings, between layers, and before the output layer.
        label_smoothing: share of the target probability that is spread over the whole vocabulary.
        initializer_range: standard deviation of the initial embeddings and linear weights.
        use_cache: whether generation keeps the decoder's state and the projected keys.
        pad_token_id: id of the padding token.
        bos_token_id: id of the token that starts a text.
        eos_token_id: id of the token that ends a text, or a list of ids.
        decoder_start_token_id: id of the decoder's first input.
        tie_word_embeddings: whether encoder, decoder and output layer share the token embeddings.

    Raises:
        ValueError: for the reasons of `RegardConfig`. The alignment checks that the widths suit it.
    """

    model_type = "regard_recurrent"
    keys_to_ignore_at_inference = ["cache", "past_key_values"]
    choices: ClassVar[dict[str, Collection[str]]] = {"alignment": ALIGNMENT_NAMES, "rnn_type": RNN_TYPES}

    vocab_size: int = 8192
    hidden_size: int = 512
    encoder_hidden_size: int | None = None
    num_hidden_layers: int = 1
    rnn_type: str = "gru"
    alignment: str = "additive"
    hidden_dropout_prob: float | int = 0.1
    label_smoothing: float | int = 0.0
    initializer_range: float = 0.02
    use_cache: bool = True
    is_encoder_decoder: bool = True
    pad_token_id: int | None = 0
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    decoder_start_token_id: int = 1
    tie_word_embeddings: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        if self.encoder_hidden_size is None:
            self.encoder_hidden_size = self.hidden_size // 2
        super().__post_init__(**kwargs)
