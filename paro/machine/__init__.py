"""A cluster as data, and the time of its collectives."""
