"""BERT: the encoder, and the classes that are pretrained; `bert_tasks` has those that are fine-tuned.

Devlin et al. (2019), https://arxiv.org/abs/1810.04805. What each class returns, and which arguments it takes, is as
in transformers' `Bert*` classes.

Dimension letters: B batch, L length, E width of the model, V vocabulary, P predicted positions.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_outputs import (
    BaseModelOutputWithPooling,
    MaskedLMOutput,
    NextSentencePredictorOutput,
)
from transformers.processing_utils import Unpack
from transformers.utils import ModelOutput, TransformersKwargs, logging
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from ..configuration.bert import RegardBertConfig
from .attention import MultiHeadAttention
from .base import (
    RegardPreTrainedModel,
    check_ids,
    check_length,
    check_positions,
    cross_entropy,
    one_of,
    show_weights,
    weighted_cross_entropy,
)
from .block import TransformerBlock, TransformerStack
from .positions import LearnedPositions
from .weights import named_as_in_memory, register_bert_weights

logger = logging.get_logger(__name__)

register_bert_weights()


class BertEmbeddings(nn.Module):
    """Sum of token, position and segment embeddings, normalised."""

    def __init__(self, config: RegardBertConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)
        self.positions = LearnedPositions(config.max_position_embeddings, config.hidden_size)
        self.segments = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, inputs_embeds: Tensor, token_type_ids: Tensor, position_ids: Tensor) -> Tensor:
        """Token embeddings (B, L, E), segment ids and position ids (B or 1, L) give the blocks' input (B, L, E)."""
        embedded = inputs_embeds + self.segments(token_type_ids) + self.positions(position_ids)
        return self.dropout(self.norm(embedded))


