"""The sharded optimizer and its schedules."""
