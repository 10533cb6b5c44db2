"""Tests of the parts of preprocess_data.py."""
