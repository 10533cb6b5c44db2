"""Parts of the studies that hold the planner against papers and against measured steps."""
