"""Operations that are computed faster than plain PyTorch does, each beside its definition."""
