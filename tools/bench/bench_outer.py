"""Times steps of training with outer steps beside synchronous ones, over slow links."""

# A run is timed over its second half, by its log line of that half: where groups train alone, they
# wait for each other at log lines. With outer steps a half is from one round to the next, and
# whatever a round costs comes once. Contenders take turns in an emulated cluster. Each round of
# turns begins by measuring the cluster, for the planner: the speed of the machine below it changes
# from minute to minute.

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Literal

if not __package__:  # run as a script: the repository root is not on sys.path
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from paro.arguments.parser import parse_args
from paro.config.run import configure
from paro.distributed.user_errors import run_script
from paro.distributed.world import World
from paro.errors import RunError, check_least
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
ALONE = "a group alone"
MODEL = SHAPES["deep"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A way to train, by its flags."""

    name: str
    flags: str
    num_steps: int = 2 * STEPS

    def words(self, args: argparse.Namespace) -> list[str]:
        """Return the arguments of pretrain_llama.py."""
        size = args.micro_batches * NODES * RANKS_PER_NODE
        common = (
            f"--paro-group-size {RANKS_PER_NODE} --distributed-backend gloo --mock-data "
            "--tokenizer-type NullTokenizer --lr 1e-5 --micro-batch-size 1 --eval-iters 0 "
            f"--train-iters {self.num_steps} --log-interval {self.num_steps // 2} --num-workers 0 "
            f"--peak-tflops 1 --global-batch-size {size}"
        )
        common += "" if args.fp32 else " --grad-reduce-in-bf16"
        return f"{model_of(args)} {common} {self.flags}".split()


def model_of(args: argparse.Namespace) -> str:
    """Return the flags of the model and of what it computes in."""
    return f"{MODEL} --make-vocab-size-divisible-by 1{'' if args.fp32 else ' --bf16'}"


def contenders(delay: int) -> list[Contender]:
    """Return synchronous training in 16 and 4 bits, and outer steps that wait or do not."""
    bits = "--paro-inter-grad-bits 4 --paro-inter-param-bits 4"
    outer = "--paro-strategy III --paro-outer-warmup 0 --paro-outer-steps"
    return [
        Contender(name="IIG", flags="--paro-strategy IIG", num_steps=6),
        Contender(name="IIG, 4 bits", flags=f"--paro-strategy IIG {bits}", num_steps=6),
        Contender(name="outer steps", flags=f"{outer} {STEPS}"),
        Contender(
            name=f"outer steps, delay {delay}", flags=f"{outer} {STEPS} --paro-outer-delay {delay}"
        ),
        Contender(name=ALONE, flags=f"{outer} {1000 * STEPS}"),  # more than it trains
    ]


@dataclass(frozen=True, slots=True)
class Timed:
    """Seconds of a step, the mean over a round, as measured and as planned."""

    mean: float
    planned: float


def on_all_ranks(made: Cluster, script: str, words: Sequence[str]) -> None:
    """Run a program on all ranks; `RunError` if it fails."""
    status = run(made, [str(ROOT / script), *words])
    if status != 0:
        raise RunError(f"{script} ended with status {status}")


def train(
    made: Cluster, contender: Contender, words: Sequence[str], planned: float, folder: Path
) -> Timed:
    """Train once on all ranks; return the mean seconds of the second half of the steps."""
    metrics = folder / "metrics.jsonl"
    metrics.unlink(missing_ok=True)
    on_all_ranks(made, "pretrain_llama.py", [*words, "--metrics-file", str(metrics)])
    *_, last = rows_in(metrics)
    return Timed(last["iteration_time_ms"] / 1000.0, planned)


def measure(made: Cluster, model: str, folder: Path) -> Path:
    """Measure the cluster, and the device with this model; return the machine file."""
    file, spec = folder / "machine.json", made.spec
    words = f"--inter-bandwidth {spec.inter} --nic {spec.nic} --algorithms native --rounds 3"
    words += f" --sizes 64K,1M,4M --machine-file {file}"
    on_all_ranks(made, "tools/bench_collectives.py", [*words.split(), "--train", model])
    return file


def predicted(words: Sequence[str], machine: Path) -> float:
    """Return the planner's seconds of a step, with the mean of what a round adds."""
    world = World(size=NODES * RANKS_PER_NODE, ranks_per_node=RANKS_PER_NODE)
    config = configure(parse_args([*words, "--paro-machine", str(machine)]), world)
    assert config.estimator is not None
    request = config.estimator.request
    return config.estimator.estimate(request.candidate(config.strategy)).seconds


def table(turns: dict[str, list[Timed]]) -> str:
    """Format seconds of a step, and its ratios to predictions and to neighbours, as Markdown."""
    heads = (
        "training | s/step | of the planned | of a group alone | of IIG | of IIG, 4 bits | exposed"
    )
    return "\n".join(markdown_table(heads, rows_of(turns)))


def rows_of(turns: dict[str, list[Timed]]) -> Iterator[list[str]]:
    """Yield a row for each contender: medians over the rounds, with the least and the most."""
    for name, runs in turns.items():
        ratios = [[each.mean / each.planned for each in runs]]
        for base in (ALONE, "IIG", "IIG, 4 bits"):
            ratios.append([a.mean / b.mean for a, b in zip(runs, turns[base], strict=True)])
        exposed = f"{1.0 - 1.0 / median(ratios[1]):.1%}" if name.startswith("outer") else ""
        step = median(each.mean for each in runs)
        yield [name, f"{step:.2f}", *map(_spread, ratios), exposed]


def _spread(ratios: Sequence[float]) -> str:
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
    turns: dict[str, list[Timed]] = {each.name: [] for each in all_of}
    with cluster(spec) as made:
        for number in range(args.rounds):
            machine = measure(made, model_of(args), folder)
            for each in order_of_round(all_of, number):
                planned = predicted(words[each.name], machine)
                turns[each.name].append(train(made, each, words[each.name], planned, folder))
                print_line(f"round {number + 1}: {each.name}: {turns[each.name][-1]}")
    print_line(table(turns), whole=True)
    write_json(args.json, {name: [asdict(each) for each in runs] for name, runs in turns.items()})


if __name__ == "__main__":
    run_script("bench_outer.py", main)
