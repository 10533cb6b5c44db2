"""Programs that measure the project itself; their results are recorded, a folder has a subject."""
