"""Tests of paro/."""
