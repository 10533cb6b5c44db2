#!/usr/bin/env python
"""Where the steps of a profile went: computing, waiting, communication; on GPUs, each stream."""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NotRequired, TypedDict

if not __package__:  # run as a script: the repository root is not on sys.path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from paro.distributed.user_errors import run_script
from paro.errors import UserError, about
from paro.files.schema import Count, conform, read_json
from paro.planning.simulation import StreamActivity
from paro.report.log import print_line
from paro.text import align
from paro.topology import WaitKind
from tools.planning.pictures import draw_timeline
from tools.profiles.device import DeviceProfile, Event, device_profile, is_of_device, length
from tools.profiles.device_report import device_figures, device_text, draw_streams
from tools.shared.command_line import Parser
from tools.shared.output import write_json
from tools.shared.picture import check_can_draw

DESCRIPTION = """\
Reads what --profile --use-pytorch-profiler wrote: where each rank's steps went, with --plot a
picture of all of them, and with --json the same figures in a file.

  torchrun --nproc-per-node 4 pretrain_llama.py ... --profile --use-pytorch-profiler \\
    --profile-step-start 5 --profile-step-end 7 --profile-ranks 0 3 --tensorboard-dir runs/profile
  python tools/draw_profile.py runs/profile/*.pt.trace.json --plot steps.png

On CPU ranks the picture has a row for the training thread and one for each comm
stream. The training thread computes, waits for communication, or does neither: it reads batches,
agrees on norms, writes its log. In the picture its row has the colour of what it waits for. A comm
stream is busy from the beginning of a job to its end, including its wait for other ranks. Times
begin with each rank's first step. Profiling itself slows a step down, small pieces most.

On GPUs the picture has a row for each CUDA stream, coloured by the class of the kernels. Printed
are: the share of time in which the GPU is busy, the idle gaps of the stream that computes, the
time of NCCL's kernels and how much of it no computing kernel covers (exposed), the shares of the
classes of kernels, and the kernels that take most time.
"""

COMPUTING = {
    "paro/forward-compute": "forward",
    "paro/backward-compute": "backward",
    "paro/update": "update",
}
WAITS = tuple(kind.value for kind in WaitKind)
STEP, WAIT, LANE = "ProfilerStep#", "paro/wait:", "paro/lane:"
_NAMES = (STEP, WAIT, LANE, *COMPUTING)
_MAX_BYTES = 2**31  # a profile of many steps is large


@dataclass(frozen=True, slots=True)
class Profile:
    """The activities of a rank from the start of the first step to the end of the last; seconds."""

    rank: int
    num_steps: int
    seconds: float
    activities: tuple[StreamActivity, ...]  # of "compute", and of every communication stream's jobs

    def computing(self) -> float:
        """Return seconds of forward, backward and update, without the waits in them."""
        thread = [activity for activity in self.activities if activity.stream == "compute"]
        waits = [(wait.start, wait.end) for wait in thread if wait.kind in WAITS]
        return length((each.start, each.end) for each in thread) - length(waits)

    def waited(self, kind: str) -> float:
        """Return seconds for which the training thread waited for communication of a kind."""
        return sum(
            activity.end - activity.start
            for activity in self.activities
            if activity.stream == "compute" and activity.kind == kind
        )

    def lanes(self) -> dict[str, float]:
        """Return seconds for which each communication stream was busy."""
        busy: defaultdict[str, float] = defaultdict(float)
        for activity in self.activities:
            if activity.stream != "compute":
                busy[activity.stream] += activity.end - activity.start
        return dict(sorted(busy.items()))


class _Ranked(TypedDict):
    rank: Count


class _Trace(TypedDict):
    traceEvents: list[dict[str, Any]]
    distributedInfo: NotRequired[_Ranked]


def read_profile(path: Path) -> Profile | DeviceProfile:
    """Read a trace written by a run on CPU or on a GPU; `UserError` for any other file."""
    with about(suffix="; give what --use-pytorch-profiler wrote"):
        trace: _Trace = read_json(path, _Trace, max_bytes=_MAX_BYTES)
        ranges = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
        rank = trace["distributedInfo"]["rank"] if "distributedInfo" in trace else 0
        if is_of_device(ranges):
            return device_profile(ranges, rank, str(path))
        ours = [event for event in ranges if str(event.get("name")).startswith(_NAMES)]
        events: list[Event] = conform(ours, list[Event], f"{path}: traceEvents")
        steps = [event for event in events if event["name"].startswith(STEP)]
        if not steps or not any(event["name"] in COMPUTING for event in events):
            raise UserError(f"{path}: no step of a training")
    begin = min(event["ts"] for event in steps)
    end = max(event["ts"] + event["dur"] for event in steps)
    found = _activities(sorted(events, key=lambda event: event["ts"]), rank, begin, end)
    return Profile(rank, len(steps), (end - begin) / 1e6, tuple(found))


def _activities(
    events: Iterable[Event], rank: int, begin: float, end: float
) -> Iterable[StreamActivity]:
    """Return ranges in the steps, sorted by start; of nested waits the outer ones."""
    waited_until = begin
    for event in events:
        name, first = event["name"], event["ts"]
        last = min(first + event["dur"], end)
        if not begin <= first < end:
            continue
        start, stop = (first - begin) / 1e6, (last - begin) / 1e6
        if name in COMPUTING:
            yield StreamActivity(rank, "compute", name, COMPUTING[name], start, stop)
        elif name.startswith(WAIT) and first >= waited_until:
            waited_until = last
            yield StreamActivity(rank, "compute", name, name.removeprefix(WAIT), start, stop)
        elif name.startswith(LANE):
            lane = name.removeprefix(LANE)
            yield StreamActivity(rank, lane, name, lane.partition(" ")[0], start, stop)


def table(profiles: Sequence[Profile]) -> str:
    """Return the mean milliseconds of a step, as a text table; a row for each rank."""
    lanes = sorted({lane for profile in profiles for lane in profile.lanes()})
    names = ["rank", "a step", "computes", *(f"waits: {kind}" for kind in WAITS), "neither", *lanes]
    rows = [names]
    for profile in profiles:
        waits = [profile.waited(kind) for kind in WAITS]
        parts = [profile.computing(), *waits]
        busy = profile.lanes()
        figures = [profile.seconds, *parts, profile.seconds - sum(parts)]
        figures += [busy.get(lane, 0.0) for lane in lanes]
        per_step = [1e3 * figure / profile.num_steps for figure in figures]
        rows.append([str(profile.rank), *(f"{figure:.1f}" for figure in per_step)])
    title = "ms of a step, means; the last columns: how long a comm stream was busy"
    return f"{title}\n{align(rows, left=())}"


def figures(profile: Profile) -> dict[str, Any]:
    """Return the figures of a CPU rank's profile, as --json has them, in seconds of all steps."""
    return {
        "rank": profile.rank,
        "num_steps": profile.num_steps,
        "seconds_per_step": profile.seconds / profile.num_steps,
        "computing_seconds": profile.computing(),
        "waiting_seconds": {kind: profile.waited(kind) for kind in WAITS},
        "lane_seconds": profile.lanes(),
    }


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="draw_profile.py", description=DESCRIPTION)
    parser.add_argument("traces", nargs="+", type=Path, metavar="TRACE", help="a file per rank")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the steps; .svg, .pdf")
    parser.add_argument("--title", help="of the picture")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    args = make_parser().parse_args(argv)
    check_can_draw(args.plot)
    profiles = sorted(map(read_profile, args.traces), key=lambda profile: profile.rank)
    if len({profile.rank for profile in profiles}) < len(profiles):
        raise UserError("two traces are of one rank: give those of one run")
    title = args.title or "steps of a profile"
    on_cpu = [profile for profile in profiles if isinstance(profile, Profile)]
    on_gpu = [profile for profile in profiles if isinstance(profile, DeviceProfile)]
    if on_cpu and on_gpu:
        raise UserError("traces of CPU and of GPU ranks: give those of one run")
    ranks = [*map(figures, on_cpu), *map(device_figures, on_gpu)]
    write_json(args.json, {"device": "cuda" if on_gpu else "cpu", "ranks": ranks})
    if args.plot is not None:
        if on_gpu:
            draw_streams(args.plot, on_gpu, title)
        else:
            activities = [activity for profile in on_cpu for activity in profile.activities]
            draw_timeline(args.plot, activities, title, actor="rank")
    # After what may still be refused.
    if on_gpu:
        print_line(*"\n".join(map(device_text, on_gpu)).splitlines())
    else:
        print_line(table(on_cpu))
    if args.plot is not None:
        print_line(f"picture written to {args.plot}")


if __name__ == "__main__":
    run_script("draw_profile.py", main)
