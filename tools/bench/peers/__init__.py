"""What compare_peers.py lets train: this project, PyTorch's data parallelism and DeepSpeed's."""
