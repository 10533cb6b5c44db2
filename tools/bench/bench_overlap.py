"""Times training steps with and without overlap over links that are slowed down on purpose.

    torchrun --standalone --nproc-per-node 4 tools/bench/bench_overlap.py --inter-bandwidth 100mbit

Every rank sleeps, in the communication stream that sends, for as long as its bytes would take on a
link of the given bandwidth. So the figures show what overlap hides, but nothing of a real network.
A sleeping communication stream leaves the cores to the computation, as a network card does.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from paro.arguments.parser import parse_args
from paro.config.run import RunConfig
from paro.distributed.byte_counter import ByteCounter
from paro.distributed.control import Control
from paro.distributed.process_group import distributed
from paro.distributed.user_errors import run_script
from paro.distributed.world import read_world
from paro.errors import UserError
from paro.topology import Link
from paro.training.assembly import build_data, build_sources, build_training, start_state
from paro.training.step import train_step

UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
MODEL = (
    "--distributed-backend gloo --mock-data --tokenizer-type NullTokenizer --vocab-size 4096 "
    "--num-layers 6 --hidden-size 256 --num-attention-heads 4 --ffn-hidden-size 688 "
    "--seq-length 128 --micro-batch-size 1 --num-workers 0 --lr 1e-3 --train-iters 1000"
)


class SlowTraffic(ByteCounter):
    """Sleeps for as long as the counted bytes would take on their link."""

    def __init__(self, seconds_per_byte: dict[Link, float]) -> None:
        super().__init__()
        self._seconds_per_byte = seconds_per_byte

    def add(self, link: Link, num_bytes: int) -> None:
        super().add(link, num_bytes)
        time.sleep(num_bytes * self._seconds_per_byte.get(link, 0.0))


def seconds_per_byte(bandwidth: str) -> float:
    """Seconds per byte of a bandwidth in tc's notation: 100mbit, 8gbit."""
    match = re.fullmatch(r"([0-9.]+)(kbit|mbit|gbit)", bandwidth)
    if match is None:
        raise UserError(f"bandwidth {bandwidth!r} must look like 100mbit or 8gbit")
    return 8.0 / (float(match[1]) * UNITS[match[2]])


def time_steps(flags: list[str], control: Control, options: argparse.Namespace) -> list[float]:
    """Seconds of each step of one run, without the first step."""
    config = RunConfig.from_args(parse_args(flags), control.world)
    slow = {Link.INTER: seconds_per_byte(options.inter_bandwidth)}
    if options.intra_bandwidth:
        slow[Link.INTRA] = seconds_per_byte(options.intra_bandwidth)
    training = build_training(config, control, traffic=SlowTraffic(slow))
    state = start_state(config)
    source = build_sources(config, build_data(config), training, state).train
    seconds = []
    for _ in range(options.steps + 1):
        begin = time.perf_counter()
        train_step(training, state, source)
        seconds.append(time.perf_counter() - begin)
    training.close()
    return seconds[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--inter-bandwidth", default="100mbit", help="of each rank")
    parser.add_argument("--intra-bandwidth", help="of each rank; default: as fast as it goes")
    parser.add_argument("--group-size", type=int, default=2, help="ranks in a group; default 2")
    parser.add_argument("--strategies", default="IIG,NIG,GGG", help="default IIG,NIG,GGG")
    parser.add_argument("--micro-batches", type=int, default=4, help="per step; default 4")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of a run; default 5")
    parser.add_argument("--pairs", type=int, default=3, help="runs of each setting; default 3")
    parser.add_argument("--json", help="write the rows to this file too")
    options = parser.parse_args()
    world = read_world()
    settings = parse_args([*MODEL.split(), "--paro-group-size", str(options.group_size)])
    runtime = RunConfig.from_args(settings, world).runtime
    with distributed(runtime, world) as control:
        rows = [measure(strategy, control, options) for strategy in options.strategies.split(",")]
        if world.rank == 0 and options.json:
            Path(options.json).write_text(json.dumps(rows, indent=1) + "\n")


def measure(strategy: str, control: Control, options: argparse.Namespace) -> dict[str, object]:
    """Medians over interleaved runs of one strategy; also prints them as a line."""
    global_batch = options.micro_batches * control.world.size
    common = f"{MODEL} --paro-strategy {strategy} --paro-group-size {options.group_size}"
    times: dict[int, list[float]] = {0: [], 1: []}
    for _ in range(options.pairs):
        for ahead, seconds in times.items():
            flags = f"{common} --global-batch-size {global_batch} --paro-prefetch-units {ahead}"
            seconds += time_steps(flags.split(), control, options)
            control.barrier()
    without, overlapped = (statistics.median(times[ahead]) for ahead in (0, 1))
    row = {
        "strategy": strategy,
        "inter_bandwidth": options.inter_bandwidth,
        "seconds_without_overlap": without,
        "seconds_with_overlap": overlapped,
        "ratio": without / overlapped,
    }
    if control.world.rank == 0:
        print(
            f"{strategy:8s} without overlap {without:7.3f} s, with {overlapped:7.3f} s a step: "
            f"{without / overlapped:.2f} times as fast",
            flush=True,
        )
    return row


if __name__ == "__main__":
    run_script("bench_overlap.py", main)
