"""A training step as data: the policies that decide its actions, and the list of them."""
