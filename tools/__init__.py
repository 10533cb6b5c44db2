"""Programs that are run by hand or by quickstart: text to data sets, benchmarks, planning."""
