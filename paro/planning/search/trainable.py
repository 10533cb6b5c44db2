"""Which parameters train: all, the last blocks, or small adapters on a frozen model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from model.config import LlamaConfig, unit_shapes
from paro.errors import UserError
from paro.layout import ALIGN
from paro.planning.cost_model import UnitSize
from paro.planning.units import units_of


class TrainableKind(Enum):
    """Which part of the model the trained share is."""

    FULL = "full"
    LAST_BLOCKS = "last-blocks"  # this share of all blocks, at least one
    ADAPTERS = "adapters"  # LoRA-like: every block gets this share of its size in addition


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainable:
    """What trains, as a share of the parameters."""

    kind: TrainableKind = TrainableKind.FULL
    share: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise UserError(f"--trainable share {self.share} must be in (0, 1]")

    def units(
        self,
        config: LlamaConfig,
        *,
        world_size: int,
        rotated_over: int = 1,
        in_place: bool = False,
    ) -> tuple[UnitSize, ...]:
        """The units of a model with its trained and its frozen buffers; see `units_of`."""
        if self.kind is TrainableKind.ADAPTERS:
            assert rotated_over == 1, "adapters need gathered parameters"
            frozen = units_of(config, world_size=world_size, is_trained=frozenset().__contains__)
            embedding, *blocks, head = frozen
            return (embedding, *(self._with_adapters(b, world_size) for b in blocks), head)
        shapes = unit_shapes(config)
        first, last = 0, len(shapes)
        if self.kind is TrainableKind.LAST_BLOCKS:
            last -= 1  # the head
            first = last - max(1, round(self.share * config.num_layers))
        trained = {f"{unit}.{name}" for unit in [*shapes][first:last] for name in shapes[unit]}
        return units_of(
            config,
            world_size=world_size,
            is_trained=trained.__contains__,
            rotated_over=rotated_over,
            in_place=in_place,
        )

    def _with_adapters(self, unit: UnitSize, world_size: int) -> UnitSize:
        step = ALIGN * world_size
        numel = -(-round(unit.frozen_numel * self.share) // step) * step
        # Backward passes through every block to reach the adapters below, so frozen blocks are
        # gathered for it too.
        return replace(
            unit,
            trainable_numel=numel,
            gathers_per_micro_batch=2,
            gathered_for_backward=True,
        )
