"""The model families: one record for each, in names alone, and checks of values; reading them imports no library."""
