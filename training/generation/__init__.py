"""Generating for evaluation, and metrics of texts."""
