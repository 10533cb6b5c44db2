"""Tests of paro/checkpoint/in_memory/."""
