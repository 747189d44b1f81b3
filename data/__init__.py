"""Text to tokens to batches, in an order that depends on the seed and the step alone."""
