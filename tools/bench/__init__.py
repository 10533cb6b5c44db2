"""What measures the project itself: programs whose results are recorded; a folder has a subject."""
