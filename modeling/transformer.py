"""The encoder-decoder Transformer.

Vaswani et al. (2017), https://arxiv.org/abs/1706.03762

Dimension letters: B batch, S source length, T target length, E width of the model, V vocabulary.
"""

from torch import Tensor, nn
from transformers import Cache, DynamicCache, EncoderDecoderCache
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask
from transformers.modeling_outputs import (
    BaseModelOutput,
    BaseModelOutputWithPastAndCrossAttentions,
)
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from ..configuration.transformer import RegardTransformerConfig
from .attention import MultiHeadAttention
from .base import (
    FastGenerationMixin,
    RegardPreTrainedModel,
    eager_for_output_attentions,
    named_cache,
    takes_cache,
)
from .block import TransformerBlock, TransformerStack
from .checks import check_ids, check_length, check_positions, check_source, require_exactly_one
from .cpu import Linear
from .positions import TextEmbeddings, position_ids_for
from .seq2seq import ConditionalGeneration, EncoderDecoderModel


class RegardTransformerPreTrainedModel(RegardPreTrainedModel):
    """Base of the encoder-decoder classes."""

    config_class = RegardTransformerConfig
    config: RegardTransformerConfig
    base_model_prefix = "model"
    _can_compile_fullgraph = True
    embeddings: TextEmbeddings

    def get_input_embeddings(self) -> nn.Module:
        """The token embeddings of an encoder or a decoder."""
        return self.embeddings.tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replaces the token embeddings of an encoder or a decoder."""
        self.embeddings.tokens = value  # type: ignore[assignment]


def _embeddings(config: RegardTransformerConfig) -> TextEmbeddings:
    return TextEmbeddings(config, scale=config.hidden_size**0.5 if config.scale_embedding else 1.0)


class RegardTransformerEncoder(RegardTransformerPreTrainedModel):
    """Reads the source, where each token sees all others: computes hidden states of every token."""

    main_input_name = "input_ids"
    _can_record_outputs = {
        "hidden_states": TransformerBlock,
        "attentions": OutputRecorder(MultiHeadAttention, index=1),
    }

    def __init__(self, config: RegardTransformerConfig) -> None:
        super().__init__(config)
        self.embeddings = _embeddings(config)
        self.stack = TransformerStack(config, config.num_hidden_layers, config.norm_position)
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    @eager_for_output_attentions
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutput:
        """Encodes source ids or embeddings (B, S) under a mask (B, S), as for `EncoderDecoderModel.forward`."""
        given = require_exactly_one(input_ids, inputs_embeds)
        length = given.shape[1]
        check_length(length, self.config.max_position_embeddings)
        check_ids("input_ids", input_ids, self.embeddings.tokens.num_embeddings, "vocab_size")
        check_source(length, attention_mask)
        if inputs_embeds is None:
            inputs_embeds = self.embeddings.tokens(input_ids)
        mask = create_bidirectional_mask(
            config=self.config, inputs_embeds=inputs_embeds, attention_mask=attention_mask
        )
        embedded = self.embeddings(inputs_embeds, position_ids_for(attention_mask, length, 0, given.device))
        return BaseModelOutput(last_hidden_state=self.stack(embedded, mask, **kwargs))


class RegardTransformerDecoder(RegardTransformerPreTrainedModel):
    """Writes the target, where each token sees itself, earlier ones, and the whole source."""

    _can_record_outputs = {
        "hidden_states": TransformerBlock,
        "attentions": OutputRecorder(MultiHeadAttention, index=1, layer_name="self_attention"),
        "cross_attentions": OutputRecorder(MultiHeadAttention, index=1, layer_name="cross_attention"),
    }

    def __init__(self, config: RegardTransformerConfig) -> None:
        super().__init__(config)
        self.embeddings = _embeddings(config)
        self.stack = TransformerStack(
            config, config.num_decoder_layers or 0, config.norm_position, is_causal=True, has_cross_attention=True
        )
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    @eager_for_output_attentions
    @takes_cache
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """Decodes target ids (B, T) from encoder states (B, S, E), as for `EncoderDecoderModel.forward`."""
        config = self.config
        given = require_exactly_one(input_ids, inputs_embeds, "decoder_")
        length = given.shape[1]
        check_ids("decoder_input_ids", input_ids, self.embeddings.tokens.num_embeddings, "vocab_size")
        if inputs_embeds is None:
            inputs_embeds = self.embeddings.tokens(input_ids)
        if use_cache and cache is None:
            cache = EncoderDecoderCache(DynamicCache(config=config), DynamicCache(config=config))
        past = cache.get_seq_length() if cache is not None else 0
        check_length(length, config.max_position_embeddings, past)
        mask = create_causal_mask(
            config=config,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            **named_cache(cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache),
        )
        memory_mask = create_bidirectional_mask(
            config=config,
            inputs_embeds=inputs_embeds,
            attention_mask=encoder_attention_mask,
            encoder_hidden_states=encoder_hidden_states,
        )
        position_ids = position_ids_for(attention_mask, length, past, given.device)
        check_positions(position_ids, config.max_position_embeddings)
        embedded = self.embeddings(inputs_embeds, position_ids)
        hidden_states = self.stack(
            embedded, mask, memory=encoder_hidden_states, memory_mask=memory_mask, cache=cache, **kwargs
        )
        return BaseModelOutputWithPastAndCrossAttentions(
            last_hidden_state=hidden_states, **named_cache(cache if use_cache else None)
        )


class RegardTransformerModel(EncoderDecoderModel, RegardTransformerPreTrainedModel):
    """Encoder and decoder without the output layer."""

    _tied_weights_keys = {"encoder.embeddings.tokens.weight": "decoder.embeddings.tokens.weight"}

    def __init__(self, config: RegardTransformerConfig) -> None:
        super().__init__(config)
        self.encoder = RegardTransformerEncoder(config)
        self.decoder = RegardTransformerDecoder(config)
        self.post_init()


class RegardTransformerForConditionalGeneration(
    ConditionalGeneration, RegardTransformerPreTrainedModel, FastGenerationMixin
):
    """The encoder-decoder with an output layer."""

    _tied_weights_keys = {"lm_head.weight": "model.decoder.embeddings.tokens.weight"}

    def __init__(self, config: RegardTransformerConfig) -> None:
        super().__init__(config)
        self.model = RegardTransformerModel(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()
