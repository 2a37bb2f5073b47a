"""Attention maps, and the figures and HTML pages that show them."""
