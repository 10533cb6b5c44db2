"""The parts of report.py: runs as they were recorded, their charts, and the page."""
