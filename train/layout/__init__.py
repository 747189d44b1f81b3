"""Whether a layout computes what one process does."""
