"""Tests of paro/planning/memory."""
