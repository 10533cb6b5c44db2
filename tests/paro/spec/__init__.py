"""Tests of paro/spec/."""
