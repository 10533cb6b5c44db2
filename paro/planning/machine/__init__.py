"""A cluster as data, and how long its collectives take."""
