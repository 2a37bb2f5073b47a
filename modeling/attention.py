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

from .cpu.linear import Linear, can_use_cpu_kernels, is_unhooked
from .cpu.linear import dropout as drop_out
from .packing import SequenceBounds, attend_packed


def normalize(scores: Tensor, mask: Tensor | None = None) -> Tensor:
    """Turns scores into weights that sum to one over the keys that may be seen.

    Args:
        scores: (..., Q, K).
        mask: broadcastable to `scores`. Boolean, True where a key may be seen; or floating point, added to the
            scores, with the lowest number of its type where a key may not be seen. None: every key is seen.

    Returns:
        Weights, (..., Q, K): exactly zero where a key may not be seen, and for every key of a row that sees none.
    """
    if mask is None:
        return torch.softmax(scores, dim=-1)
    if mask.dtype == torch.bool:
        hidden = ~mask
    else:
        hidden = mask <= torch.finfo(mask.dtype).min
        scores = scores + mask
    # Filled once, with a finite number: sums of two masks reach -inf, and a row of -inf is NaN after the softmax.
    scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
    return torch.softmax(scores, dim=-1).masked_fill(hidden, 0.0)


def combine(weights: Tensor, values: Tensor) -> Tensor:
    """The context vectors: weights (..., Q, K) and values (..., K, D) give (..., Q, D)."""
    return torch.matmul(weights, values)


def dot_scores(query: Tensor, keys: Tensor, scale: float = 1.0) -> Tensor:
    """Dot products of query (..., Q, D) and keys (..., K, D), times `scale`: (..., Q, K)."""
    return torch.matmul(query * scale, keys.transpose(-1, -2))


class Alignment(nn.Module):
    """Scores queries against keys. Keys are projected once and passed in; nothing is kept on the module."""

    def project_keys(self, keys: Tensor) -> Tensor:
        """Projects keys, (B, K, key width), for any number of later calls of `forward`: (B, K, A)."""
        return keys

    def forward(self, query: Tensor, projected_keys: Tensor) -> Tensor:
        """Scores of query (B, Q, query width) against projected keys (B, K, A): (B, Q, K)."""
        raise NotImplementedError(f"{type(self).__name__} does not say how to score")


