"""Peak memory of a rank, and the memory limit of a device."""
