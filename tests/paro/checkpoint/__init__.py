"""Tests of paro/checkpoint/."""
