"""Command-line programs for users: text to data sets, conversion, planning, reports."""
