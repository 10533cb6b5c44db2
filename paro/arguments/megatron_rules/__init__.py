"""Tables of Megatron's flags without an equivalent in PaRO: accepted, ignored or refused."""
