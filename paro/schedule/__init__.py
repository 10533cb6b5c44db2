"""Schedules of a run: batch size, learning rate and weight decay, loss scale; checks of a step."""
