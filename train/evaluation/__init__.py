"""Evaluation of checkpoints: scores, generated text, leaks, routing stability."""
