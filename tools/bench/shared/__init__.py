"""Helpers of several measurements."""
