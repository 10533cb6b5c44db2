"""Tests of tools/cluster/."""
