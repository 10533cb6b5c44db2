"""What each iteration of a run does: batch sizes, learning rate, loss scale, and when to stop."""
