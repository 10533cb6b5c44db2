"""Tests of tools/shared/."""
