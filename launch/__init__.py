"""The `polyad` command, and how processes are started."""
