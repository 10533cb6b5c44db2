"""Step time: costs of a training step's parts, and their simulation."""
