"""What a step will take and cost on processes that are not there: memory, exchanges, time."""
