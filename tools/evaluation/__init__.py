"""The parts of evaluate.py: log-likelihoods of texts, and the harness's interface to them."""
