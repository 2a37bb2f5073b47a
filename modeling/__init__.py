"""The attention core and the model families built on it."""

# The import of transformers registers the model families, for which the modules below are imported. So it comes before
# any of them: one that is half imported by then would lack its classes.
import transformers  # noqa: F401
