"""Pretrain mixture-of-experts transformers at scale."""
