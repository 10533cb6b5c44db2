"""The project's own evidence: benchmarks and studies whose results are recorded."""
