"""The parts of preprocess_data.py: encoding, worker processes, partitions and progress."""
