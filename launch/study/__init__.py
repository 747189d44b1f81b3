"""`polyad study`: the same run in several ways over several seeds, compared in pairs."""
