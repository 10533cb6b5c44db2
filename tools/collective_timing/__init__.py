"""The parts of bench_collectives.py: trials, the race, the device, tables and plots."""
