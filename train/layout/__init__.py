"""Verification that a layout computes the same as one process."""
