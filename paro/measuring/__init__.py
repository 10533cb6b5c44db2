"""Measures this machine: collectives in turns, what a rank computes, and memory."""
