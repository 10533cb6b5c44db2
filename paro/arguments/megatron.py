"""Megatron's flags that PaRO does not have: accepted if they change nothing, ignored or refused."""

# So a LLaMA script for Megatron-LM without tensor or pipeline parallelism runs unchanged;
# for other scripts the error names the PaRO configuration that fits the same model.

from __future__ import annotations

import argparse
import math
import tomllib
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

from paro.arguments.flag_parser import by_flag
from paro.text import listed

# A LLaMA's parts, what a GPT of Megatron-LM has in their place, and the flags that ask for them.
_PARTS = (
    ("RMSNorm for LayerNorm", "--normalization"),
    ("SwiGLU for GELU", "--swiglu"),
    (
        "rotary positions for learned ones",
        "--position-embedding-type --use-rotary-position-embeddings",
    ),
    ("linear layers without biases", "--disable-bias-linear"),
    (
        "an output layer of its own (--tie-embeddings-and-output-weights ties it)",
        "--tie-embeddings-and-output-weights",
    ),
    ("no dropout in attention", "--attention-dropout"),
    ("no dropout behind it", "--hidden-dropout"),
)
# The arguments that cut one copy of a model into as many parts as their product.
_CUTS = ("tensor_model_parallel_size", "pipeline_model_parallel_size")


class Outcome(Enum):
    """The treatment of a flag."""

    ACCEPTED = "accepted"  # it requests what PaRO does anyway
    IGNORED = "ignored"  # it changes no result; the run's first lines report that it has no effect
    REFUSED = "refused"  # it requests something else


@dataclass(frozen=True, slots=True)
class Rule:
    """The treatment of one flag, or of a family such as `--moe-*`, with its reason.

    An accepted flag is a switch, or takes one of `values`, or is a switch where an argument has a
    value. Other uses of it are refused, and the error gives `instead`. Other flags take any values.
    """

    flag: str
    outcome: Outcome
    why: str = ""
    instead: str = ""
    values: tuple[str | int | float, ...] = ()
    where: tuple[str, object] | None = None  # an argument, and the value that it has or may get

    @property
    def is_family(self) -> bool:
        return self.flag.endswith("*")


def _rules() -> Iterator[Rule]:
    """Yield all rows of the table, by flag."""
    for row in _TABLE["partly_accepted"]:
        values, where = tuple(row.get("values", ())), row.get("where")
        why, instead = _one_line(row["why"]), _one_line(row["instead"])
        for flag in row["flags"].split():
            yield Rule(flag, Outcome.ACCEPTED, why, instead, values, where)
    for outcome in Outcome:
        for flags, text in _TABLE[outcome.value]:
            texts = ("", _one_line(text)) if outcome is Outcome.REFUSED else (_one_line(text),)
            yield from (Rule(flag, outcome, *texts) for flag in flags.split())


def _one_line(text: str) -> str:
    return " ".join(text.split())


_TABLE: dict[str, Any] = tomllib.loads(
    Path(__file__).with_name("megatron_rules.toml").read_text(encoding="utf-8")
)
# The words to give in place of a refused flag, with any value or by its value.
BECOMES: Mapping[str, str | Mapping[str, str]] = _TABLE["becomes"]
RULES = tuple(_rules())
_BY_FLAG = {rule.flag: rule for rule in RULES}
_FAMILIES = {rule.flag[:-1]: rule for rule in RULES if rule.is_family}


@cache
def rule_of(flag: str) -> Rule | None:
    """Return the rule for a flag or else for its family; None for a setting or an unknown flag."""
    families = (rule for prefix, rule in _FAMILIES.items() if flag.startswith(prefix))
    return _BY_FLAG.get(flag) or next(families, None)


def add_compatibility_args(parser: ArgumentParser) -> None:
    """Add every flag that may be accepted; one not given does not appear in the namespace."""
    add = parser.add_argument_group(
        "Megatron-LM compatibility",
        "Accepted so that LLaMA scripts run unchanged; every one says why it changes nothing. "
        "docs/megatron.md has those that have no effect, and those that are refused with what to "
        "use instead.",
    ).add_argument
    unset = argparse.SUPPRESS
    for rule in RULES:
        if rule.outcome is not Outcome.ACCEPTED or rule.is_family:
            continue
        if rule.values:
            accepts, kind = " ".join(map(str, rule.values)), type(rule.values[0])
            add(rule.flag, type=kind, default=unset, metavar="X", help=f"{accepts}: {rule.why}")
        else:
            add(rule.flag, action="store_true", default=unset, help=rule.why)


