"""Tests of the measurement of a machine."""
