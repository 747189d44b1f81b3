"""What a run is: its configuration, loop, losses, metrics and evaluation."""
