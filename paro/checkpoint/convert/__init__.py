"""Other formats of checkpoints, read and written tensor by tensor."""
