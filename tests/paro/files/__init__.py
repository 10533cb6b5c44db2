"""Tests of paro/config."""
