"""Tokenizers: training a vocabulary into a stock tokenizer, and checking one against a corpus and a model."""

# The import of transformers registers the model families, for which the modules below are imported. So it comes before
# any of them: one that is half imported by then would lack its classes.
import transformers  # noqa: F401
