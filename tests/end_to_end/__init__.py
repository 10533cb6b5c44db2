"""Tests that run the scripts through their command lines."""
