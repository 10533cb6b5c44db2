"""A training step as data: what decides it, and the list of its actions."""
