"""Tests of paro/arguments."""
