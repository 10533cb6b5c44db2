"""Attention of samples that several ranks share, each with a part of their tokens."""
