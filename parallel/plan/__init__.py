"""What a step holds, exchanges and computes on processes that are not there."""
