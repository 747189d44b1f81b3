"""Sparse mixture of experts: scores, graphs, selection, dispatch and experts, one module each."""
