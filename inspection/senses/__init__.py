"""Comparison of the static and the contextual vectors of a word."""
