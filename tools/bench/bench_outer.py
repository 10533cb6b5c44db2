"""Times steps of training with outer steps beside synchronous ones, over slow links."""

# A step of groups that train alone has no message between nodes: the steps before the first round
# are such steps. A round and the steps up to the next one, those under which its messages travel
# included, are compared with them, and with the steps of synchronous training. Contenders take
# turns in an emulated cluster.

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

if not __package__:  # run as a script: the repository root is not on sys.path
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from paro.arguments.parser import parse_args
from paro.config.run import configure
from paro.distributed.user_errors import run_script
from paro.distributed.world import World
from paro.errors import RunError, check_least
from paro.launch.prediction import planned_step
from paro.report.log import print_line
from tools.bench.planning.rounds import NODES, RANKS_PER_NODE
from tools.bench.shared.turns import ROOT, order_of_round, rows_in
from tools.bench.study_plan import SHAPES
from tools.cluster.launch import run
from tools.cluster.lifecycle import cluster
from tools.cluster.network import check_system
from tools.cluster.spec import ClusterSpec
from tools.cluster.state import Cluster
from tools.shared.command_line import Parser
from tools.shared.output import markdown_table, write_json

DESCRIPTION = """\
Compares training with outer steps (--paro-outer-steps) with synchronous training of 6.8M parameters
in an emulated cluster of 2 nodes x 4 ranks. Needs root, iproute2, and cores with instructions for
bf16: on others computing takes so long that it hides what links cost. There, --fp32 computes in
fp32; synchronous training then sends gradients and parameters in 4 bytes each instead of 2.

  python tools/bench/bench_outer.py --folder runs/outer-speed --inter 10mbit --micro-batches 4
  python tools/bench/bench_outer.py --folder runs/outer-speed-shared --inter 10mbit --nic shared \\
      --micro-batches 1 --delay 14
"""
STEPS = 16  # of a group between two rounds
ALONE = "steps of a group alone"
MODEL = f"{SHAPES['deep']} --make-vocab-size-divisible-by 1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A way to train, by its flags; `delay` is that of outer steps, None without."""

    name: str
    flags: str
    delay: int | None = None

    @property
    def num_steps(self) -> int:
        """The steps of a run: two rounds, or enough for a median."""
        return 6 if self.delay is None else 2 * STEPS

    def words(self, args: argparse.Namespace) -> list[str]:
        """Return the arguments of pretrain_llama.py."""
        size = args.micro_batches * NODES * RANKS_PER_NODE
        own = f"{self.flags} --paro-group-size {RANKS_PER_NODE} --train-iters {self.num_steps}"
        if self.delay is not None:
            own += f" --paro-outer-steps {STEPS} --paro-outer-warmup 0"
            own += f" --paro-outer-delay {self.delay}"
        common = (
            "--distributed-backend gloo --mock-data --tokenizer-type NullTokenizer --lr 1e-5 "
            "--micro-batch-size 1 --eval-iters 0 --log-interval 1 --num-workers 0 --peak-tflops 1 "
            f"--global-batch-size {size}{'' if args.fp32 else ' --bf16 --grad-reduce-in-bf16'}"
        )
        if args.machine_file is not None:
            own += f" --paro-machine {args.machine_file.absolute()}"
        return f"{MODEL} {common} {own}".split()


def contenders(delay: int) -> list[Contender]:
    """Return synchronous training in 16 and 4 bits, and outer steps that wait or do not."""
    bits = "--paro-inter-grad-bits 4 --paro-inter-param-bits 4"
    return [
        Contender(name="IIG", flags="--paro-strategy IIG"),
        Contender(name="IIG, 4 bits", flags=f"--paro-strategy IIG {bits}"),
        Contender(name="outer steps", flags="--paro-strategy III", delay=0),
        Contender(name=f"outer steps, delay {delay}", flags="--paro-strategy III", delay=delay),
    ]


@dataclass(frozen=True, slots=True)
class Timed:
    """Seconds of a step: the mean over a round, and that of steps without messages, if any."""

    mean: float
    alone: float | None


def timed(contender: Contender, rows: Sequence[dict[str, Any]]) -> Timed:
    """Return the seconds of steps from the metrics of a run; the first step warms up."""
    times = {row["iteration"]: row["iteration_time_ms"] / 1000.0 for row in rows}
    if times.keys() != set(range(1, contender.num_steps + 1)):
        raise RunError(f"{contender.name}: its metrics lack iterations")
    if contender.delay is None:
        return Timed(median(times[i] for i in times if i > 2), None)
    # From the first round to before the second: whatever a round costs comes once.
    period = [times[i] for i in range(STEPS, 2 * STEPS)]
    return Timed(sum(period) / STEPS, median(times[i] for i in range(2, STEPS)))


def train(made: Cluster, contender: Contender, words: Sequence[str], folder: Path) -> Timed:
    """Train once on all ranks."""
    metrics = folder / "metrics.jsonl"
    metrics.unlink(missing_ok=True)
    status = run(made, [str(ROOT / "pretrain_llama.py"), *words, "--metrics-file", str(metrics)])
    if status != 0:
        raise RunError(f"{contender.name} ended with status {status}")
    return timed(contender, [*rows_in(metrics)])


def predicted(words: Sequence[str]) -> float | None:
    """Return the planner's seconds of a step, the mean of a round's; None without a machine."""
    size = NODES * RANKS_PER_NODE
    config = configure(parse_args(words), World(size=size, ranks_per_node=RANKS_PER_NODE))
    planned = planned_step(config)
    return None if planned is None else planned.seconds["step"]


def table(turns: dict[str, list[Timed]], planned: dict[str, float | None]) -> str:
    """Format seconds of a step, predictions, and the ratios of neighbours, as Markdown."""
    heads = f"training | s/step | planned | of {ALONE} | of IIG | of IIG, 4 bits | exposed"
    return "\n".join(markdown_table(heads, rows_of(turns, planned)))


def rows_of(turns: dict[str, list[Timed]], planned: dict[str, float | None]) -> Iterator[list[str]]:
    """Yield a row for each contender: medians over the rounds, with the least and the most."""
    for name, runs in turns.items():
        alone = [each.mean / each.alone for each in runs if each.alone is not None]
        bases = [alone]
        for base in ("IIG", "IIG, 4 bits"):
            bases.append([a.mean / b.mean for a, b in zip(runs, turns[base], strict=True)])
        exposed = f"{1.0 - 1.0 / median(alone):.1%}" if alone else ""
        step = median(each.mean for each in runs)
        forecast = planned[name]
        text = "" if forecast is None else f"{forecast:.2f}"
        yield [name, f"{step:.2f}", text, *map(_spread, bases), exposed]
    alone_steps = [each.alone for runs in turns.values() for each in runs if each.alone is not None]
    yield [ALONE, f"{median(alone_steps):.2f}", *[""] * 5]


def _spread(ratios: Sequence[float]) -> str:
    if not ratios:
        return ""
    return f"{median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(prog="bench_outer.py", description=DESCRIPTION)
    add = parser.add_argument
    add("--folder", type=Path, required=True, metavar="DIR", help="of trainings; is emptied")
    add("--inter", default="10mbit", metavar="RATE", help="of each NIC, each way; default 10mbit")
    nics: tuple[Literal["per-rank", "shared"], ...] = ("per-rank", "shared")
    add("--nic", choices=nics, default="per-rank", help="a NIC for each rank, or one for a node")
    add("--micro-batches", type=int, default=4, help="of a rank in a step; default 4")
    add("--delay", type=int, default=2, help="--paro-outer-delay of the last one; default 2")
    add("--rounds", type=int, default=3, help="turns of every contender; default 3")
    add("--fp32", action="store_true", help="compute in fp32, on CPUs without bf16")
    machine = "of such a cluster, from tools/bench_collectives.py: steps are predicted for it"
    add("--machine-file", type=Path, metavar="FILE", help=machine)
    add("--json", type=Path, metavar="FILE", help="write all figures")
    args = parser.parse_args(argv)
    check_least(1, rounds=args.rounds, micro_batches=args.micro_batches, delay=args.delay)
    check_system()
    with suppress(FileNotFoundError):
        shutil.rmtree(args.folder)
    folder = args.folder.absolute()
    folder.mkdir(parents=True)
    all_of = contenders(args.delay)
    words = {each.name: each.words(args) for each in all_of}
    spec = ClusterSpec(
        nodes=NODES, ranks_per_node=RANKS_PER_NODE, inter=args.inter, nic=args.nic, name="outer"
    )
    planned = {each.name: predicted(words[each.name]) for each in all_of}
    turns: dict[str, list[Timed]] = {each.name: [] for each in all_of}
    with cluster(spec) as made:
        for number in range(args.rounds):
            for each in order_of_round(all_of, number):
                turns[each.name].append(train(made, each, words[each.name], folder))
                print_line(f"round {number + 1}: {each.name}: {turns[each.name][-1]}")
    print_line(table(turns, planned), whole=True)
    steps = {name: [[each.mean, each.alone] for each in runs] for name, runs in turns.items()}
    write_json(args.json, {"planned": planned, "mean_and_alone": steps})


if __name__ == "__main__":
    run_script("bench_outer.py", main)
