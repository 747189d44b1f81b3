"""A checkpoint scored."""
