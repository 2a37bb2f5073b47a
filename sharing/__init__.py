"""To and from the Hub: pushing, pulling, model cards, export to stock models."""
