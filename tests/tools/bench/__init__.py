"""Tests of the programs that measure and count the project's own evidence."""
