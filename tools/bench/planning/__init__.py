"""Parts of the study that compares the planner with measured steps."""
