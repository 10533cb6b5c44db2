"""Configurations by flags, trainings as the entry script makes them, and their comparison."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import TensorStorageMetadata

from data.batch import Batch
from model.config import LlamaConfig
from model.trainable import Trainable
from model.units import parameter_shapes
from paro.arguments.parser import parse_args
from paro.checkpoint.agreement import LockedFolders, one_process, ranks_by_folder
from paro.checkpoint.chunks import ChunkedState
from paro.checkpoint.directory import common_of, find_checkpoint, latest_iteration
from paro.checkpoint.manifest import read_manifest
from paro.checkpoint.storage import CheckedReader
from paro.config.run import RunConfig, configure, take_early
from paro.distributed.control import Control
from paro.distributed.process_group import device_for
from paro.distributed.world import World
from paro.launch.placement import check_placement
from paro.layout import split_range
from paro.report.log import Log
from paro.sharding.buffers import BufferCounters
from paro.spec.states import PARAM
from paro.training.assembly import build_data, build_sources, build_training
from paro.training.resume import FROM_NOTHING, Resumed
from paro.training.saving import Saver
from paro.training.step import StepResult, Training, TrainState, train_step
from tests.helpers.margins import Margin, margin_of, note


def configured(flags: str | Sequence[str], world: World | None = None) -> RunConfig:
    """A run on the ranks of `world`: by default those of its dry run, or one process."""
    args = parse_args(flags.split() if isinstance(flags, str) else flags)
    return configure(args, world or take_early(args).world)


Heads = tuple[int, int, int]  # of queries, of keys and values, and channels of each


def llama(
    layers: int, hidden: int, ffn: int, *, heads: Heads, length: int, vocab: int, **more: Any
) -> LlamaConfig:
    """Makes a configuration of these sizes."""
    names = (field.name for field in fields(LlamaConfig))
    values = (layers, hidden, ffn, *heads, length, vocab)
    sizes: dict[str, Any] = dict(zip(names, values, strict=False))
    return LlamaConfig(**sizes, **more)


# Sizes that need padding on any world: 5 x 7 heads' worth of channels, an odd feed-forward, an odd
# vocabulary; the norms of the head and the blocks are smaller than the world's alignment.
TINY = (
    "--distributed-backend gloo --mock-data --tokenizer-type NullTokenizer --vocab-size 60 "
    "--make-vocab-size-divisible-by 1 --num-layers 3 --hidden-size 20 --num-attention-heads 2 "
    "--ffn-hidden-size 37 --seq-length 12 --micro-batch-size 1 --num-workers 0 --lr 0.002 "
    "--lr-decay-style constant --weight-decay 0.1 --init-method-std 0.1"
)


def save_run(
    config: RunConfig,
    training: Training,
    resumed: Resumed = FROM_NOTHING,
    *,
    state: TrainState | None = None,
) -> None:
    """Saves a run under --save, by default one that has just started."""
    assert config.checkpoint.save is not None, "nowhere to save"
    folders = ranks_by_folder(Path(config.checkpoint.save), training.control, "--save")
    locked = LockedFolders(folders, None)
    # What a saver loaded it does not save again, and `state` may be the loaded one, trained on.
    resumed = resumed._replace(state=None)
    saver = Saver(config, training, Log(rank=0, world_size=1), locked, resumed=resumed)
    saver.save(state or TrainState.at_start(config.loss_scale))
    saver.settle()


@dataclass(frozen=True, slots=True)
class Trained:
    """The results of a run on one rank."""

    steps: list[StepResult]
    # Whole, fp32: the optimizer's master parameters if it has them, and averages as ema.NAME.
    parameters: dict[str, Tensor]
    model_state_bytes: int
    counters: BufferCounters  # after training
    slice_bytes: int = 0  # of parameters, for the largest part that rotates
    # By parameter: the norm of its change. Of a single process, to which others are compared.
    movements: dict[str, float] = field(default_factory=dict)


def built(
    flags: str | Sequence[str], *, control: Control | None = None, frozen: Collection[str] = ()
) -> tuple[RunConfig, Training]:
    """A run as the entry script builds it, on the ranks of `control`.

    By default on those of the default group, or in a single process.
    """
    world = World()
    if dist.is_initialized():
        world = World(rank=dist.get_rank(), size=dist.get_world_size())
    config = configured(flags, world if control is None else control.world)
    if frozen:
        trained = tuple(name for name in parameter_shapes(config.model) if name not in frozen)
        trainable = Trainable(patterns=trained)
        config = replace(config, trainable=trainable)
    control = copy(control) if control else Control(config.world, device_for(config.runtime, world))
    control.world = config.world  # with the ranks that share samples
    training = build_training(config, control)
    check_placement(training)
    return config, training


def begun(config: RunConfig, training: Training) -> tuple[TrainState, Iterator[Batch]]:
    """The state and the micro-batches of a run that starts."""
    state = TrainState.at_start(config.loss_scale)
    return state, build_sources(config, build_data(config), training, state).train


def train(
    flags: str | Sequence[str],
    *,
    group_size: int | None = None,
    frozen: Collection[str] = (),
    before: Callable[[Training], None] | None = None,
    control: Control | None = None,
) -> Trained:
    """Trains on the ranks of `control`: by default of the default group, or a single process."""
    argv = flags.split() if isinstance(flags, str) else list(flags)
    if group_size is not None:
        argv += ["--paro-group-size", str(group_size)]
    config, training = built(argv, control=control, frozen=frozen)
    if before is not None:
        before(training)
    start = whole_parameters(training) if config.world.size == 1 else {}
    steps = run_steps(config, training)
    counters = training.model.context.counters
    slices = Counter[str]()  # by part of the model: units may hold halves of a slice
    for unit in training.model.units:
        slices[unit.name.partition(" ")[0]] += unit.param_shard.nbytes
    averages = whole_states(training, only="ema")
    parameters = whole_parameters(training) | averages
    start |= {name: start[name.removeprefix("ema.")] for name in averages} if start else {}
    training.close()
    return Trained(
        steps=steps,
        parameters=parameters,
        model_state_bytes=training.optimizer.model_state_bytes(),
        counters=counters,
        slice_bytes=max(slices.values(), default=0),
        movements={name: float((parameters[name] - start[name]).norm()) for name in start},
    )


def run_steps(config: RunConfig, training: Training) -> list[StepResult]:
    state, source = begun(config, training)
    return [train_step(training, state, source) for _ in range(config.train.train_iters)]


def whole_parameters(training: Training) -> dict[str, Tensor]:
    """Every parameter, assembled from all ranks' optimizers."""
    whole = whole_states(training, only=PARAM)
    return {name.removeprefix(f"{PARAM}."): values for name, values in whole.items()}


