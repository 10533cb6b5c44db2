"""Units of a model: their layout, buffers and life."""
