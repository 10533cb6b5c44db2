"""Measures training steps in emulated clusters and compares them with the planner's predictions."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

if not __package__:  # run as a script: the repository root is not on sys.path
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from paro.arguments.parser import parse_args
from paro.config.run import configure
from paro.distributed.user_errors import run_script
from paro.distributed.world import World
from paro.errors import UserError, about, check_least
from paro.machine.collective_time import speed_of
from paro.machine.files import read_machine
from paro.machine.machine import Machine, bits_per_second, rate_text
from paro.planning.search_space import PlanRequest
from paro.strategy import legal_letters
from paro.topology import Link
from tools.bench.peers.own import parse_setting
from tools.bench.planning.comparison import PREDICTED_WAYS, compare
from tools.bench.planning.rounds import NODES, RANKS_PER_NODE, median_machine, rows_of
from tools.bench.planning.steps_page import Chapter, draw, page
from tools.bench.shared.turns import ROOT
from tools.cluster.launch import run
from tools.cluster.lifecycle import cluster
from tools.cluster.spec import ClusterSpec
from tools.cluster.state import Cluster
from tools.collective_timing.training import training_config
from tools.shared.command_line import Parser
from tools.shared.output import write_text
from tools.shared.picture import check_can_draw

DESCRIPTION = """\
Measures steps of all strategies in emulated clusters of 2 nodes x 4 ranks, and sets the planner's
predictions beside them, from a machine file that is measured in the same cluster. Needs root; a
run that ends early, or after --minutes, goes on where it ended.

  python tools/bench/study_plan.py measure --folder runs/steps --minutes 120
  python tools/bench/study_plan.py report --folder runs/steps
"""
NicSetting = Literal["per-rank", "shared"]
ROTATED = ("III@native+rotate", "IIG@native+rotate", "III@native+in-place", "IIG@native+in-place")
NICS: tuple[NicSetting, ...] = ("per-rank", "shared")
SHAPES = {
    "deep": "--num-layers 6 --hidden-size 256 --num-attention-heads 4 --ffn-hidden-size 688 "
    "--vocab-size 4096 --seq-length 128",
    "wide": "--num-layers 3 --hidden-size 384 --num-attention-heads 6 --ffn-hidden-size 1024 "
    "--vocab-size 2048 --seq-length 64",
}
_DEEPER = (
    "--num-layers 16 --hidden-size 160 --num-attention-heads 4 --ffn-hidden-size 432 "
    "--vocab-size 2048 --seq-length 128"
)
PARTIAL = {  # the paper's: a sixteenth of the blocks, and adapters of 3 parameters in 1,000
    "sixteenth": f"{_DEEPER} --trainable last-blocks:0.0625",
    "adapters": f"{_DEEPER} --lora-rank 2 --lora-target-modules q_proj,v_proj",
}
TRAIN_FLAGS = (
    "--distributed-backend gloo --mock-data --tokenizer-type NullTokenizer --micro-batch-size 1 "
    "--global-batch-size 8 --train-iters 1000 --lr 1e-5"
)
COUNTS = (1, 4)
SIZES = "64K,256K,1M,4M"
SMALL_SIZES = "4K,16K,"  # added where a part trains: its buffers are small
TOOLS = ROOT / "tools"


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyPart:
    """The settings measured in one cluster, with one machine file."""

    nic: NicSetting
    shape: str

    @property
    def name(self) -> str:
        return f"{self.nic}-{self.shape}"

    def machine_in(self, folder: Path, number: int) -> Path:
        return folder / f"steps-{self.name}-{number}.json"

    def machine_files(self, folder: Path) -> list[Path]:
        return sorted(folder.glob(f"steps-{self.name}-*.json"))

    def inter(self, speed: str) -> str:
        """Return the speed of a NIC; a NIC per node is as fast as those of its ranks."""
        sharing = RANKS_PER_NODE if self.nic == "shared" else 1
        return rate_text(sharing * bits_per_second(speed))

    @property
    def train_flags(self) -> str:
        shape = {**SHAPES, **PARTIAL}[self.shape]
        return f"{shape} --make-vocab-size-divisible-by 1 --bf16"


def parts() -> Iterator[StudyPart]:
    for nic in NICS:
        for shape in SHAPES:
            yield StudyPart(nic=nic, shape=shape)
    for shape in PARTIAL:
        yield StudyPart(nic="per-rank", shape=shape)


def missing(
    part: StudyPart,
    number: int,
    settings: Sequence[str],
    turns: int,
    rows: Sequence[dict[str, Any]],
) -> list[str]:
    """Return the candidates for which at least half the turns of a part's round are missing."""
    done = Counter(
        (row["setting"], row["micro_batches"])
        for row in rows
        if (row["nic"], row["shape"], row["round"]) == (part.nic, part.shape, number)
    )
    return [s for s in settings if any(2 * done[s, count] <= turns for count in COUNTS)]


