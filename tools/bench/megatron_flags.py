"""Counts which of Megatron-LM's own configurations this parser takes, and writes the page of flags.

    python tools/bench/megatron_flags.py MEGATRON_CHECKOUT --output docs/megatron.md

reads the flags and values of the functional tests of dense GPT models in a checkout of Megatron-LM,
checks each as a launch would, drops those that are refused or unknown, and makes a dry run of the
rest on the ranks that are left for data parallelism. Needs no GPU and runs no Megatron-LM code.
"""

from __future__ import annotations

import argparse
import io
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import yaml

if not __package__:  # run as a script: the repository root is not on sys.path
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from paro.arguments.megatron import refused
from paro.arguments.parser import build_parser, parse_args, parse_known
from paro.arguments.words import by_flag
from paro.config.run import RunConfig, take_world
from paro.errors import UserError
from paro.training.dry_run import run_dry
from tools.bench.megatron.page import Count, page
from tools.shared.command_line import Parser, status_of
from tools.shared.output import write_text

CONFIGURATIONS = "tests/functional_tests/test_cases/gpt/gpt3*/model_config.yaml"
RANKS = 8  # of a functional test, which runs on one node
PARALLEL = (
    "--tensor-model-parallel-size",
    "--pipeline-model-parallel-size",
)
# Variables that a test's environment defines; all others are left as they are written.
ENVIRONMENT = {"REPEAT": "1"}
# A checkout has no tokenizer files: a vocabulary of GPT-2's size replaces all of them.
TOKENIZER = ("--tokenizer-type", "--tokenizer-model", "--vocab-file", "--merge-file")
STAND_IN = ("--tokenizer-type", "NullTokenizer")
VOCABULARY = ("--vocab-size", "50257")


@dataclass(frozen=True, slots=True)
class Trial:
    """The outcome for one configuration."""

    name: str
    words: tuple[str, ...]
    unknown: tuple[str, ...]  # flags
    refused: Mapping[str, Sequence[str]]  # flags with their values, by the advice
    failure: str | None  # of the dry run without those flags

    @property
    def is_untouched(self) -> bool:
        return not (self.unknown or self.refused or self.failure)

    @property
    def is_data_parallel(self) -> bool:
        """Whether the configuration keeps the whole model on every rank."""
        return degree_of(self.words) == 1


def read_configurations(checkout: Path) -> dict[str, tuple[str, ...]]:
    """The command lines of the configurations by name; `UserError` if there are none."""
    found = {}
    for path in sorted(checkout.glob(CONFIGURATIONS)):
        arguments = yaml.safe_load(path.read_text(encoding="utf-8"))["MODEL_ARGS"]
        found[path.parent.name] = tuple(command_line(arguments))
    if not found:
        raise UserError(f"{checkout} has no {CONFIGURATIONS}: give a checkout of Megatron-LM")
    return found


def command_line(arguments: Mapping[str, object]) -> Iterator[str]:
    """The words of a configuration: true is a switch, [a b] and numbers are several, else one."""
    for flag, value in arguments.items():
        yield flag
        if value is True:
            continue
        text = re.sub(r"\$\{?(\w+)\}?", lambda name: ENVIRONMENT.get(name[1], name[1]), str(value))
        several = re.fullmatch(r"\[(.*)\]|(\d+(?: \d+)+)", text)
        yield from shlex.split((several[1] or text).replace(",", " ")) if several else [text]


def degree_of(words: Sequence[str]) -> int:
    """Over how many ranks a configuration splits the model."""
    degree = 1
    for flag, *values in by_flag(words):
        if flag in PARALLEL:
            degree *= int(values[0])
    return degree


def try_configuration(name: str, words: Sequence[str]) -> Trial:
    """Checks one configuration for refused and unknown flags, and makes a dry run without them."""
    mistakes: list[str] = []
    args, extra, _ = parse_known(build_parser(), words, mistakes)
    unknown = tuple(flag.split("=")[0] for flag, *_ in by_flag(extra))
    instead = refused(args)
    gone = {given.split()[0] for flags in instead.values() for given in flags} | {*unknown}
    sharing = args.context_parallel_size
    readers = max(1, RANKS // degree_of(words) // sharing)
    while args.global_batch_size and args.global_batch_size % (args.micro_batch_size * readers):
        readers //= 2  # largest number of data-parallel ranks that divides the batch
    failure = "; ".join(mistakes) or why_no_dry_run(without(words, gone), readers * sharing)
    return Trial(name, tuple(words), unknown, instead, failure)


def without(words: Sequence[str], flags: set[str]) -> list[str]:
    groups = [group for group in by_flag(words) if group[0] not in flags]
    return [word for group in groups for word in group]


def why_no_dry_run(words: Sequence[str], world_size: int) -> str | None:
    """Why a dry run of a command line fails, or None; uses the tokenizer `STAND_IN`."""
    kept = without(words, {*TOKENIZER})
    size = () if "--vocab-size" in kept else VOCABULARY
    plan = ("--dry-run", "--world-size", str(world_size))
    try:
        args = parse_args([*kept, *STAND_IN, *size, *plan])
        world = take_world(args)
        with redirect_stdout(io.StringIO()):
            run_dry(RunConfig.from_args(args, world))
    except UserError as error:
        return " ".join(str(error).split())
    return None


def commit_of(checkout: Path) -> tuple[str, str]:
    """The commit of a checkout and its date."""
    command = ["git", "-C", str(checkout), "log", "-1", "--format=%h %cs"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise UserError(f"{checkout} is no checkout of git's: {done.stderr.strip()}")
    commit, date = done.stdout.split()
    return commit, date


def count_of(trials: Sequence[Trial], commit: str, date: str) -> Count:
    """The totals over all trials."""
    by_advice: dict[str, dict[str, set[str]]] = {}
    for trial in trials:
        for advice, flags in trial.refused.items():
            # Advice that differs only in the value counts as the same advice.
            advice = re.sub(r"(--paro-group-size) \d+", r"\1 X", advice)
            for given in flags:
                by_advice.setdefault(advice, {}).setdefault(given, set()).add(trial.name)
    return Count(
        commit=commit,
        date=date,
        configurations=len(trials),
        data_parallel=sum(trial.is_data_parallel for trial in trials),
        untouched=sum(trial.is_untouched for trial in trials),
        without_refused=sum(trial.failure is None for trial in trials),
        data_parallel_without_refused=sum(
            trial.failure is None and trial.is_data_parallel for trial in trials
        ),
        refused=by_advice,
        unknown=[flag for trial in trials for flag in trial.unknown],
        given=[flag for trial in trials for flag, *_ in by_flag(trial.words)],
        failures={trial.name: trial.failure for trial in trials if trial.failure is not None},
    )


def run(options: argparse.Namespace) -> None:
    configurations = read_configurations(options.checkout)
    commit, date = commit_of(options.checkout)
    trials = [try_configuration(name, words) for name, words in configurations.items()]
    count = count_of(trials, commit, date)
    if options.output is not None:
        write_text(options.output, page(count))
    print("\n".join(count.lines()))


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(description=__doc__)
    parser.add_argument("checkout", type=Path, metavar="MEGATRON_CHECKOUT")
    parser.add_argument("--output", type=Path, metavar="FILE.md", help="write the page there")
    options = parser.parse_args(argv)
    return status_of("megatron_flags.py", lambda: run(options))


if __name__ == "__main__":
    sys.exit(main())
