"""Muon's step: momentum, matrices sent to owner ranks in rounds, Newton-Schulz, the update."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from paro.collectives.matrices import MatrixExchange
from paro.distributed.comm_stream import Event
from paro.distributed.exposed_time import Exposure, WaitKind
from paro.optim.muon_kernels import MomentumUpdate, MuonKernels, Square, square_by_torch
from paro.optim.rounding import Rounding
from paro.sharding.shards import UnitShards
from paro.spec.muon_rounds import Assignment, MuonMatrix, MuonRound, MuonRounds
from paro.spec.optim_config import Coefficients, MuonConfig

_EPS = 1e-7  # of the norm by which a matrix is divided


@dataclass(frozen=True, slots=True)
class MuonRange:
    """The first elements of an optimizer range, which Muon updates; one tensor for each state."""

    unit: UnitShards
    master: Tensor
    momentum: Tensor
    seed: int  # of the rounding of its momentum


class _AllToAll(NamedTuple):
    """An all-to-all of a round under way, with the tensors that it reads and writes.

    `received` is by group rank of the sender; `whole` is the matrix of which these are shards, if
    this rank is the owner of one.
    """

    muon_round: MuonRound
    sent: dict[int, Tensor]
    received: dict[int, Tensor]
    event: Event
    whole: Tensor | None = None


class MuonStep:
    """Muon's update of all matrices of a shard group; its ranks must take the same steps.

    `ranges` has this rank's range of each buffer, or bucket, with matrices. Momentum and updates
    are sent in `wire`. While one round computes, the next one arrives.
    """

    def __init__(
        self,
        rounds: MuonRounds,
        ranges: Mapping[int, MuonRange],
        exchange: MatrixExchange,
        config: MuonConfig,
        exposure: Exposure,
        *,
        wire: torch.dtype,
        kernels: MuonKernels,
    ) -> None:
        self.rounds = rounds
        self._ranges = ranges
        self._exchange = exchange
        self._config = config
        self._exposure = exposure
        self._wire = wire
        self._kernels = kernels

    def update(self, *, lr: float, weight_decay: float, factor: float, step: int) -> Iterator[int]:
        """Yield the number of each buffer as soon as all its matrices are updated.

        Gradients, times `factor`, are undefined afterwards.
        """
        rounds = self.rounds.rounds
        to_update = Counter(one.matrix.buffer for one in chain.from_iterable(rounds))
        momentum: _AllToAll | None = None
        update: _AllToAll | None = None
        for muon_round in (*rounds, None, None):  # two more turns, in which the last ones arrive
            next_momentum = self._send_momentum(muon_round, factor, step) if muon_round else None
            next_update = self._send_update(momentum) if momentum else None
            if update:
                self._apply(update, lr, weight_decay)
                for assignment in update.muon_round:
                    to_update[assignment.matrix.buffer] -= 1
                    if not to_update[assignment.matrix.buffer]:
                        yield assignment.matrix.buffer
            momentum, update = next_momentum, next_update

    def _send_momentum(self, muon_round: MuonRound, factor: float, step: int) -> _AllToAll:
        """Update the momentum of a round, and queue its all-to-all to the owners."""
        rank, is_sharded = self._exchange.group_rank, self.rounds.is_sharded
        sent: dict[int, Tensor] = {}
        for assignment, low, high in self._held(muon_round):
            read = self._momentum(assignment.matrix, low, high, factor, step)
            if is_sharded or assignment.owner == rank:
                sent[assignment.owner] = read
        received: dict[int, Tensor] = {}
        owned, whole = self._owned(muon_round), None
        if owned is not None:
            whole = self._ranges[owned.buffer].momentum.new_empty(owned.numel, dtype=self._wire)
            for holder, low, high in self.rounds.shards(owned):
                if is_sharded or holder == rank:
                    received[holder] = whole[low:high]
        event = self._all_to_all(sent, received)
        return _AllToAll(muon_round, sent, received, event, whole)

    def _momentum(
        self, matrix: MuonMatrix, low: int, high: int, factor: float, step: int
    ) -> Tensor:
        """Update the momentum of a matrix's shard; return what Newton-Schulz reads."""
        held = self._ranges[matrix.buffer]
        part = _part(held.unit, matrix, low, high)
        kept, start, rounding = held.momentum[part], held.unit.optim_start, None
        if kept.dtype != torch.float32:
            (chunk_range,) = held.unit.layout.chunk_ranges(start + part.start, start + part.stop)
            rounding = Rounding.of(chunk_range, held.seed)
        update = MomentumUpdate(self._config, factor, self._wire, rounding, step)
        return self._kernels.momentum(kept, held.unit.optim_grad[part], update)

    def _send_update(self, momentum: _AllToAll) -> _AllToAll:
        """Compute the update of this rank's matrix of a round, and queue its all-to-all back."""
        self._exposure.wait(WaitKind.REDUCE, momentum.event)
        owned = self._owned(momentum.muon_round)
        sent: dict[int, Tensor] = {}
        if owned is not None and momentum.whole is not None:
            whole = momentum.whole.view(owned.rows, owned.columns)
            update = (
                orthogonal(whole, self._config, self._kernels.square).to(self._wire).reshape(-1)
            )
            sent = {rank: update[low:high] for rank, low, high in self.rounds.shards(owned)}
        received = {
            assignment.owner: self._ranges[assignment.matrix.buffer].master.new_empty(
                high - low, dtype=self._wire
            )
            for assignment, low, high in self._held(momentum.muon_round)
        }
        event = self._all_to_all(sent, received)
        return _AllToAll(momentum.muon_round, sent, received, event)

    def _apply(self, update: _AllToAll, lr: float, weight_decay: float) -> None:
        """Update the masters of a round's matrices, once the update has arrived."""
        self._exposure.wait(WaitKind.PARAM_ALL_GATHER, update.event)
        for assignment, low, high in self._held(update.muon_round):
            matrix = assignment.matrix
            held = self._ranges[matrix.buffer]
            master = held.master[_part(held.unit, matrix, low, high)]
            master.mul_(1.0 - lr * weight_decay)
            scale = self._config.scale(matrix.rows, matrix.columns)
            master.add_(update.received[assignment.owner].float(), alpha=-lr * scale)

    def _owned(self, muon_round: MuonRound) -> MuonMatrix | None:
        """Return the matrix of a round of which this rank is the owner, if any."""
        rank = self._exchange.group_rank
        return next((one.matrix for one in muon_round if one.owner == rank), None)

    def _held(self, muon_round: MuonRound) -> Iterator[tuple[Assignment, int, int]]:
        """Yield the matrices of a round of which this rank holds elements [low, high), with
        these."""
        for assignment in muon_round:
            for rank, low, high in self.rounds.shards(assignment.matrix):
                if rank == self._exchange.group_rank:
                    yield assignment, low, high

    def _all_to_all(self, sent: dict[int, Tensor], received: dict[int, Tensor]) -> Event:
        with self._exposure.submitting(WaitKind.REDUCE):
            return self._exchange.all_to_all(sent, received)


def _part(unit: UnitShards, matrix: MuonMatrix, low: int, high: int) -> slice:
    """Return elements [low, high) of a matrix in this rank's optimizer range."""
    begin = matrix.start - unit.optim_start
    return slice(begin + low, begin + high)


def orthogonal(matrix: Tensor, config: MuonConfig, square: Square = square_by_torch) -> Tensor:
    """Compute the matrix with its singular values nearly 1, in the type of the matmuls.

    `square` computes products of a bf16 matrix with its own transpose.
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
    """Return whether a device multiplies bf16 by instructions for it, not in fp32."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def newton_schulz(
    matrix: Tensor,
    coefficients: tuple[Coefficients, ...],
    dtype: torch.dtype = torch.float32,
    square: Square = square_by_torch,
) -> Tensor:
    """Return the matrix in `dtype` after a step of Newton-Schulz for each of the coefficients."""
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