def measure(args: argparse.Namespace) -> None:
    """Measure missing rounds one by one until the time is up.

    A round of a part is repeated as a whole, because only figures of the same turns are comparable.
    """
    end = time.monotonic() + 60 * args.minutes
    args.folder.mkdir(parents=True, exist_ok=True)
    chosen = [part for part in parts() if not args.parts or part.name in args.parts.split(",")]
    settings_of = {part: take_settings(args.settings, part) for part in chosen}
    for part in chosen:
        _check_speed(part, args.folder, args.inter)
    rounds = [(number, part) for number in range(1, args.rounds + 1) for part in chosen]
    for number, part in rounds:
        settings = settings_of[part]
        left = missing(part, number, settings, args.turns, rows_of(args.folder))
        machine = part.machine_in(args.folder, number)
        if (not left and machine.exists()) or time.monotonic() > end:
            continue
        spec = ClusterSpec(
            nodes=NODES,
            ranks_per_node=RANKS_PER_NODE,
            inter=part.inter(args.inter),
            nic=part.nic,
            name=args.name,
        )
        print(f"{part.name}, round {number}: {len(left)} of {len(settings)} left", flush=True)
        with cluster(spec) as made:
            if not machine.exists():
                _measure_machine(made, part, machine, settings, spec.inter)
            if left:
                seconds = max(1.0, end - time.monotonic())
                _run(made, _steps_flags(part, number, args, settings, seconds))
    rows = rows_of(args.folder)
    left = [
        candidate
        for number, part in rounds
        for candidate in missing(part, number, settings_of[part], args.turns, rows)
    ]
    print(f"{len(rows)} rows, {len(left)} settings left", flush=True)


def take_settings(text: str | None, part: StudyPart) -> list[str]:
    """Return --settings, or all with native collectives that can train the part's model."""
    if text is None:
        settings = [f"{name}@native" for name in legal_letters()]
        heads = training_config(part.train_flags, "gloo").model.num_query_groups
        rotates = heads % RANKS_PER_NODE == 0 and part.shape in SHAPES
        return [*settings, *ROTATED] if rotates else settings
    settings = text.split(",")
    world = World(size=NODES * RANKS_PER_NODE, ranks_per_node=RANKS_PER_NODE)
    for candidate in settings:
        named = parse_setting(candidate)
        if not named.collective:
            raise UserError(f"--settings {candidate}: names no collective, as IIG@native does")
        if named.way not in PREDICTED_WAYS:
            ways = ", +".join(PREDICTED_WAYS[1:])
            raise UserError(f"--settings {candidate}: +{named.way} is not predicted: give +{ways}")
        flags = [*part.train_flags.split(), *TRAIN_FLAGS.split(), *named.flags]
        configure(parse_args(flags), world)
    return settings


def _check_speed(part: StudyPart, folder: Path, speed: str) -> None:
    """Raise `UserError` if the folder has figures of links of another speed."""
    with about("--inter: "):
        wanted = part.inter(speed)
    for path in part.machine_files(folder):
        rate = _inter_of(read_machine(path))
        if rate != wanted:
            raise UserError(
                f"--inter {speed}: {path} is of NICs of {rate}, not {wanted}: choose another "
                "--folder"
            )


def _inter_of(machine: Machine) -> str:
    return rate_text(speed_of(machine, Link.INTER).bits_per_second)


def _measure_machine(
    made: Cluster, part: StudyPart, path: Path, settings: Sequence[str], inter: str
) -> None:
    """Measure a part's machine file; a collective's cost during computing differs by shape."""
    names = ",".join(dict.fromkeys(parse_setting(candidate).collective for candidate in settings))
    bench = str(TOOLS / "bench_collectives.py")
    sizes = SMALL_SIZES * (part.shape in PARTIAL) + SIZES
    flags = ["--algorithms", names, "--sizes", sizes, "--dtype", "bfloat16"]
    flags += ["--inter-bandwidth", inter, "--nic", part.nic, "--train", part.train_flags]
    _run(made, [bench, *flags, "--machine-file", str(path)])


def _steps_flags(
    part: StudyPart, number: int, args: argparse.Namespace, settings: Sequence[str], seconds: float
) -> list[str]:
    return [
        str(TOOLS / "bench" / "planning" / "steps.py"),
        *("--output", str(args.folder / "steps.jsonl"), "--turns", str(args.turns)),
        *("--label", json.dumps({"nic": part.nic, "shape": part.shape, "round": number})),
        *("--settings", ",".join(settings), "--counts", ",".join(map(str, COUNTS))),
        *("--seconds", f"{seconds:.0f}", "--train", f"{part.train_flags} {TRAIN_FLAGS}"),
    ]