def take_other_flags(
    words: Sequence[str], parser: ArgumentParser
) -> tuple[list[str], dict[str, list[str]]]:
    """Take the flags of rules that the parser lacks out of the words; also return their values."""
    left: list[str] = []
    taken: dict[str, list[str]] = {}
    for head, *values in by_flag(words):
        flag, equals, value = head.partition("=")
        if flag in parser._option_string_actions or rule_of(flag) is None:
            left += [head, *values]
        else:
            name = flag.removeprefix("--").replace("-", "_")
            taken[name] = [value, *values] if equals else values
    return left, taken


def refused(args: Namespace) -> dict[str, list[str]]:
    """Return the given flags that are refused, grouped by what to do instead.

    They would train another model or need an unsupported feature.
    """
    found: dict[str, list[str]] = {}
    degree = math.prod(max(1, getattr(args, name, 1)) for name in _CUTS)
    for rule, flag, values in _given(args):
        if not _is_accepted(rule, args, values):
            instead = rule.instead.format(value=" ".join(map(str, values)), degree=degree)
            found.setdefault(instead, []).append(_spelled(flag, values))
    return found


def refusals(args: Namespace) -> list[str]:
    """Return one line per alternative to the flags that are refused."""
    return [
        f"{listed(given)} {'is' if len(given) == 1 else 'are'} not supported: {instead}"
        for instead, given in refused(args).items()
    ]


def ignored_lines(args: Namespace) -> tuple[str, ...]:
    """Return one line per given flag that has no effect."""
    return tuple(
        f"{_spelled(flag, values)} has no effect: {rule.why}"
        for rule, flag, values in _given(args)
        if rule.outcome is Outcome.IGNORED
    )


def replacements(args: Namespace) -> dict[str, list[str]]:
    """Return the words to give instead of each given flag that is refused or has no effect.

    There are none for a flag that is to be left out.
    """
    found = {}
    for rule, flag, values in _given(args):
        if rule.outcome is Outcome.IGNORED or not _is_accepted(rule, args, values):
            value = " ".join(map(str, values))
            becomes = BECOMES.get(flag, "")
            text = becomes if isinstance(becomes, str) else becomes.get(value, "")
            found[flag] = [word.format(value=value) for word in text.split()]
    return found


def changed_parts(args: Namespace) -> tuple[str, ...]:
    """Return a line with the parts of the model that Megatron-LM would make differently; or none.

    Flags that Megatron-LM alone has tell its script from one of this project, which asks for none.
    """
    given = list(_given(args))
    asked = {flag for rule, flag, values in given if _is_accepted(rule, args, values)}
    if args.tie_embeddings_and_output_weights is not None:
        asked.add("--tie-embeddings-and-output-weights")
    parts = _PARTS if given or args.vocab_file else [part for part in _PARTS if "tie" in part[1]]
    changed = [part for part, flags in parts if not asked.intersection(flags.split())]
    if not changed or args.llama_preset is not None or args.use_checkpoint_args:
        return ()
    return (f"Megatron-LM makes another model of these flags: this LLaMA has {listed(changed)}",)


def _given(args: Namespace) -> Iterator[tuple[Rule, str, list[object]]]:
    """Yield the given flags that have a rule, with it and their values."""
    for name, value in vars(args).items():
        flag = f"--{name.replace('_', '-')}"
        rule = rule_of(flag)
        if rule is not None:
            yield rule, flag, [] if value is True else value if isinstance(value, list) else [value]


def _is_accepted(rule: Rule, args: Namespace, values: Sequence[object]) -> bool:
    if rule.values:
        return values[0] in rule.values
    if rule.where:
        name, value = rule.where
        return bool(getattr(args, name, value) == value)
    return rule.outcome is not Outcome.REFUSED


def _spelled(flag: str, values: Sequence[object]) -> str:
    return " ".join((flag, *map(str, values)))
