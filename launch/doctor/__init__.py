"""`polyad doctor`: what would break a run on these hosts, or slow it down."""
