"""Checkpoints that do not depend on the layout that wrote them."""
