"""The recurrent encoder-decoder, with an alignment or with the fixed context vector.

Bahdanau et al. (2015), https://arxiv.org/abs/1409.0473; Cho et al. (2014), https://arxiv.org/abs/1406.1078

Dimension letters: B batch, S source length, T target length, E width of embeddings and decoder state, C width of the
encoder's states (two directions), A width of the alignment, V vocabulary.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, initialization
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutput, BaseModelOutputWithPastAndCrossAttentions
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults

from ..configuration.recurrent import RegardRecurrentConfig
from .attention import attend, make_alignment, normalize
from .base import CACHE, FastGenerationMixin, RegardPreTrainedModel, named_cache, takes_cache
from .checks import check_ids, check_source, require_exactly_one
from .cpu import (
    GRU,
    LSTM,
    Dropout,
    GRUCell,
    Linear,
    LSTMCell,
    ReadingOrder,
    StepProducts,
    reading_orders,
    share_step_products,
)
from .seq2seq import ConditionalGeneration, EncoderDecoderModel


class RecurrentCache(Cache):
    """The state of a recurrent decoder between steps.

    Attributes:
        state: the `state` of `RecurrentDecoderStep`; None before the first step.
        source: the `source` of `RecurrentDecoderStep`; None before the first step.
        steps: number of target tokens read.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.reset()

    def reset(self) -> None:
        """Forgets everything."""
        self.state: tuple[Tensor, ...] | None = None
        self.source: Tensor | None = None
        self.steps = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The number of target tokens read."""
        return self.steps

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Returns -1, which means that there is no maximum."""
        return -1

    @property
    def is_compileable(self) -> bool:
        """Returns False: a compiled decoding step cannot use this cache."""
        return False

    def _map(self, change: Callable[[Tensor], Tensor]) -> None:
        if self.state is not None and self.source is not None:
            self.state, self.source = tuple(map(change, self.state)), change(self.source)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keeps the rows that beam search continues."""
        self._map(lambda values: values.index_select(0, beam_idx.to(values.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each row."""
        self._map(lambda values: values.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps the rows of these indices."""
        self._map(lambda values: values[indices])


class RegardRecurrentPreTrainedModel(RegardPreTrainedModel):
    """Base of the recurrent classes."""

    config_class = RegardRecurrentConfig
    config: RegardRecurrentConfig
    base_model_prefix = "model"
    _no_split_modules = ["RecurrentEncoderLayer", "RecurrentDecoderStep"]
    # A state cannot be rolled back to an earlier token, which assisted generation needs.
    _is_stateful = True
    # There is only one attention implementation.
    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = _supports_attention_backend = False
    tokens: nn.Embedding

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
            for name, parameter in module.named_parameters(recurse=False):
                if "bias" in name:
                    initialization.zeros_(parameter)
                elif "weight_hh" in name:
                    initialization.orthogonal_(parameter)
                else:
                    initialization.xavier_uniform_(parameter)

    def get_input_embeddings(self) -> nn.Module:
        """The token embeddings of an encoder or a decoder."""
        return self.tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replaces the token embeddings of an encoder or a decoder."""
        self.tokens = value  # type: ignore[assignment]


class RecurrentEncoderLayer(GradientCheckpointingLayer):
    """Reads its input in both directions: (B, S, input width) to (B, S, C)."""

    def __init__(self, config: RegardRecurrentConfig, input_size: int) -> None:
        super().__init__()
        kind = {"gru": GRU, "lstm": LSTM}[config.rnn_type]
        self.forward_rnn = kind(input_size, config.encoder_hidden_size)
        self.backward_rnn = kind(input_size, config.encoder_hidden_size)

    def forward(self, inputs: Tensor, orders: tuple[ReadingOrder, ReadingOrder]) -> Tensor:
        """Reads the inputs in both of `reading_orders`; places that are not read get zeros."""
        rnns = (self.forward_rnn, self.backward_rnn)
        return torch.cat([rnn(inputs, order) for rnn, order in zip(rnns, orders, strict=True)], dim=-1)  # (B, S, C)


class RegardRecurrentEncoder(RegardRecurrentPreTrainedModel):
    """Reads the source in both directions: computes states of every token, and zeros for padding."""

    main_input_name = "input_ids"

    def __init__(self, config: RegardRecurrentConfig) -> None:
        super().__init__(config)
        self.tokens = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)
        self.dropout = Dropout(config.hidden_dropout_prob)
        sizes = [config.hidden_size] + [2 * (config.encoder_hidden_size or 0)] * (config.num_hidden_layers - 1)
        self.layers = nn.ModuleList(RecurrentEncoderLayer(config, size) for size in sizes)
        self.post_init()

    @merge_with_config_defaults
    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutput:
        """Encodes source ids or embeddings (B, S) under a mask (B, S), padded on either side: (B, S, C)."""
        given = require_exactly_one(input_ids, inputs_embeds)
        check_ids("input_ids", input_ids, self.tokens.num_embeddings, "vocab_size")
        check_source(given.shape[1], attention_mask)
        embedded = self.dropout(self.tokens(input_ids) if inputs_embeds is None else inputs_embeds)
        mask = given.new_ones(given.shape[:2], dtype=torch.bool) if attention_mask is None else attention_mask.bool()
        orders = reading_orders(mask, self, embedded)
        hidden_states = [embedded]
        for number, layer in enumerate(self.layers):
            inputs = self.dropout(hidden_states[-1]) if number else embedded
            hidden_states.append(layer(inputs, orders).masked_fill(~mask.unsqueeze(-1), 0.0))
        shown = tuple(hidden_states) if _is_requested(self, kwargs, "output_hidden_states") else None
        return BaseModelOutput(last_hidden_state=hidden_states[-1], hidden_states=shown)


