"""Tests of paro/launch."""
