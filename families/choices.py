"""The words that some fields of configurations may have."""

ALIGNMENT_NAMES = ("dot", "scaled_dot", "bilinear", "additive", "none")
RNN_TYPES = ("gru", "lstm")
DECODER_TYPES = ("recurrent", "transformer")
