"""BERT's encoder; the classes for pretraining are in `bert_pretraining`, those for fine-tuning in `bert_tasks`.

Devlin et al. (2019), https://arxiv.org/abs/1810.04805. Each class takes the arguments, and returns the outputs, of the
class of that name in transformers.

Dimension letters: B batch, L length, E width of the model, V vocabulary, P predicted positions.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, logging
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from ..configuration.bert import RegardBertConfig
from .attention import MultiHeadAttention
from .base import RegardPreTrainedModel, eager_for_output_attentions
from .bert_weight_names import named_as_in_memory, register_bert_weights
from .block import TransformerBlock, TransformerStack
from .checks import check_ids, check_length, check_positions, require_exactly_one
from .cpu import Dropout, Linear, SequenceBounds, pad_to_multiple, readable_values
from .packing import check_packed, position_ids_of, select_positions, take_bounds
from .positions import LearnedPositions

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
        self.dropout = Dropout(config.hidden_dropout_prob)

    def forward(self, inputs_embeds: Tensor, token_type_ids: Tensor, position_ids: Tensor) -> Tensor:
        """Maps token embeddings (B, L, E), segment ids and position ids (B or 1, L) to the blocks' input (B, L, E)."""
        embedded = inputs_embeds + self.segments(token_type_ids) + self.positions(position_ids)
        return self.dropout(self.norm(embedded))


class BertPooler(nn.Module):
    """A linear layer and tanh on the vector of each sequence's first token, (B, E)."""

    def __init__(self, config: RegardBertConfig) -> None:
        super().__init__()
        self.dense = Linear(config.hidden_size, config.hidden_size)

    def forward(self, first: Tensor) -> Tensor:
        """Maps the vectors of classification tokens, (B, E), to pooled vectors, (B, E)."""
        return torch.tanh(self.dense(first))


class RegardBertPreTrainedModel(RegardPreTrainedModel):
    """Base of the BERT classes."""

    config_class = RegardBertConfig
    config: RegardBertConfig
    base_model_prefix = "bert"
    # Stock BERT saved this buffer before transformers 4.31.
    _keys_to_ignore_on_load_unexpected = [r"embeddings\.position_ids$"]
    _no_split_modules = ["BertEmbeddings", "TransformerBlock"]
    _can_record_outputs = {
        "hidden_states": TransformerBlock,
        "attentions": OutputRecorder(MultiHeadAttention, index=1),
    }

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Loads a state whose names are those in memory or those on disk."""
        return super().load_state_dict(
            named_as_in_memory(state_dict, self.config.tie_word_embeddings), strict=strict, assign=assign
        )

    # transformers saves with the parts of the mapping that its last load used. A head that was not in the loaded
    # checkpoint would then be saved under its name in memory. With None here, it saves with the whole mapping.
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
        add_pooling_layer: whether to add the pooler.
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
    @eager_for_output_attentions
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        output_positions: Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPooling:
        """Encodes a batch, padded or packed.

        A packed batch is a single row of sequences without padding; `cu_seq_lens_q` says where each begins and ends,
        as returned by transformers' `DataCollatorWithFlattening` with `return_flash_attn_kwargs=True`.

        Args:
            input_ids: word-piece ids, (B, L).
            attention_mask: 1 for tokens, 0 for padding, (B, L), or any other mask that transformers accepts. None: no
                padding.
            token_type_ids: segment ids, (B, L); None: all in the first segment.
            position_ids: positions, (B, L) or (1, L); None: counted from 0 in each sequence.
            inputs_embeds: token embeddings, (B, L, E), instead of `input_ids`.
            output_positions: places in a packed batch, (P,). Only their hidden states are returned, (1, P, E), and
                the last layer computes no others.
            **kwargs: options of the attention function and of transformers, such as `output_attentions`.

        Returns:
            `last_hidden_state` (B, L, E) and `pooler_output` (B, E), a row for each sequence.

        Raises:
            ValueError: if a sequence is longer than the positions, if ids are outside their vocabularies, or if a
                packed batch comes with an attention mask or attention weights are requested of it. Ids on an
                accelerator are not checked, since reading them would wait for it.
        """
        given = require_exactly_one(input_ids, inputs_embeds)
        config, length, bounds = self.config, given.shape[1], take_bounds(kwargs)
        check_ids("input_ids", input_ids, self.embeddings.tokens.num_embeddings, "vocab_size")
        check_ids("token_type_ids", token_type_ids, config.type_vocab_size, "type_vocab_size")
        if token_type_ids is None:
            if bounds is None:
                self._warn_about_missing_segments(input_ids)
            token_type_ids = torch.zeros((1, length), dtype=torch.long, device=given.device)
        if position_ids is None:
            check_length(bounds.max_length_q if bounds else length, config.max_position_embeddings)
            counted = torch.arange(length, device=given.device) if bounds is None else position_ids_of(bounds, length)
            position_ids = counted.unsqueeze(0)
        else:
            check_positions(position_ids, config.max_position_embeddings)
        if inputs_embeds is None:
            inputs_embeds = self.embeddings.tokens(input_ids)

        embedded = self.embeddings(inputs_embeds, token_type_ids, position_ids)
        if bounds is not None:
            check_packed(given, attention_mask, kwargs.get("output_attentions") or config.output_attentions)
            hidden_states, first = self._encode_packed(embedded, bounds, output_positions, **kwargs)
        elif output_positions is not None:
            raise ValueError("`output_positions` needs a packed batch, with `cu_seq_lens_q`")
        else:
            mask = create_bidirectional_mask(config=config, inputs_embeds=embedded, attention_mask=attention_mask)
            hidden_states = self.encoder(embedded, mask, **kwargs)
            first = hidden_states[:, 0]
        return BaseModelOutputWithPooling(
            last_hidden_state=hidden_states, pooler_output=self.pooler(first) if self.pooler is not None else None
        )

    def _encode_packed(
        self, embedded: Tensor, bounds: SequenceBounds, output_positions: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Hidden states of the output positions, (1, P, E), and of each sequence's first token, (B, E)."""
        tokens, firsts = embedded.shape[1], bounds.cu_seq_lens_q[:-1]
        if not kwargs.get("output_hidden_states", self.config.output_hidden_states):
            embedded, bounds = pad_to_multiple(embedded, bounds)
        if output_positions is None:
            hidden_states = self.encoder(embedded, bounds=bounds, **kwargs)[:, :tokens]
            return hidden_states, hidden_states[0].index_select(0, firsts)
        selected, indices = select_positions(output_positions, bounds)
        hidden_states = self.encoder(embedded, bounds=bounds, selected=selected, **kwargs)
        # Between the two lies the first token of the sequence of zeros, where there is one.
        first_indices, output_indices = indices[: len(firsts)], indices[len(indices) - len(output_positions) :]
        return hidden_states.index_select(1, output_indices), hidden_states[0].index_select(0, first_indices)

    def _warn_about_missing_segments(self, input_ids: Tensor | None) -> None:
        separator, ids = self.config.sep_token_id, readable_values(input_ids)
        if separator is not None and ids is not None and ((ids == separator).sum(dim=1) > 1).any():
            logger.warning_once(
                "a sequence has two separators but no `token_type_ids` came with it: all of it counts as one segment"
            )
