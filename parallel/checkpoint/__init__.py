"""Checkpoints that are independent of the parallel layout that wrote them."""
