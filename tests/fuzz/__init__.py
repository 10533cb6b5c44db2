"""Damaged, hostile and absurd inputs: each is answered cleanly."""
