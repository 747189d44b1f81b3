"""The multilinear mixture of experts: every expert in one factorized tensor."""
