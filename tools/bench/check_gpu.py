"""Checks and measures this project on the GPUs of this machine, part by part, into a folder."""

from __future__ import annotations

import argparse
import json
import math
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

if not __package__:  # run as a script: the repository root is not on sys.path
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from model.config import FP8_CAPABILITY
from paro.distributed.user_errors import run_script
from paro.errors import UserError, check_least, count_text, describe
from paro.report.log import print_line
from tools.bench.gpu_check import measures, quick, suites
from tools.bench.gpu_check.page import PAGE, archive, read_results, write_results
from tools.bench.gpu_check.running import PART_SECONDS, Outcome, Runner
from tools.bench.shared.clocks import CLOCKS, recorded, working_clock
from tools.bench.shared.turns import ROOT
from tools.shared.command_line import Parser

DESCRIPTION = """\
Runs the parts, each at most 8 minutes, and writes a page, a JSON file and pictures to a folder.
Results of earlier runs in that folder stay, so that parts can be run one by one, in any order.

  make gpu                   all parts on one GPU        make gpu PARTS=a,e   only these
  make gpu GPUS=8            under torchrun on 8 GPUs    make gpu REHEARSE=1  on a CPU, small shapes
  make gpu QUICK=1, QUICK=2  what one GPU shows in twice 9 minutes, what is unmeasured first

It needs torch 2.11 or newer, a GPU of compute capability 8.0 or newer, and no network.
"""
NEEDED_CAPABILITY = (8, 0)

Part = Callable[[Runner], Outcome]
PARTS: dict[str, tuple[str, Part]] = {  # in the order in which they run
    "e": ("speed", partial(measures.speed, name="speed")),
    "a": ("tests on a GPU", suites.gpu_tests),
    "b": ("4 ranks on one GPU against one process", partial(suites.tests_in, name="test_ranks")),
    "c": ("races", partial(suites.tests_in, name="test_races")),
    "d": ("memory against its prediction", measures.memory),
    "f": ("profile of a step", measures.profile),
    "g": ("checkpoints", measures.checkpoint),
    "j": ("speed of variants", partial(measures.speed, name="variants")),
    "k": ("Muon beside AdamW", measures.muon),
    "m": ("one real rank of 128", measures.one_rank),
    "n": ("attention's kernels, and a matmul next to busy thread blocks", measures.kernels),
    "p": ("fp8 with sequences of 8,192", partial(measures.speed, name="fp8")),
    "q": ("LLaMA-7B", partial(measures.speed, name="7B")),
    "r": ("64k tokens", partial(measures.speed, name="64k")),
    "s": ("LLaMA-3 8B with sequences of 8,192", partial(measures.speed, name="8B")),
    "t": ("128k tokens", partial(measures.speed, name="128k")),
    "h": ("collectives", measures.collectives),
    "i": ("strategies beside FSDP2", measures.peers),
    "l": ("ranks that share samples", measures.shared_samples),
}
OF_SEVERAL_GPUS = ("h", "i", "l")

