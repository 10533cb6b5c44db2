"""Tests of tools/bench/shared/."""
