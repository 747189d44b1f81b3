"""Models on one device: no process groups, no data, no training loop."""
