"""`polyad launch`: the backends that start the processes of a run."""
