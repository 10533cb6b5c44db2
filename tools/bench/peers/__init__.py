"""The contenders of compare_peers.py: this project, PyTorch's data parallelism and DeepSpeed's."""
