"""Helpers of several tools: parsing flags, reading the machine's meters, and drawing plots."""
