"""Data pipeline from text to micro-batches: tokenizers, Megatron's data sets and sample order."""
