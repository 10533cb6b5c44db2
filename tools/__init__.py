"""Command-line programs: text to data sets, benchmarks, planning, reports."""
