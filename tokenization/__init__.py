"""Tokenizers: training a vocabulary into a stock tokenizer, and checking one against a corpus and a model."""
