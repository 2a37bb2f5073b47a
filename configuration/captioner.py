"""The configuration of the image captioner."""

# No `from __future__ import annotations` here: it turns types into strings, and `strict` does not check those.

from collections.abc import Collection
from dataclasses import fields
from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.configuration_utils import SubConfigSpec

from ..families.choices import ALIGNMENT_NAMES, DECODER_TYPES, RNN_TYPES
from .base import NORM_POSITIONS, POSITION_TYPES, RegardConfig
from .recurrent import RegardRecurrentConfig
from .transformer import RegardTransformerConfig

# A ResNet small enough to be trained from scratch on small images; its grid is an eighth of the image each way.
_DEFAULT_BACKBONE = {
    "embedding_size": 32,
    "hidden_sizes": [64, 128],
    "depths": [1, 1],
    "layer_type": "basic",
    "out_features": ["stage2"],
}


@strict
class RegardCaptionerConfig(RegardConfig):
    """Configuration of `RegardCaptionerForConditionalGeneration`.

    Xu et al. (2015), "Show, attend and tell", https://arxiv.org/abs/1502.03044

    Args:
        backbone_config: configuration of any `AutoBackbone`, as an object or a dictionary with a `model_type`; a small
            ResNet if None. The model reads the last feature map among its `out_features`.
        freeze_backbone: whether the backbone is not trained: it gets no gradients and stays in evaluation mode.
        decoder_type: "recurrent", with an alignment, or "transformer", with cross-attention.
        vocab_size: number of tokens.
        hidden_size: width of the decoder, and of the image features that it reads.
        num_hidden_layers: layers of the decoder.
        num_attention_heads: heads of a Transformer decoder.
        intermediate_size: width of a Transformer decoder's feed-forward layers.
        hidden_act: activation of a Transformer decoder's feed-forward layers.
        rnn_type: cells of a recurrent decoder, "gru" or "lstm".
        alignment: alignment of a recurrent decoder, as for `RegardRecurrentConfig`.
        hidden_dropout_prob: dropout of the decoder.
        attention_probs_dropout_prob: dropout of a Transformer decoder's attention weights.
        max_position_embeddings: the longest caption, in tokens, of a Transformer decoder.
        position_embedding_type: positions of a Transformer decoder, "learned" or "sinusoidal".
        norm_position: place of the norms in a Transformer decoder, "pre" or "post".
        attention_regularization: weight of the doubly stochastic regularizer, which makes a recurrent decoder attend
            to every place of the image in the course of a caption; 0 turns it off.
        label_smoothing: share of the target probability that is spread over the whole vocabulary.
        initializer_range: standard deviation of the initial embeddings and linear weights.
        layer_norm_eps: epsilon of the layer normalisations.
        use_cache: whether generation keeps the decoder's state, or its keys and values.
        pad_token_id: id of the padding token.
        bos_token_id: id of the token that starts a caption.
        eos_token_id: id of the token that ends a caption, or a list of ids.
        decoder_start_token_id: id of the decoder's first input.
        tie_word_embeddings: whether the output layer shares the token embeddings.

    Raises:
        ValueError: for the reasons of `RegardConfig`.
    """

    model_type = "regard_captioner"
    keys_to_ignore_at_inference = ["cache", "past_key_values"]
    choices: ClassVar[dict[str, Collection[str]]] = {
        "decoder_type": DECODER_TYPES,
        "alignment": ALIGNMENT_NAMES,
        "rnn_type": RNN_TYPES,
        "hidden_act": ACT2FN,
        "position_embedding_type": POSITION_TYPES,
        "norm_position": NORM_POSITIONS,
    }
    sub_configs_defaults: ClassVar[dict[str, Any]] = {
        "backbone_config": SubConfigSpec(AutoConfig, model_type="resnet", init_kwargs=_DEFAULT_BACKBONE)
    }

    backbone_config: dict | PreTrainedConfig | None = None
    freeze_backbone: bool = False
    decoder_type: str = "recurrent"
    vocab_size: int = 1024
    hidden_size: int = 256
    num_hidden_layers: int = 1
    num_attention_heads: int = 4
    intermediate_size: int = 1024
    hidden_act: str = "relu"
    rnn_type: str = "lstm"
    alignment: str = "additive"
    hidden_dropout_prob: float | int = 0.1
    attention_probs_dropout_prob: float | int = 0.1
    max_position_embeddings: int = 64
    position_embedding_type: str = "sinusoidal"
    norm_position: str = "pre"
    attention_regularization: float | int = 1.0
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
        own = self.backbone_config
        if isinstance(own, dict) and own.get("model_type") not in CONFIG_MAPPING:
            raise ValueError(
                f"`backbone_config` has the `model_type` {own.get('model_type')!r}, unknown to transformers: "
                "name a backbone's, such as 'resnet'"
            )
        super().__post_init__(**kwargs)

    def validate_architecture(self) -> None:
        """Checks each field by itself."""
        super().validate_architecture()
        if self.attention_regularization < 0:
            raise ValueError(f"`attention_regularization` ({self.attention_regularization}) must be at least 0")

    def make_decoder_config(self) -> RegardRecurrentConfig | RegardTransformerConfig:
        """The configuration of the decoder, as one of its own family."""
        family = RegardRecurrentConfig if self.decoder_type == "recurrent" else RegardTransformerConfig
        own = {field.name for field in fields(family)} & {field.name for field in fields(type(self))}
        own -= {"architectures", "dtype", "transformers_version"}
        return family(**{name: getattr(self, name) for name in own})
