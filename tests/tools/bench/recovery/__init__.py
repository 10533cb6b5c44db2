"""Tests of tools/bench/recovery/."""
