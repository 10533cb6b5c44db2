"""Quantized ranges: symmetric codes of few bits, with a scale for each block."""
