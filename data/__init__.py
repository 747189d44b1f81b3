"""Text to tokens to batches, in an order that depends only on the seed and the step."""
