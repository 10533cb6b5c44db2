"""Tests of paro/step/."""
