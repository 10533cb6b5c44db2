"""The parts of bench_collectives.py: what is moved, the race, the device, texts and pictures."""
