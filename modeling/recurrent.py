"""The recurrent encoder-decoder, with an alignment or with the fixed context vector.

Bahdanau et al. (2015), https://arxiv.org/abs/1409.0473; Cho et al. (2014), https://arxiv.org/abs/1406.1078

Dimension letters: B batch, S source length, T target length, E width of embeddings and decoder state, C width of the
encoder's states (two directions), A width of the alignment, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from transformers import Cache, GenerationMixin, initialization
from transformers.modeling_outputs import (
    BaseModelOutput,
    BaseModelOutputWithPastAndCrossAttentions,
)
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults

from ..configuration.recurrent import RegardRecurrentConfig
from .attention import attend, make_alignment
from .base import RegardPreTrainedModel, check_ids, check_source, one_of
from .seq2seq import ConditionalGeneration, EncoderDecoderModel

# One recurrent layer's state: (hidden,) of a GRU, (hidden, cell) of an LSTM, each (B, E).
State = tuple[Tensor, ...]


class RecurrentCache(Cache):
    """What a recurrent decoder keeps between steps: its state, and what it projected of the source.

    Attributes:
        states: the state of each layer, None before the first step.
        projected_keys: the encoder's states as the alignment takes them, (B, S, A).
        steps: number of target tokens read.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.reset()

    def reset(self) -> None:
        """Forgets everything."""
        self.states: list[State] | None = None
        self.projected_keys: Tensor | None = None
        self.steps = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The number of target tokens read."""
        return self.steps

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """No maximum: -1."""
        return -1

    @property
    def is_compileable(self) -> bool:
        """Whether a compiled decoding step can use it."""
        return False

    def _map(self, change: Any) -> None:
        if self.states is not None:
            self.states = [tuple(map(change, state)) for state in self.states]
        if self.projected_keys is not None:
            self.projected_keys = change(self.projected_keys)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Takes the rows that beam search goes on with."""
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
    _no_split_modules = ["RecurrentDecoderCell"]
    # A state can't be taken back to an earlier token, as assisted generation would have it.
    _is_stateful = True
    # There is no kernel to choose from.
    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = _supports_attention_backend = False
    supports_gradient_checkpointing = False
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


class RegardRecurrentEncoder(RegardRecurrentPreTrainedModel):
    """Reads the source in both directions: states of every token, zero on padding."""

    main_input_name = "input_ids"

    def __init__(self, config: RegardRecurrentConfig) -> None:
        super().__init__(config)
        self.tokens = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        layers = config.num_hidden_layers
        self.rnn = {"gru": nn.GRU, "lstm": nn.LSTM}[config.rnn_type](
            config.hidden_size,
            config.encoder_hidden_size,
            layers,
            batch_first=True,
            bidirectional=True,
            dropout=config.hidden_dropout_prob if layers > 1 else 0.0,
        )
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
        """Encodes source ids or embeddings (B, S) under a mask (B, S), padding on either side: (B, S, C)."""
        given = one_of(input_ids, inputs_embeds)
        check_ids("input_ids", input_ids, self.tokens.num_embeddings, "vocab_size")
        check_source(given.shape[1], attention_mask)
        embedded = self.dropout(self.tokens(input_ids) if inputs_embeds is None else inputs_embeds)
        states = self._run(embedded, attention_mask)
        hidden = (embedded, states) if _asked(self, kwargs, "output_hidden_states") else None
        return BaseModelOutput(last_hidden_state=states, hidden_states=hidden)

    def _run(self, embedded: Tensor, attention_mask: Tensor | None) -> Tensor:
        if attention_mask is None:
            return self.rnn(embedded)[0]  # (B, S, C)
        # Packing leaves padding out of both directions. It wants each row's tokens in front.
        mask = attention_mask.bool()
        order = (~mask).int().argsort(dim=1, stable=True).unsqueeze(-1)  # (B, S, 1)
        in_front = embedded.gather(1, order.expand_as(embedded))
        packed = pack_padded_sequence(in_front, mask.sum(dim=1).cpu(), batch_first=True, enforce_sorted=False)
        states, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=mask.shape[1])
        return torch.zeros_like(states).scatter(1, order.expand_as(states), states)  # (B, S, C)


def _asked(model: RegardPreTrainedModel, kwargs: Any, name: str) -> bool:
    return bool(kwargs.get(name, getattr(model.config, name)))


def summarize(states: Tensor, mask: Tensor | None) -> Tensor:
    """The source in one vector: the forward state of its last token, the backward state of its first: (B, C)."""
    forward, backward = states.chunk(2, dim=-1)
    if mask is None:
        return torch.cat([forward[:, -1], backward[:, 0]], dim=-1)
    rows = torch.arange(len(states), device=states.device)
    places = torch.arange(states.shape[1], device=states.device)
    first = mask.int().argmax(dim=1)
    last = (mask.int() * (places + 1)).argmax(dim=1)
    return torch.cat([forward[rows, last], backward[rows, first]], dim=-1)


class RecurrentDecoderCell(nn.Module):
    """One step of all layers of the decoder."""

    def __init__(self, config: RegardRecurrentConfig, context_size: int) -> None:
        super().__init__()
        width, kind = config.hidden_size, {"gru": nn.GRUCell, "lstm": nn.LSTMCell}[config.rnn_type]
        inputs = [width + context_size] + [width] * (config.num_hidden_layers - 1)
        self.layers = nn.ModuleList(kind(size, width) for size in inputs)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.is_lstm = config.rnn_type == "lstm"

    def forward(self, inputs: Tensor, states: list[State]) -> list[State]:
        """Inputs (B, E + C) and each layer's state give each layer's next state."""
        after: list[State] = []
        for number, (layer, state) in enumerate(zip(self.layers, states, strict=True)):
            if number:
                inputs = self.dropout(after[-1][0])
            after.append(tuple(layer(inputs, state)) if self.is_lstm else (layer(inputs, state[0]),))
        return after


