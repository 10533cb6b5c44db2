"""Megatron's flags that PaRO does not have: accepted if they change nothing, ignored or refused."""

# Thereby a LLaMA script for Megatron-LM without tensor or pipeline parallelism runs unchanged.
# For other scripts the error names the PaRO configuration that fits the same model.

from __future__ import annotations

import argparse
import math
import tomllib
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

from paro.arguments.flag_parser import AddFlag, by_flag, flag_group
from paro.errors import flag_of, one_line
from paro.text import listed

# ("LLaMA's part for the part of Megatron-LM's default GPT", flags that select LLaMA's part)
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
# Megatron's model-parallel sizes: one copy of the model is split into their product of parts.
_CUTS = ("tensor_model_parallel_size", "pipeline_model_parallel_size")


class FlagTreatment(Enum):
    """The treatment of a flag."""

    ACCEPTED = "accepted"  # a flag that requests what PaRO does anyway
    IGNORED = "ignored"  # a flag that changes no result; the log reports that it has no effect
    REFUSED = "refused"  # a flag that requests what PaRO does not do


@dataclass(frozen=True, slots=True)
class FlagRule:
    """The treatment of one flag, or of a family such as `--moe-*`, with its reason.

    An accepted flag is a switch or takes one of `values`; with `where`, it is accepted only if
    another argument has a value. Other uses are refused, and the error says what to use `instead`.
    Ignored and refused flags take any values.
    """

    flag: str
    outcome: FlagTreatment
    why: str = ""
    instead: str = ""
    values: tuple[str | int | float, ...] = ()
    where: tuple[str, object] | None = None  # (argument, value that makes the flag acceptable)


def _rules() -> Iterator[FlagRule]:
    """Yield all rows of the table, by flag."""
    for flags, allowed, why, instead in _TABLE["partly_accepted"]:
        is_switch, reasons = isinstance(allowed, dict), (one_line(why), one_line(instead))
        values = () if is_switch else tuple(allowed)
        where = next(iter(allowed.items())) if is_switch else None
        for flag in flags.split():
            yield FlagRule(flag, FlagTreatment.ACCEPTED, *reasons, values, where)
    for outcome in FlagTreatment:
        for flags, text in _TABLE[outcome.value]:
            texts = ("", one_line(text)) if outcome is FlagTreatment.REFUSED else (one_line(text),)
            yield from (FlagRule(flag, outcome, *texts) for flag in flags.split())


_TABLE: dict[str, Any] = tomllib.loads(
    Path(__file__).with_name("megatron_rules.toml").read_text(encoding="utf-8")
)
# Refused flag, or `flag=value` for one value alone: the words to give instead.
BECOMES = {given: words for flags, words in _TABLE["becomes"] for given in flags.split()}
RULES = tuple(_rules())
_BY_FLAG = {rule.flag: rule for rule in RULES}
_FAMILIES = {rule.flag[:-1]: rule for rule in RULES if rule.flag.endswith("*")}


@cache
def rule_of(flag: str) -> FlagRule | None:
    """Return the rule of a flag, else of its family; None for flags without a rule."""
    families = (rule for prefix, rule in _FAMILIES.items() if flag.startswith(prefix))
    return _BY_FLAG.get(flag) or next(families, None)


@flag_group(
    "Megatron-LM compatibility",
    "Accepted so that LLaMA scripts run unchanged; every one says why it changes nothing. "
    "docs/megatron.md has those that have no effect, and those that are refused with what to "
    "use instead.",
)
def add_compatibility_args(add: AddFlag) -> None:
    """Add every flag that may be accepted; flags not given are absent from the namespace."""
    unset = argparse.SUPPRESS
    for rule in RULES:
        if rule.outcome is not FlagTreatment.ACCEPTED or rule.flag.endswith("*"):
            continue
        if rule.values:
            accepts, kind = " ".join(map(str, rule.values)), type(rule.values[0])
            add(rule.flag, type=kind, default=unset, metavar="X", help=f"{accepts}: {rule.why}")
        else:
            add(rule.flag, action="store_true", default=unset, help=rule.why)


