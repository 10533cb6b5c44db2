"""What ranks hold and send of each unit: executed by the engine, counted by the planner."""
