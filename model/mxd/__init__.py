"""Mixtures of decoders and transcoders: a sparse gate over the rows of a table."""
