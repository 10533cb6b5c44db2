"""Data parallelism in which every model state picks its own redundancy (PaRO)."""
