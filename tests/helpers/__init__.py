"""What several tests need: reused worker processes, small models, tiny data."""
