"""Corpora, collators, the training loop, run checkpoints and metrics."""
