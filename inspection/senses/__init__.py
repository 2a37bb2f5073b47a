"""Static against contextual vectors of a word."""
