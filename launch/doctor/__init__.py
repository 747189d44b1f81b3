"""`polyad doctor`: finds what would break or slow down a run on these hosts."""
