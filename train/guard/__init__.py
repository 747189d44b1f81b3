"""What keeps a run alive."""
