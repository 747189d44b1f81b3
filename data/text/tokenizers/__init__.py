"""Tokenizers: trained, read, and what can be wrong with them."""
