"""The LLaMA model, ignorant of distribution."""
