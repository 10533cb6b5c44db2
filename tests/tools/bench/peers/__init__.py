"""Tests of what compare_peers.py is made of."""
