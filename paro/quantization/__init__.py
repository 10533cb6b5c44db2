"""Quantized ranges: symmetric quantization to few bits, with a scale for each block."""
