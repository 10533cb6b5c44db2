"""Sharded checkpoints: saved as chunks of named parameters, loaded under any sharding."""
