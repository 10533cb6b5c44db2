"""The training program: building a run, its steps, its loop, saving and resuming, the dry run."""
