"""Muon's step: momentum, matrices sent to owner ranks in rounds, Newton-Schulz, the update."""

# `ParoOptimizer` has a `MuonStep` run the rounds of paro/spec/muon_rounds.py as a pipeline. While
# owner ranks orthogonalize the matrices of a round, one all-to-all sends them the shards of the
# next round's momentum, another returns shards of the previous round's update to all ranks.

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from paro.collectives.interface import Endpoint
from paro.collectives.wire import Wire
from paro.distributed.comm_stream import DONE, Event
from paro.errors import describe
from paro.optim import adamw
from paro.optim.adamw import StepUpdate
from paro.optim.rounding import Rounding, round_into
from paro.sharding.shards import UnitShards
from paro.spec.muon_rounds import MuonMatrix, MuonRound, MuonRounds
from paro.spec.optim_config import Coefficients, MuonConfig
from paro.spec.param_groups import ParamGroups
from paro.topology import StreamKind, WaitKind

Square = Callable[[Tensor, tuple[float, float] | None], Tensor]  # see square_by_torch
_EPS = 1e-7  # smallest norm by which a matrix is divided
_MOST_ERROR = 2.0**-7  # of a product in bf16, relative to the largest element


class MomentumUpdate(NamedTuple):
    """An update of a range of momentum by a gradient times `factor`; `step` seeds the rounding.

    Momentum in bf16 needs a `rounding`.
    """

    config: MuonConfig
    factor: float
    read_as: torch.dtype  # dtype in which Newton-Schulz gets the momentum
    rounding: Rounding | None
    step: int


Momentum = Callable[[Tensor, Tensor, MomentumUpdate], Tensor]


class MuonKernels(NamedTuple):
    """Implementations of Muon's operations, and the log line that says why they were chosen."""

    momentum: Momentum
    square: Square
    line: str = ""


def momentum_by_torch(stored: Tensor, grad: Tensor, update: MomentumUpdate) -> Tensor:
    """Update stored momentum in place; return the values that Newton-Schulz reads."""
    config, factor, read_as, rounding, step = update
    grad = grad.float() * factor
    momentum = stored.float().lerp_(grad, 1.0 - config.muon_momentum)
    read = grad.lerp(momentum, config.muon_momentum) if config.muon_nesterov else momentum
    read = read.to(read_as, copy=True)
    if rounding is not None:
        round_into(momentum, rounding.bits(0, stored.numel(), step, stored.device), stored)
    return read


def square_by_torch(x: Tensor, factors: tuple[float, float] | None = None) -> Tensor:
    """Compute `x @ x.T` or, with factors (b, c) and a symmetric `x`, `b * x + c * x @ x`."""
    if factors is None:
        return x @ x.mT
    return torch.addmm(x, x, x, beta=factors[0], alpha=factors[1])


BY_TORCH = MuonKernels(momentum_by_torch, square_by_torch)


@cache
def choose_muon_kernels(name: str, device: torch.device) -> MuonKernels:
    """Return the implementation of momentum and of symmetric bf16 products.

    The implementation is Triton's on a GPU where small tensors show that it works, unless
    --adam-implementation names another.
    """
    if name not in ("auto", "triton") or device.type not in adamw.TRITON_DEVICES:
        return BY_TORCH
    try:
        from paro.optim.kernels import VERSION, momentum, square

        _compare(MuonKernels(momentum, square), device)
    except Exception as error:  # any exception of Triton, the compiler or the device's driver
        line = f"Muon: torch's operations, because Triton fails: {describe(error)}"
        return BY_TORCH._replace(line=line)
    line = f"Muon: momentum in one pass and symmetric products by Triton {VERSION}"
    return MuonKernels(momentum, square, line)


def _compare(kernels: MuonKernels, device: torch.device) -> None:
    """Raise `RuntimeError` unless results equal torch's to rounding and products are symmetric."""
    x = torch.linspace(-3.0, 3.0, 130 * 70, device=device).sin_().view(130, 70).bfloat16()
    rounding = Rounding(seed=0, name="", low=0, width=7, stride=9, start=2)
    results = []
    for by in (BY_TORCH, kernels):
        stored = [x.flatten().clone(), x.flatten().float()]
        read = [
            by.momentum(each, x.flatten(), MomentumUpdate(MuonConfig(), 0.5, x.dtype, at, step=1))
            for each, at in zip(stored, (rounding, None), strict=True)
        ]
        symmetric = x[:70] + x[:70].mT
        results.append((*stored, *read, by.square(x, None), by.square(symmetric, (-1.5, 0.5))))
    errors = [float((a - b).abs().max() / a.abs().max()) for a, b in zip(*results, strict=True)]
    products = results[1][-2:]
    if not (max(errors) <= _MOST_ERROR and all(torch.equal(each, each.mT) for each in products)):
        raise RuntimeError(f"results differ by {max(errors):.2g} from torch's")