def _is_requested(model: RegardPreTrainedModel, kwargs: Any, name: str) -> bool:
    return bool(kwargs.get(name, getattr(model.config, name)))


def end_states(states: Tensor, mask: Tensor | None) -> Tensor:
    """The source in one vector, (B, C): the forward state of its last token and the backward state of its first."""
    forward, backward = states.chunk(2, dim=-1)
    if mask is None:
        return torch.cat([forward[:, -1], backward[:, 0]], dim=-1)
    rows = torch.arange(len(states), device=states.device)
    places = torch.arange(states.shape[1], device=states.device)
    first = mask.int().argmax(dim=1)
    last = (mask.int() * (places + 1)).argmax(dim=1)
    return torch.cat([forward[rows, last], backward[rows, first]], dim=-1)


class RecurrentDecoderStep(GradientCheckpointingLayer):
    """One step of the decoder: its last state is the query, and the context vector goes into the next state.

    The `state` that is passed between steps is the hidden state (B, E) of each layer, followed in an LSTM by each
    layer's cell. The `source` is what a step needs of it: the projected keys (B, S, A), or without an alignment the
    fixed context vector (B, C).

    Args:
        config: configuration with the widths, the number of layers and the kinds of cell and alignment.
        context_size: width of the states that are attended to.
    """

    def __init__(self, config: RegardRecurrentConfig, context_size: int) -> None:
        super().__init__()
        width, kind = config.hidden_size, {"gru": GRUCell, "lstm": LSTMCell}[config.rnn_type]
        fixed = config.alignment == "none"
        self.alignment = None if fixed else make_alignment(config.alignment, width, context_size)
        sizes = [width + context_size] + [width] * (config.num_hidden_layers - 1)
        self.cells = nn.ModuleList(kind(size, width) for size in sizes)
        self.dropout = Dropout(config.hidden_dropout_prob)
        self.is_lstm = config.rnn_type == "lstm"

    def begin(self, hidden: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The first state, from each layer's hidden state (B, E)."""
        return (*hidden, *(torch.zeros_like(each) for each in hidden)) if self.is_lstm else hidden

    def forward(
        self,
        embedded: Tensor,
        memory: Tensor,
        source: Tensor,
        mask: Tensor | None,
        products: StepProducts | None,
        *state: Tensor,
    ) -> tuple[Tensor, ...]:
        """Reads a token (B, E), attending to a memory (B, S, C) under a mask (B, 1, S).

        `products` are those of `share_step_products`; None if the step computes its own.

        Returns:
            The context vector (B, C); its weights (B, 1, S), or None without an alignment; and the next state.
        """
        layers = len(self.cells)
        context, weights = source, None
        if self.alignment is not None:
            query = state[layers - 1].unsqueeze(1)
            if products is None:
                attended, weights = attend(self.alignment, query, source, memory, mask)
            else:
                weights = normalize(self.alignment(query, source), mask)
                attended = products.memory(weights)
            context = attended.squeeze(1)
        inputs = torch.cat([embedded, context], dim=-1)
        after: list[tuple[Tensor, ...]] = []
        for number, cell in enumerate(self.cells):
            if number:
                inputs = self.dropout(after[-1][0])
            before, shared = state[number::layers], None if products is None else products.cells[number]
            after.append(cell(inputs, before, shared) if self.is_lstm else (cell(inputs, *before, shared),))
        return context, weights, *(part for parts in zip(*after, strict=True) for part in parts)


class RegardRecurrentDecoder(RegardRecurrentPreTrainedModel):
    """Writes the target step by step from an encoder's states.

    Args:
        config: the configuration.
        context_size: width of the states that are attended to; that of the recurrent encoder's states if None.
        summarize: maps the states that are attended to (B, S, C) and their mask (B, S) to one vector (B, C). The first
            state is computed from it, and without an alignment it is the fixed context vector.
    """

    def __init__(
        self,
        config: RegardRecurrentConfig,
        context_size: int | None = None,
        summarize: Callable[[Tensor, Tensor | None], Tensor] = end_states,
    ) -> None:
        super().__init__(config)
        width = config.hidden_size
        context_size = context_size or 2 * (config.encoder_hidden_size or 0)
        self.summarize = summarize
        self.tokens = nn.Embedding(config.vocab_size, width, padding_idx=config.pad_token_id)
        self.dropout = Dropout(config.hidden_dropout_prob)
        self.first_state = Linear(context_size, config.num_hidden_layers * width)
        self.step = RecurrentDecoderStep(config, context_size)
        self.readout = Linear(2 * width + context_size, width)
        self.post_init()

    def _begin(self, memory: Tensor, mask: Tensor | None, cache: RecurrentCache) -> None:
        summary, alignment = self.summarize(memory, mask), self.step.alignment
        hidden = torch.tanh(self.first_state(summary)).chunk(self.config.num_hidden_layers, dim=-1)
        cache.state = self.step.begin(hidden)
        cache.source = summary if alignment is None else alignment.project_keys(memory)

    @merge_with_config_defaults
    @can_return_tuple
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
        """Decodes target ids (B, T) from encoder states (B, S, C), as for `EncoderDecoderModel.forward`.

        `hidden_states` are the embeddings and the states of each layer. `last_hidden_state` is the output layer's
        input, computed from the state of the last layer, the context vector and the embedding.
        """
        require_exactly_one(input_ids, inputs_embeds, "decoder_")
        check_ids("decoder_input_ids", input_ids, self.tokens.num_embeddings, "vocab_size")
        if not isinstance(cache, RecurrentCache | None):
            raise ValueError(f"`cache` is a {type(cache).__name__}, but a recurrent decoder takes a RecurrentCache")
        embedded = self.dropout(self.tokens(input_ids) if inputs_embeds is None else inputs_embeds)  # (B, T, E)
        memory = encoder_hidden_states
        assert memory is not None
        mask = None if encoder_attention_mask is None else encoder_attention_mask.bool()
        kept = RecurrentCache() if cache is None else cache
        if kept.state is None:
            self._begin(memory, mask, kept)
        state, source = kept.state, kept.source
        assert state is not None
        seen = None if mask is None else mask.unsqueeze(1)  # (B, 1, S)
        products = None
        # A wrapper around the step may have its weights in place only while it is called, and gradient checkpointing
        # needs all that has gradients as tensors among the arguments.
        if type(self.step) is RecurrentDecoderStep and not self.step.gradient_checkpointing:
            products = share_step_products(self.step, self.step.cells, memory)

        contexts, weights, states = [], [], []
        # Unbound once: a slice for each step would have a gradient as large as the whole tensor.
        for token in embedded.unbind(dim=1):
            context, attended, *state = self.step(token, memory, source, seen, products, *state)
            contexts.append(context)
            weights.append(attended)
            states.append(state[: self.config.num_hidden_layers])
        hidden = [torch.stack(layer, dim=1) for layer in zip(*states, strict=True)]  # each (B, T, E)
        read = torch.cat([hidden[-1], torch.stack(contexts, dim=1), embedded], dim=-1)
        kept.state, kept.steps = tuple(state), kept.steps + embedded.shape[1]
        shown = self.step.alignment is not None and _is_requested(self, kwargs, "output_attentions")
        return BaseModelOutputWithPastAndCrossAttentions(
            last_hidden_state=self.dropout(torch.tanh(self.readout(read))),
            **named_cache(kept if use_cache else None),
            hidden_states=(embedded, *hidden) if _is_requested(self, kwargs, "output_hidden_states") else None,
            cross_attentions=(torch.stack(weights, dim=2),) if shown else None,  # (B, 1, T, S)
        )


class RegardRecurrentModel(EncoderDecoderModel, RegardRecurrentPreTrainedModel):
    """Encoder and decoder without the output layer."""

    _tied_weights_keys = {"encoder.tokens.weight": "decoder.tokens.weight"}

    def __init__(self, config: RegardRecurrentConfig) -> None:
        super().__init__(config)
        self.encoder = RegardRecurrentEncoder(config)
        self.decoder = RegardRecurrentDecoder(config)
        self.post_init()


class RegardRecurrentForConditionalGeneration(
    ConditionalGeneration, RegardRecurrentPreTrainedModel, FastGenerationMixin
):
    """The encoder-decoder with an output layer."""

    _tied_weights_keys = {"lm_head.weight": "model.decoder.tokens.weight"}

    def __init__(self, config: RegardRecurrentConfig) -> None:
        super().__init__(config)
        self.model = RegardRecurrentModel(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def _prepare_cache_for_generation(  # type: ignore[override]
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any
    ) -> None:
        if model_kwargs.get(CACHE) is None and generation_config.use_cache is not False:
            model_kwargs[CACHE] = RecurrentCache()
