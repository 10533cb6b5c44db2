"""Local copies: every rank's states in its node's memory, from which a restarted run recovers."""
