"""Tests of paro/rotation/."""
