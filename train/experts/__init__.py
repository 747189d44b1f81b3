"""Observing and steering experts: routing fluctuation, reports, steering."""
