"""Process groups for one rank of many, whose links a machine file describes."""
