"""The base of the encoder-decoder families: encodes the source, decodes the target and scores the vocabulary.

Dimension letters: B batch, S source length, T target length, E width of the model, V vocabulary.
"""

from typing import Any

from torch import Tensor, nn
from transformers import Cache
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput, Seq2SeqModelOutput
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs
from transformers.utils.generic import can_return_tuple

from .base import CACHE, RegardPreTrainedModel, named_cache, takes_cache
from .losses import cross_entropy, loss_without_scores, shift_right


class SharedVocabulary(RegardPreTrainedModel):
    """A model whose source and target share a vocabulary: resizing changes the embeddings of both, tied or not."""

    def _resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Module:
        if not self.config.tie_word_embeddings:
            self.get_decoder()._resize_token_embeddings(*args, **kwargs)
        return super()._resize_token_embeddings(*args, **kwargs)


class EncoderDecoderModel(SharedVocabulary):
    """An `encoder` and a `decoder` without the output layer: computes hidden states of every target token."""

    encoder: RegardPreTrainedModel
    decoder: RegardPreTrainedModel

    def get_input_embeddings(self) -> nn.Module:
        """The token embeddings of the encoder, which are also the decoder's if weights are tied."""
        return self.encoder.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replaces the token embeddings of the encoder, and of the decoder if weights are tied."""
        self.encoder.set_input_embeddings(value)
        if self.config.tie_word_embeddings:
            self.decoder.set_input_embeddings(value)

    @can_return_tuple
    @takes_cache
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: BaseModelOutput | tuple | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Seq2SeqModelOutput:
        """Encodes the source, and decodes the target from it.

        Args:
            input_ids: source ids, (B, S).
            attention_mask: 1 for source tokens, 0 for padding, (B, S). None: no padding.
            decoder_input_ids: target ids, (B, T), the start token first; with a cache, those that are not in it.
            decoder_attention_mask: 1 for target tokens, 0 for padding, (B, T with those in the cache).
            encoder_outputs: earlier outputs of the encoder, instead of the source.
            cache: keys and values of earlier target tokens and of the source; those of this call are added.
            inputs_embeds: source token embeddings, (B, S, E), instead of `input_ids`.
            decoder_inputs_embeds: target token embeddings, (B, T, E), instead of `decoder_input_ids`.
            use_cache: whether to make a cache if none is given, and return it.
            **kwargs: options of the attention function and of transformers, such as `output_attentions`.

        Raises:
            ValueError: if a source is empty or nothing but padding, if a sequence is longer than the positions, or if
                ids are outside the vocabulary.
        """
        if encoder_outputs is None:
            encoded = self.encoder(input_ids, attention_mask, inputs_embeds=inputs_embeds, return_dict=True, **kwargs)
        elif isinstance(encoder_outputs, (tuple, list)):
            encoded = BaseModelOutput(*encoder_outputs)
        else:
            encoded = encoder_outputs
        decoded = self.decoder(
            decoder_input_ids,
            attention_mask=decoder_attention_mask,
            encoder_hidden_states=encoded.last_hidden_state,
            encoder_attention_mask=attention_mask,
            cache=cache,
            inputs_embeds=decoder_inputs_embeds,
            use_cache=use_cache,
            return_dict=True,
            **kwargs,
        )
        return Seq2SeqModelOutput(
            last_hidden_state=decoded.last_hidden_state,
            **named_cache(getattr(decoded, CACHE)),
            decoder_hidden_states=decoded.hidden_states,
            decoder_attentions=decoded.attentions,
            cross_attentions=decoded.cross_attentions,
            encoder_last_hidden_state=encoded.last_hidden_state,
            encoder_hidden_states=encoded.hidden_states,
            encoder_attentions=encoded.attentions,
        )


class ConditionalGeneration(SharedVocabulary):
    """A `model` with an output layer `lm_head`: predicts each target token from the source and the tokens before."""

    model: EncoderDecoderModel
    lm_head: nn.Linear

    def get_input_embeddings(self) -> nn.Module:
        """The token embeddings of the encoder, which are also the decoder's if weights are tied."""
        return self.model.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replaces the token embeddings of the encoder, and of the decoder if weights are tied."""
        self.model.set_input_embeddings(value)

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """The decoder's input for labels (B, T); `DataCollatorForSeq2Seq` calls it."""
        return shift_right(labels, self.config.decoder_start_token_id, self.config.pad_token_id)

    @can_return_tuple
    @takes_cache
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: BaseModelOutput | tuple | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
        predicted_only: bool = False,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Seq2SeqLMOutput:
        """Scores the vocabulary after each target token.

        Args:
            input_ids: source ids, (B, S).
            attention_mask: 1 for source tokens, 0 for padding, (B, S).
            decoder_input_ids: target ids, (B, T); None: made from `labels`.
            decoder_attention_mask: 1 for target tokens, 0 for padding, (B, T with those in the cache).
            encoder_outputs: earlier outputs of the encoder, instead of the source.
            cache: keys and values of earlier target tokens and of the source; those of this call are added.
            inputs_embeds: source token embeddings, (B, S, E), instead of `input_ids`.
            decoder_inputs_embeds: target token embeddings, (B, T, E), instead of `decoder_input_ids`.
            labels: target ids, (B, T), with the end token last and without the start token; -100 for padding.
            use_cache: whether to make a cache if none is given, and return it.
            num_items_in_batch: number of target tokens in the whole batch, if this is a part of it.
            predicted_only: whether to score only the P positions that have a label, and in training to return only the
                loss: it is the same, for less work and memory.
            **kwargs: options of `EncoderDecoderModel.forward`, which describes the inputs in full.

        Returns:
            `logits` (B, T, V), or with `predicted_only` (P, V), and None in training; the `loss` if there are labels;
            and the other outputs of `EncoderDecoderModel`.

        Raises:
            ValueError: if labels are outside the vocabulary, if `predicted_only` comes without labels, and for the
                reasons of `EncoderDecoderModel.forward`.
        """
        if predicted_only and labels is None:
            raise ValueError("`predicted_only` needs `labels`, which mark the positions to predict")
        if labels is not None and decoder_input_ids is None and decoder_inputs_embeds is None:
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        outputs = self.model(
            input_ids,
            attention_mask,
            decoder_input_ids,
            decoder_attention_mask,
            encoder_outputs,
            cache,
            inputs_embeds,
            decoder_inputs_embeds,
            use_cache if labels is None else False,
            return_dict=True,
            **kwargs,
        )
        hidden_states = outputs.last_hidden_state
        if predicted_only:
            assert labels is not None
            predicted = labels != -100
            hidden_states, labels = hidden_states[predicted], labels[predicted]
        logits, loss = self._score(hidden_states, labels, num_items_in_batch)
        return Seq2SeqLMOutput(
            loss=loss,
            logits=logits,
            **named_cache(getattr(outputs, CACHE)),
            decoder_hidden_states=outputs.decoder_hidden_states,
            decoder_attentions=outputs.decoder_attentions,
            cross_attentions=outputs.cross_attentions,
            encoder_last_hidden_state=outputs.encoder_last_hidden_state,
            encoder_hidden_states=outputs.encoder_hidden_states,
            encoder_attentions=outputs.encoder_attentions,
        )

    def _score(
        self, hidden_states: Tensor, labels: Tensor | None, items: Tensor | int | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """The scores of the vocabulary, if they are needed, and the loss, if there are labels."""
        smoothing = self.config.label_smoothing
        if not smoothing:
            loss = loss_without_scores(hidden_states, self.lm_head, labels, self.config.vocab_size, items)
            if loss is not None:
                return None, loss
        logits = self.lm_head(hidden_states)
        return logits, None if labels is None else cross_entropy(logits, labels, items, label_smoothing=smoothing)
