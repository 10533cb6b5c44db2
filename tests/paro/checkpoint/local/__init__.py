"""Tests of paro/checkpoint/local/."""
