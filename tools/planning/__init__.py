"""Helpers of tools/plan.py and of the studies of the papers' figures and of measured steps."""