def whole_states(
    training: Training, *, replicas: bool = False, only: str | None = None
) -> dict[str, Tensor]:
    """Every state by names such as exp_avg.head.weight, assembled from all ranks' optimizers.

    With `replicas` from all copies, which must be equal. All are in fp32.
    """
    training.model.wait_for_updated_params()
    # As arrays, which are sent and received many times as fast as tensors.
    mine = [
        (f"{shard.state}.{part.chunk.name}", part.chunk.shape, chunk.offsets, values)
        for shard in training.optimizer.flat_shards()
        if (shard.rank == shard.replicas[0] or replicas) and only in (None, shard.state)
        for part in shard.layout.chunk_ranges(shard.start, shard.start + shard.values.numel())
        for low, chunk in split_range(part.chunk, part.low, part.high)
        for begin in [part.offset - shard.start + low - part.low]
        for part_of_shard in [shard.values[begin : begin + chunk.numel]]
        for values in [part_of_shard.float().cpu().view(chunk.sizes).numpy()]
    ]
    whole: dict[str, Tensor] = {}
    for pieces in training.control.gather(mine):
        for name, shape, start, values in pieces:
            into = whole.setdefault(name, torch.full(shape, torch.nan)).numpy()
            corner = tuple(slice(a, a + b) for a, b in zip(start, values.shape, strict=True))
            there = into[corner]
            assert (np.isnan(there) | (there == values)).all(), f"replicas of {name} differ"
            into[corner] = values
    return whole


def load_parameters(root: Path, iteration: int | None = None) -> dict[str, Tensor]:
    """Every parameter whole, in fp32 on the CPU, read by this process only."""
    with one_process().raise_on_all_ranks(f"--load {root}"):
        directory = find_checkpoint(root, iteration)
        reader = CheckedReader(read_manifest(directory))
        tensors = {
            name: torch.empty(state.size, dtype=torch.float32)
            for name, state in reader.metadata.state_dict_metadata.items()
            if isinstance(state, TensorStorageMetadata) and name.startswith(f"{PARAM}.")
        }
        states = {
            name: ChunkedState(shape=tensor.shape, chunks={(0,) * tensor.dim(): tensor})
            for name, tensor in tensors.items()
        }
        reader.read(reader.plan(states.items()))
    return {name.removeprefix(f"{PARAM}."): tensor for name, tensor in tensors.items()}


def read_common(root: Path, iteration: int | None = None) -> dict[str, Any] | None:
    """Return the contents of common.json; None if nothing was saved."""
    if iteration is None and latest_iteration(root) is None:
        return None
    return common_of(read_manifest(find_checkpoint(root, iteration)))


# [Note: the scale of a difference]
# Sums in another order change a gradient by less than a millionth of its size, and how far a
# parameter moves by as much. That distance is short compared with the parameter, whose own size
# would hide a wrong step: a difference is measured against the distance, and against the rounding
# of the parameter. AdamW divides a gradient that is nothing but rounding by its own size and takes
# a full step; trainings that are compared have an epsilon above such gradients.
ADAM_EPS = "--adam-eps 1e-4"  # the gradients of the models that are compared are around 1e-3


@dataclass(frozen=True, slots=True)
class Allowed:
    """How much two trainings that compute the same may differ."""

    movement: float  # as a share of the distance that a parameter moves, in norm
    scalar: float  # as a share of a loss or gradient norm


FP32 = Allowed(movement=1e-4, scalar=5e-6)
BF16 = Allowed(movement=0.06, scalar=0.005)
BF16_MUON = Allowed(movement=0.3, scalar=0.01)  # small singular values grow several hundredfold


def margin_between(trained: Trained, reference: Trained, allowed: Allowed, label: str) -> Margin:
    """Returns the largest difference of losses, norms and parameters, in what is allowed."""
    margins = []
    for number, (step, wanted) in enumerate(zip(trained.steps, reference.steps, strict=True)):
        for name in ("loss", "grad_norm"):
            value, want = getattr(step, name), getattr(wanted, name)
            limit = allowed.scalar * abs(want)
            margins.append(margin_of(value, want, limit, f"{label}: {name} of step {number}"))
    assert trained.parameters.keys() == reference.parameters.keys()
    rounding = torch.finfo(torch.float32).eps * len(reference.steps)
    for name, value in reference.parameters.items():
        limit = allowed.movement * reference.movements[name] + rounding * float(value.norm())
        difference = float((trained.parameters[name] - value).norm())
        margins.append(margin_of(difference, 0.0, limit, f"{label}: {name}"))
    return max(margins)


def assert_same(trained: Trained, reference: Trained, label: str, allowed: Allowed = FP32) -> None:
    """Fails if losses, norms or parameters of two trainings differ by more than is allowed."""
    note(margin_between(trained, reference, allowed, label))
