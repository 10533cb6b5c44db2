"""Parts of tools/plan.py and of the study of the papers' figures."""
