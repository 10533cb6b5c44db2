"""Times saving and loading against the bare disk, and steps during a save; measures memory."""

# torchrun --standalone --nproc-per-node 2 tools/bench_checkpoint.py --folder runs/bench
# OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 1 tools/bench_checkpoint.py \
#     --folder runs/bench --steps 20
#
# The disk's bandwidth is that of as many ranks writing as many bytes to one file each, with fsync,
# and reading them. Nothing is overwritten, and before a read the files' pages are dropped from the
# page cache. The turns interleave, so that with a shared disk neighbours in time are compared.

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

if not __package__:  # run as a script: the repository root is not on sys.path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from paro.arguments.parser import parse_args
from paro.checkpoint.agreement import LockedFolders, ranks_by_folder, with_one_folder
from paro.checkpoint.chunks import chunked_states
from paro.checkpoint.directory import remove_folder
from paro.checkpoint.load import load_checkpoint
from paro.checkpoint.save import write_states
from paro.config.run import configure
from paro.distributed.control import Control
from paro.distributed.process_group import RuntimeConfig, distributed
from paro.distributed.user_errors import run_script
from paro.distributed.world import read_world
from paro.errors import UserError, check_least
from paro.files.object_cache import BLOCKS, ObjectCache
from paro.files.object_store import StorePath, path_of
from paro.layout import make_layout, whole_chunk
from paro.report.log import Log
from paro.spec.states import MOMENTS, PARAM, FlatShard
from paro.topology import make_topology
from paro.training.assembly import build_data, build_sources, build_training
from paro.training.saving import Saver
from paro.training.step import TrainState, train_step
from tools.shared.command_line import RankParser
from tools.shared.meters import MemoryMeter, drop_from_cache
from tools.shared.output import print_json, write_json

BLOCK_BYTES = 2**20
MODEL = (
    "--distributed-backend gloo --mock-data --tokenizer-type NullTokenizer --vocab-size 8192 "
    "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 128 "
    "--micro-batch-size 1 --num-workers 0 --lr 1e-3 --train-iters 10000 --async-save"
)


