"""Tests of the modules of compare_peers.py."""
