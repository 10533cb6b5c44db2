"""In-memory checkpoints: states of every rank in node memory, to recover from."""
