"""Attention maps, shape traces, worked calculations and tests of faithfulness."""
