"""Parts of tools/plan.py and of the studies of its predictions."""
