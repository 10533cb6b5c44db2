"""How long a training step takes: costs of its parts, and their simulation."""