class BertPooler(nn.Module):
    """The first token's vector through a linear layer and tanh: (B, L, E) to (B, E)."""

    def __init__(self, config: RegardBertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Pools the sequence, which must start with the classification token."""
        return torch.tanh(self.dense(hidden_states[:, 0]))


class MaskedLMHead(nn.Module):
    """Scores the vocabulary at each position: (..., E) to (..., V)."""

    def __init__(self, config: RegardBertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.activation = ACT2FN[config.hidden_act]
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Transforms, then scores each word piece."""
        return self.decoder(self.norm(self.activation(self.dense(hidden_states))))


class RegardBertPreTrainedModel(RegardPreTrainedModel):
    """Base of the BERT classes."""

    config_class = RegardBertConfig
    config: RegardBertConfig
    base_model_prefix = "bert"
    # A buffer that stock BERT saved before transformers 4.31.
    _keys_to_ignore_on_load_unexpected = [r"embeddings\.position_ids$"]
    _no_split_modules = ["BertEmbeddings", "TransformerBlock"]
    _can_record_outputs = {
        "hidden_states": TransformerBlock,
        "attentions": OutputRecorder(MultiHeadAttention, index=1),
    }

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Loads a state, under its names in memory or those on disk."""
        return super().load_state_dict(
            named_as_in_memory(state_dict, self.config.tie_word_embeddings), strict=strict, assign=assign
        )

    # transformers saves with those parts of the mapping that its last load used. A head that was not in the loaded
    # checkpoint would then be saved under its name in memory: with None, it saves with the whole mapping.
    @property
    def _weight_conversions(self) -> None:
        return None

    @_weight_conversions.setter
    def _weight_conversions(self, used: Any) -> None:
        pass


class RegardBertModel(RegardBertPreTrainedModel):
    """The encoder: hidden states of every token, and a pooled vector of the sequence.

    Args:
        config: the configuration.
        add_pooling_layer: whether to have the pooler.
    """

    def __init__(self, config: RegardBertConfig, add_pooling_layer: bool = True) -> None:
        super().__init__(config)
        self.embeddings = BertEmbeddings(config)
        self.encoder = TransformerStack(config, config.num_hidden_layers)
        self.pooler = BertPooler(config) if add_pooling_layer else None
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """The token embeddings."""
        return self.embeddings.tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replaces the token embeddings."""
        self.embeddings.tokens = value  # type: ignore[assignment]

    @merge_with_config_defaults
    @capture_outputs
    @show_weights
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPooling:
        """Encodes a batch.

        Args:
            input_ids: word-piece ids, (B, L).
            attention_mask: 1 for tokens, 0 for padding, (B, L); or any mask that transformers takes. None: no padding.
            token_type_ids: segment ids, (B, L); None: all in the first segment.
            position_ids: positions, (B, L) or (1, L); None: counted from 0.
            inputs_embeds: token embeddings, (B, L, E), instead of `input_ids`.
            **kwargs: what the attention function takes, and transformers' `output_attentions` and the like.

        Returns:
            `last_hidden_state` (B, L, E) and `pooler_output` (B, E).

        Raises:
            ValueError: for a sequence longer than the positions, or for ids outside their vocabularies. Ids on an
                accelerator are not read, since that would wait for it.
        """
        given = one_of(input_ids, inputs_embeds)
        config, length = self.config, given.shape[1]
        check_ids("input_ids", input_ids, self.embeddings.tokens.num_embeddings, "vocab_size")
        check_ids("token_type_ids", token_type_ids, config.type_vocab_size, "type_vocab_size")
        if token_type_ids is None:
            self._warn_of_pairs(input_ids)
            token_type_ids = torch.zeros((1, length), dtype=torch.long, device=given.device)
        if position_ids is None:
            check_length(length, config.max_position_embeddings)
            position_ids = torch.arange(length, device=given.device).unsqueeze(0)
        else:
            check_positions(position_ids, config.max_position_embeddings)
        if inputs_embeds is None:
            inputs_embeds = self.embeddings.tokens(input_ids)

        embedded = self.embeddings(inputs_embeds, token_type_ids, position_ids)
        mask = create_bidirectional_mask(config=config, inputs_embeds=embedded, attention_mask=attention_mask)
        hidden_states = self.encoder(embedded, mask, **kwargs)
        return BaseModelOutputWithPooling(
            last_hidden_state=hidden_states,
            pooler_output=self.pooler(hidden_states) if self.pooler is not None else None,
        )

    def _warn_of_pairs(self, input_ids: Tensor | None) -> None:
        separator = self.config.sep_token_id
        if separator is None or input_ids is None or input_ids.device.type != "cpu" or torch.compiler.is_compiling():
            return
        if ((input_ids == separator).sum(dim=1) > 1).any():
            logger.warning_once(
                "a sequence has two separators but no `token_type_ids` came with it: all of it counts as one segment"
            )


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
    masked_lm_head: MaskedLMHead

    def get_output_embeddings(self) -> nn.Module:
        """The layer that scores the vocabulary."""
        return self.masked_lm_head.decoder

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        """Replaces the layer that scores the vocabulary."""
        self.masked_lm_head.decoder = new_embeddings

    def predict_tokens(
        self, hidden_states: Tensor, labels: Tensor | None, predicted_only: bool, items: Tensor | int | None
    ) -> tuple[Tensor, Tensor | None]:
        """Scores (B, L, V), or (P, V) with `predicted_only`, and the loss if there are labels."""
        if predicted_only:
            if labels is None:
                raise ValueError("`predicted_only` needs `labels`, which tell the positions to predict")
            chosen = labels != -100
            hidden_states, labels = hidden_states[chosen], labels[chosen]  # (P, E), (P)
        logits = self.masked_lm_head(hidden_states)
        return logits, None if labels is None else cross_entropy(logits, labels, items)


class RegardBertForPreTraining(PredictsMaskedTokens):
    """Masked language modeling and next sentence prediction on one encoder."""

    def __init__(self, config: RegardBertConfig) -> None:
        super().__init__(config)
        self.bert = RegardBertModel(config)
        self.masked_lm_head = MaskedLMHead(config)
        self.next_sentence_head = nn.Linear(config.hidden_size, 2)
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
            predicted_only: score only the positions that have a label: the same loss for a fraction of the work.
            num_items_in_batch: number of predicted tokens in the whole batch, where this is a part of it.
            num_sequences_in_batch: number of sequences in the whole batch. Where only `num_items_in_batch` is given,
                as by `Trainer`, a sequence's next-sentence loss is weighted by its number of predicted tokens, so that
                the parts of a batch add up to the whole there too.
            **kwargs: see there.

        Raises:
            ValueError: for labels that are no class, and see `RegardBertModel.forward`.
        """
        outputs = self.bert(
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, return_dict=True, **kwargs
        )
        logits, loss = self.predict_tokens(outputs.last_hidden_state, labels, predicted_only, num_items_in_batch)
        next_logits = self.next_sentence_head(outputs.pooler_output)
        if next_sentence_label is not None:
            if num_items_in_batch is None or num_sequences_in_batch is not None or labels is None:
                items = num_sequences_in_batch
                next_loss = cross_entropy(next_logits, next_sentence_label, items, name="next_sentence_label")
            else:
                per_sequence = (labels != -100).sum(dim=1)
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
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> MaskedLMOutput:
        """Predicts masked tokens; the arguments are those of `RegardBertForPreTraining.forward`."""
        outputs = self.bert(
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, return_dict=True, **kwargs
        )
        logits, loss = self.predict_tokens(outputs.last_hidden_state, labels, predicted_only, num_items_in_batch)
        return MaskedLMOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class RegardBertForNextSentencePrediction(RegardBertPreTrainedModel):
    """Next sentence prediction."""

    def __init__(self, config: RegardBertConfig) -> None:
        super().__init__(config)
        self.bert = RegardBertModel(config)
        self.next_sentence_head = nn.Linear(config.hidden_size, 2)
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
