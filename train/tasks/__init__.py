"""Tasks: what a run learns from, its samples, losses and scores."""
