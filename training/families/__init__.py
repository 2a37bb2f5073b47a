"""The registry of families, the recipe of each, their sizes and their evaluation."""
