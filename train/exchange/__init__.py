"""Weights in and out."""
