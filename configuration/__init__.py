"""Configurations: one strict dataclass per model family."""
