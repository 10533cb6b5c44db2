"""The parts of bench_collectives.py: the training that is timed, tables and plots."""
