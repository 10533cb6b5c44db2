"""The one way to print: on the first rank, or on the last as Megatron's log line does."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """Made once from this process's place among the ranks, and handed to whoever has to speak."""

    rank: int = 0
    world_size: int = 1

    def log0(self, message: str) -> None:
        """Print on the first rank."""
        if self.rank == 0:
            print(message, flush=True)

    def log_last(self, message: str) -> None:
        """Print on the last rank, which is where scripts look for the log line."""
        if self.rank == self.world_size - 1:
            print(message, flush=True)
