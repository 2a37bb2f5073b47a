"""Attention maps, and the figure and the page that show them."""
