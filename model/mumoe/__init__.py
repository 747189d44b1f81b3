"""The multilinear mixture of experts: all experts in one factorized tensor."""
