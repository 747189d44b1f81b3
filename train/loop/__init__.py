"""The training step, and the loop over steps."""
