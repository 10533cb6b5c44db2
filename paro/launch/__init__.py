"""The start of a run, and its dry run: predictions, checks, what is logged; above all the rest."""