class DotAlignment(Alignment):
    """q . k (Luong et al., 2015, https://arxiv.org/abs/1508.04025). Query and keys must have one width.

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
        """See `Alignment.forward`."""
        return dot_scores(query, projected_keys)


class ScaledDotAlignment(DotAlignment):
    """q . k / sqrt(width) (Vaswani et al., 2017, https://arxiv.org/abs/1706.03762)."""

    def forward(self, query: Tensor, projected_keys: Tensor) -> Tensor:
        """See `Alignment.forward`."""
        return dot_scores(query, projected_keys, scale=query.shape[-1] ** -0.5)


class BilinearAlignment(Alignment):
    """q . W k, Luong et al.'s "general" score (2015, https://arxiv.org/abs/1508.04025)."""

    def __init__(self, query_size: int, key_size: int) -> None:
        super().__init__()
        self.key = Linear(key_size, query_size, bias=False)

    def project_keys(self, keys: Tensor) -> Tensor:
        """See `Alignment.project_keys`."""
        return self.key(keys)

    def forward(self, query: Tensor, projected_keys: Tensor) -> Tensor:
        """See `Alignment.forward`."""
        return dot_scores(query, projected_keys)


def _sigmoid_of_doubled_sums(query: Tensor, keys: Tensor) -> Tensor:
    return torch.add(2 * query.unsqueeze(2), keys.unsqueeze(1), alpha=2).sigmoid_()  # (B, Q, K, A)


class _AdditiveScores(torch.autograd.Function):
    """The scores of `AdditiveAlignment`, with tanh(x) as 2 sigmoid(2 x) - 1.

    On CPUs PyTorch takes several times as long for a tanh as for a sigmoid. The sigmoids are computed twice instead of
    kept for the backward pass, where those of all steps of a decoder would take more memory than all else.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, keys: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(query, keys, weight)
        return torch.matmul(_sigmoid_of_doubled_sums(query, keys), 2 * weight) - weight.sum()  # (B, Q, K)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        query, keys, weight = ctx.saved_tensors
        sigmoids = _sigmoid_of_doubled_sums(query, keys)
        of_weight = 2 * torch.mv(sigmoids.flatten(0, 2).t(), gradient.flatten()) - gradient.sum()
        of_sums = gradient.unsqueeze(-1) * (4 * weight)
        torch.ops.aten.sigmoid_backward.grad_input(of_sums, sigmoids, grad_input=of_sums)
        return of_sums.sum(dim=2), of_sums.sum_to_size(keys.unsqueeze(1).shape).squeeze(1), of_weight


class AdditiveAlignment(Alignment):
    """v . tanh(W q + U k) (Bahdanau et al., 2015, https://arxiv.org/abs/1409.0473)."""

    def __init__(self, query_size: int, key_size: int, alignment_size: int | None = None) -> None:
        super().__init__()
        alignment_size = alignment_size or query_size
        self.query = Linear(query_size, alignment_size)
        self.key = Linear(key_size, alignment_size, bias=False)
        self.score = Linear(alignment_size, 1, bias=False)

    def project_keys(self, keys: Tensor) -> Tensor:
        """See `Alignment.project_keys`."""
        return self.key(keys)

    def forward(self, query: Tensor, projected_keys: Tensor) -> Tensor:
        """See `Alignment.forward`."""
        query = self.query(query)
        if self._suits_sigmoid(query, projected_keys):
            return _AdditiveScores.apply(query, projected_keys, self.score.weight.squeeze(0))
        matched = torch.tanh(query.unsqueeze(2) + projected_keys.unsqueeze(1))  # (B, Q, K, A)
        return self.score(matched).squeeze(-1)  # (B, Q, K)

    def _suits_sigmoid(self, query: Tensor, keys: Tensor) -> bool:
        tensors = (query, keys, self.score.weight)
        return (
            is_unhooked(self.score)
            and can_use_cpu_kernels(*tensors)
            and all(tensor.dtype == torch.float32 for tensor in tensors)
            and len(query) == len(keys)
        )


ALIGNMENTS: dict[str, type[Alignment]] = {
    "dot": DotAlignment,
    "scaled_dot": ScaledDotAlignment,
    "bilinear": BilinearAlignment,
    "additive": AdditiveAlignment,
}


def make_alignment(name: str, query_size: int, key_size: int) -> Alignment:
    """Builds an alignment function by its name.

    Raises:
        ValueError: if there is no alignment of that name (the names are listed), or the widths do not suit it.
    """
    if name not in ALIGNMENTS:
        raise ValueError(f"`alignment` ({name!r}) must be one of {', '.join(ALIGNMENTS)}")
    return ALIGNMENTS[name](query_size, key_size)


def attend(
    alignment: Alignment, query: Tensor, projected_keys: Tensor, values: Tensor, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attends with any alignment function.

    Args:
        alignment: scores queries against keys.
        query: (B, Q, query width).
        projected_keys: what `alignment.project_keys(keys)` gave, (B, K, A).
        values: (B, K, value width).
        mask: boolean or additive, see `normalize`; broadcastable to (B, Q, K).

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
    """The motif on heads, in the signature of transformers' attention functions; it alone returns the weights.

    Query (B, H, Q, D), key and value (B, H, K, D) give the context (B, Q, H, D) and the weights (B, H, Q, K).
    """
    length = query.shape[2]
    if is_causal is None:
        is_causal = getattr(module, "is_causal", False)
    if attention_mask is None and is_causal and length > 1:
        # As the other kernels read it: no mask means the causal one where the module, or the caller, says so.
        attention_mask = torch.ones(length, key.shape[2], dtype=torch.bool, device=query.device).tril()
    weights = normalize(dot_scores(query, key, scaling), attention_mask)
    weights = drop_out(weights, dropout, module.training)
    return combine(weights, value).transpose(1, 2).contiguous(), weights


class MultiHeadAttention(nn.Module):
    """Projections, heads, scaled dot-product attention, merge, output projection.

    Vaswani et al. (2017), https://arxiv.org/abs/1706.03762. The kernel is the one that `attn_implementation` names.

    Args:
        config: gives `hidden_size`, `num_attention_heads`, `attention_probs_dropout_prob` and the kernel.
        layer_idx: the layer's place in a cache.
        is_causal: whether a query sees its own and earlier keys only, where no mask says otherwise.
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
            # The memory does not change while decoding: it was projected once, at the first step.
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
            attention_mask: as `transformers.masking_utils` makes it for the kernel in use; None: nothing is hidden.
            memory: (B, K, E), what cross-attention reads.
            cache: keys and values of earlier steps; this step's are added.
            bounds: of the sequences of a packed batch, none of which sees another.
            queries: positions that alone attend, (Q,); None: all do.
            **kwargs: what the attention function takes.

        Returns:
            The output (B, Q, E), and the weights (B, H, Q, K) if the kernel is eager and the batch is not packed.
        """
        if self.is_cross_attention:
            query, key, value = self._cross_attended(hidden_states, memory, cache)
        else:
            query, key, value = self._self_attended(hidden_states, cache)
        if queries is not None:
            query = query.index_select(2, queries)
        dropout = self.dropout if self.training else 0.0
        kernel = self.config._attn_implementation
        if kernel == "sdpa" and dropout and query.device.type == "cpu":
            # PyTorch has no kernel that drops weights there, and takes the same steps, less quickly.
            kernel = "eager"
        attention: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(kernel, eager_attention_forward)
        kwargs |= {"scaling": self.scaling, "dropout": dropout}
        if bounds is None:
            context, weights = attention(self, query, key, value, attention_mask, **kwargs)
        else:
            context, weights = attend_packed(attention, self, query, key, value, bounds, **kwargs)
        return self.output(context.flatten(2)), weights  # (B, Q, E)
