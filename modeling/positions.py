"""Position embeddings, and the token embeddings of generating models that they are added to.

Dimension letters: B batch, L length, P positions, E width of the model.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from .cpu import Dropout


def sinusoids(num_positions: int, hidden_size: int) -> Tensor:
    """Sines and cosines of geometrically spaced wavelengths, (P, E) in float64.

    The first half of a vector holds the sines, the second half the cosines. Vaswani et al. (2017),
    https://arxiv.org/abs/1706.03762
    """
    half = (hidden_size + 1) // 2
    # In float64: float32 loses the last digits of the angle at positions in the thousands.
    rates = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.arange(num_positions, dtype=torch.float64)[:, None] * rates  # (P, E / 2)
    return torch.cat([angles.sin(), angles.cos()], dim=-1)[:, :hidden_size]


class LearnedPositions(nn.Embedding):
    """One learned vector per position (Gehring et al., 2017, https://arxiv.org/abs/1705.03122).

    They start as sinusoids. From random vectors a small model takes thousands of steps to find out which positions
    are neighbors, and until then predicts from the words of a sentence alone, whatever their order.
    """

    def compute_start(self, std: float) -> Tensor:
        """The initial vectors, (P, E), with twice the standard deviation of the other weights."""
        return sinusoids(*self.weight.shape) * (2 * 2**0.5 * std)


class SinusoidalPositions(nn.Module):
    """Fixed sinusoids.

    Raises:
        ValueError: if the width is odd.
    """

    table: Tensor

    def __init__(self, num_positions: int, hidden_size: int) -> None:
        super().__init__()
        if hidden_size % 2:
            raise ValueError(f"`hidden_size` ({hidden_size}) must be even for sinusoidal positions")
        self.num_positions, self.hidden_size = num_positions, hidden_size
        self.register_buffer("table", self.compute_table(), persistent=False)

    def compute_table(self) -> Tensor:
        """The table, (P, E). It is not saved, so it is computed again after each load."""
        return sinusoids(self.num_positions, self.hidden_size).to(torch.get_default_dtype())

    def forward(self, position_ids: Tensor) -> Tensor:
        """Maps position ids (B, L) to embeddings (B, L, E)."""
        return nn.functional.embedding(position_ids, self.table)


POSITIONS: dict[str, type[nn.Module]] = {"learned": LearnedPositions, "sinusoidal": SinusoidalPositions}


def make_positions(name: str, num_positions: int, hidden_size: int) -> nn.Module:
    """Builds position embeddings by their name.

    Raises:
        ValueError: if `name` is not a key of `POSITIONS`; the error lists the names.
    """
    if name not in POSITIONS:
        raise ValueError(f"`position_embedding_type` ({name!r}) must be one of {', '.join(POSITIONS)}")
    return POSITIONS[name](num_positions, hidden_size)


def position_ids_for(attention_mask: Tensor | None, length: int, past: int, device: torch.device) -> Tensor:
    """Positions of `length` new tokens after `past` earlier ones, (B or 1, L).

    They are counted from each row's first token, so that padding on the left changes nothing.

    Args:
        attention_mask: (B, past + L), 1 for tokens and 0 for padding; a mask of any other form is read as no padding.
        length: number of new tokens.
        past: number of tokens before them, padding included.
        device: device of the result.
    """
    if attention_mask is None or attention_mask.dim() != 2:
        return (torch.arange(length, device=device) + past).unsqueeze(0)
    return (attention_mask.long().cumsum(dim=-1) - 1).clamp(min=0)[:, -length:]


class TextEmbeddings(nn.Module):
    """Token embeddings times a scale, plus position embeddings: the input of a generating model's first block."""

    def __init__(self, config: PreTrainedConfig, scale: float = 1.0) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)
        self.positions = make_positions(
            config.position_embedding_type, config.max_position_embeddings, config.hidden_size
        )
        self.scale = scale
        self.dropout = Dropout(config.hidden_dropout_prob)

    def forward(self, inputs_embeds: Tensor, position_ids: Tensor) -> Tensor:
        """Maps token embeddings (B, L, E) and position ids (B or 1, L) to the first block's input (B, L, E)."""
        return self.dropout(inputs_embeds * self.scale + self.positions(position_ids))
