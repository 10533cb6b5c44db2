"""The planner: predicts a strategy's traffic, memory and step time before anything runs."""
