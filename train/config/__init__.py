"""The configuration of a run: read, checked and described."""
