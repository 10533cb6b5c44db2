"""The sharded optimizer: AdamW and Muon on ranges of parameters, rounding, and outer steps."""
