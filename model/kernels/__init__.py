"""Fast implementations of operations, each beside its definition in plain PyTorch."""
