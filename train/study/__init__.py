"""Variants and seeds, compared in pairs."""
