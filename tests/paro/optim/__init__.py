"""Tests of paro/optim/."""