# In a process of its own: this one never touches the GPU, whose memory belongs to the parts.
_ASK_TORCH = """
import json, torch
found = {"torch": torch.__version__, "gpus": torch.cuda.device_count()}
if found["gpus"]:
    of = torch.cuda.get_device_properties(0)
    found |= {"name": of.name, "bytes": of.total_memory, "capability": [of.major, of.minor]}
print(json.dumps(found))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchMachine:
    """The machine as torch sees it."""

    torch: str
    gpus: int
    name: str = "no GPU"
    bytes: int = 0  # of one GPU
    capability: tuple[int, int] = (0, 0)


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(description=DESCRIPTION)
    add = parser.add_argument
    titles = "; ".join(f"{letter}: {title}" for letter, (title, _) in PARTS.items())
    add("--parts", metavar="LETTERS", help=f"default: all that the machine allows. {titles}")
    add("--gpus", type=int, default=1, metavar="N", help="default 1; h, i and l need more")
    add("--quick", type=int, choices=quick.QUICK, help="parts for 9 minutes of one GPU, by a plan")
    add("--rehearse", action="store_true", help="small shapes on a CPU: the parts' own course")
    add("--out", type=Path, default=Path("runs/gpu"), metavar="DIR", help="default runs/gpu")
    return parser


def parts_of(args: argparse.Namespace) -> list[str]:
    """Return the chosen letters in order; `UserError` for one that cannot run."""
    check_least(1, gpus=args.gpus)
    if args.quick and (args.parts is not None or args.gpus > 1):
        raise UserError(f"--quick {args.quick} chooses the parts, for one GPU: no --parts, --gpus")
    if args.parts is None:
        return [letter for letter in PARTS if args.gpus > 1 or letter not in OF_SEVERAL_GPUS]
    chosen = {letter.strip() for letter in args.parts.split(",")}
    for letter in sorted(chosen):
        if letter not in PARTS:
            raise UserError(
                f"--parts {args.parts}: {letter!r} is none of {','.join(sorted(PARTS))}"
            )
        if letter in OF_SEVERAL_GPUS and args.gpus == 1:
            raise UserError(f"--parts {args.parts}: part {letter} needs --gpus 2 or more")
    return [letter for letter in PARTS if letter in chosen]


def check_machine(machine: TorchMachine, args: argparse.Namespace) -> None:
    """Raise `UserError` unless this machine has the GPUs that the flags need."""
    if args.rehearse:
        return
    if machine.gpus < args.gpus:
        raise UserError(
            f"--gpus {args.gpus}: torch {machine.torch} of {sys.executable} sees "
            f"{count_text(machine.gpus, 'GPU')}; run it with a Python whose torch has CUDA, or "
            "give --rehearse"
        )
    if machine.capability < NEEDED_CAPABILITY:
        major, minor = machine.capability
        raise UserError(f"{machine.name} has compute capability {major}.{minor}: 8.0 is needed")


def run(args: argparse.Namespace) -> None:
    end = time.monotonic() + quick.COMMAND_SECONDS if args.quick else math.inf
    stages = [quick.Stage(letter, PART_SECONDS) for letter in parts_of(args)]
    machine = ask_torch()
    check_machine(machine, args)
    args.out.mkdir(parents=True, exist_ok=True)
    results = read_results(args.out)
    where = "CPU (rehearsal)" if args.rehearse else f"{args.gpus} x {machine.name}"
    facts = {"machine": f"{where}, torch {machine.torch}", "commit": _commit()}
    if args.quick:
        stages = quick.stages_of(args.quick, results, facts)
        print_line(f"have not passed here: {', '.join(s.letters for s in stages) or 'none'}")
    with recorded(args.out / CLOCKS, rehearse=args.rehearse):
        for stage, seconds in quick.course(stages, lambda: end - time.monotonic()):
            begin = time.monotonic()
            for letter, outcome in run_stage(stage, seconds, args, machine):
                if seconds is not None or letter not in results:
                    results[letter] = {
                        "title": PARTS[letter][0],
                        **facts,
                        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
                        "seconds": time.monotonic() - begin,
                        **asdict(outcome),
                    }
            write_results(args.out, results, rehearsal=args.rehearse)
    print_line(f"written: {args.out / PAGE}, and all files in {archive(args.out)}")
    if not all(results[letter]["passed"] for stage in stages for letter in stage.letters):
        raise SystemExit(1)


def run_stage(
    stage: quick.Stage, seconds: float | None, args: argparse.Namespace, machine: TorchMachine
) -> list[tuple[str, Outcome]]:
    """Run the parts of a stage side by side, in so many seconds; with None, run none."""
    named = ", ".join(f"{letter}. {PARTS[letter][0]}" for letter in stage.letters)
    print_line(f"{named}: {quick.NOT_REACHED if seconds is None else f'at most {seconds:.0f} s'}")
    if seconds is None:
        outcome = Outcome(passed=False, lines=(quick.NOT_REACHED,))
        return [(letter, outcome) for letter in stage.letters]
    runner = Runner(
        folder=args.out,
        rehearse=args.rehearse,
        num_gpus=args.gpus,
        device_bytes=machine.bytes,
        has_fp8=args.rehearse or machine.capability >= FP8_CAPABILITY,
        seconds=seconds,
    )
    runners = [replace(runner) for _ in stage.letters]
    with ThreadPoolExecutor(len(runners)) as pool:
        try:
            return [*zip(stage.letters, pool.map(_attempt, stage.letters, runners), strict=True)]
        except KeyboardInterrupt:
            for one in runners:
                one.stop()
            raise


def _attempt(letter: str, runner: Runner) -> Outcome:
    """Run a part; an error of this program is its outcome, and later parts run."""
    begin = time.time()
    try:
        outcome = PARTS[letter][1](runner)
    except Exception as error:
        traceback.print_exc()
        outcome = Outcome(passed=False, lines=(f"{type(error).__name__}: {describe(error)}",))
    lines = (*outcome.lines, working_clock(runner.folder / CLOCKS, begin))
    shown = (*lines, "passed" if outcome.passed else "FAILED")
    print_line(*(f"   {letter}: {line}" for line in shown))
    return replace(outcome, lines=lines)


def ask_torch() -> TorchMachine:
    words = ["timeout", "60", sys.executable, "-c", _ASK_TORCH]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode != 0:
        raise UserError(f"{sys.executable} has no torch that starts: install torch 2.11 or newer")
    answer = json.loads(done.stdout)
    return TorchMachine(**{**answer, "capability": tuple(answer.get("capability", (0, 0)))})


def _commit() -> str:
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
    )
    return done.stdout.strip() or "unknown"


def main(argv: Sequence[str] | None = None) -> None:
    args = make_parser().parse_args(argv)
    # Else shells may have children ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        run(args)
    except KeyboardInterrupt:
        print_line("check_gpu.py: stopped; finished parts are written", stream=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    run_script("check_gpu.py", main)
