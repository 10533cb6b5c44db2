"""Changes an operator, constant or call of the product, one at a time, and asks the tests."""

# Three stages, each continued where it was interrupted. `choose` draws mutants, at most one of a
# function. `reach` runs all tests once and notes which of them execute each mutant's code, in all
# their processes. `run` applies one mutant after another to a copy of the repository and runs the
# tests that reach it, those of its own file first, until one fails. A test that fails without the
# mutant too kills nothing. Mutants are kept by content: they apply after files have moved.

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: the repository root is not on sys.path
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from paro.distributed.user_errors import run_script
from paro.errors import UserError, check_least
from tools.bench.mutation.mutants import Mutant, apply, mutants_of
from tools.bench.mutation.reach import add_probes, durations, make_environment, read_notes
from tools.shared.command_line import Parser
from tools.shared.output import print_line, write_json

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("paro", "model", "data")
# The engine, of which at least 3 of 10 mutants are.
CORE = ("collectives", "sharding", "step", "optim", "checkpoint", "context_parallel", "rotation")
MOST_SECONDS = 600
_NEAREST_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The verdict of the tests on a mutant."""

    number: int
    status: str  # killed, survived, unreached, unfinished or gone
    by: str = ""  # the test that killed it
    tests: int  # that reach it
    seconds: float


def build_parser() -> Parser:
    parser = Parser(description=__doc__)
    parser.add_argument("stage", choices=("choose", "reach", "run", "table"))
    parser.add_argument("--out", type=Path, default=Path("runs/mutants"), help="folder of results")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=200, help="mutants to draw")
    parser.add_argument("--workers", type=int, default=2, help="processes that run tests")
    parser.add_argument("--minutes", type=float, help="`run` ends after the mutant of this minute")
    return parser


def choose(seed: int, count: int) -> list[Mutant]:
    """Draw mutants of all kinds equally often, at most one of a function; 4 of 10 of the engine."""
    core: list[Mutant] = []
    others: list[Mutant] = []
    for folder in PRODUCT:
        for path in sorted((ROOT / folder).glob("**/*.py")):
            name = str(path.relative_to(ROOT))
            is_core = name.startswith(tuple(f"paro/{room}/" for room in CORE))
            (core if is_core else others).extend(mutants_of(name, path.read_text(encoding="utf-8")))
    generator = random.Random(seed)
    num_core = count * 4 // 10
    return draw(core, num_core, generator) + draw(others, count - num_core, generator)


def draw(mutants: Iterable[Mutant], count: int, generator: random.Random) -> list[Mutant]:
    """Draw `count` mutants of different functions: a kind, then one of it."""
    by_kind: dict[str, list[Mutant]] = {}
    for mutant in mutants:
        by_kind.setdefault(mutant.kind, []).append(mutant)
    for of_kind in by_kind.values():
        generator.shuffle(of_kind)
    drawn: dict[tuple[str, str], Mutant] = {}
    while len(drawn) < count and any(by_kind.values()):
        kind = generator.choice(sorted(kind for kind, left in by_kind.items() if left))
        mutant = by_kind[kind].pop()
        drawn.setdefault((mutant.path, mutant.function), mutant)
    return list(drawn.values())


@contextmanager
def copy_of_repository() -> Iterator[Path]:
    """Copy the last commit to a folder, in which files may be changed."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree = Path(folder) / "tree"
        subprocess.run(["git", "-C", ROOT, "worktree", "add", "--detach", "-q", tree], check=True)
        try:
            yield tree
        finally:
            subprocess.run(["git", "-C", ROOT, "worktree", "remove", "--force", tree], check=True)


def find_reach(out: Path, mutants: Sequence[Mutant], workers: int) -> None:
    """Run all tests with probes; write the tests that reach each mutant, and all tests' seconds."""
    notes, report = (out / "notes.txt").resolve(), (out / "report.xml").resolve()
    notes.unlink(missing_ok=True)
    with copy_of_repository() as tree, tempfile.TemporaryDirectory() as folder:
        python = make_environment(Path(folder), notes)
        add_probes(tree, mutants)
        command = [str(python), "-m", "pytest", "-q", "-n", str(workers), f"--junitxml={report}"]
        subprocess.run(command, cwd=tree, check=False)  # tests of the code's text fail
    reached = read_notes(notes, len(mutants))
    write_json(out / "reached.json", {"tests": reached, "seconds": dict(durations(report))})


def nearest_first(mutant: Mutant, tests: Sequence[str], seconds: Mapping[str, float]) -> list[str]:
    """Return the tests of the mutant's own file, of its folder, then all others by seconds."""
    folder, _, file = mutant.path.rpartition("/")

    def distance(test: str) -> tuple[int, float]:
        path = test.partition("::")[0]
        far = 2 - path.startswith(f"tests/{folder}/") - path.endswith(f"/test_{file}")
        return far, seconds.get(test, 0.0)

    return sorted(tests, key=distance)


