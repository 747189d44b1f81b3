"""The `polyad` command, and the launching of processes."""
