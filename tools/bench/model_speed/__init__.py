"""Training speed of models on one device: contenders, turns and figures (bench_model.py)."""
