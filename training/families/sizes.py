"""Sizes of models, by name or field by field, and what follows from the width."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ..run.settings import TrainingSettings, option

# The sizes of Turc et al. (2019), https://arxiv.org/abs/1908.08962, and of Devlin et al. (2019): layers and width. The
# feed-forward layer is four times as wide, and a head 64, but for the smallest, whose two heads are made four.
SIZES = {
    "tiny": (2, 128),
    "mini": (4, 256),
    "small": (4, 512),
    "medium": (8, 512),
    "base": (12, 768),
    "large": (24, 1024),
}


@dataclass
class SizedSettings(TrainingSettings):
    """Settings of a run whose model has a size."""

    size: str = option("tiny", f"Size of the model: {', '.join(SIZES)}.")
    config: dict = option({}, "Fields of the model's configuration, which go before the size.")
    dropout: float = option(0.1, "Dropout of hidden states and attention weights.")

    # The learning rate, unless it is given, is this over the width.
    rate_times_width: ClassVar[float] = 0.256

    def check(self) -> None:
        """See `TrainingSettings.check`."""
        self.require_choice("size", SIZES)
        if self.learning_rate is None:
            self.learning_rate = self.rate_times_width / self.width
        super().check()
        if not 0 <= self.dropout < 1:
            raise ValueError(f"`dropout` ({self.dropout}) must be at least 0 and less than 1")

    @property
    def width(self) -> int:
        """The model's width: the configuration's, or else the size's."""
        width = self.config.get("hidden_size")
        # One that is no width is left for the configuration to refuse.
        return width if isinstance(width, int) and 0 < width < 2**31 else SIZES[self.size][1]

    @property
    def layers(self) -> int:
        """The number of layers that the size has."""
        return SIZES[self.size][0]

    @property
    def initializer_range(self) -> float:
        """BERT's 0.02 at its width of 768: narrower layers add up fewer products."""
        return 0.02 * (768 / self.width) ** 0.5

    def transformer_fields(self) -> dict[str, Any]:
        """The configuration fields of a stack of Transformer blocks of the size."""
        return {
            "num_hidden_layers": self.layers,
            "hidden_size": self.width,
            "num_attention_heads": max(4, self.width // 64),
            "intermediate_size": 4 * self.width,
            "hidden_dropout_prob": self.dropout,
            "attention_probs_dropout_prob": self.dropout,
            "initializer_range": self.initializer_range,
        }

    def require_positions(self, positions: int) -> None:
        """Raises a ValueError if the positions do not reach as far as the examples."""
        if self.max_length > positions:
            raise ValueError(
                f"`max_length` ({self.max_length}) is more than `max_position_embeddings` ({positions}): "
                f"shorten it, or set max_position_embeddings={self.max_length} in `config`"
            )
