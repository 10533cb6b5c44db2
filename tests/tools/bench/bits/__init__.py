"""Tests of tools/bench/bits/."""
