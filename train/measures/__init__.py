"""Measures of experts on held-out data, one per file."""
