"""Save and load a run as boxes of named parameters."""