def run_tests(tree: Path, tests: Sequence[str], workers: int, seconds: float) -> str | None:
    """Return the first test that fails, "" if none does, None if they take longer."""
    (tree / "tests-to-run.txt").write_text("\n".join(tests) + "\n", encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", str(workers), "--no-header"]
    # A session of its own, so that all processes of a test that hangs can be ended.
    with subprocess.Popen(
        [*command, "-rfE", "@tests-to-run.txt"],
        cwd=tree,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    ) as pytest:
        try:
            printed, _ = pytest.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(pytest.pid, signal.SIGKILL)
            return None
    if pytest.returncode == 0:
        return ""
    failed = re.search(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", printed, re.M)
    return failed[1] if failed else f"pytest ended with {pytest.returncode}"


def judge(
    number: int,
    mutant: Mutant,
    tests: Sequence[str],
    seconds: Mapping[str, float],
    tree: Path,
    workers: int,
) -> Outcome:
    """Apply a mutant to the copy, run the tests that reach it, and take it back."""
    began = time.monotonic()

    def outcome(status: str, by: str = "") -> Outcome:
        took = round(time.monotonic() - began, 1)
        return Outcome(number=number, status=status, by=by, tests=len(tests), seconds=took)

    path = place_of(mutant, tree)
    if path is None:
        return outcome("gone")
    if not tests:
        return outcome("unreached")
    original = path.read_text(encoding="utf-8")
    changed = apply(mutant, original)
    assert changed is not None
    ordered, left = nearest_first(mutant, tests, seconds), float(MOST_SECONDS)
    path.write_text(changed, encoding="utf-8")
    try:
        for batch in batches(ordered, seconds):
            left = MOST_SECONDS - (time.monotonic() - began)
            failed = run_tests(tree, batch, workers if len(batch) > workers else 1, max(left, 1.0))
            if failed is None:
                return outcome("unfinished")
            if failed:
                path.write_text(original, encoding="utf-8")
                if run_tests(tree, [failed], 1, MOST_SECONDS) == "":
                    return outcome("killed", failed)
                path.write_text(changed, encoding="utf-8")
        return outcome("survived")
    finally:
        path.write_text(original, encoding="utf-8")


def batches(tests: Sequence[str], seconds: Mapping[str, float]) -> list[Sequence[str]]:
    """Return the nearest tests, of about a minute, and all others."""
    total = 0.0
    for index, test in enumerate(tests):
        total += seconds.get(test, 0.0)
        if total > _NEAREST_SECONDS:
            return [tests[: index + 1], tests[index + 1 :]] if index + 1 < len(tests) else [tests]
    return [tests]


def place_of(mutant: Mutant, tree: Path) -> Path | None:
    """Return the file that has the mutant's code now; None if none has."""
    paths = [path for folder in PRODUCT for path in sorted((tree / folder).glob("**/*.py"))]
    for path in sorted(paths, key=lambda path: path != tree / mutant.path):
        if apply(mutant, path.read_text(encoding="utf-8")) is not None:
            return path
    return None


def run(out: Path, mutants: Sequence[Mutant], workers: int, minutes: float | None) -> None:
    """Judge every mutant that has no outcome yet, and write each outcome at once."""
    reached = read_json(out / "reached.json", "reach")
    tests: list[list[str]] = reached["tests"]
    results, began = out / "outcomes.jsonl", time.monotonic()
    done = {outcome.number for outcome in read_outcomes(results)}
    with copy_of_repository() as tree:
        for number, mutant in enumerate(mutants):
            if number in done:
                continue
            if minutes is not None and time.monotonic() - began > 60 * minutes:
                return
            outcome = judge(number, mutant, tests[number], reached["seconds"], tree, workers)
            with results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(outcome)) + "\n")
            print_line(f"{number} {outcome.status} in {outcome.seconds:.0f} s: {mutant.path}")


def read_outcomes(path: Path) -> list[Outcome]:
    """Return the outcomes that a file has; none if there is no file."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    return [Outcome(**json.loads(line)) for line in lines]


def read_json(path: Path, stage: str) -> Any:
    """Return the file of an earlier stage; `UserError` names the stage if the file is missing."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} does not exist: run the stage `{stage}` first") from None


def table(mutants: Sequence[Mutant], outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Yield the numbers of outcomes by kind, then every mutant that no test killed, as Markdown."""
    statuses = ("killed", "survived", "unreached", "unfinished", "gone")
    counts = Counter((mutants[each.number].kind, each.status) for each in outcomes)
    yield f"| change | {' | '.join(statuses)} |"
    yield f"|---|{'---|' * len(statuses)}"
    for kind in sorted({kind for kind, _ in counts}):
        yield f"| {kind} | {' | '.join(str(counts[kind, status]) for status in statuses)} |"
    yield ""
    yield "| mutant | in | code | instead of | outcome |"
    yield "|---|---|---|---|---|"
    for each in outcomes:
        mutant = mutants[each.number]
        if each.status != "killed":
            code = [" ".join(text.split()).replace("|", "\\|") for text in (mutant.new, mutant.old)]
            where = f"`{mutant.path}` `{mutant.function}`"
            yield f"| {each.number} | {where} | `{code[0]}` | `{code[1]}` | {each.status} |"


def main() -> None:
    args: argparse.Namespace = build_parser().parse_args()
    check_least(1, count=args.count, workers=args.workers)
    args.out.mkdir(parents=True, exist_ok=True)
    chosen = args.out / "mutants.json"
    if args.stage == "choose" and not chosen.exists():
        write_json(chosen, {"mutants": [asdict(each) for each in choose(args.seed, args.count)]})
    mutants = [Mutant(**each) for each in read_json(chosen, "choose")["mutants"]]
    if args.stage == "reach" and not (args.out / "reached.json").exists():
        find_reach(args.out, mutants, args.workers)
    elif args.stage == "run":
        run(args.out, mutants, args.workers, args.minutes)
    elif args.stage == "table":
        for line in table(mutants, read_outcomes(args.out / "outcomes.jsonl")):
            print_line(line)


if __name__ == "__main__":
    run_script("study_mutants.py", main)
