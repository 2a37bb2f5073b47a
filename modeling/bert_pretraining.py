"""BERT's classes for pretraining: masked language modeling and next sentence prediction.

Devlin et al. (2019), https://arxiv.org/abs/1810.04805.

Dimension letters: B batch, L length, E width of the model, V vocabulary, P predicted positions, T tokens of a packed
batch.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.modeling_outputs import (
    BaseModelOutputWithPooling,
    MaskedLMOutput,
    NextSentencePredictorOutput,
)
from transformers.processing_utils import Unpack
from transformers.utils import ModelOutput, TransformersKwargs
from transformers.utils.generic import can_return_tuple

from ..configuration.bert import RegardBertConfig
from .bert import RegardBertModel, RegardBertPreTrainedModel
from .cpu import Linear, pad_positions
from .losses import cross_entropy, loss_without_scores, weighted_cross_entropy
from .packing import count_predicted, pack


class MaskedLMHead(nn.Module):
    """Scores the vocabulary at each position: (..., E) to (..., V)."""

    def __init__(self, config: RegardBertConfig) -> None:
        super().__init__()
        self.dense = Linear(config.hidden_size, config.hidden_size)
        self.activation = ACT2FN[config.hidden_act]
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.decoder: nn.Linear = Linear(config.hidden_size, config.vocab_size)

    def transform(self, hidden_states: Tensor) -> Tensor:
        """Maps hidden states to what the last layer scores the vocabulary from."""
        return self.norm(self.activation(self.dense(hidden_states)))

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Transforms hidden states, then scores each word piece."""
        return self.decoder(self.transform(hidden_states))


@dataclass
class RegardBertForPreTrainingOutput(ModelOutput):
    """The outputs of `RegardBertForPreTraining`.

    Attributes:
        loss: sum of the losses whose labels are given, a scalar.
        prediction_logits: scores of the vocabulary, (B, L, V); with `predicted_only` (P, V), and None in training.
        seq_relationship_logits: scores of "is the next sentence" and "is a random one", (B, 2).
        hidden_states: with `output_hidden_states`, those of the embeddings and of each block, (B, L, E) each.
        attentions: with `output_attentions`, the weights of each block, (B, heads, L, L) each.
    """

    loss: Tensor | None = None
    prediction_logits: Tensor | None = None
    seq_relationship_logits: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


