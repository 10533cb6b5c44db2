"""Tests of the parts of the planner's tools."""
