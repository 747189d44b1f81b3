"""Observation of and intervention on experts: routing, information, knockouts, steering."""