@dataclass(frozen=True, slots=True)
class MuonRange:
    """An optimizer range whose first elements Muon updates; one tensor per state."""

    unit: UnitShards
    master: Tensor
    momentum: Tensor
    seed: int  # seed of the stochastic rounding of momentum


class _AllToAll(NamedTuple):
    """A round's all-to-all in flight, with the tensors that it reads and writes.

    Tensors are by the peer's rank in the shard group. The owner of a matrix receives the shards of
    the matrix in `whole`.
    """

    muon_round: MuonRound
    sent: dict[int, Tensor]
    received: dict[int, Tensor]
    event: Event
    whole: Tensor | None = None


@dataclass(eq=False, kw_only=True)
class MuonStep(Endpoint):
    """Muon's update of all matrices of a shard group, whose ranks must take the same steps.

    While a round computes, the momentum of the next round arrives. Ranks are numbered inside the
    group, in the order of their optimizer shards.
    """

    rounds: MuonRounds
    ranges: Mapping[int, MuonRange]  # this rank's range of each buffer, or bucket, with matrices
    config: MuonConfig
    param_groups: ParamGroups
    wire: torch.dtype  # dtype in which momentum and updates are sent
    kernels: MuonKernels

    def __post_init__(self) -> None:
        self._span = self.rounds.span(self.groups.topology)
        self._ranks = self.groups.topology.in_order_of_shards(self._span, self.groups.rank)
        self._group_rank = self._ranks.index(self.groups.rank)

    def update(self, update: StepUpdate) -> Iterator[int]:
        """Yield the number of each buffer as soon as all its matrices are updated.

        Gradients are undefined afterwards.
        """
        rounds = self.rounds.rounds
        to_update = Counter(matrix.buffer for each in rounds for matrix in each.values())
        momentum: _AllToAll | None = None
        result: _AllToAll | None = None
        for muon_round in (*rounds, None, None):  # two more turns for the last arrivals
            next_momentum = self._send_momentum(muon_round, update) if muon_round else None
            next_result = self._send_result(momentum) if momentum else None
            if result:
                self._apply(result, update)
                for matrix in result.muon_round.values():
                    to_update[matrix.buffer] -= 1
                    if not to_update[matrix.buffer]:
                        yield matrix.buffer
            momentum, result = next_momentum, next_result

    def _send_momentum(self, muon_round: MuonRound, update: StepUpdate) -> _AllToAll:
        """Update the momentum of a round, and queue the all-to-all to the owners."""
        rank, is_sharded = self._group_rank, self.rounds.is_sharded
        sent: dict[int, Tensor] = {}
        for owner, matrix, low, high in self._local_shards(muon_round):
            read = self._momentum(matrix, low, high, update)
            if is_sharded or owner == rank:
                sent[owner] = read
        received: dict[int, Tensor] = {}
        owned, whole = muon_round.get(rank), None
        if owned is not None:
            whole = self.ranges[owned.buffer].momentum.new_empty(owned.numel, dtype=self.wire)
            for holder, low, high in self.rounds.shards(owned):
                if is_sharded or holder == rank:
                    received[holder] = whole[low:high]
        event = self._all_to_all(sent, received)
        return _AllToAll(muon_round, sent, received, event, whole)

    def _momentum(self, matrix: MuonMatrix, low: int, high: int, update: StepUpdate) -> Tensor:
        """Update the momentum of a matrix's shard; return the values that Newton-Schulz reads."""
        states = self.ranges[matrix.buffer]
        unit, rounding = states.unit, None
        part = _part(unit, matrix, low, high)
        stored, start = states.momentum[part], unit.optim_start
        if stored.dtype != torch.float32:
            (chunk_range,) = unit.layout.chunk_ranges(start + part.start, start + part.stop)
            rounding = Rounding.of(chunk_range, states.seed)
        how = MomentumUpdate(self.config, update.factor, self.wire, rounding, update.step)
        return self.kernels.momentum(stored, unit.optim_grad[part], how)

    def _send_result(self, momentum: _AllToAll) -> _AllToAll:
        """Orthogonalize this rank's matrix of a round, and queue the all-to-all of the result."""
        self.exposed_timer.wait(WaitKind.REDUCE, momentum.event)
        owned = momentum.muon_round.get(self._group_rank)
        sent: dict[int, Tensor] = {}
        if owned is not None and momentum.whole is not None:
            whole = momentum.whole.view(owned.rows, owned.columns)
            result = orthogonal(whole, self.config, self.kernels.square).to(self.wire).reshape(-1)
            sent = {rank: result[low:high] for rank, low, high in self.rounds.shards(owned)}
        received = {
            owner: self.ranges[matrix.buffer].master.new_empty(high - low, dtype=self.wire)
            for owner, matrix, low, high in self._local_shards(momentum.muon_round)
        }
        event = self._all_to_all(sent, received)
        return _AllToAll(momentum.muon_round, sent, received, event)

    def _apply(self, result: _AllToAll, update: StepUpdate) -> None:
        """Update the masters of a round's matrices, once the result has arrived."""
        self.exposed_timer.wait(WaitKind.PARAM_ALL_GATHER, result.event)
        for owner, matrix, low, high in self._local_shards(result.muon_round):
            unit = self.ranges[matrix.buffer].unit
            master = self.ranges[matrix.buffer].master[_part(unit, matrix, low, high)]
            (at,) = unit.layout.chunk_ranges(matrix.start + low, matrix.start + high)
            settings = update.of(self.param_groups.of(at.chunk.name, at.chunk.shape))
            master.mul_(1.0 - settings.lr * settings.weight_decay)
            scale = self.config.scale(matrix.rows, matrix.columns)
            master.add_(result.received[owner].float(), alpha=-settings.lr * scale)

    def _local_shards(self, muon_round: MuonRound) -> Iterator[tuple[int, MuonMatrix, int, int]]:
        """Yield (owner, matrix, low, high) of a round: elements [low, high) are in this shard."""
        for owner, matrix in muon_round.items():
            for rank, low, high in self.rounds.shards(matrix):
                if rank == self._group_rank:
                    yield owner, matrix, low, high

    def _all_to_all(self, sent: Mapping[int, Tensor], received: Mapping[int, Tensor]) -> Event:
        """Queue an all-to-all of shards by group rank; both ends know the size of each shard.

        The caller must not free or change the tensors before the event is done.
        """
        group_rank = self._group_rank

        def job() -> None:
            out, into = (
                {self._ranks[rank]: shard for rank, shard in shards.items() if rank != group_rank}
                for shards in (sent, received)
            )
            Wire(self.groups, StreamKind.EXCHANGE, self._span).exchange(out, into)

        with self.exposed_timer.submitting(WaitKind.REDUCE):
            if group_rank in received:
                received[group_rank].copy_(sent[group_rank])
            return self._submit(StreamKind.EXCHANGE, self._span, job) if self._span else DONE