class RegardRecurrentDecoder(RegardRecurrentPreTrainedModel):
    """Writes the target step by step: its last state asks the source, and the answer goes into the next state."""

    def __init__(self, config: RegardRecurrentConfig) -> None:
        super().__init__(config)
        width, context_size = config.hidden_size, 2 * (config.encoder_hidden_size or 0)
        self.tokens = nn.Embedding(config.vocab_size, width, padding_idx=config.pad_token_id)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        fixed = config.alignment == "none"
        self.alignment = None if fixed else make_alignment(config.alignment, width, context_size)
        self.first_state = nn.Linear(context_size, config.num_hidden_layers * width)
        self.cell = RecurrentDecoderCell(config, context_size)
        self.readout = nn.Linear(2 * width + context_size, width)
        self.post_init()

    def _begin(self, memory: Tensor, mask: Tensor | None) -> list[State]:
        first = torch.tanh(self.first_state(summarize(memory, mask)))
        hidden = first.chunk(self.config.num_hidden_layers, dim=-1)  # one (B, E) for each layer
        return [(each, torch.zeros_like(each)) if self.cell.is_lstm else (each,) for each in hidden]

    @merge_with_config_defaults
    @can_return_tuple
    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
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
        """Decodes target ids (B, T) on encoder states (B, S, C); see `EncoderDecoderModel.forward`."""
        one_of(input_ids, inputs_embeds, "decoder_")
        check_ids("decoder_input_ids", input_ids, self.tokens.num_embeddings, "vocab_size")
        embedded = self.dropout(self.tokens(input_ids) if inputs_embeds is None else inputs_embeds)  # (B, T, E)
        memory = encoder_hidden_states
        assert memory is not None
        mask = None if encoder_attention_mask is None else encoder_attention_mask.bool()
        if use_cache and cache is None:
            cache = RecurrentCache()
        kept = cache if isinstance(cache, RecurrentCache) else RecurrentCache()
        states = self._begin(memory, mask) if kept.states is None else kept.states
        look = self._looker(memory, mask, kept)

        outputs, contexts, weights = [], [], []
        for step in range(embedded.shape[1]):
            context, seen = look(states[-1][0])  # (B, C), (B, 1, S)
            states = self.cell(torch.cat([embedded[:, step], context], dim=-1), states)
            outputs.append(states[-1][0])
            contexts.append(context)
            weights.append(seen)
        hidden = torch.stack(outputs, dim=1)  # (B, T, E)
        read = torch.cat([hidden, torch.stack(contexts, dim=1), embedded], dim=-1)
        kept.states, kept.steps = states, kept.steps + embedded.shape[1]
        attended = self.alignment is not None and _asked(self, kwargs, "output_attentions")
        return BaseModelOutputWithPastAndCrossAttentions(
            last_hidden_state=self.dropout(torch.tanh(self.readout(read))),
            cache=cache if use_cache else None,
            hidden_states=(embedded, hidden) if _asked(self, kwargs, "output_hidden_states") else None,
            cross_attentions=(torch.stack(weights, dim=2),) if attended else None,  # (B, 1, T, S)
        )

    def _looker(self, memory: Tensor, mask: Tensor | None, kept: RecurrentCache) -> Any:
        """What gives a context vector (B, C), and the weights behind it (B, 1, S), for a state (B, E)."""
        if self.alignment is None:
            fixed = summarize(memory, mask)
            return lambda state: (fixed, None)
        if kept.projected_keys is None:
            kept.projected_keys = self.alignment.project_keys(memory)
        alignment, keys = self.alignment, kept.projected_keys
        seen = None if mask is None else mask.unsqueeze(1)  # (B, 1, S)

        def look(state: Tensor) -> tuple[Tensor, Tensor]:
            context, weights = attend(alignment, state.unsqueeze(1), keys, memory, seen)
            return context.squeeze(1), weights

        return look


class RegardRecurrentModel(EncoderDecoderModel, RegardRecurrentPreTrainedModel):
    """Encoder and decoder without the output layer."""

    _tied_weights_keys = {"encoder.tokens.weight": "decoder.tokens.weight"}

    def __init__(self, config: RegardRecurrentConfig) -> None:
        super().__init__(config)
        self.encoder = RegardRecurrentEncoder(config)
        self.decoder = RegardRecurrentDecoder(config)
        self.post_init()


class RegardRecurrentForConditionalGeneration(ConditionalGeneration, RegardRecurrentPreTrainedModel, GenerationMixin):
    """The encoder-decoder with an output layer."""

    _tied_weights_keys = {"lm_head.weight": "model.decoder.tokens.weight"}

    def __init__(self, config: RegardRecurrentConfig) -> None:
        super().__init__(config)
        self.model = RegardRecurrentModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def _prepare_cache_for_generation(  # type: ignore[override]
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any
    ) -> None:
        if model_kwargs.get("cache") is None and generation_config.use_cache is not False:
            model_kwargs["cache"] = RecurrentCache()
