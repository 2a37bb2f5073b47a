"""The Transformer block and the stack of blocks, for every family.

Dimension letters: B batch, L length, M memory length, E width of the model, F width of the feed-forward layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers import Cache, PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.pytorch_utils import apply_chunking_to_forward

from .attention import MultiHeadAttention
from .base import CachingLayer
from .cpu import Dropout, Linear, SequenceBounds, activated_linear
from .packing import SelectedPositions


class FeedForward(nn.Module):
    """Two linear layers with an activation between, applied to each position by itself: (B, L, E) to (B, L, E)."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        self.up = Linear(config.hidden_size, config.intermediate_size)
        self.activation = ACT2FN[config.hidden_act]
        self.down = Linear(config.intermediate_size, config.hidden_size)
        self.chunk_size = config.chunk_size_feed_forward

    def _transform(self, hidden_states: Tensor) -> Tensor:
        return activated_linear(self.activation, self.up(hidden_states), self.down)  # (B, L, E)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Transforms each position, in chunks of `chunk_size_feed_forward` positions if that is not 0."""
        if not self.chunk_size:
            # `apply_chunking_to_forward` inspects a signature first, which takes longer than this layer in generation.
            return self._transform(hidden_states)
        return apply_chunking_to_forward(self._transform, self.chunk_size, 1, hidden_states)


class ResidualSlot(nn.Module):
    """The residual connection around a sub-layer, with a norm before the sub-layer or after the sum.

    Args:
        before: norm on the sub-layer's input; `nn.Identity()` for post-LN.
        after: norm on the sum; `nn.Identity()` for pre-LN.
        dropout: probability of dropping an element of the sub-layer's output.
    """

    def __init__(self, before: nn.Module, after: nn.Module, dropout: float) -> None:
        super().__init__()
        self.before, self.after, self.dropout = before, after, Dropout(dropout)

    def add(self, residual: Tensor, output: Tensor) -> Tensor:
        """Adds a sub-layer's output to the residual, both (B, L, E)."""
        return self.after(residual + self.dropout(output))


def _norm(config: PreTrainedConfig) -> nn.LayerNorm:
    return nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)


def post_norm_slot(config: PreTrainedConfig) -> ResidualSlot:
    """Post-LN, as in the original Transformer and BERT (Vaswani et al., 2017, https://arxiv.org/abs/1706.03762)."""
    return ResidualSlot(nn.Identity(), _norm(config), config.hidden_dropout_prob)


def pre_norm_slot(config: PreTrainedConfig) -> ResidualSlot:
    """Pre-LN, which trains without warm-up (Xiong et al., 2020, https://arxiv.org/abs/2002.04745)."""
    return ResidualSlot(_norm(config), nn.Identity(), config.hidden_dropout_prob)


NORM_SLOTS: dict[str, Callable[[PreTrainedConfig], ResidualSlot]] = {"post": post_norm_slot, "pre": pre_norm_slot}


class TransformerBlock(CachingLayer):
    """Self-attention, cross-attention if the block reads a memory, and the feed-forward layer, each in its slot.

    Args:
        config: configuration with the widths, the heads, the dropouts and the attention implementation.
        layer_idx: the block's place in a cache.
        norm_position: "post" or "pre", a key of `NORM_SLOTS`.
        is_causal: whether a position sees only itself and earlier ones.
        has_cross_attention: whether the block reads a memory.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        layer_idx: int,
        norm_position: str = "post",
        is_causal: bool = False,
        has_cross_attention: bool = False,
    ) -> None:
        super().__init__()
        make_slot = NORM_SLOTS[norm_position]
        self.self_attention = MultiHeadAttention(config, layer_idx, is_causal)
        self.self_attention_slot = make_slot(config)
        self.cross_attention = None
        if has_cross_attention:
            self.cross_attention = MultiHeadAttention(config, layer_idx, is_cross_attention=True)
            self.cross_attention_slot = make_slot(config)
        self.feed_forward = FeedForward(config)
        self.feed_forward_slot = make_slot(config)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        memory: Tensor | None = None,
        memory_mask: Tensor | None = None,
        cache: Cache | None = None,
        bounds: SequenceBounds | None = None,
        positions: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Computes the hidden states of the next block.

        Args:
            hidden_states: (B, L, E).
            attention_mask: mask of the self-attention, as `transformers.masking_utils` makes it for the attention
                implementation in use.
            memory: states that the cross-attention reads, (B, M, E).
            memory_mask: mask of the cross-attention, made in the same way.
            cache: keys and values of earlier steps; those of this step are added.
            bounds: bounds of the sequences in a packed batch.
            positions: the only places to compute hidden states of, (P,); None: all.
            **kwargs: options of the attention function.

        Returns:
            Hidden states, (B, L, E), or (B, P, E) with `positions`.
        """
        slot = self.self_attention_slot
        attended, _ = self.self_attention(
            slot.before(hidden_states), attention_mask, cache=cache, bounds=bounds, queries=positions, **kwargs
        )
        if positions is not None:
            hidden_states = hidden_states.index_select(1, positions)
        hidden_states = slot.add(hidden_states, attended)
        if self.cross_attention is not None:
            slot = self.cross_attention_slot
            attended, _ = self.cross_attention(
                slot.before(hidden_states), memory_mask, memory=memory, cache=cache, **kwargs
            )
            hidden_states = slot.add(hidden_states, attended)
        slot = self.feed_forward_slot
        return slot.add(hidden_states, self.feed_forward(slot.before(hidden_states)))


class TransformerStack(nn.Module):
    """Blocks one after another, followed by a norm if they are pre-LN, whose sum is not normalized.

    Args:
        config: configuration of the blocks.
        num_layers: number of blocks.
        norm_position: "post" or "pre", a key of `NORM_SLOTS`.
        is_causal: whether a position sees only itself and earlier ones.
        has_cross_attention: whether the blocks read a memory.

    Raises:
        ValueError: if `norm_position` is not a key of `NORM_SLOTS`.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        num_layers: int,
        norm_position: str = "post",
        is_causal: bool = False,
        has_cross_attention: bool = False,
    ) -> None:
        super().__init__()
        if norm_position not in NORM_SLOTS:
            raise ValueError(f"`norm_position` ({norm_position!r}) must be one of {', '.join(NORM_SLOTS)}")
        self.blocks = nn.ModuleList(
            TransformerBlock(config, index, norm_position, is_causal, has_cross_attention)
            for index in range(num_layers)
        )
        self.norm = _norm(config) if norm_position == "pre" else nn.Identity()

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        memory: Tensor | None = None,
        bounds: SequenceBounds | None = None,
        selected: SelectedPositions | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Runs the blocks; the other arguments are those of `TransformerBlock.forward`.

        With `selected`, the last block computes only these positions of a packed batch.
        """
        for block in self.blocks:
            if selected is not None and block is self.blocks[-1]:
                kwargs["positions"], bounds = selected
            # Tensors with gradients are positional arguments: reentrant gradient checkpointing sees no others.
            hidden_states = block(hidden_states, attention_mask, memory, bounds=bounds, **kwargs)
        return self.norm(hidden_states)