def _part(unit: UnitShards, matrix: MuonMatrix, low: int, high: int) -> slice:
    """Return the slice of elements [low, high) of a matrix in this rank's optimizer range."""
    begin = matrix.start - unit.optim_start
    return slice(begin + low, begin + high)


def orthogonal(matrix: Tensor, config: MuonConfig, square: Square = square_by_torch) -> Tensor:
    """Set the singular values of a matrix to nearly 1; the result has the dtype of the matmuls.

    `square` multiplies a bf16 matrix by its own transpose.
    """
    precision, dtype = config.muon_fp32_matmul_prec, torch.float32
    if precision in ("low", "medium"):
        # Torch has no bf16 matmuls of fp32 tensors: its "medium" is TF32 on GPUs, fp32 on CPUs.
        precision = "high"
        if _has_bf16_matmuls(matrix.device):
            dtype = torch.bfloat16
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        by = square if dtype == torch.bfloat16 else square_by_torch
        return newton_schulz(matrix, config.coefficients(), dtype, by)
    finally:
        torch.set_float32_matmul_precision(before)


def _has_bf16_matmuls(device: torch.device) -> bool:
    """Return whether a device has instructions for bf16 matmuls, and does not compute in fp32."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def newton_schulz(
    matrix: Tensor,
    coefficients: tuple[Coefficients, ...],
    dtype: torch.dtype = torch.float32,
    square: Square = square_by_torch,
) -> Tensor:
    """Return the matrix in `dtype` after one Newton-Schulz step per tuple of coefficients."""
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.mT if is_tall else matrix
    x = x.to(torch.promote_types(x.dtype, dtype))  # divide in the wider type, round once
    x = (x / torch.linalg.vector_norm(x, dtype=torch.float32).clamp(min=_EPS)).to(dtype)
    for a, b, c in coefficients:
        x = torch.addmm(x, square(square(x, None), (b, c)), x, beta=a)
    return x.mT if is_tall else x
