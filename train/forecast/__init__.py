"""Predictions of the memory, time and cost of a run, without its machines."""
