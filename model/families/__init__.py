"""Names and configurations of other libraries' checkpoints: one table a family."""
