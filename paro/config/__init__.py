"""From flags to a checked configuration: one frozen dataclass per concern."""
