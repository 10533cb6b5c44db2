"""Tests of paro/schedule."""
