"""Weights that travel round a ring of ranks instead of being gathered (RTP)."""
