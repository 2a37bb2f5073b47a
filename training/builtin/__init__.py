"""Built-in data, which needs no network: Python's documentation, dates and glyphs."""
