"""The request to the planner, a candidate, and the search space of candidates."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product

from model.config import FP8_MULTIPLE, LlamaConfig, RecomputeConfig
from model.trainable import Trainable
from paro.errors import check_least, check_multiple
from paro.machine.collective_time import algorithms_of
from paro.machine.machine import Machine
from paro.planning.computing import device_of
from paro.precision import PrecisionConfig
from paro.quantization.formats import FULL_BITS
from paro.spec.context_layout import ContextLayout
from paro.spec.run_spec import Materialize, RunSettings
from paro.spec.strategy_limits import MUON_CONFLICT, StrategyLimits
from paro.strategy import Strategy, effective_letters, parse_strategy, strategy_of
from paro.text import listed
from paro.topology import divisors

MEMORY_MARGIN = 0.03  # share of a device's memory to leave free, since searches fill the rest
FEWEST_BITS = 4  # the bit width to choose; 8 bits quantize no faster, and send twice the bytes


@dataclass(frozen=True, kw_only=True)
class PlanRequest(RunSettings):
    """A request to the planner: the model, machine and batch to plan for, with the other flags."""

    machine: Machine  # the cluster, with the world size of the run
    global_batch_size: int  # samples of the step that is timed
    largest_batch_size: int = 0  # samples of the largest step; 0: as many as are timed
    trainable: Trainable = field(default_factory=Trainable)
    memory_bytes: int | None = None  # bytes per device; None: as the machine says
    memory_margin: float = 0.0  # share of the device's memory that a choice leaves free
    ranks_per_node: int | None = None  # None: each group of the machine is a node
    survive: int = 0  # number of nodes that may be lost at once without losing any state
    chooses_bits: bool = False  # whether to choose 16 bits or `FEWEST_BITS` between groups

    def __post_init__(self) -> None:
        device_of(self.machine)
        self.limits.check_nodes()
        self.micro_batches(self.micro_batch_size)

    @property
    def world_size(self) -> int:
        return self.machine.world_size

    @property
    def data_parallel_size(self) -> int:
        """The number of context-parallel groups, each with samples of its own."""
        return self.world_size // self.context.size

    @cached_property
    def trained(self) -> frozenset[str]:
        """The names of the parameters that train."""
        return self.trainable.names(self.model)

    @property
    def device_bytes(self) -> int:
        """The bytes of a rank's device, the limit for the total of a `DeviceMemory`."""
        return self.memory_bytes or device_of(self.machine).memory_bytes

    @property
    def choice_bytes(self) -> int:
        """The bytes of a device that a choice may take: all but the margin."""
        return int(self.device_bytes * (1 - self.memory_margin))

    @property
    def choice_text(self) -> str:
        """The bytes of a device that a choice may take, in words."""
        percent = 100 * self.memory_margin
        less = f", less a margin of {percent:g}%" if percent else ""
        return f"{self.device_bytes / 1e9:g} GB of a device{less}"

    def micro_batches(self, size: int, context: ContextLayout | None = None) -> int:
        """Count micro-batches of a size per rank and step; `UserError` if it does not divide.

        With `context` None the request's context-parallel layout counts.
        """
        check_least(1, micro_batch_size=size)
        batch, num_ranks = self.global_batch_size, self.world_size // (context or self.context).size
        check_multiple("--global-batch-size", batch, size, num_ranks)
        return batch // (size * num_ranks)

    def strategy(self, text: str) -> Strategy:
        return parse_strategy(text, world_size=self.world_size, group_size=self.group_size)

    def candidate(self, strategy: Strategy) -> Candidate:
        """Make a candidate of a strategy, with the other flags as given."""
        return Candidate(
            strategy=strategy,
            micro_batch_size=self.micro_batch_size,
            context=self.context,
            collective=self.collective,
            recompute=self.model.recompute,
            materialize=self.materialize,
        )

    def as_given(self, strategies: tuple[Strategy, ...] | None = None) -> SearchSpace:
        """Make a search space of some strategies, or of all, with other choices as requested."""
        return SearchSpace(
            strategies=strategies,
            micro_batch_sizes=(self.micro_batch_size,),
            collectives=(self.collective,),
            recomputes=(self.model.recompute,),
        )

    @property
    def limits(self) -> StrategyLimits:
        """The limits of strategies on the ranks of the request."""
        node = self.ranks_per_node or self.machine.group_size
        return StrategyLimits(self.world_size, self.group_size, node, self.survive, self.outer)

    def infeasible_reason(self, strategy: Strategy, materialize: Materialize) -> str | None:
        """Say why a run cannot have a strategy and `materialize` parameters so; None if it can."""
        rotates = materialize.rotates
        if rotates and self.precision.optimizer == "muon":
            return MUON_CONFLICT
        return self.limits.infeasible_reason(strategy, self.model if rotates else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A point of the search space: the choices of one possible run."""

    strategy: Strategy
    micro_batch_size: int
    context: ContextLayout
    collective: str
    recompute: RecomputeConfig | None
    materialize: Materialize = Materialize.GATHER
    letters: str | None = None  # letters of the strategy, if they hold at another group size
    inter_bits: int | None = None  # bit width between groups; None: as requested

    @property
    def name(self) -> str:
        """The name of the strategy, with rotation and the chosen bit width if any."""
        suffix = f" {self.materialize.value}" if self.materialize.rotates else ""
        if self.inter_bits not in (None, FULL_BITS):
            suffix += f" {self.inter_bits}-bit"
        return self.strategy.name + suffix

    def precision(self, request: PlanRequest) -> PrecisionConfig:
        """Return the precision of the request with the chosen bit width."""
        precision = request.precision
        return precision if self.inter_bits is None else precision.with_inter_bits(self.inter_bits)

    def describe(self) -> str:
        """Write the values of the flags in one line."""
        recompute = recompute_text(self.recompute)
        name = self.name + (f" ({self.letters})" if self.letters else "")
        return f"{name}, micro-batches of {self.micro_batch_size}, {self.collective}, {recompute}"


def first_blocks(count: int, model: LlamaConfig) -> RecomputeConfig:
    """Make the recomputation of the first `count` blocks, with the outputs that the model saves."""
    every = RecomputeConfig(granularity="full", keeps_core=model.keeps_core)
    return every if count == model.num_layers else replace(every, method="block", num_layers=count)


def least_recomputation(
    model: LlamaConfig, fits: Callable[[RecomputeConfig], bool]
) -> RecomputeConfig | None:
    """Recompute as few of the first blocks as fit, at least as many as now; None if none fits."""
    recompute, fewest = model.recompute, 1
    if recompute is not None and recompute.granularity == "full":
        if recompute.method == "uniform":
            return None
        fewest = recompute.num_layers + 1
    counts = range(fewest, model.num_layers + 1)  # in decreasing order of memory
    index = bisect_left(counts, True, key=lambda count: fits(first_blocks(count, model)))
    return first_blocks(counts[index], model) if index < len(counts) else None


def recompute_flags(recompute: RecomputeConfig) -> str:
    """Write a recomputation as flags."""
    text = f"--recompute-granularity {recompute.granularity}"
    text += " --paro-recompute-keep core_attn" * recompute.keeps_core
    if (recompute.method, recompute.num_layers) != ("uniform", 1):
        text += f" --recompute-method {recompute.method}"
        text += f" --recompute-num-layers {recompute.num_layers}"
    return text


def recompute_text(recompute: RecomputeConfig | None) -> str:
    """Write in words which blocks are recomputed."""
    if recompute is None:
        return "no recomputation"
    but = " but for attention" * recompute.keeps_core
    if recompute.method == "block":
        return f"recomputation of the first {recompute.num_layers} blocks{but}"
    together = f" in groups of {recompute.num_layers}" if recompute.num_layers > 1 else ""
    return f"{recompute.granularity} recomputation{together}{but}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSpace:
    """The choices of a search; a field that is None allows every possibility."""

    strategies: tuple[Strategy, ...] | None = None
    micro_batch_sizes: tuple[int, ...] | None = None
    # Layouts, each with a micro-batch size; None: as given.
    contexts: tuple[tuple[ContextLayout, int], ...] | None = None
    collectives: tuple[str, ...] | None = None
    recomputes: tuple[RecomputeConfig | None, ...] | None = None

    def describe(self) -> str:
        """Name the choices in which candidates differ; the other choices are as given."""
        choices = {
            "strategies": self.strategies,
            "micro-batch sizes": self.micro_batch_sizes,
            "collectives": self.collectives,
            "recomputation (none, selective, as few blocks as fit, all)": self.recomputes,
        }
        return listed([n for n, values in choices.items() if values is None or len(values) > 1])


def all_candidates(request: PlanRequest, search_space: SearchSpace) -> Iterator[Candidate]:
    """Yield every feasible combination in the search space."""
    strategies = search_space.strategies or tuple(
        legal_strategies(request.world_size, request.group_size, request.machine.group_size)
    )
    contexts = search_space.contexts or [
        (request.context, size)
        for size in search_space.micro_batch_sizes or micro_batch_sizes(request)
    ]
    machine = request.machine
    collectives = search_space.collectives or algorithms_of(machine, by_nccl=machine.is_of_gpus)
    recomputes = search_space.recomputes or (
        None,
        RecomputeConfig(granularity="selective"),
        RecomputeConfig(granularity="full", keeps_core=request.model.keeps_core),
    )
    way = request.materialize
    possible = [s for s in strategies if request.infeasible_reason(s, way) is None]
    inter_bits = (FULL_BITS, FEWEST_BITS) if request.chooses_bits else (None,)
    for strategy, (context, size), collective, recompute, bits in product(
        possible, contexts, collectives, recomputes, inter_bits
    ):
        yield Candidate(
            strategy=strategy,
            micro_batch_size=size,
            context=context,
            collective=collective,
            recompute=recompute,
            materialize=way,
            letters=_letters_elsewhere(strategy, request.world_size),
            inter_bits=bits,
        )


def _letters_elsewhere(strategy: Strategy, world_size: int) -> str | None:
    """Return a strategy's letters and the group size for which they hold; None without any."""
    sizes = {*strategy.degrees} - {1, world_size}
    if "," not in strategy.name or len(sizes) != 1:
        return None
    size = sizes.pop()
    letters = effective_letters(strategy, world_size=world_size, group_size=size)
    return f"{letters} in groups of {size}"


def legal_strategies(
    world_size: int, group_size: int, links: int | None = None
) -> Iterator[Strategy]:
    """Yield every legal triple of degrees, as letters in groups of `group_size` where possible.

    Every degree divides, or is a multiple of, `group_size` and `links` (the ranks that fast links
    join). Any group size is a degree, so the triples include letters of other group sizes.
    """

    def nests(degree: int, size: int) -> bool:
        return degree % size == 0 or size % degree == 0

    degrees = [
        degree
        for degree in divisors(world_size)
        if nests(degree, group_size) and nests(degree, links or degree)
    ]
    for params, grads, optim in product(degrees, repeat=3):
        if nests(params, grads) and optim % params == optim % grads == 0:
            yield strategy_of(params, grads, optim, world_size=world_size, group_size=group_size)


def micro_batch_sizes(request: PlanRequest) -> tuple[int, ...]:
    """Return the sizes that divide a data-parallel rank's share of a batch and that fp8 allows."""
    per_rank = request.global_batch_size // request.data_parallel_size
    tokens = request.seq_length // request.context.size
    multiple = 1 if request.model.fp8_format is None else FP8_MULTIPLE
    return tuple(size for size in divisors(per_rank) if size * tokens % multiple == 0)
