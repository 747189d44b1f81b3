"""The arguments of the commands of `polyad`."""
