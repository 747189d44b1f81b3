"""Emergent mixture of experts: groups of the units of a trained dense feed-forward."""
