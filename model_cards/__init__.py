"""Model card templates, and the cards of our own reference checkpoints."""
