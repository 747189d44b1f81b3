"""Studies: variants of a run over several seeds, compared in pairs."""
