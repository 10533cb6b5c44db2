"""LoraConfig: low-rank adapters of the frozen weights of blocks, in the words of peft."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from paro.errors import UserError, check_least

Shape = tuple[int, ...]

# peft's names of a block's projections, and this project's names of their weights.
MODULES = {
    "q_proj": "wq",
    "k_proj": "wk",
    "v_proj": "wv",
    "o_proj": "wo",
    "gate_proj": "w_gate",
    "up_proj": "w_up",
    "down_proj": "w_down",
}
ALL_LINEAR = "all-linear"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """Adapters: `weight @ x` becomes `weight @ x + alpha / rank * B @ A @ dropout(x)`."""

    rank: int
    alpha: float = 8.0
    dropout: float = 0.0
    targets: tuple[str, ...] = ("wq", "wv")  # weights of every block, in the block's order

    def __post_init__(self) -> None:
        check_least(1, lora_rank=self.rank)
        if not 0.0 < self.alpha < math.inf:
            raise UserError(f"--lora-alpha {self.alpha} must be a positive number")
        if not 0.0 <= self.dropout < 1.0:
            raise UserError(f"--lora-dropout {self.dropout} must be at least 0 and below 1")
        known = set(MODULES.values())
        if not self.targets or not known.issuperset(self.targets):
            raise UserError(f"adapters of {', '.join(self.targets)}: there are {', '.join(known)}")

    @property
    def scaling(self) -> float:
        return self.alpha / self.rank

    def shapes(self, block: Mapping[str, Shape]) -> dict[str, Shape]:
        """Return the shapes of a block's adapters, given its weights' shapes."""
        found: dict[str, Shape] = {}
        for name in self.targets:
            rows, columns = block[name]
            if self.rank > min(rows, columns):
                raise UserError(
                    f"--lora-rank {self.rank} is above the {min(rows, columns)} of {name}, a "
                    f"matrix of {rows} x {columns}: give a smaller rank"
                )
            found |= {down_name(name): (self.rank, columns), up_name(name): (rows, self.rank)}
        return found


def down_name(weight: str) -> str:
    """Return the name of a weight's adapter that reads its input (peft's lora_A)."""
    return f"{weight}_lora_a"


def up_name(weight: str) -> str:
    """Return the name of a weight's adapter that makes its output (peft's lora_B)."""
    return f"{weight}_lora_b"


def adapted_weight(name: str) -> str:
    """Return the name of the weight that an adapter of this name is added to."""
    return name.removesuffix("_lora_a").removesuffix("_lora_b")


def is_adapter(name: str) -> bool:
    """Return whether a parameter's name is that of an adapter."""
    return name.endswith(("_lora_a", "_lora_b"))


def targets_of(text: str) -> tuple[str, ...]:
    """Return the weights of --lora-target-modules, in the block's order."""
    if text == ALL_LINEAR:
        return tuple(MODULES.values())
    modules = text.split(",")
    for module in modules:
        if module not in MODULES:
            raise UserError(
                f"--lora-target-modules {module!r} is unknown: give {ALL_LINEAR}, or some of "
                f"{', '.join(MODULES)} with commas between them"
            )
    return tuple(weight for module, weight in MODULES.items() if module in modules)
