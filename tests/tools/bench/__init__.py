"""Tests of the programs that measure the project itself."""
