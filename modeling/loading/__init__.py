"""Reading a model's folder safely."""
