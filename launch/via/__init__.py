"""`polyad launch`: the ways to start the processes of a run."""
