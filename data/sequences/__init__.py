"""Labelled sequences: rows of files or of the hub, to padded batches of token ids."""
