"""What goes into the first block of a generating model.

Dimension letters: B batch, L length, E width of the model.
"""

from __future__ import annotations

from torch import Tensor, nn
from transformers import PreTrainedConfig

from .cpu.linear import Dropout
from .positions import make_positions


class TextEmbeddings(nn.Module):
    """Token embeddings, scaled if asked for, plus position embeddings."""

    def __init__(self, config: PreTrainedConfig, scale: float = 1.0) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)
        self.positions = make_positions(
            config.position_embedding_type, config.max_position_embeddings, config.hidden_size
        )
        self.scale = scale
        self.dropout = Dropout(config.hidden_dropout_prob)

    def forward(self, inputs_embeds: Tensor, position_ids: Tensor) -> Tensor:
        """Token embeddings (B, L, E) and position ids (B or 1, L) give the first block's input (B, L, E)."""
        return self.dropout(inputs_embeds * self.scale + self.positions(position_ids))
