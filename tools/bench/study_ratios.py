"""How much HO-Ring gains over Ring and H-Ring, from equal links to links that differ widely."""

# The model (papers of PaRO and HO-Ring; ours, derived from the schedules): a buffer of V bytes on
# g groups of m, n = m g ranks. B bytes per second leave a rank inside its group, b between groups;
# a flat ring has one flow between two groups, which gets b with a NIC per rank and m b with one NIC
# for all of a group's ranks. An emulated node has one loopback of m B for all its ranks, and a flat
# ring has m - 1 flows there: each gets m / (m - 1) B. (With links per rank it would be B.)
#
#     ring      (n - 1) / n * V / min(m / (m - 1) B, b or m b)
#     h-ring    (g - 1) / n * V / b  +  (m - 1) / m * V / B
#     ho-ring   the larger of the two

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

if not __package__:  # run as a script: the repository root is not on sys.path
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from data.atomic_file import replacing
from paro.errors import UserError
from paro.planning.machine.machine import bits_per_second, rate_text
from tools.cluster.launch import run
from tools.cluster.lifecycle import cluster
from tools.cluster.spec import ClusterSpec
from tools.collective_timing.plot import plot_gains
from tools.shared.command_line import Parser, status_of
from tools.shared.picture import check_can_draw

DESCRIPTION = """\
Times an all-gather by ring, h-ring and ho-ring in emulated clusters whose links inside a node are
1, 2, 4 ... times as fast as a rank's share of the links between nodes. Needs root.

  python tools/bench/study_ratios.py --json ratios.json --plot ratios.png
"""
ALGORITHMS = ("ring", "h-ring", "ho-ring")
BENCH = Path(__file__).resolve().parents[1] / "bench_collectives.py"
NicSetting = Literal["per-rank", "shared"]
NICS: tuple[NicSetting, ...] = ("per-rank", "shared")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What is the same at every ratio; `inter` is a rank's share of its node's NICs."""

    nodes: int
    ranks_per_node: int
    inter: str
    num_bytes: int

    def spec(self, ratio: float, nic: NicSetting) -> ClusterSpec:
        share = bits_per_second(self.inter)
        card = share * (self.ranks_per_node if nic == "shared" else 1)
        return ClusterSpec(
            nodes=self.nodes,
            ranks_per_node=self.ranks_per_node,
            inter=rate_text(card),
            intra=rate_text(round(share * ratio)),
            nic=nic,
            name="ratios",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One ratio: the median time measured for each algorithm, and the model's time."""

    nic: NicSetting
    ratio: float
    seconds: dict[str, float]
    model: dict[str, float]
    gains_by_round: dict[str, tuple[float, ...]]  # of ho-ring over the others, round by round

    def gain(self, other: str) -> float:
        """By what fraction HO-Ring takes less time than `other`, the median over rounds."""
        return median(self.gains_by_round[other])

    def model_gain(self, other: str) -> float:
        return 1.0 - self.model["ho-ring"] / self.model[other]


def model_seconds(shape: Shape, ratio: float, nic: NicSetting) -> dict[str, float]:
    """Seconds of an all-gather by the model above."""
    m, g = shape.ranks_per_node, shape.nodes
    b = bits_per_second(shape.inter) / 8
    one_flow = b * m if nic == "shared" else b
    inter = (g - 1) / (m * g) * shape.num_bytes / b
    intra = (m - 1) / m * shape.num_bytes / (b * ratio)
    inside = b * ratio * m / (m - 1) if m > 1 else float("inf")
    ring = (m * g - 1) / (m * g) * shape.num_bytes / min(inside, one_flow)
    return {"ring": ring, "h-ring": inter + intra, "ho-ring": max(inter, intra)}


def point_of(shape: Shape, ratio: float, nic: NicSetting, rows: Sequence[dict[str, Any]]) -> Point:
    """Summarizes the benchmark's rows of one ratio."""
    by_name = {row["algorithm"]: row for row in rows}
    ours = by_name["ho-ring"]["seconds_by_round"]
    return Point(
        nic=nic,
        ratio=ratio,
        seconds={name: by_name[name]["seconds"] for name in ALGORITHMS},
        model=model_seconds(shape, ratio, nic),
        gains_by_round={
            name: tuple(
                1.0 - mine / other
                for mine, other in zip(ours, by_name[name]["seconds_by_round"], strict=True)
            )
            for name in ALGORITHMS
            if name != "ho-ring"
        },
    )


def measure(shape: Shape, ratio: float, nic: NicSetting, rounds: int) -> Point:
    """Makes a cluster, runs the benchmark in it, and removes it."""
    with (
        tempfile.TemporaryDirectory() as folder,
        cluster(shape.spec(ratio, nic)) as made,
    ):
        rows = Path(folder) / "rows.json"
        argv = [str(BENCH), "--ops", "all_gather", "--algorithms", ",".join(ALGORITHMS)]
        argv += ["--sizes", str(shape.num_bytes), "--rounds", str(rounds), "--json", str(rows)]
        status = run(made, argv)
        if status != 0:
            raise UserError(f"bench_collectives.py failed at ratio {ratio:g}, status {status}")
        return point_of(shape, ratio, nic, json.loads(rows.read_text())["rows"])


def table(points: Sequence[Point]) -> str:
    """Measured times, and HO-Ring's gains as measured (as the model predicts)."""
    lines = ["nic       ratio   ring ms  h-ring ms  ho-ring ms   less than ring   less than h-ring"]
    for point in points:
        times = "  ".join(f"{point.seconds[name] * 1e3:9.0f}" for name in ALGORITHMS)
        gains = "   ".join(
            f"{point.gain(name):7.1%} ({point.model_gain(name):5.1%})" for name in ALGORITHMS[:2]
        )
        lines.append(f"{point.nic:8s} {point.ratio:6g} {times}  {gains}")
    return "\n".join(lines)


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="study_ratios.py",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--nodes", type=int, default=2, help="default 2")
    add("--ranks-per-node", type=int, default=4, help="default 4")
    add("--inter", default="100mbit", metavar="RATE", help="of each rank; default 100mbit")
    add("--ratios", default="1,2,4,6,10,20,40", help="intra by inter; default %(default)s")
    add("--bytes", type=int, default=32_000_000, help="of the whole buffer; default 32000000")
    add("--rounds", type=int, default=5, help="turns that count; default 5")
    add("--json", type=Path, metavar="FILE", help="write what was measured")
    add("--plot", type=Path, metavar="FILE.png", help="draw the gains over the ratio")
    return parser


def execute(args: argparse.Namespace) -> None:
    try:
        ratios = [float(word) for word in args.ratios.split(",")]
    except ValueError:
        ratios = [math.nan]
    if not all(0 < ratio < math.inf for ratio in ratios):
        raise UserError(f"--ratios {args.ratios}: give positive numbers, joined by commas")
    if args.plot:
        check_can_draw(args.plot)
    shape = Shape(
        nodes=args.nodes,
        ranks_per_node=args.ranks_per_node,
        inter=args.inter,
        num_bytes=args.bytes,
    )
    specs = [(ratio, nic, shape.spec(ratio, nic)) for nic in NICS for ratio in ratios]
    points: list[Point] = []
    for ratio, nic, spec in specs:
        print(f"{len(points) + 1} of {len(specs)}: {spec.describe()}", flush=True)
        points.append(measure(shape, ratio, nic, args.rounds))
    print(table(points))
    if args.json:
        with replacing(args.json) as temporary:
            found = {"shape": asdict(shape), "points": [asdict(point) for point in points]}
            temporary.write_text(json.dumps(found, indent=2) + "\n")
    if args.plot:
        curves = [
            {
                "nic": point.nic,
                "other": name,
                "ratio": point.ratio,
                "measured": point.gain(name),
                "model": point.model_gain(name),
            }
            for point in points
            for name in ALGORITHMS[:2]
        ]
        plot_gains(args.plot, f"all-gather of {shape.num_bytes:,} bytes", curves)


def main(argv: Sequence[str] | None = None) -> int:
    args = make_parser().parse_args(argv)
    return status_of("study_ratios.py", lambda: execute(args))


if __name__ == "__main__":
    sys.exit(main())
