"""The parts of bench_collectives.py: what is moved, the race of algorithms, and its picture."""
