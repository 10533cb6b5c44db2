"""Peak memory of a rank, and what it takes of its device."""
