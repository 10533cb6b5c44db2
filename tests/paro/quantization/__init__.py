"""Tests of paro/quantization/."""
