"""Faults of processes, ranks, links, disks and memory: each run ends as expected and continues."""
