"""Parts of check_gpu.py: tests, races, memory, speed, profile and checkpoints on this machine."""
