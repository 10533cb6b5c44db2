"""What a strategy costs, in bytes, memory and time, before anything runs."""
