"""Tests of paro/collectives/."""
