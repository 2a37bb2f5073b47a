"""Shape traces, worked examples, and what masks, positions and heads do."""
