"""Counts which of Megatron-LM's own configurations this parser takes, and writes the page of flags.

    python tools/bench/megatron_flags.py MEGATRON_CHECKOUT --output docs/megatron.md

reads the flags and values of the functional tests of dense GPT models in a checkout of Megatron-LM,
checks each as a launch would, drops those that are refused or unknown, and makes a dry run of the
rest on the ranks that are left for data parallelism. Needs no GPU and runs no Megatron-LM code.
"""

from __future__ import annotations

import io
import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import yaml

if not __package__:  # run as a script: the repository root is not on sys.path
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from paro.arguments.flag_parser import by_flag
from paro.arguments.megatron import RULES, FlagRule, FlagTreatment, refused, rule_of
from paro.arguments.parser import build_parser, names_in, parse_args, parse_known
from paro.config.run import configure, take_early
from paro.distributed.user_errors import run_script
from paro.errors import UserError, flag_of
from paro.launch.dry_run import run_dry
from tools.shared.command_line import Parser
from tools.shared.output import markdown_table, write_text

HEAD = """\
<!-- Written by tools/bench/megatron_flags.py MEGATRON_CHECKOUT --output docs/megatron.md. -->
# Megatron-LM's flags

A Megatron-LM launch script of a dense LLaMA starts here with the script's name changed. Flags that
have a setting here keep their name, their default and their meaning, and are in `--help`. The
others are below: accepted, without effect, or refused; `--moe-*` stands for all that begin so and
have no row of their own. One start names all flags that are refused, unknown or missing and all
values that are wrong, each with what to do. If flags are refused, it ends with those that are left,
ready to paste: without what is refused, unknown or has no effect, with what replaces it, with batch
sizes that divide by the ranks, all of which take a part of the batch, and with the tokenizer type
that reads the given files where Megatron-LM's forks have another name. A guess for an unknown flag
never replaces one that is given. Other values that are refused are left out, which a line says:
then the default holds.

In place of tensor or pipeline parallelism stands `--paro-strategy GGG`. It needs the least memory
and sends the most: [tools/plan.py](planning.md) finds the fastest strategy that fits. In a dry run
`NullTokenizer` stands in place of a tokenizer that is not on this machine.

The model is a LLaMA whether its flags are given or not: where a script leaves out `--swiglu`,
`--normalization RMSNorm`, `--position-embedding-type rope`, `--disable-bias-linear` or the dropouts
of 0, Megatron-LM trains another model, and this one trains a LLaMA of the same sizes. A line at the
start says which parts are others.
"""
MOST_CHARACTERS = 60  # of a flag with its value
CONFIGURATIONS = "tests/functional_tests/test_cases/gpt/gpt3*/model_config.yaml"
RANKS = 8  # of a functional test, which runs on one node
PARALLEL = (
    "--tensor-model-parallel-size",
    "--pipeline-model-parallel-size",
)
GROUPS = ("parameter groups", "muP")  # of --help: flags whose configurations are counted
# Variables that a test's environment defines; all others are left as they are written.
ENVIRONMENT = {"REPEAT": "1"}
# A checkout has no tokenizer files: a vocabulary of GPT-2's size replaces all of them.
TOKENIZER = ("--tokenizer-type", "--tokenizer-model", "--vocab-file", "--merge-file")
STAND_IN = ("--tokenizer-type", "NullTokenizer")
VOCABULARY = ("--vocab-size", "50257")


@dataclass(frozen=True, slots=True)
class DryRun:
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
        """Tell whether the configuration keeps the whole model on every rank."""
        return degree_of(self.words) == 1


def read_configurations(checkout: Path) -> dict[str, tuple[str, ...]]:
    """Return the command lines of the configurations by name; `UserError` if there are none."""
    scripts = {}
    for path in sorted(checkout.glob(CONFIGURATIONS)):
        arguments = yaml.safe_load(path.read_text(encoding="utf-8"))["MODEL_ARGS"]
        scripts[path.parent.name] = tuple(command_line(arguments))
    if not scripts:
        raise UserError(f"{checkout} has no {CONFIGURATIONS}: give a checkout of Megatron-LM")
    return scripts


