"""Attention maps, shape traces, worked examples, word senses and tests of faithfulness."""
