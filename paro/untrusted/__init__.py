"""Reads files that nobody vouches for: regular ones, of a limited size, checked against types."""
