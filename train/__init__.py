"""Training runs: configuration, loop, losses, metrics and evaluation."""
