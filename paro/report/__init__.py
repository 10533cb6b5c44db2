"""What one sees of a run: log line, metrics, dashboards, memory."""
