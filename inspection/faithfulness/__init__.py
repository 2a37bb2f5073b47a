"""Tests of whether attention explains a prediction."""
