"""How tools/generate.py continues texts, and talks."""
