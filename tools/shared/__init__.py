"""What several tools share: how they read flags, and how they draw pictures."""
