"""Fast implementations of operations, each together with its reference in plain PyTorch."""
