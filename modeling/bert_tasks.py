"""BERT's classes for fine-tuning, which label sequences, tokens and spans, or pick a choice.

Dimension letters: B batch, L length, E width of the model, C classes, N choices.
"""

from torch import Tensor, nn
from transformers.modeling_outputs import (
    MultipleChoiceModelOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs
from transformers.utils.generic import can_return_tuple

from ..configuration.bert import RegardBertConfig
from .bert import RegardBertModel, RegardBertPreTrainedModel
from .checks import require_exactly_one
from .cpu import Dropout, Linear
from .losses import cross_entropy, mean_loss


class _Classifier(RegardBertPreTrainedModel):
    """An encoder followed by dropout and a linear layer."""

    def __init__(self, config: RegardBertConfig, num_outputs: int | None, add_pooling_layer: bool) -> None:
        super().__init__(config)
        dropout = config.classifier_dropout
        self.bert = RegardBertModel(config, add_pooling_layer)
        self.dropout = Dropout(config.hidden_dropout_prob if dropout is None else dropout)
        self.classifier = Linear(config.hidden_size, num_outputs or 2)
        self.post_init()


class RegardBertForSequenceClassification(_Classifier):
    """Predicts a class, several labels, or numbers for a sequence.

    `config.problem_type` says which. If it is None, one output means regression, labels of an integer type mean
    classes, and other labels mean several labels.
    """

    def __init__(self, config: RegardBertConfig) -> None:
        super().__init__(config, config.num_labels, add_pooling_layer=True)

    def _loss(self, logits: Tensor, labels: Tensor, items: Tensor | int | None) -> Tensor:
        problem = self.config.problem_type
        if problem is None and logits.shape[-1] == 1:
            problem = "regression"
        if problem == "single_label_classification" or (problem is None and not labels.is_floating_point()):
            return cross_entropy(logits, labels, items)
        # With one output, labels may be (B,) or (B, 1); with several there is a number for each output.
        labels = labels.to(logits.device, logits.dtype).reshape(logits.shape)
        squared = problem == "regression"
        error = nn.functional.mse_loss if squared else nn.functional.binary_cross_entropy_with_logits
        return mean_loss(error(logits, labels, reduction="sum"), labels.numel(), items)

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
    ) -> SequenceClassifierOutput:
        """Scores each sequence, (B, C); `labels` is (B,) for classes, (B, C) otherwise."""
        outputs = self.bert(
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, return_dict=True, **kwargs
        )
        logits = self.classifier(self.dropout(outputs.pooler_output))
        return SequenceClassifierOutput(
            loss=None if labels is None else self._loss(logits, labels, num_items_in_batch),
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class RegardBertForTokenClassification(_Classifier):
    """Predicts a class for each token."""

    def __init__(self, config: RegardBertConfig) -> None:
        super().__init__(config, config.num_labels, add_pooling_layer=False)

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
    ) -> TokenClassifierOutput:
        """Scores each token, (B, L, C); `labels` is (B, L), with -100 for a token to ignore."""
        outputs = self.bert(
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, return_dict=True, **kwargs
        )
        logits = self.classifier(self.dropout(outputs.last_hidden_state))
        return TokenClassifierOutput(
            loss=None if labels is None else cross_entropy(logits, labels, num_items_in_batch),
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class RegardBertForMultipleChoice(_Classifier):
    """Picks one of several choices, each of which is encoded by itself."""

    def __init__(self, config: RegardBertConfig) -> None:
        super().__init__(config, 1, add_pooling_layer=True)

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
    ) -> MultipleChoiceModelOutput:
        """Scores the choices, (B, N); inputs are (B, N, L), `labels` is (B,), the index of the right choice."""
        num_choices = require_exactly_one(input_ids, inputs_embeds).shape[1]

        def each(values: Tensor | None) -> Tensor | None:
            return None if values is None else values.reshape(-1, *values.shape[2:])  # (B * N, ...)

        outputs = self.bert(
            *map(each, (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds)),
            return_dict=True,
            **kwargs,
        )
        logits = self.classifier(self.dropout(outputs.pooler_output)).reshape(-1, num_choices)  # (B, N)
        return MultipleChoiceModelOutput(
            loss=None if labels is None else cross_entropy(logits, labels, num_items_in_batch),
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class RegardBertForQuestionAnswering(RegardBertPreTrainedModel):
    """Predicts the span of a text that answers a question."""

    def __init__(self, config: RegardBertConfig) -> None:
        super().__init__(config)
        self.bert = RegardBertModel(config, add_pooling_layer=False)
        self.qa_outputs = Linear(config.hidden_size, 2)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> QuestionAnsweringModelOutput:
        """Scores each token as the answer's first and last, (B, L) each.

        Args:
            input_ids: word-piece ids, (B, L).
            attention_mask: 1 for tokens, 0 for padding, (B, L).
            token_type_ids: segment ids, (B, L).
            position_ids: positions, (B, L) or (1, L).
            inputs_embeds: token embeddings, (B, L, E), instead of `input_ids`.
            start_positions: place of the answer's first token, (B,) or (B, 1); one beyond the sequence is ignored.
            end_positions: place of its last token, in the same form.
            **kwargs: options of `RegardBertModel.forward`, which describes the inputs in full.
        """
        outputs = self.bert(
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, return_dict=True, **kwargs
        )
        start_logits, end_logits = self.qa_outputs(outputs.last_hidden_state).unbind(dim=-1)  # (B, L) each
        loss = None
        if start_positions is not None and end_positions is not None:
            length = start_logits.shape[1]

            def within(positions: Tensor) -> Tensor:
                positions = positions.reshape(-1)
                return positions.masked_fill(positions >= length, -100)

            start_loss = cross_entropy(start_logits, within(start_positions), name="start_positions")
            loss = (start_loss + cross_entropy(end_logits, within(end_positions), name="end_positions")) / 2
        return QuestionAnsweringModelOutput(
            loss=loss,
            start_logits=start_logits,
            end_logits=end_logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )
