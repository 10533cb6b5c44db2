"""Logs which ranks hold each shard of the model states, and checks the placement."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from paro.config.context_parallel import faster_comm_type
from paro.config.elastic import nearest_surviving
from paro.config.run import RunConfig
from paro.errors import count_text
from paro.sharding.shards import UnitShards
from paro.spec.offload import state_bytes
from paro.spec.sharding_spec import ModelStateBytes
from paro.spec.strategy_limits import Survival
from paro.strategy import FLAG, Strategy, effective_letters
from paro.text import align, ranks_text, size_text
from paro.topology import Topology
from paro.training.step import Training


def placement_lines(config: RunConfig, training: Training) -> list[str]:
    """Build the placement table of the log: the ranks that hold each state."""
    context = training.model.context
    strategy, topology = context.strategy, context.topology
    states = state_bytes(training.model.specs, config.device_type)
    ranks = ranks_text(topology.world_size, topology.group_size)
    title = f"> strategy: {strategy.name}, {ranks}, collectives {config.sharding.collective}"
    if config.sharding.materialize == "rotate":
        how = "in place" if config.sharding.rotate_in_place else "out of place"
        title += f", weights rotate over {strategy.params} ranks {how}, norms are replicated"
    same = effective_letters(
        strategy, world_size=topology.world_size, group_size=topology.group_size
    )
    if same is not None and same != strategy.name:
        title += f" (here this is the same as {same})"
    outer, survival = config.sharding.outer, config.sharding.limits.survival(strategy)
    copies = f"> copies: {survival.describe()}"
    if config.sharding.survive:
        copies += f", as --paro-survive {config.sharding.survive} demands"
    return [
        title,
        *_sharing(config),
        *describe_placement(strategy, topology, states),
        *([] if outer is None else [f"> outer steps: {outer.describe()}"]),
        copies,
        *_muon_lines(training, config.muon.muon_num_ns_steps),
        *_after_a_failure(config, survival),
    ]


def describe_placement(
    strategy: Strategy, topology: Topology, states: ModelStateBytes
) -> tuple[str, ...]:
    """Build a table of the states: degree, copies, ranks of each full copy, MB per rank."""
    num_ranks = topology.world_size
    letters = {1: "N", topology.group_size: "I", num_ranks: "G"}
    sizes = {"params": states.params, "grads": states.grads, "optimizer": states.optim}
    rows = [("state", "level", "degree", "copies", "a full copy on ranks", "MB per rank")]
    for (state, size), degree in zip(sizes.items(), strategy.degrees, strict=True):
        copies = str(num_ranks // degree), _copies(degree, num_ranks)
        megabytes = f"{size / 1e6:.2f}"
        rows.append((state, letters.get(degree, "-"), str(degree), *copies, megabytes))
    return tuple(align(rows, left=range(len(rows[0]))).splitlines())


def _copies(degree: int, world_size: int) -> str:
    """Describe the ranks of the first full copies, and of the last: `0-3 4-7 .. 28-31`."""
    copies = [
        f"{first}-{first + degree - 1}" if degree > 1 else str(first)
        for first in range(0, world_size, degree)
    ]
    return " ".join(copies if len(copies) <= 4 else [*copies[:2], "..", copies[-1]])


def _sharing(config: RunConfig) -> Iterator[str]:
    """Yield a line about the context-parallel ranks, and one about a faster type, if any."""
    context, world = config.context, config.world
    size, group_size = context.context_parallel_size, world.group_size
    if size == 1:
        return
    where = "inside groups" if size <= group_size else f"across {size // group_size} groups"
    yield (
        f"> context parallelism: {context.cp_comm_type} over {size} neighbouring ranks {where}, "
        f"{config.data.seq_length // size:,} tokens of a sample on each"
    )
    if config.estimator is not None and config.trained:
        faster = faster_comm_type(context, config.estimator, config.strategy)
        yield from [] if faster is None else [f">   {faster}"]


def _muon_lines(training: Training, num_steps: int) -> Iterator[str]:
    """Yield lines about the owner ranks of Muon's matrices, one for each kind of shard group."""
    strategy, topology = training.model.context.strategy, training.model.context.topology
    for assigned in (muon.rounds for muon in training.optimizer.muons):
        rounds, others = assigned.rounds, strategy.optim // assigned.degree - 1
        num_ranks, how = assigned.num_ranks, "made whole on" if assigned.is_sharded else "dealt to"
        longest, total = assigned.newton_schulz_flops(num_steps)
        blocks = len({matrix.buffer for owned in rounds for matrix in owned.values()})
        each = "group" if assigned.degree == topology.group_size else "such set"
        elsewhere = f", as many of other blocks in {count_text(others, f'other {each}')}"
        elsewhere = elsewhere if others else ""
        yield (
            f"> Muon: {sum(map(len, rounds))} matrices of {count_text(blocks, 'block')} are "
            f"{how} {count_text(num_ranks, 'rank')} in {count_text(len(rounds), 'round')}"
            f"{elsewhere}; Newton-Schulz takes {total * (others + 1):.4e} FLOPs a step, and the "
            f"longest of every round together {longest * num_ranks / total:.2f} times what a rank "
            "has on average"
        )


def _after_a_failure(config: RunConfig, survival: Survival) -> list[str]:
    """Describe in a line how a run with in-memory checkpoints resumes after a failure."""
    if config.in_memory_interval is None:
        return []
    load = config.checkpoint.load
    otherwise = "starts again from nothing" if load is None else f"continues from --load {load}"
    line = "> after a failure of ranks the run recovers from memory"
    if survival.nodes:
        line += f", also without {count_text(survival.nodes, 'node')} and its memory"
        return [f"{line}; without more it {otherwise}"]
    line += f"; after the loss of a node's memory it {otherwise}"
    nearest = nearest_surviving(config.spec, config.sharding.limits._replace(survive=1))
    if config.world.num_nodes > 1 and nearest is not None:
        degrees, more = nearest
        line += f" ({FLAG} {degrees} survives that, for {size_text(more)} more a rank)"
    return [line]


def check_placement(training: Training) -> None:
    """Assert that every rank holds exactly the shards that the strategy assigns to it.

    Collective. Every rank reports the range that it allocated for each state. With sharding degree
    d and n ranks, the ranges must be d pieces that tile the unit, each on n / d ranks.
    """
    everywhere = training.control.gather([_held(unit) for unit in training.model.units])
    for number, unit in enumerate(training.model.units):
        strategy = unit.spec.strategy
        degrees = {"params": strategy.params}
        if unit.trainable:
            degrees |= {"grads": strategy.grads, "optimizer": unit.bucket[0].spec.optim_degree}
        for state, degree in degrees.items():
            size = unit.layout.numel // degree
            ranges = Counter(held[number][state] for held in everywhere if held[number][state][1])
            copies = training.control.world.size // (
                strategy.optim if state == "optimizer" else degree
            )
            expected = {(index * size, size): copies for index in range(degree)}
            assert ranges == expected, f"{state} of {unit.name} lie at {ranges}, asked: {expected}"


def _held(unit: UnitShards) -> dict[str, tuple[int, int]]:
    """Return (first element, length) of this rank's shard of each state."""
    held = {"params": (unit.param_start, unit.param_shard.numel())}
    if unit.trainable:
        held["grads"] = (unit.start_at(unit.spec.strategy.grads), unit.grad_shard.numel())
        held["optimizer"] = (unit.optim_start, unit.optim_grad.numel())
    return held
