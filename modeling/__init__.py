"""The attention core and the model families built on it."""
