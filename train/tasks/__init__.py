"""Training tasks: their samples, losses and scores."""
