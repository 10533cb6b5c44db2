"""Megatron's flags that no setting here has: tables of what is accepted, ignored and refused."""
