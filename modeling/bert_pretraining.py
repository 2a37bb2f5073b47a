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
from .cpu.linear import Linear, can_use_cpu_kernels, is_unhooked
from .cpu.vocabulary_loss import vocabulary_loss
from .losses import check_labels, cross_entropy, mean_loss, weighted_cross_entropy
from .packing import POSITIONS_AT_ONCE, count_predicted, missing_rows, pack


class MaskedLMHead(nn.Module):
    """Scores the vocabulary at each position: (..., E) to (..., V)."""

    def __init__(self, config: RegardBertConfig) -> None:
        super().__init__()
        self.dense = Linear(config.hidden_size, config.hidden_size)
        self.activation = ACT2FN[config.hidden_act]
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.decoder: nn.Linear = Linear(config.hidden_size, config.vocab_size)

    def transform(self, hidden_states: Tensor) -> Tensor:
        """What the last layer scores the vocabulary from."""
        return self.norm(self.activation(self.dense(hidden_states)))

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Transforms, then scores each word piece."""
        return self.decoder(self.transform(hidden_states))


@dataclass
class RegardBertForPreTrainingOutput(ModelOutput):
    """What `RegardBertForPreTraining` returns.

    Attributes:
        loss: sum of the losses whose labels were given, a scalar.
        prediction_logits: scores of the vocabulary, (B, L, V), or (P, V) with `predicted_only`.
        seq_relationship_logits: scores of "is the next sentence" and "is a random one", (B, 2).
        hidden_states: with `output_hidden_states`, one (B, L, E) for the embeddings and for each block.
        attentions: with `output_attentions`, one (B, heads, L, L) for each block.
    """

    loss: Tensor | None = None
    prediction_logits: Tensor | None = None
    seq_relationship_logits: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


class PredictsMaskedTokens(RegardBertPreTrainedModel):
    """Base of the two classes with a masked language modeling head; the head may share the token embeddings."""

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
        tensors: dict[str, Tensor | None],
        labels: Tensor | None,
        attention_mask: Tensor | None,
        predicted_only: bool,
        predicted_positions: Tensor | None,
        **kwargs: Any,
    ) -> tuple[BaseModelOutputWithPooling, Tensor, Tensor | None]:
        """Runs the encoder; for predicted positions alone without padding, and in its last layer on no others.

        Args:
            tensors: `input_ids`, `token_type_ids`, `position_ids` and `inputs_embeds`, or None.
            labels: (B, L), or None.
            attention_mask: see `RegardBertModel.forward`.
            predicted_only: whether to find the positions in the labels.
            predicted_positions: (P,), or None.
            **kwargs: see there.

        Returns:
            What the encoder gives; the hidden states to predict from, (B, L, E) or (P, E); and their labels, if there
            are any.
        """
        if not predicted_only and predicted_positions is None:
            outputs = self.bert(**tensors, attention_mask=attention_mask, return_dict=True, **kwargs)
            return outputs, outputs.last_hidden_state, labels
        if labels is None:
            raise ValueError("`predicted_only` needs `labels`, which tell the positions to predict")
        if kwargs.get("cu_seq_lens_q") is None:
            if predicted_positions is not None:
                raise ValueError("`predicted_positions` needs a packed batch, with `cu_seq_lens_q`")
            if tensors["position_ids"] is None:
                tensors["position_ids"] = torch.arange(labels.shape[1], device=labels.device).unsqueeze(0)
            packed, bounds = pack({**tensors, "labels": labels}, attention_mask, *labels.shape)
            labels = packed.pop("labels")
            tensors, attention_mask, kwargs = {**packed}, None, kwargs | bounds._asdict()
        labels = labels.flatten()
        if predicted_positions is None:
            predicted_positions = (labels != -100).nonzero().squeeze(1)
        labels = labels.index_select(0, predicted_positions)
        if self.training and can_use_cpu_kernels(labels) and is_unhooked(self.masked_lm_head.decoder):
            # Nothing but the loss is made of them in training. The first token stands for those that are missing.
            missing = missing_rows(len(labels), POSITIONS_AT_ONCE)
            predicted_positions = nn.functional.pad(predicted_positions, (0, missing))
            labels = nn.functional.pad(labels, (0, missing), value=-100)
        outputs = self.bert(
            **tensors,
            attention_mask=attention_mask,
            output_positions=predicted_positions,
            return_dict=True,
            **kwargs,
        )
        return outputs, outputs.last_hidden_state[0], labels

    def predict_tokens(
        self, hidden_states: Tensor, labels: Tensor | None, items: Tensor | int | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """The scores of the vocabulary and, if there are labels, the loss.

        In training there are no scores of positions (P, E) that were chosen for their labels, but the loss alone.
        """
        head = self.masked_lm_head
        if self.training and hidden_states.dim() == 2 and is_unhooked(head.decoder):
            assert labels is not None
            check_labels(labels, len(head.decoder.weight))
            total = vocabulary_loss(head.transform(hidden_states), head.decoder.weight, head.decoder.bias, labels)
            return None, mean_loss(total, (labels != -100).sum(), items)
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
            input_ids: see `RegardBertModel.forward`, as for the four after it.
            attention_mask: see there.
            token_type_ids: see there.
            position_ids: see there.
            inputs_embeds: see there.
            labels: (B, L), the ids to predict, -100 elsewhere.
            next_sentence_label: (B,), 0 if the second segment follows the first, 1 if it is a random one.
            predicted_only: compute without padding, and in the last layer and the head only the positions that have a
                label, P of them: the same loss for a fraction of the work. Hidden states are then packed, (1, T, E).
            predicted_positions: those positions in a packed batch, (P,), so that they need not be looked for; takes
                the place of `predicted_only`.
            num_items_in_batch: number of predicted tokens in the whole batch, where this is a part of it.
            num_sequences_in_batch: number of sequences in the whole batch. Where only `num_items_in_batch` is given,
                as by `Trainer`, a sequence's next-sentence loss is weighted by its number of predicted tokens, so that
                the parts of a batch add up to the whole there too.
            **kwargs: see there.

        Raises:
            ValueError: for labels that are no class, for what `predicted_only` can't do without, and see
                `RegardBertModel.forward`.
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
