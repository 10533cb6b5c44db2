"""Files and objects of stores: written whole, read with limits, and checked against types."""
