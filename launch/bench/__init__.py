"""Comparisons with named peers, in one run each; may import anything, lazily."""
