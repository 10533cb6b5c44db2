"""Parts of the count of Megatron-LM's own configurations (megatron_flags.py)."""