def take_other_flags(
    words: Sequence[str], parser: ArgumentParser
) -> tuple[list[str], dict[str, list[str]]]:
    """Take flags that have a rule but are not in the parser out of `words`; map them to values."""
    left: list[str] = []
    values_of: dict[str, list[str]] = {}
    for head, *values in by_flag(words):
        flag, equals, value = head.partition("=")
        if flag in parser._option_string_actions or rule_of(flag) is None:
            left += [head, *values]
        else:
            name = flag.removeprefix("--").replace("-", "_")
            values_of[name] = [value, *values] if equals else values
    return left, values_of


def refused(args: Namespace) -> dict[str, list[str]]:
    """Return the given flags that are refused, grouped by what to do instead.

    A refused flag would train another model or needs an unsupported feature.
    """
    by_remedy: dict[str, list[str]] = {}
    degree = math.prod(max(1, getattr(args, name, 1)) for name in _CUTS)
    for rule, treatment, flag, value in _given(args):
        if treatment is FlagTreatment.REFUSED:
            instead = rule.instead.format(value=value, degree=degree)
            by_remedy.setdefault(instead, []).append(f"{flag} {value}".rstrip())
    return by_remedy


def refusals(args: Namespace) -> list[str]:
    """Return one line per alternative, with the refused flags that it replaces."""
    return [
        f"{listed(flags)} {'is' if len(flags) == 1 else 'are'} not supported: {instead}"
        for instead, flags in refused(args).items()
    ]


def ignored_lines(args: Namespace) -> tuple[str, ...]:
    """Return one line per given flag that has no effect."""
    return tuple(
        f"{flag} {value}".rstrip() + f" has no effect: {rule.why}"
        for rule, treatment, flag, value in _given(args)
        if treatment is FlagTreatment.IGNORED
    )


def replacements(args: Namespace) -> dict[str, list[str]]:
    """Map each given flag that is refused or has no effect to the words to give instead.

    The words are empty for a flag that is to be left out.
    """
    remedies = {}
    for _, treatment, flag, value in _given(args):
        if treatment is not FlagTreatment.ACCEPTED:
            text = BECOMES.get(f"{flag}={value}", BECOMES.get(flag, ""))
            remedies[flag] = [word.format(value=value) for word in text.split()]
    return remedies


def changed_parts(args: Namespace) -> tuple[str, ...]:
    """Return a line with the model parts that Megatron-LM would build differently, if any.

    Only a script with flags that Megatron-LM alone has gets the line.
    """
    ruled = list(_given(args))
    chosen = {flag for _, treatment, flag, _ in ruled if treatment is not FlagTreatment.REFUSED}
    for name in ("tie_embeddings_and_output_weights", "position_embedding_type"):
        if getattr(args, name) is not None:
            chosen.add(flag_of(name))
    parts = _PARTS if ruled or args.vocab_file else [part for part in _PARTS if "tie" in part[1]]
    changed = [part for part, flags in parts if not chosen.intersection(flags.split())]
    if not changed or args.llama_preset is not None or args.use_checkpoint_args:
        return ()
    return (f"Megatron-LM makes another model of these flags: this LLaMA has {listed(changed)}",)


def _given(args: Namespace) -> Iterator[tuple[FlagRule, FlagTreatment, str, str]]:
    """Yield (rule, treatment of this use, flag, values) for each given flag that has a rule."""
    for name, value in vars(args).items():
        flag = flag_of(name)
        if (rule := rule_of(flag)) is not None:
            values = [] if value is True else value if isinstance(value, list) else [value]
            treatment = rule.outcome if _fits(rule, args, values) else FlagTreatment.REFUSED
            yield rule, treatment, flag, " ".join(map(str, values))


def _fits(rule: FlagRule, args: Namespace, values: Sequence[object]) -> bool:
    """Return whether a flag is used as its rule accepts it; a rule without conditions always is."""
    if rule.where:
        name, value = rule.where
        return bool(getattr(args, name, value) == value)
    return not rule.values or values[0] in rule.values
