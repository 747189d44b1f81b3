"""A step, and steps."""