def command_line(arguments: Mapping[str, object]) -> Iterator[str]:
    """Yield the words of a configuration: true is a switch, a list is several words."""
    for flag, value in arguments.items():
        yield flag
        if value is True:
            continue
        text = re.sub(r"\$\{?(\w+)\}?", lambda name: ENVIRONMENT.get(name[1], name[1]), str(value))
        several = re.fullmatch(r"\[(.*)\]|(\d+(?: \d+)+)", text)
        yield from shlex.split((several[1] or text).replace(",", " ")) if several else [text]


def degree_of(words: Sequence[str]) -> int:
    """Return over how many ranks a configuration splits the model."""
    degree = 1
    for flag, *values in by_flag(words):
        if flag in PARALLEL:
            degree *= int(values[0])
    return degree


def try_configuration(name: str, words: Sequence[str]) -> DryRun:
    """Check one configuration for refused and unknown flags, and make a dry run without them."""
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
    return DryRun(name, tuple(words), unknown, instead, failure)


def without(words: Sequence[str], flags: set[str]) -> list[str]:
    groups = [group for group in by_flag(words) if group[0] not in flags]
    return [word for group in groups for word in group]


def why_no_dry_run(words: Sequence[str], world_size: int) -> str | None:
    """Say why a dry run of a command line fails, or None; its tokenizer is `STAND_IN`."""
    own_words = without(words, {*TOKENIZER})
    size = () if "--vocab-size" in own_words else VOCABULARY
    plan = ("--dry-run", "--world-size", str(world_size))
    try:
        args = parse_args([*own_words, *STAND_IN, *size, *plan])
        world = take_early(args).world
        with redirect_stdout(io.StringIO()):
            run_dry(configure(args, world))
    except UserError as error:
        return " ".join(str(error).split())
    return None


