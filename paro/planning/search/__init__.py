"""What may be chosen for a run, and the search for the fastest that fits."""
