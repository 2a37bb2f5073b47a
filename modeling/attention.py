"""Score, normalize, combine: attention from the alignment functions to multi-head attention.

Every model of the package attends the same way:

    scores  = align(query, keys)          how well each query matches each key
    weights = normalize(scores, mask)     softmax over the keys that may be seen
    context = combine(weights, values)    the weighted sum of the values

Dimension letters: B batch, H heads, Q queries, K keys (and values), D width of a head, E width of the model,
A width of an alignment.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, EncoderDecoderCache, PreTrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .cpu import Linear, SequenceBounds, additive_scores, apply_dropout, attend_packed, attention_kernel


def normalize(scores: Tensor, mask: Tensor | None = None) -> Tensor:
    """Turns scores into weights that sum to one over the visible keys.

    Args:
        scores: (..., Q, K).
        mask: broadcastable to `scores`. Either boolean, True where a key is visible, or floating point, added to the
            scores, with the lowest number of its type where a key is hidden. None: every key is visible.

    Returns:
        Weights, (..., Q, K): exactly zero for a hidden key, and for every key of a row in which all are hidden.
    """
    if mask is None:
        return torch.softmax(scores, dim=-1)
    if mask.dtype == torch.bool:
        hidden = ~mask
    else:
        hidden = mask <= torch.finfo(mask.dtype).min
        scores = scores + mask
    # A finite number fills hidden scores: sums of two masks reach -inf, and the softmax of a row of -inf is NaN.
    scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
    return torch.softmax(scores, dim=-1).masked_fill(hidden, 0.0)


def combine(weights: Tensor, values: Tensor) -> Tensor:
    """The context vectors, (..., Q, D): the values (..., K, D) summed with the weights (..., Q, K)."""
    return torch.matmul(weights, values)


def dot_scores(query: Tensor, keys: Tensor, scale: float = 1.0) -> Tensor:
    """Dot products of query (..., Q, D) and keys (..., K, D), times `scale`: (..., Q, K)."""
    return torch.matmul(query * scale, keys.transpose(-1, -2))


class Alignment(nn.Module):
    """Scores queries against keys. Keys are projected once and passed in; the module keeps no state."""

    def project_keys(self, keys: Tensor) -> Tensor:
        """Projects keys, (B, K, key width), for any number of later calls of `forward`: (B, K, A)."""
        return keys

    def forward(self, query: Tensor, projected_keys: Tensor) -> Tensor:
        """Scores of query (B, Q, query width) against projected keys (B, K, A): (B, Q, K)."""
        raise NotImplementedError(f"{type(self).__name__} must define `forward`")


class DotAlignment(Alignment):
    """q . k (Luong et al., 2015, https://arxiv.org/abs/1508.04025). Queries and keys must have the same width.

    Raises:
        ValueError: if the two widths differ.
    """

    def __init__(self, query_size: int, key_size: int) -> None:
        super().__init__()
        if query_size != key_size:
            raise ValueError(
                f"{type(self).__name__} needs queries and keys of one width, got {query_size} and {key_size}: "
                f"make them equal, or use 'bilinear' or 'additive'"
            )

    def forward(self, query: Tensor, projected_keys: Tensor) -> Tensor:
        return dot_scores(query, projected_keys)


class ScaledDotAlignment(DotAlignment):
    """q . k / sqrt(width) (Vaswani et al., 2017, https://arxiv.org/abs/1706.03762)."""

    def forward(self, query: Tensor, projected_keys: Tensor) -> Tensor:
        return dot_scores(query, projected_keys, scale=query.shape[-1] ** -0.5)


class BilinearAlignment(Alignment):
    """q . W k, Luong et al.'s "general" score (2015, https://arxiv.org/abs/1508.04025)."""

    def __init__(self, query_size: int, key_size: int) -> None:
        super().__init__()
        self.key = Linear(key_size, query_size, bias=False)

    def project_keys(self, keys: Tensor) -> Tensor:
        return self.key(keys)

    def forward(self, query: Tensor, projected_keys: Tensor) -> Tensor:
        return dot_scores(query, projected_keys)


class AdditiveAlignment(Alignment):
    """v . tanh(W q + U k) (Bahdanau et al., 2015, https://arxiv.org/abs/1409.0473)."""

    def __init__(self, query_size: int, key_size: int, alignment_size: int | None = None) -> None:
        super().__init__()
        alignment_size = alignment_size or query_size
        self.query = Linear(query_size, alignment_size)
        self.key = Linear(key_size, alignment_size, bias=False)
        self.score = Linear(alignment_size, 1, bias=False)

    def project_keys(self, keys: Tensor) -> Tensor:
        return self.key(keys)

    def forward(self, query: Tensor, projected_keys: Tensor) -> Tensor:
        return additive_scores(self.query(query), projected_keys, self.score)


ALIGNMENTS: dict[str, type[Alignment]] = {
    "dot": DotAlignment,
    "scaled_dot": ScaledDotAlignment,
    "bilinear": BilinearAlignment,
    "additive": AdditiveAlignment,
}


def make_alignment(name: str, query_size: int, key_size: int) -> Alignment:
    """Builds an alignment function by its name.

    Raises:
        ValueError: if `name` is not a key of `ALIGNMENTS` (the error lists them), or the widths do not suit it.
    """
    if name not in ALIGNMENTS:
        raise ValueError(f"`alignment` ({name!r}) must be one of {', '.join(ALIGNMENTS)}")
    return ALIGNMENTS[name](query_size, key_size)


def attend(
    alignment: Alignment, query: Tensor, projected_keys: Tensor, values: Tensor, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attends with any alignment function.

    Args:
        alignment: the alignment function.
        query: (B, Q, query width).
        projected_keys: the result of `alignment.project_keys(keys)`, (B, K, A).
        values: (B, K, value width).
        mask: boolean or additive mask, as for `normalize`, broadcastable to (B, Q, K).

    Returns:
        The context vectors (B, Q, value width) and the weights (B, Q, K).
    """
    weights = normalize(alignment(query, projected_keys), mask)
    return combine(weights, values), weights


def eager_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """The motif on heads, in the signature of transformers' attention functions.

    Of all attention implementations this is the only one that returns the weights. It maps the query (B, H, Q, D), key
    and value (B, H, K, D) to the context (B, Q, H, D) and the weights (B, H, Q, K).
    """
    length = query.shape[2]
    if is_causal is None:
        is_causal = getattr(module, "is_causal", False)
    if attention_mask is None and is_causal and length > 1:
        # As in the other implementations, no mask means the causal one if the module or the caller is causal.
        attention_mask = torch.ones(length, key.shape[2], dtype=torch.bool, device=query.device).tril()
    weights = normalize(dot_scores(query, key, scaling), attention_mask)
    weights = apply_dropout(weights, dropout, module.training)
    return combine(weights, value).transpose(1, 2).contiguous(), weights


class MultiHeadAttention(nn.Module):
    """Projections, heads, scaled dot-product attention, merge, output projection.

    Vaswani et al. (2017), https://arxiv.org/abs/1706.03762. `attn_implementation` names the attention function.

    Args:
        config: configuration with `hidden_size`, `num_attention_heads`, `attention_probs_dropout_prob` and the
            attention implementation.
        layer_idx: the layer's place in a cache.
        is_causal: whether a query sees only its own and earlier keys where there is no mask.
        is_cross_attention: whether keys and values come from a memory instead of the layer's own input.

    Raises:
        ValueError: if the heads do not divide the width.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        layer_idx: int = 0,
        is_causal: bool = False,
        is_cross_attention: bool = False,
    ) -> None:
        super().__init__()
        width, heads = config.hidden_size, config.num_attention_heads
        if width % heads:
            raise ValueError(f"`hidden_size` ({width}) must be a multiple of `num_attention_heads` ({heads})")
        self.config = config
        self.layer_idx = layer_idx
        self.is_causal = is_causal
        self.is_cross_attention = is_cross_attention
        self.head_dim = width // heads
        self.scaling = self.head_dim**-0.5
        self.dropout = config.attention_probs_dropout_prob
        if is_cross_attention:
            self.query = Linear(width, width)
            self.key_value = Linear(width, 2 * width)
        else:
            self.query_key_value = Linear(width, 3 * width)
        self.output = Linear(width, width)

    def _heads(self, projected: Tensor) -> Tensor:
        return projected.view(*projected.shape[:-1], -1, self.head_dim).transpose(1, 2)  # (B, H, length, D)

    def _self_attended(self, hidden_states: Tensor, cache: Cache | None) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = map(self._heads, self.query_key_value(hidden_states).chunk(3, dim=-1))
        if isinstance(cache, EncoderDecoderCache):
            cache = cache.self_attention_cache
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        return query, key, value

    def _cross_attended(
        self, hidden_states: Tensor, memory: Tensor | None, cache: Cache | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        query = self._heads(self.query(hidden_states))
        assert cache is None or isinstance(cache, EncoderDecoderCache)
        if cache is not None and cache.is_updated.get(self.layer_idx):
            # The memory does not change during decoding: it is projected once, at the first step.
            layer: Any = cache.cross_attention_cache.layers[self.layer_idx]
            return query, layer.keys, layer.values
        key, value = map(self._heads, self.key_value(memory).chunk(2, dim=-1))
        if cache is not None:
            key, value = cache.cross_attention_cache.update(key, value, self.layer_idx)
            cache.is_updated[self.layer_idx] = True
        return query, key, value

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        memory: Tensor | None = None,
        cache: Cache | None = None,
        bounds: SequenceBounds | None = None,
        queries: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attends from `hidden_states` to themselves, or to `memory` in cross-attention.

        Args:
            hidden_states: (B, Q, E).
            attention_mask: mask as `transformers.masking_utils` makes it for the attention implementation in use;
                None: every key is visible.
            memory: states that cross-attention reads, (B, K, E).
            cache: keys and values of earlier steps; those of this step are added.
            bounds: bounds of the sequences in a packed batch; a query sees no key of another sequence.
            queries: the only positions that attend, (Q,); None: all.
            **kwargs: options of the attention function.

        Returns:
            The output (B, Q, E), and the weights (B, H, Q, K) if attention is eager and the batch is not packed.
        """
        if self.is_cross_attention:
            query, key, value = self._cross_attended(hidden_states, memory, cache)
        else:
            query, key, value = self._self_attended(hidden_states, cache)
        if queries is not None:
            query = query.index_select(2, queries)
        dropout = self.dropout if self.training else 0.0
        kernel = attention_kernel(self.config._attn_implementation, query, dropout)
        attention: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(kernel, eager_attention_forward)
        kwargs |= {"scaling": self.scaling, "dropout": dropout}
        if bounds is None:
            context, weights = attention(self, query, key, value, attention_mask, **kwargs)
        else:
            context, weights = attend_packed(attention, self, query, key, value, bounds, **kwargs)
        return self.output(context.flatten(2)), weights  # (B, Q, E)
