"""Names and configurations of other libraries' checkpoints: one table per family."""