def chapters_of(folder: Path) -> list[Chapter]:
    """Return all that was measured, medians over rounds, and the planner's current predictions."""
    rows = rows_of(folder)
    if not rows:
        raise UserError(f"--folder {folder}: there are no rows: measure first")
    chapters = []
    for part in parts():
        # By what the candidates of a chapter have in common, and by candidate.
        by_key: dict[tuple[str, int, bool], dict[str, list[dict[str, Any]]]] = {}
        for row in rows:
            if (row["nic"], row["shape"]) == (part.nic, part.shape):
                named = parse_setting(row["setting"])
                key = named.collective, row["micro_batches"], named.rotates
                by_key.setdefault(key, {}).setdefault(row["setting"], []).append(row)
        if not by_key:
            continue
        machines = [read_machine(path) for path in part.machine_files(folder)]
        if not machines:
            raise UserError(
                f"--folder {folder}: {part.machine_in(folder, 1).name} is missing, with which the "
                "rows were measured: put it there, or measure again in another folder"
            )
        machine = median_machine(machines)
        nics = "a NIC of {} per rank" if part.nic == "per-rank" else "one NIC of {} a node"
        cluster_name = f"{part.shape}, {nics.format(_inter_of(machine))}"
        for (collective, count, rotates), settings in by_key.items():
            request = plan_request_of_part(part, machine, collective, count)
            chapters.append(
                Chapter(
                    cluster=cluster_name,
                    collective=f"{collective}, rotated" if rotates else collective,
                    micro_batches=count,
                    compared=compare(request, [*settings.values()]),
                )
            )
    return chapters


def plan_request_of_part(
    part: StudyPart, machine: Machine, collective: str, count: int
) -> PlanRequest:
    """Return the measured training as a request of the planner."""
    config = training_config(part.train_flags, "gloo")
    return PlanRequest(
        model=config.model,
        machine=machine,
        group_size=machine.group_size,
        seq_length=config.data.seq_length,
        micro_batch_size=config.batches.micro_batch_size,
        global_batch_size=config.batches.micro_batch_size * machine.world_size * count,
        precision=config.precision,
        trainable=config.trainable,
        collective=collective,
        device_type="cpu",
    )


def report(args: argparse.Namespace) -> None:
    """Write steps.md and steps.png."""
    page_file = args.folder / "steps.md"
    picture = page_file.with_suffix(".png")
    check_can_draw(picture, "--folder")
    chapters = chapters_of(args.folder)
    names = {row["shape"] for row in rows_of(args.folder)}
    shapes = {name: flags for name, flags in (SHAPES | PARTIAL).items() if name in names}
    write_text(page_file, page(args.folder, chapters, shapes))
    draw(picture, chapters)
    print(f"wrote {page_file} and {picture}")


def _run(made: Cluster, argv: Sequence[str]) -> None:
    status = run(made, argv)
    if status != 0:
        raise UserError(f"{shlex.join(argv)} failed, status {status}")


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(prog="study_plan.py", description=DESCRIPTION)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    measuring = commands.add_parser("measure", help="measure what is missing")
    add = measuring.add_argument
    add("--folder", type=Path, required=True, metavar="DIR", help="of rows and machine files")
    add("--minutes", type=float, default=60.0, help="begin nothing after so many; default 60")
    add("--name", default="study", help="of the cluster; default study")
    add(
        "--inter",
        default="100mbit",
        metavar="SPEED",
        help="of a rank's NIC; one of a node has that of all its ranks; default 100mbit",
    )
    add("--rounds", type=int, default=3, help="of everything, one after the other; default 3")
    add("--turns", type=int, default=5, help="of every setting in a round; default 5")
    add(
        "--settings",
        metavar="SETTING,...",
        help="STRATEGY@COLLECTIVE[+rotate|+in-place|+4-bit]; default: all strategies by native, "
        "and weights that rotate where they can",
    )
    names = ",".join(part.name for part in parts())
    add("--parts", help=f"some of {names}; default all")
    reporting = commands.add_parser("report", help="write the page")
    reporting.add_argument("--folder", type=Path, required=True, metavar="DIR")
    args = parser.parse_args(argv)
    if args.command == "measure":
        check_least(1, rounds=args.rounds, turns=args.turns)
    (measure if args.command == "measure" else report)(args)


if __name__ == "__main__":
    run_script("study_plan.py", main)
