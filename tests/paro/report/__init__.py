"""Tests of paro/report/."""
