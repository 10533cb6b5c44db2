"""Converters between checkpoint formats, which read and write tensor by tensor."""
