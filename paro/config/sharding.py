"""How the model states are sharded, gathered and reduced, as the flags say."""

from __future__ import annotations

from dataclasses import dataclass

from paro.planning.machine.machine import Machine


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingConfig:
    """How the model states are spread (the flags `--paro-*`)."""

    strategy: str  # as typed: letters, degrees or a name; parsed against the world by config.py
    group_size: int
    collective: str = "native"
    prefetch_units: int = 1
    machine: Machine | None = None  # how fast collectives are, where that decides
    materialize: str = "gather"  # or "rotate": how parameters come to where they are used
    rotate_in_place: bool = False

    def __post_init__(self) -> None:
        if self.collective == "auto" and self.machine is None:
            raise ValueError(
                "--paro-collective auto chooses by what was measured: give --paro-machine FILE, "
                "which tools/bench_collectives.py --machine-file FILE writes"
            )
        if self.rotate_in_place and self.materialize != "rotate":
            raise ValueError("--paro-rotate-in-place needs --paro-materialize rotate")
        if self.prefetch_units < 0:
            raise ValueError(f"--paro-prefetch-units {self.prefetch_units} is negative; 0 is off")