def make_shards(num_params: int, hidden_size: int, control: Control) -> list[FlatShard]:
    """Make shards with a LLaMA's shapes over all ranks: a unit is 12 square matrices."""
    world = control.world
    topology = make_topology(
        world_size=world.size, group_size=world.size, degrees=(world.size, world.size, world.size)
    )
    per_unit = 12 * hidden_size * hidden_size
    shards = []
    for unit in range(max(1, num_params // per_unit)):
        chunks = [whole_chunk(f"blocks.{unit}.w{i}", (hidden_size, hidden_size)) for i in range(12)]
        layout = make_layout(chunks, world_size=world.size)
        numel = layout.numel // world.size
        start = topology.shard_start(world.rank, world.size, layout.numel)
        for number, state in enumerate((PARAM, *MOMENTS)):
            values = torch.full((numel,), 1.0 + unit + number / 4.0)
            shards.append(
                FlatShard(
                    layout=layout,
                    start=start,
                    values=values,
                    state=state,
                    rank=world.rank,
                    replicas=(world.rank,),
                )
            )
    return shards


def write_plainly(path: Path, num_bytes: int) -> None:
    """Write one file in large blocks and fsync it, or one object: the baseline."""
    block = memoryview(bytearray(os.urandom(BLOCK_BYTES)))
    if isinstance(path, StorePath):
        path.write_bytes((block.tobytes() * (num_bytes // BLOCK_BYTES + 1))[:num_bytes])
        return
    with path.open("wb", buffering=0) as file:
        while num_bytes > 0:
            num_bytes -= file.write(block[:num_bytes])
        os.fsync(file.fileno())


def read_plainly(path: Path) -> None:
    block = bytearray(BLOCK_BYTES)
    if isinstance(path, StorePath):
        path.read_bytes()
        return
    with path.open("rb", buffering=0) as file:
        while file.readinto(block):
            pass


def timed(control: Control, action: Callable[[], object]) -> float:
    """Return seconds until the last rank has finished."""
    control.barrier()
    begin = time.perf_counter()
    action()
    control.barrier()
    return time.perf_counter() - begin


def peak_of(action: Callable[[], object]) -> int:
    """Measure how many bytes of anonymous memory an action adds at its peak."""
    meter = MemoryMeter(torch.device("cpu"))
    meter.start()
    action()
    meter.end_of_warmup()
    return meter.peak() or 0


def bandwidths(args: argparse.Namespace, control: Control) -> dict[str, object]:
    """Compute medians over rounds: GB/s, fractions of the disk's, memory beyond the shards."""
    shards = make_shards(args.params, args.hidden_size, control)
    held = sum(shard.values.nbytes for shard in shards)
    unit = sum(s.values.nbytes for s in shards if s.layout is shards[0].layout)
    total = int(control.sum([float(held)])[0])
    folder, plain = args.folder / "ckpt", args.folder / f"plain_{control.world.rank}"
    seconds: dict[str, list[float]] = {"write": [], "save": [], "read": [], "load": []}
    ranks = with_one_folder(control)

    log = Log(rank=1, world_size=2).log0  # no output

    def save() -> None:
        states = chunked_states(shards, writers=ranks.folder_ranks)
        write_states(folder, 1, states, {}, ranks=ranks, log=log)

    load = partial(load_checkpoint, folder, shards, control, log=log)
    peaks = {"save": peak_of(save), "load": peak_of(load)}  # in a separate round that is not timed
    control.barrier()
    if control.world.rank == 0:
        remove_folder(folder)
    for _ in range(args.rounds):
        seconds["write"].append(timed(control, lambda: write_plainly(plain, held)))
        seconds["save"].append(timed(control, save))
        control.barrier()
        if isinstance(folder, StorePath):
            shutil.rmtree(ObjectCache.folder / BLOCKS, ignore_errors=True)
        else:
            drop_from_cache(path for path in args.folder.rglob("*") if path.is_file())
        seconds["read"].append(timed(control, lambda: read_plainly(plain)))
        seconds["load"].append(timed(control, load))
        control.barrier()
        plain.unlink()
        if control.world.rank == 0:  # so that no timed write also frees the blocks of older files
            remove_folder(folder)
    ratios = {
        action: statistics.median(
            disk / ours for disk, ours in zip(seconds[bare], seconds[action], strict=True)
        )
        for action, bare in (("save", "write"), ("load", "read"))
    }
    return {
        "bytes": total,
        "ranks": control.world.size,
        "gb_per_second": {
            name: total / statistics.median(times) / 1e9 for name, times in seconds.items()
        },
        "part_of_the_disk": ratios,
        "seconds": seconds,
        "bytes_of_a_rank": held,
        "bytes_of_a_unit_and_rank": unit,
        "peak_bytes_beside_the_shards": {
            name: max(control.gather(peak)) for name, peak in peaks.items()
        },
    }


def steps_during_saves(args: argparse.Namespace, control: Control) -> dict[str, object]:
    """Return medians of steps that start during a save and of steps without one, in turns.

    A save may end within a step that started during it: that step still counts.
    """
    folder = args.folder / "ckpt"
    flags = f"{MODEL} --save {folder} --global-batch-size {4 * control.world.size}"
    config = configure(parse_args(flags.split()), control.world)
    training = build_training(config, control)
    state = TrainState.at_start(config.loss_scale)
    source = build_sources(config, build_data(config), training, state).train
    locked = LockedFolders(ranks_by_folder(folder, control, "--folder"), None)
    saver = Saver(config, training, Log(rank=1, world_size=2), locked)  # no output

    def step() -> float:
        return timed(control, lambda: train_step(training, state, source))

    for _ in range(2):
        step()
    with_save: list[float] = []
    without: list[float] = []
    staging: list[float] = []
    while len(with_save) < args.steps:
        training.model.wait_for_updated_params()
        staging.append(timed(control, lambda: saver.save(state)))
        while any(control.gather(saver.background.is_running)):
            with_save.append(step())
        saver.settle()
        without += [step() for _ in range(2)]
        if control.world.rank == 0:  # do not fill the disk
            remove_folder(folder)
        control.barrier()
        if not with_save and len(staging) > args.steps:
            raise UserError("--steps: saves end before a step begins: the disk is too fast")
    training.close()
    during, alone = statistics.median(with_save), statistics.median(without)
    return {
        "ranks": control.world.size,
        "cores": os.cpu_count(),
        "seconds_of_a_step": {"during_a_save": during, "without": alone, "ratio": during / alone},
        "steps_of_a_save": len(with_save) / len(staging),
        "seconds_of_staging": statistics.median(staging[1:] or staging),
        "steps": {"during_a_save": with_save, "without": without},
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = RankParser(description=__doc__)
    add = parser.add_argument
    add(
        "--folder",
        type=path_of,
        required=True,
        help="on the disk or in the store in question (s3://BUCKET/KEY); is emptied",
    )
    add("--params", type=int, default=100_000_000, help="12 bytes of state each")
    add("--hidden-size", type=int, default=1024)
    add("--rounds", type=int, default=5)
    add("--steps", type=int, help="time that many steps during asynchronous saves instead")
    add("--json", type=Path, help="write the figures here")
    args = parser.parse_args(argv)
    counts = ("params", "hidden_size", "rounds", "steps")
    check_least(1, **{name: getattr(args, name) for name in counts})
    world = read_world()
    with distributed(RuntimeConfig(distributed_backend="gloo"), world) as control:
        if world.rank == 0:
            with suppress(FileNotFoundError):
                remove_folder(args.folder)
            args.folder.mkdir(parents=True)
        control.barrier()
        measure = bandwidths if args.steps is None else steps_during_saves
        figures = measure(args, control)
        if world.rank == 0:
            remove_folder(args.folder)
            write_json(args.json, figures)
            print_json(figures, indent=1)


if __name__ == "__main__":
    run_script("bench_checkpoint.py", main)
