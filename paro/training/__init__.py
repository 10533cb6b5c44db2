"""The training program: builds a run, runs its steps and loop, saves and resumes."""
