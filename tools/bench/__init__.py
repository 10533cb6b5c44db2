"""The project's own evidence: what is measured, counted and recorded of it."""
