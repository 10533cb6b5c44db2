"""What a strategy costs, in bytes and memory, before anything runs."""
