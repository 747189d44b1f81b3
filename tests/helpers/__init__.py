"""Shared test helpers: reused worker processes, small models, tiny data."""
