"""The parts of inspect_dataset.py: lengths of documents, and the samples of a training."""
