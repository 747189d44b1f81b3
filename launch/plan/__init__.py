"""`polyad plan`."""
