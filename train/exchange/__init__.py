"""Conversion of weights from and to other formats."""
