"""Configurations of runs: reading, checking and describing them."""
