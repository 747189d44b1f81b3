"""Emergent mixture of experts: the units of a trained dense feed-forward in groups."""
