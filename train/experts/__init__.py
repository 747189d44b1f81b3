"""What experts do."""
