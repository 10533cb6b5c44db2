"""How much memory a rank needs, and how much a device has for it."""
