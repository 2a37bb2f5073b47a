"""The decoder-only causal language model.

Dimension letters: B batch, L length, E width of the model, V vocabulary.
"""

from typing import Any

from torch import Tensor, nn
from transformers import Cache, DynamicCache
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from ..configuration.decoder import RegardDecoderConfig
from .attention import MultiHeadAttention
from .base import (
    CACHE,
    FastGenerationMixin,
    RegardPreTrainedModel,
    eager_for_output_attentions,
    named_cache,
    takes_cache,
)
from .block import TransformerBlock, TransformerStack
from .checks import check_ids, check_length, check_positions, require_exactly_one
from .cpu import Linear
from .losses import causal_lm_loss
from .positions import TextEmbeddings, position_ids_for


class RegardDecoderPreTrainedModel(RegardPreTrainedModel):
    """Base of the decoder classes."""

    config_class = RegardDecoderConfig
    config: RegardDecoderConfig
    base_model_prefix = "decoder"
    _can_compile_fullgraph = True
    _can_record_outputs = {
        "hidden_states": TransformerBlock,
        "attentions": OutputRecorder(MultiHeadAttention, index=1),
    }


class RegardDecoderModel(RegardDecoderPreTrainedModel):
    """The blocks without the output layer: computes hidden states of every token."""

    def __init__(self, config: RegardDecoderConfig) -> None:
        super().__init__(config)
        self.embeddings = TextEmbeddings(config)
        self.stack = TransformerStack(config, config.num_hidden_layers, config.norm_position, is_causal=True)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """The token embeddings."""
        return self.embeddings.tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replaces the token embeddings."""
        self.embeddings.tokens = value  # type: ignore[assignment]

    @merge_with_config_defaults
    @capture_outputs
    @eager_for_output_attentions
    @takes_cache
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPast:
        """Runs the blocks; no token sees a later one.

        Args:
            input_ids: token ids, (B, L); with a cache, those that are not in it.
            attention_mask: 1 for tokens, 0 for padding, (B, L with those in the cache), or any other mask that
                transformers accepts. None: no padding.
            position_ids: positions, (B, L) or (1, L); None: counted from each row's first token in the mask.
            cache: keys and values of earlier tokens; those of this call are added.
            inputs_embeds: token embeddings, (B, L, E), instead of `input_ids`.
            use_cache: whether to make a cache if none is given, and return it.
            **kwargs: options of the attention function and of transformers, such as `output_attentions`.

        Returns:
            `last_hidden_state` (B, L, E) and the `cache`.

        Raises:
            ValueError: if a sequence is longer than the positions, or ids are outside the vocabulary. Ids on an
                accelerator are not checked, since reading them would wait for it.
        """
        given = require_exactly_one(input_ids, inputs_embeds)
        length = given.shape[1]
        check_ids("input_ids", input_ids, self.embeddings.tokens.num_embeddings, "vocab_size")
        if inputs_embeds is None:
            inputs_embeds = self.embeddings.tokens(input_ids)
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        past = cache.get_seq_length() if cache is not None else 0
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            **named_cache(cache),
            position_ids=position_ids,
        )
        if position_ids is None:
            check_length(length, self.config.max_position_embeddings, past)
            position_ids = position_ids_for(attention_mask, length, past, given.device)
        else:
            check_positions(position_ids, self.config.max_position_embeddings)
        embedded = self.embeddings(inputs_embeds, position_ids)
        hidden_states = self.stack(embedded, mask, cache=cache, position_ids=position_ids, **kwargs)
        return BaseModelOutputWithPast(last_hidden_state=hidden_states, **named_cache(cache if use_cache else None))


class RegardDecoderForCausalLM(RegardDecoderPreTrainedModel, FastGenerationMixin):
    """The causal language model: each token predicts the next."""

    _tied_weights_keys = {"lm_head.weight": "decoder.embeddings.tokens.weight"}

    def __init__(self, config: RegardDecoderConfig) -> None:
        super().__init__(config)
        self.decoder = RegardDecoderModel(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    @takes_cache
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> CausalLMOutputWithPast:
        """Scores the vocabulary after each token.

        Args:
            input_ids: token ids, (B, L); with a cache, those that are not in it.
            attention_mask: 1 for tokens, 0 for padding, (B, L with those in the cache).
            position_ids: positions, (B, L) or (1, L).
            cache: keys and values of earlier tokens; those of this call are added.
            inputs_embeds: token embeddings, (B, L, E), instead of `input_ids`.
            labels: the same ids as the input, (B, L), which this method shifts; -100 for a token not to predict.
            use_cache: whether to make a cache if none is given, and return it.
            logits_to_keep: number of last positions to score, or indices of the positions; 0: all positions.
            num_items_in_batch: number of predicted tokens in the whole batch, if this is a part of it.
            **kwargs: options of `RegardDecoderModel.forward`, which describes the inputs in full; and `shift_labels`,
                labels that are already shifted, instead of `labels`.

        Returns:
            `logits` (B, L, V), the `loss` if there are labels, and the `cache`.

        Raises:
            ValueError: if labels are outside the vocabulary, and for the reasons of `RegardDecoderModel.forward`.
        """
        # Not a named argument, since `Trainer` expects each of those with "label" in its name in every batch.
        shift_labels: Any = kwargs.pop("shift_labels", None)
        outputs = self.decoder(
            input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            return_dict=True,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept])
        loss: Any = None
        if labels is not None or shift_labels is not None:
            loss = causal_lm_loss(logits, labels, num_items_in_batch, shift_labels)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            **named_cache(getattr(outputs, CACHE)),
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )
