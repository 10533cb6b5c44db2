"""What several tools share: parsing flags, reading the machine's meters, and drawing plots."""
