"""The model families: one record for each, in names alone, so that reading them imports no library."""
