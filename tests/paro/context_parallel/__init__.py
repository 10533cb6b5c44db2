"""Tests of paro/context_parallel/."""
