"""Tests of tools/profiles/."""
