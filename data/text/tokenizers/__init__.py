"""Tokenizers: training, reading, and checks of their files."""
