"""Estimates of what a run takes: parameters, memory, operations and time."""
