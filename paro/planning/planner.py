"""The fastest way to train that fits: every legal setting weighed, exactly, by enumeration."""

# AMSP's problem (arXiv 2311.00257v2, section IV): the least step time under a memory limit over the
# degrees of params, grads and optimizer state, here with micro-batch sizes, collectives and
# recomputation too. Its sets are small enough to enumerate. What has to be simulated is found by
# bounds: settings come in the order of memory, and one that cannot be faster than what needs less
# memory is left out (StepCosts.least_seconds never exceeds the simulation). What is left is the
# Pareto front of memory and time, and so the best under any limit.

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise, product

from model.config import LlamaConfig, RecomputeConfig, flops_per_token
from paro.planning.collective_time import CollectiveTimes
from paro.planning.computing import Computing
from paro.planning.cost_model import UnitSize, traffic_per_step
from paro.planning.llama import MicroBatch, activations_of
from paro.planning.machine import Machine
from paro.planning.moves import Moves
from paro.planning.step_costs import Overlap, StepCosts, device_of
from paro.planning.timeline import Timeline, simulate
from paro.planning.trainable import Trainable
from paro.planning.working_memory import Moment, PeakMemory
from paro.precision import BYTES_OF, PrecisionConfig
from paro.strategy import Strategy, effective_letters, legal_letters, parse_strategy
from paro.traffic import Sent

