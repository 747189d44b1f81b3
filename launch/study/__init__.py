"""`polyad study`: compares variants of a run over several seeds, in pairs."""
