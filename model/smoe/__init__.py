"""Sparse mixture of experts: scores, graphs, selection, dispatch, experts, each on its own."""
