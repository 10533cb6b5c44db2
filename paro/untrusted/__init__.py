"""Reads untrusted files: regular ones, of a limited size, checked against types."""
