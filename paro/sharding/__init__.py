"""Sharded units: flat buffers and shards, all-gather and reduce-scatter around each use."""