RESOLUTION = 0.002  # of a step's time
FRONT_STEP = 0.02
_FRONT_LIMIT = 4  # times the memory that there is: beyond that nobody looks


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What may be chosen."""

    strategy: Strategy
    micro_batch_size: int
    collective: str
    recompute: RecomputeConfig | None
    letters: str | None = None  # of degrees that have letters in groups of another size

    def describe(self) -> str:
        """One line, in the words of the flags."""
        recompute = "no recomputation"
        if self.recompute is not None:
            recompute = f"{self.recompute.granularity} recomputation"
        name = self.strategy.name + (f" ({self.letters})" if self.letters else "")
        return f"{name}, micro-batches of {self.micro_batch_size}, {self.collective}, {recompute}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What a setting needs and takes."""

    setting: Setting
    num_micro_batches: int
    fits: bool
    memory: Moment
    memory_bytes: int  # Estimator.needed_bytes
    timeline: Timeline
    tokens_per_second: float
    mfu: float
    sent: Sent

    @property
    def seconds(self) -> float:
        return self.timeline.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Freedom:
    """What a search may choose from; None: every possibility."""

    strategies: tuple[Strategy, ...] | None = None
    micro_batch_sizes: tuple[int, ...] | None = None
    collectives: tuple[str, ...] | None = None
    recomputes: tuple[RecomputeConfig | None, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a search has found; every list is fastest first."""

    best: Estimate | None  # the fastest that fits
    runner_up: Estimate | None  # the fastest that fits with another strategy
    front: tuple[Estimate, ...]  # none of them needs less memory and is faster; fits or not
    least: Estimate  # that needs least memory of all
    num_settings: int
    num_simulated: int
    limit_bytes: int


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is to be trained, and where; `settings` and the rest of the flags as given."""

    model: LlamaConfig
    machine: Machine  # of the world that trains
    group_size: int  # what I means in letters
    seq_length: int
    micro_batch_size: int
    global_batch_size: int
    precision: PrecisionConfig
    prefetch_units: int = 1
    collective: str = "native"
    trainable: Trainable = field(default_factory=Trainable)
    overlap: Overlap | None = None
    memory_bytes: int | None = None  # of a device, instead of the machine's
    device_type: str = "cuda"

    def __post_init__(self) -> None:
        device_of(self.machine)
        self.micro_batches(self.micro_batch_size)

    @property
    def world_size(self) -> int:
        return self.machine.world_size

    @property
    def limit_bytes(self) -> int:
        device = device_of(self.machine)
        return device.memory_bytes if self.memory_bytes is None else self.memory_bytes

    def micro_batches(self, size: int) -> int:
        """How many of them a rank takes in a step."""
        at_once = size * self.world_size
        if size < 1:
            raise ValueError(f"--micro-batch-size {size} must be at least 1")
        if self.global_batch_size < at_once or self.global_batch_size % at_once:
            raise ValueError(
                f"--global-batch-size {self.global_batch_size} is no multiple of "
                f"--micro-batch-size {size} times {self.world_size} ranks: choose a multiple of "
                f"{at_once}"
            )
        return self.global_batch_size // at_once

    def strategy(self, text: str) -> Strategy:
        return parse_strategy(text, world_size=self.world_size, group_size=self.group_size)

    def setting(self, strategy: Strategy) -> Setting:
        """A strategy at the flags as given."""
        return Setting(
            strategy=strategy,
            micro_batch_size=self.micro_batch_size,
            collective=self.collective,
            recompute=self.model.recompute,
        )


class Estimator:
    """Estimates settings of one case; what they have in common is computed once."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self._moves: dict[tuple[object, ...], Moves] = {}
        self._computing: dict[tuple[object, ...], Computing] = {}
        self._memory: dict[tuple[object, ...], PeakMemory] = {}

    @cached_property
    def units(self) -> tuple[UnitSize, ...]:
        case = self.case
        return case.trainable.units(case.model, world_size=case.world_size)

    def costs(self, setting: Setting) -> StepCosts:
        case = self.case
        key = (setting.strategy.degrees, setting.collective)
        if key not in self._moves:
            self._moves[key] = self.moves(setting)
        return StepCosts(
            computing=self._computing_of(setting),
            moves=self._moves[key],
            num_micro_batches=case.micro_batches(setting.micro_batch_size),
            prefetch_units=case.prefetch_units,
            overlap=case.overlap,
        )

    def moves(self, setting: Setting) -> Moves:
        """What a setting sends, as this project's engine does; another one's may stand here."""
        return Moves(
            units=self.units,
            strategy=setting.strategy,
            precision=self.case.precision,
            times=CollectiveTimes(self.case.machine, setting.collective),
        )

    def memory(self, setting: Setting) -> Moment:
        """The moment of a step at which a rank needs most."""
        key = (setting.micro_batch_size, setting.recompute)
        if key not in self._memory:
            computing = self._computing_of(setting)
            self._memory[key] = PeakMemory(
                self.units,
                self.case.precision,
                activations_of(computing.model, computing.batch),
                prefetch_units=self.case.prefetch_units,
                num_micro_batches=self.case.micro_batches(setting.micro_batch_size),
            )
        return self._memory[key].of(setting.strategy, self.costs(setting).moves.topology)

    def needed_bytes(self, setting: Setting) -> int:
        """Of a rank's device: what `memory` adds up, and what the device reserves."""
        return self.memory(setting).total + device_of(self.case.machine).reserved_bytes

    def estimate(self, setting: Setting, *, record: bool = False) -> Estimate:
        """A setting's memory, time and traffic; `record` keeps what every stream does."""
        case, costs = self.case, self.costs(setting)
        memory = self.memory(setting)
        total = self.needed_bytes(setting)
        timeline = simulate(costs, record=record)
        tokens = case.global_batch_size * case.seq_length
        flops = flops_per_token(case.model, case.seq_length, causal=False) * tokens
        return Estimate(
            setting=setting,
            num_micro_batches=costs.num_micro_batches,
            fits=total <= case.limit_bytes,
            memory=memory,
            memory_bytes=total,
            timeline=timeline,
            tokens_per_second=tokens / timeline.seconds,
            mfu=flops / timeline.seconds / case.world_size / costs.device.peak_flops,
            sent=traffic_per_step(
                setting.strategy,
                costs.moves.topology,
                self.units,
                case.precision,
                costs.num_micro_batches,
            ),
        )

    def _computing_of(self, setting: Setting) -> Computing:
        key = (setting.micro_batch_size, setting.recompute)
        if key not in self._computing:
            case = self.case
            self._computing[key] = Computing(
                model=replace(case.model, recompute=setting.recompute),
                units=self.units,
                batch=MicroBatch(
                    size=setting.micro_batch_size,
                    seq_length=case.seq_length,
                    compute_bytes=BYTES_OF[case.precision.compute],
                    device_type=case.device_type,
                ),
                device=device_of(case.machine),
            )
        return self._computing[key]


def letter_rows(case: Case) -> tuple[Estimate, ...]:
    """Every legal letter strategy at the flags as given, fastest first."""
    estimator = Estimator(case)
    rows = [estimator.estimate(case.setting(case.strategy(name))) for name in legal_letters()]
    return tuple(sorted(rows, key=lambda row: row.seconds))


def plan(case: Case, freedom: Freedom | None = None, *, estimator: Estimator | None = None) -> Plan:
    """Solves the case exactly over all that may be chosen."""
    freedom = freedom or Freedom()
    estimator = estimator or Estimator(case)
    settings = list(_settings(case, freedom))
    sizes = {id(setting): estimator.memory(setting).total for setting in settings}
    least = {id(s): estimator.costs(s).least_seconds() for s in settings}
    limit = case.limit_bytes - device_of(case.machine).reserved_bytes
    done: dict[int, Estimate] = {}

    def estimate(setting: Setting) -> Estimate:
        if id(setting) not in done:
            done[id(setting)] = estimator.estimate(setting)
        return done[id(setting)]

    def fastest(candidates: Sequence[Setting]) -> Estimate | None:
        found: Estimate | None = None
        for setting in sorted(candidates, key=lambda s: (least[id(s)], sizes[id(s)])):
            if found is not None and least[id(setting)] >= found.seconds * (1 - RESOLUTION):
                break
            own = estimate(setting)
            if found is None or own.seconds < found.seconds:
                found = own
        return found and _simplest(found, [done[id(s)] for s in candidates if id(s) in done])

    fitting = [setting for setting in settings if sizes[id(setting)] <= limit]
    best = fastest(fitting)
    others = [s for s in fitting if best and s.strategy.degrees != best.setting.strategy.degrees]
    runner_up = fastest(others)
    smallest = min(settings, key=lambda s: (sizes[id(s)], least[id(s)]))
    within = [s for s in settings if sizes[id(s)] <= max(_FRONT_LIMIT * limit, sizes[id(smallest)])]
    front = _front(within, estimate, lambda s: sizes[id(s)], lambda s: least[id(s)])
    return Plan(
        best=best,
        runner_up=runner_up,
        front=front,
        least=estimate(smallest),
        num_settings=len(settings),
        num_simulated=len(done),
        limit_bytes=case.limit_bytes,
    )


def _front(
    settings: Sequence[Setting],
    estimate: Callable[[Setting], Estimate],
    size: Callable[[Setting], int],
    least: Callable[[Setting], float],
) -> tuple[Estimate, ...]:
    """What is faster than all that needs as little memory; fastest first."""
    found: list[Estimate] = []
    fastest = float("inf")
    for setting in sorted(settings, key=lambda s: (size(s), least(s))):
        if least(setting) >= fastest * (1 - FRONT_STEP):
            continue
        own = estimate(setting)
        if own.seconds < fastest * (1 - FRONT_STEP):
            fastest = own.seconds
            found.append(own)
    return tuple(reversed(found))


def _simplest(fastest: Estimate, known: Sequence[Estimate]) -> Estimate:
    """Of what is as fast, as far as that can be told, what sends least between groups."""
    alike = [e for e in known if e.seconds * (1 - RESOLUTION) <= fastest.seconds]
    return min(alike, key=lambda e: (e.sent.inter, e.memory_bytes, e.seconds))


def _settings(case: Case, freedom: Freedom) -> Iterator[Setting]:
    strategies = freedom.strategies or tuple(
        legal_strategies(case.world_size, case.group_size, case.machine.group_size)
    )
    sizes = freedom.micro_batch_sizes or micro_batch_sizes(case)
    collectives = freedom.collectives or collectives_of(case.machine)
    recomputes = freedom.recomputes or (
        None,
        RecomputeConfig(granularity="selective"),
        RecomputeConfig(granularity="full"),
    )
    for strategy, size, collective, recompute in product(
        strategies, sizes, collectives, recomputes
    ):
        yield Setting(
            strategy=strategy,
            micro_batch_size=size,
            collective=collective,
            recompute=recompute,
            letters=_letters_elsewhere(strategy, case.world_size),
        )


def _letters_elsewhere(strategy: Strategy, world_size: int) -> str | None:
    """The letters of a strategy of degrees, and the size of the groups in which they hold."""
    sizes = {*strategy.degrees} - {1, world_size}
    if "," not in strategy.name or len(sizes) != 1:
        return None
    size = sizes.pop()
    letters = effective_letters(strategy, world_size=world_size, group_size=size)
    return f"{letters} in groups of {size}"


def legal_strategies(
    world_size: int, group_size: int, links: int | None = None
) -> Iterator[Strategy]:
    """Every legal triple of degrees, under letters where groups of `group_size` give it some.

    Degrees nest with these groups, and with the `links` ranks that fast links join. A group size
    is a degree: letters in other groups are among the triples.
    """

    def nests(degree: int, size: int) -> bool:
        return degree % size == 0 or size % degree == 0

    degrees = [
        degree
        for degree in range(1, world_size + 1)
        if world_size % degree == 0 and nests(degree, group_size) and nests(degree, links or degree)
    ]
    for params, grads, optim in product(degrees, repeat=3):
        chain = sorted({params, grads, optim})
        nested = all(b % a == 0 for a, b in pairwise(chain))
        if not nested or optim < max(params, grads):
            continue
        text = f"{params},{grads},{optim}"
        strategy = Strategy(name=text, params=params, grads=grads, optim=optim)
        letters = effective_letters(strategy, world_size=world_size, group_size=group_size)
        yield replace(strategy, name=letters or text)


def micro_batch_sizes(case: Case) -> tuple[int, ...]:
    """Powers of two, and the one that was given, which divide a rank's part of the batch."""
    per_rank = case.global_batch_size // case.world_size
    powers = (1 << exponent for exponent in range(per_rank.bit_length()))
    return tuple(sorted({case.micro_batch_size, *(p for p in powers if per_rank % p == 0)}))


def collectives_of(machine: Machine) -> tuple[str, ...]:
    """Those that were measured; else the backend's and the fastest of ours."""
    names = dict.fromkeys(row.algorithm for row in machine.measured)
    return tuple(names) or ("native", "ho-ring")
