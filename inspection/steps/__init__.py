"""Traces, worked calculations, masks, positions and head distances."""
