"""Ranks and how they work together: process groups, communication streams, counters, errors."""
