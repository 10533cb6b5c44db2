"""The LLaMA model as plain single-process PyTorch: it knows nothing of ranks or sharding."""
