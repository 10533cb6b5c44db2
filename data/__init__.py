"""From text to micro-batches: tokenizers, Megatron's indexed data sets and sample order."""
