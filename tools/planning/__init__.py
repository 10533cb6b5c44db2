"""Helpers of tools/plan.py: its flags, tables and pictures, and the cost of failures."""