def commit_of(checkout: Path) -> tuple[str, str]:
    """Return the commit of a checkout and its date."""
    command = ["git", "-C", str(checkout), "log", "-1", "--format=%h %cs"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise UserError(f"{checkout} is no checkout of git's: {done.stderr.strip()}")
    commit, date = done.stdout.split()
    return commit, date


def counts(dry_runs: Sequence[DryRun]) -> Iterator[str]:
    """Yield the counts of all configurations, as Markdown."""
    passing = {
        "in all": dry_runs,
        "pass a dry run as they are": [dry_run for dry_run in dry_runs if dry_run.is_untouched],
        "pass without the flags that the refusal names": [t for t in dry_runs if t.failure is None],
    }
    rows = [(what, len(of), sum(t.is_data_parallel for t in of)) for what, of in passing.items()]
    yield from markdown_table("| configurations | of them with whole models on every rank", rows)
    yield ""
    unknown = Counter(flag for dry_run in dry_runs for flag in dry_run.unknown)
    given = {flag for dry_run in dry_runs for flag, *_ in by_flag(dry_run.words)}
    rules = {flag: rule_of(flag) for flag in given - unknown.keys()}
    outcomes = Counter(rule.outcome.value if rule else "setting" for rule in rules.values())
    yield (
        f"They have {len(given)} different flags: {outcomes['setting']} are settings "
        f"here, {outcomes['accepted']} are accepted, {outcomes['ignored']} have no effect, "
        f"{outcomes['refused']} are refused whatever their value, {len(unknown)} are "
        "unknown."
    )
    by_advice = sorted(refused_in(dry_runs).items(), key=lambda item: -len(_union(item[1])))
    heads = (
        f"{' or '.join(GROUPS)} | in configurations | pass as they are | pass without the others"
    )
    tables: dict[str, list[tuple[object, ...]]] = {
        heads: [*rows_of_groups(dry_runs)],
        "refused | in configurations | what to do": [
            (", ".join(f"`{_short(flag)}`" for flag in sorted(flags)), len(_union(flags)), advice)
            for advice, flags in by_advice
        ],
        "unknown | in configurations": [(f"`{flag}`", n) for flag, n in sorted(unknown.items())],
        "still fails | why": [
            (one.name, one.failure) for one in dry_runs if one.failure is not None
        ],
    }
    for heads, table_rows in tables.items():
        if table_rows:
            yield from ("", *markdown_table(heads, table_rows))


def rows_of_groups(dry_runs: Sequence[DryRun]) -> Iterator[tuple[object, ...]]:
    """Yield each flag of `GROUPS` in configurations, with how many have it and pass."""
    with_flag: dict[str, list[DryRun]] = {}
    for dry_run in dry_runs:
        for flag, *_ in by_flag(dry_run.words):
            with_flag.setdefault(flag, []).append(dry_run)
    names = {flag_of(name) for name in names_in(*GROUPS)}
    for flag in sorted(names & with_flag.keys()):
        have = with_flag[flag]
        passing = sum(one.is_untouched for one in have), sum(one.failure is None for one in have)
        yield f"`{flag}`", len(have), *passing


def refused_in(dry_runs: Sequence[DryRun]) -> dict[str, dict[str, set[str]]]:
    """Return the configurations by flag with value, by the advice."""
    by_advice: dict[str, dict[str, set[str]]] = {}
    for dry_run in dry_runs:
        for advice, flags in dry_run.refused.items():
            # Advice that differs only in the value counts as the same advice.
            advice = re.sub(r"(--paro-group-size) \d+", r"\1 X", advice)
            for given in flags:
                by_advice.setdefault(advice, {}).setdefault(given, set()).add(dry_run.name)
    return by_advice


def page(dry_runs: Sequence[DryRun], commit: str, date: str) -> str:
    """Return the whole page in Markdown."""
    lines = [
        HEAD,
        *rule_lines(),
        "## Megatron-LM's own configurations",
        "",
        f"The {len(dry_runs)} configurations `gpt3*` of Megatron-LM's functional tests at "
        f"{commit} ({date}). Each is checked with its own flags and values, then "
        "makes a dry run without what was refused or unknown, on those of 8 ranks that are left to "
        "data parallelism and that its batch feeds. Files of tokenizers are not in a checkout: "
        "`NullTokenizer` stands in for them. The figures are those of",
        "",
        "```bash",
        "python tools/bench/megatron_flags.py MEGATRON_CHECKOUT --output docs/megatron.md",
        "```",
        "",
        *counts(dry_runs),
    ]
    return "\n".join(lines) + "\n"


def rule_lines() -> Iterator[str]:
    """Yield the tables of flags without an effect here: accepted, ignored, refused."""
    yield from ("## Accepted: it happens anyway", "", *_table("because", FlagTreatment.ACCEPTED))
    yield from ("", "## Accepted without effect", "")
    yield "Results are the same; the start of a run says so in a line for each."
    yield from ("", *_table("because", FlagTreatment.IGNORED))
    yield from ("", "## Refused", "", *_table("what to do", FlagTreatment.REFUSED), "")


def _table(reasons: str, outcome: FlagTreatment) -> list[str]:
    """Return a row for each reason, with all the flags that share it."""
    by_reason: dict[str, list[str]] = {}
    for rule in RULES:
        if rule.outcome is outcome:
            by_reason.setdefault(_reason(rule), []).append(_spelled(rule))
    rows = [(" ".join(flags), reason) for reason, flags in by_reason.items()]
    return markdown_table(f"flag | {reasons}", rows)


def _reason(rule: FlagRule) -> str:
    if rule.outcome is FlagTreatment.REFUSED:
        return rule.instead
    other = f"; else refused: {rule.instead}" if rule.instead else ""
    return f"{rule.why}{other}".format(value="X", degree="X")


def _spelled(rule: FlagRule) -> str:
    return " ".join((f"`{rule.flag}`", ", ".join(f"`{value}`" for value in rule.values))).strip()


def _short(words: str) -> str:
    """Return a flag with its value; without the value if that is long."""
    return words if len(words) <= MOST_CHARACTERS else words.split()[0]


def _union(flags: Mapping[str, set[str]]) -> set[str]:
    return set().union(*flags.values())


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("checkout", type=Path, metavar="MEGATRON_CHECKOUT")
    parser.add_argument("--output", type=Path, metavar="FILE.md", help="write the page there")
    options = parser.parse_args(argv)
    configurations = read_configurations(options.checkout)
    commit, date = commit_of(options.checkout)
    dry_runs = [try_configuration(name, words) for name, words in configurations.items()]
    if options.output is not None:
        write_text(options.output, page(dry_runs, commit, date))
    print("\n".join(counts(dry_runs)))


if __name__ == "__main__":
    run_script("megatron_flags.py", main)
