"""Parts of the studies that compare the planner with papers and with measured steps."""
