"""Data that needs no network: Python's documentation, dates and glyphs."""
