"""The search space of a run, and the search for the fastest candidate that fits in memory."""