class PredictsMaskedTokens(RegardBertPreTrainedModel):
    """Base of the two classes with a masked language modeling head, which may share the token embeddings."""

    _tied_weights_keys = {"masked_lm_head.decoder.weight": "bert.embeddings.tokens.weight"}
    bert: RegardBertModel
    masked_lm_head: MaskedLMHead

    def get_output_embeddings(self) -> nn.Module:
        """The layer that scores the vocabulary."""
        return self.masked_lm_head.decoder

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        """Replaces the layer that scores the vocabulary."""
        self.masked_lm_head.decoder = new_embeddings

    def encode_predicted(
        self,
        inputs: dict[str, Tensor | None],
        labels: Tensor | None,
        attention_mask: Tensor | None,
        predicted_only: bool,
        predicted_positions: Tensor | None,
        **kwargs: Any,
    ) -> tuple[BaseModelOutputWithPooling, Tensor, Tensor | None]:
        """Runs the encoder, and for predicted positions only without padding and with no others in its last layer.

        Args:
            inputs: `input_ids`, `token_type_ids`, `position_ids` and `inputs_embeds`, or None for each.
            labels: (B, L), or None.
            attention_mask: mask, as for `RegardBertModel.forward`.
            predicted_only: whether to compute only the positions that have a label.
            predicted_positions: those positions in a packed batch, (P,), or None.
            **kwargs: options of `RegardBertModel.forward`.

        Returns:
            The encoder's outputs; the hidden states to predict from, (B, L, E) or (P, E); and their labels, if any.
        """
        if not predicted_only and predicted_positions is None:
            outputs = self.bert(**inputs, attention_mask=attention_mask, return_dict=True, **kwargs)
            return outputs, outputs.last_hidden_state, labels
        if labels is None:
            raise ValueError("`predicted_only` needs `labels`, which mark the positions to predict")
        if kwargs.get("cu_seq_lens_q") is None:
            if predicted_positions is not None:
                raise ValueError("`predicted_positions` needs a packed batch, with `cu_seq_lens_q`")
            if inputs["position_ids"] is None:
                inputs["position_ids"] = torch.arange(labels.shape[1], device=labels.device).unsqueeze(0)
            packed, bounds = pack({**inputs, "labels": labels}, attention_mask, *labels.shape)
            labels = packed.pop("labels")
            inputs, attention_mask, kwargs = {**packed}, None, kwargs | bounds._asdict()
        labels = labels.flatten()
        if predicted_positions is None:
            predicted_positions = (labels != -100).nonzero().squeeze(1)
        labels = labels.index_select(0, predicted_positions)
        predicted_positions, labels = pad_positions(self.masked_lm_head.decoder, predicted_positions, labels)
        outputs = self.bert(
            **inputs,
            attention_mask=attention_mask,
            output_positions=predicted_positions,
            return_dict=True,
            **kwargs,
        )
        return outputs, outputs.last_hidden_state[0], labels

    def predict_tokens(
        self, hidden_states: Tensor, labels: Tensor | None, items: Tensor | int | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """The scores of the vocabulary, and the loss if there are labels.

        In training, positions (P, E) that were selected for their labels get no scores (None), only the loss.
        """
        head = self.masked_lm_head
        loss = loss_without_scores(
            hidden_states, head.decoder, labels, self.config.vocab_size, items, transform=head.transform
        )
        if loss is not None:
            return None, loss
        logits = head(hidden_states)
        return logits, None if labels is None else cross_entropy(logits, labels, items)


class RegardBertForPreTraining(PredictsMaskedTokens):
    """Masked language modeling and next sentence prediction on one encoder."""

    def __init__(self, config: RegardBertConfig) -> None:
        super().__init__(config)
        self.bert = RegardBertModel(config)
        self.masked_lm_head = MaskedLMHead(config)
        self.next_sentence_head = Linear(config.hidden_size, 2)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        next_sentence_label: Tensor | None = None,
        predicted_only: bool = False,
        predicted_positions: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        num_sequences_in_batch: Tensor | int | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> RegardBertForPreTrainingOutput:
        """Predicts masked tokens, and whether the second segment follows the first.

        Args:
            input_ids: word-piece ids, (B, L).
            attention_mask: 1 for tokens, 0 for padding, (B, L).
            token_type_ids: segment ids, (B, L).
            position_ids: positions, (B, L) or (1, L).
            inputs_embeds: token embeddings, (B, L, E), instead of `input_ids`.
            labels: the ids to predict, (B, L), and -100 elsewhere.
            next_sentence_label: 0 if the second segment follows the first, 1 if it is a random one, (B,).
            predicted_only: whether to compute without padding, and in the last layer and the head only the P positions
                that have a label: the same loss for a fraction of the work. Hidden states are then packed, (1, T, E).
            predicted_positions: those positions in a packed batch, (P,), which saves looking for them; implies
                `predicted_only`.
            num_items_in_batch: number of predicted tokens in the whole batch, if this is a part of it.
            num_sequences_in_batch: number of sequences in the whole batch. If only `num_items_in_batch` is given, as
                by `Trainer`, each sequence's next-sentence loss is weighted by its number of predicted tokens, so that
                the losses of the parts add up to that of the whole batch.
            **kwargs: options of `RegardBertModel.forward`, which describes the inputs in full.

        Raises:
            ValueError: if labels are outside their classes, if `predicted_only` comes without labels or
                `predicted_positions` without a packed batch, and for the reasons of `RegardBertModel.forward`.
        """
        per_sequence = None if labels is None else count_predicted(labels, kwargs.get("cu_seq_lens_q"))
        outputs, hidden_states, labels = self.encode_predicted(
            {
                "input_ids": input_ids,
                "token_type_ids": token_type_ids,
                "position_ids": position_ids,
                "inputs_embeds": inputs_embeds,
            },
            labels,
            attention_mask,
            predicted_only,
            predicted_positions,
            **kwargs,
        )
        logits, loss = self.predict_tokens(hidden_states, labels, num_items_in_batch)
        next_logits = self.next_sentence_head(outputs.pooler_output)
        if next_sentence_label is not None:
            if per_sequence is None or num_items_in_batch is None or num_sequences_in_batch is not None:
                items = num_sequences_in_batch
                next_loss = cross_entropy(next_logits, next_sentence_label, items, name="next_sentence_label")
            else:
                next_loss = weighted_cross_entropy(
                    next_logits, next_sentence_label, per_sequence, num_items_in_batch, name="next_sentence_label"
                )
            loss = next_loss if loss is None else loss + next_loss
        return RegardBertForPreTrainingOutput(
            loss=loss,
            prediction_logits=logits,
            seq_relationship_logits=next_logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class RegardBertForMaskedLM(PredictsMaskedTokens):
    """Masked language modeling."""

    def __init__(self, config: RegardBertConfig) -> None:
        super().__init__(config)
        self.bert = RegardBertModel(config, add_pooling_layer=False)
        self.masked_lm_head = MaskedLMHead(config)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        predicted_only: bool = False,
        predicted_positions: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> MaskedLMOutput:
        """Predicts masked tokens; the arguments are those of `RegardBertForPreTraining.forward`."""
        outputs, hidden_states, labels = self.encode_predicted(
            {
                "input_ids": input_ids,
                "token_type_ids": token_type_ids,
                "position_ids": position_ids,
                "inputs_embeds": inputs_embeds,
            },
            labels,
            attention_mask,
            predicted_only,
            predicted_positions,
            **kwargs,
        )
        logits, loss = self.predict_tokens(hidden_states, labels, num_items_in_batch)
        return MaskedLMOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class RegardBertForNextSentencePrediction(RegardBertPreTrainedModel):
    """Next sentence prediction."""

    def __init__(self, config: RegardBertConfig) -> None:
        super().__init__(config)
        self.bert = RegardBertModel(config)
        self.next_sentence_head = Linear(config.hidden_size, 2)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> NextSentencePredictorOutput:
        """Scores "follows" (class 0) and "is random" (class 1), (B, 2); `labels` is (B,)."""
        outputs = self.bert(
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, return_dict=True, **kwargs
        )
        logits = self.next_sentence_head(outputs.pooler_output)
        return NextSentencePredictorOutput(
            loss=None if labels is None else cross_entropy(logits, labels, num_items_in_batch),
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )
