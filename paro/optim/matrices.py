"""Muon's step: momentum, matrices made whole in rounds, Newton-Schulz, and the update."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paro.collectives.matrices import MatrixExchange
from paro.distributed.comm_stream import Event
from paro.distributed.exposed_time import Exposure, WaitKind
from paro.optim.muon_kernels import MomentumUpdate, MuonKernels, Square, square_by_torch
from paro.optim.rounding import Rounding
from paro.sharding.shards import UnitShards
from paro.spec.deal import Dealt, Matrix, Places, Round, deal
from paro.spec.optim_config import Coefficients, MuonConfig

_EPS = 1e-7  # of the norm by which a matrix is divided


@dataclass(frozen=True, slots=True)
class MuonRange:
    """The first elements of an optimizer range, which Muon updates; one tensor for each state."""

    unit: UnitShards
    master: Tensor
    momentum: Tensor
    seed: int  # of the rounding of its momentum

    def matrices(self, number: int) -> Iterator[Matrix]:
        """Those of the unit, which is given this number."""
        for place in self.unit.spec.unit.matrices:
            yield Matrix(number, self.unit.layout.numel, *place)


@dataclass(slots=True)
class _Moving:
    """A round under way: what is sent and received, and the matrix that this place gets whole."""

    dealt: Round
    sent: dict[int, Tensor] = field(default_factory=dict)
    received: dict[int, Tensor] = field(default_factory=dict)
    own: Dealt | None = None
    whole: Tensor | None = None
    event: Event | None = None


class MuonStep:
    """Updates the matrices of numbered units; the exchange's ranks must take the same steps.

    `degree`: over how many ranks a matrix is spread, all of the exchange or 1.

    Matrices travel in `wire` there and back. While one round computes, the next one arrives.
    """

    def __init__(
        self,
        ranges: Mapping[int, MuonRange],
        exchange: MatrixExchange,
        degree: int,
        config: MuonConfig,
        exposure: Exposure,
        *,
        wire: torch.dtype,
        kernels: MuonKernels,
    ) -> None:
        self._ranges = ranges
        self._exchange = exchange
        self._places = places = Places(exchange.num_places, degree)
        self._config = config
        self._exposure = exposure
        self._wire = wire
        self._kernels = kernels
        matrices = (matrix for i, part in ranges.items() for matrix in part.matrices(i))
        self.rounds = deal(tuple(matrices), places.number)

    def update(self, *, lr: float, weight_decay: float, factor: float, step: int) -> Iterator[int]:
        """Yield the number of each unit as soon as all its matrices are updated.

        Gradients, times `factor`, are undefined afterwards.
        """
        left = dict.fromkeys(self._ranges, 0)
        for dealt in (each for one in self.rounds for each in one):
            left[dealt.matrix.unit] += 1
        arriving = self._gather(self.rounds[0], factor, step) if self.rounds else None
        returning: list[_Moving] = []
        for index in range(len(self.rounds)):
            current = arriving
            assert current is not None, f"round {index} was not begun"
            if index + 1 < len(self.rounds):
                arriving = self._gather(self.rounds[index + 1], factor, step)
            returning.append(self._scatter(current))
            if len(returning) > 1:
                yield from self._apply(returning.pop(0), lr, weight_decay, left)
        for last in returning:
            yield from self._apply(last, lr, weight_decay, left)

    def _gather(self, dealt: Round, factor: float, step: int) -> _Moving:
        """Update the momentum of a round's matrices, and queues the all-to-all of the result."""
        moving, place = _Moving(dealt), self._exchange.place
        for each, low, high in self._held(dealt):
            read = self._momentum(each.matrix, low, high, factor, step)
            if self._places.spread or each.owner == place:
                moving.sent[each.owner] = read
        moving.own = next((each for each in dealt if each.owner == place), None)
        if moving.own is not None:
            matrix = moving.own.matrix
            momentum = self._ranges[matrix.unit].momentum
            moving.whole = momentum.new_empty(matrix.numel, dtype=self._wire)
            for holder, low, high in self._places.parts(matrix):
                if self._places.spread or holder == place:
                    moving.received[holder] = moving.whole[low:high]
        moving.event = self._trade(moving)
        return moving

    def _momentum(self, matrix: Matrix, low: int, high: int, factor: float, step: int) -> Tensor:
        """What Newton-Schulz reads of a part of a matrix, after the momentum was updated."""
        held = self._ranges[matrix.unit]
        part = _part(held.unit, matrix, low, high)
        kept, start, rounding = held.momentum[part], held.unit.optim_start, None
        if kept.dtype != torch.float32:
            (chunk_range,) = held.unit.layout.chunk_ranges(start + part.start, start + part.stop)
            rounding = Rounding.of(chunk_range, held.seed)
        update = MomentumUpdate(self._config, factor, self._wire, rounding, step)
        return self._kernels.momentum(kept, held.unit.optim_grad[part], update)

    def _scatter(self, moving: _Moving) -> _Moving:
        """Wait for a round's matrix, and queues the all-to-all of its update."""
        assert moving.event is not None, "the all-to-all was not queued"
        self._exposure.wait(WaitKind.REDUCE, moving.event)
        back = _Moving(moving.dealt)
        if moving.own is not None and moving.whole is not None:
            matrix = moving.own.matrix
            whole = moving.whole.view(matrix.rows, matrix.columns)
            update = (
                orthogonal(whole, self._config, self._kernels.square).to(self._wire).reshape(-1)
            )
            for holder, low, high in self._places.parts(matrix):
                back.sent[holder] = update[low:high]
        for each, low, high in self._held(moving.dealt):
            master = self._ranges[each.matrix.unit].master
            back.received[each.owner] = master.new_empty(high - low, dtype=self._wire)
        back.event = self._trade(back)
        return back

    def _apply(
        self, back: _Moving, lr: float, weight_decay: float, left: dict[int, int]
    ) -> Iterator[int]:
        """Update the masters of a round's matrices."""
        assert back.event is not None, "the all-to-all was not queued"
        self._exposure.wait(WaitKind.GATHER_UPDATED, back.event)
        for each, low, high in self._held(back.dealt):
            held = self._ranges[each.matrix.unit]
            master = held.master[_part(held.unit, each.matrix, low, high)]
            master.mul_(1.0 - lr * weight_decay)
            scale = self._config.scale(each.matrix.rows, each.matrix.columns)
            master.add_(back.received[each.owner].float(), alpha=-lr * scale)
        for each in back.dealt:
            left[each.matrix.unit] -= 1
            if not left[each.matrix.unit]:
                yield each.matrix.unit

    def _held(self, dealt: Round) -> Iterator[tuple[Dealt, int, int]]:
        """Yield a round's matrices of which this place holds elements [low, high), with these."""
        for each in dealt:
            for holder, low, high in self._places.parts(each.matrix):
                if holder == self._exchange.place:
                    yield each, low, high

    def _trade(self, moving: _Moving) -> Event:
        with self._exposure.submitting(WaitKind.REDUCE):
            return self._exchange.trade(moving.sent, moving.received)


def _part(unit: UnitShards, matrix: Matrix, low: int, high: int) -> slice:
    """Return elements [low, high) of a matrix in this rank's optimizer range."""
    begin = matrix.start - unit.optim_start
    return slice(begin + low, begin + high)


def orthogonal(matrix: Tensor, config: MuonConfig, square: Square = square_by_torch) -> Tensor:
    """Nearly the matrix with all its singular values 1, in the type of the matmuls.

    `square`: how products with its own transpose are computed, if they are in bf16.
    """
    precision, dtype = config.muon_fp32_matmul_prec, torch.float32
    if precision in ("low", "medium"):
        # Torch has no bf16 matmuls of fp32 tensors: its "medium" is TF32 on GPUs, fp32 on CPUs.
        precision = "high"
        if _has_bf16_matmuls(matrix.device):
            dtype = torch.bfloat16
    with _matmul_precision(precision):
        by = square if dtype == torch.bfloat16 else square_by_torch
        return newton_schulz(matrix, config.coefficients(), dtype, by)


def _has_bf16_matmuls(device: torch.device) -> bool:
    """Return whether it multiplies bf16 by instructions of its own, not in fp32."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def newton_schulz(
    matrix: Tensor,
    coefficients: tuple[Coefficients, ...],
    dtype: torch.dtype = torch.float32,
    square: Square = square_by_torch,
) -> Tensor:
    """Return the matrix in `dtype` after one step for each coefficients."""
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.mT if is_tall else matrix
    x = x.to(torch.promote_types(x.dtype, dtype))  # divided in the wider type, rounded once
    x = (x / torch.linalg.vector_norm(x, dtype=torch.float32).clamp(min=_EPS)).to(dtype)
    for a, b, c in coefficients:
        x = torch.addmm(x, square(square(x, None), (b, c)), x, beta=a)
    return x.mT if is_tall else x


@contextmanager
def _matmul_precision(name: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
