"""Weight slices sent around a ring of ranks instead of being all-gathered (RTP)."""
