"""A text prepared in parts: encoded independently of each other, then joined."""
