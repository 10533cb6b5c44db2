"""Benches that need more than this repository: what they are given, they do not change."""
