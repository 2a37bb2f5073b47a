"""Layers and functions with additional kernels for CPUs.

Models import from here, and need not check for devices, hooks or compilation: each function chooses its kernel itself,
and falls back on PyTorch's own operators.
"""

from .additive import additive_scores
from .attention import SequenceBounds, attend_packed, attention_kernel
from .dropout import Dropout, apply_dropout
from .fused_cross_entropy import pad_positions, vocabulary_loss
from .kernel_choice import readable_values
from .linear import Linear, activated_linear, fast_inference
from .padding import pad_to_multiple, without_row_padding
from .rnn import GRU, LSTM, GRUCell, LSTMCell, ReadingOrder, StepProducts, reading_orders, share_step_products

__all__ = [
    "GRU",
    "LSTM",
    "Dropout",
    "GRUCell",
    "LSTMCell",
    "Linear",
    "ReadingOrder",
    "SequenceBounds",
    "StepProducts",
    "activated_linear",
    "additive_scores",
    "apply_dropout",
    "attend_packed",
    "attention_kernel",
    "fast_inference",
    "pad_positions",
    "pad_to_multiple",
    "readable_values",
    "reading_orders",
    "share_step_products",
    "vocabulary_loss",
    "without_row_padding",
]
