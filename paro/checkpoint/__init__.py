"""Sharded checkpoints: saved as rectangles of named parameters, loaded under any sharding."""
