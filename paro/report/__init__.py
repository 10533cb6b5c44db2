"""Reporting of a run: log lines, metrics file, dashboards, memory, profiles, watchdog."""
