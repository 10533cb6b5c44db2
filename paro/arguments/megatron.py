"""Megatron's flags beside ours: accepted where they name what happens anyway, else refused."""

# So a LLaMA script for Megatron-LM without tensor, pipeline or context parallelism runs unchanged,
# and one that asks for something else is told which setting of PaRO fits the same model.

from __future__ import annotations

import argparse
from argparse import ArgumentParser, Namespace

from paro.arguments.megatron_rules.compute import COMPUTE_RULES
from paro.arguments.megatron_rules.elsewhere import ELSEWHERE_RULES
from paro.arguments.megatron_rules.job import JOB_RULES
from paro.arguments.megatron_rules.model import MODEL_RULES
from paro.arguments.megatron_rules.parallel import PARALLEL_RULES
from paro.arguments.megatron_rules.rule import Outcome, Rule
from paro.arguments.needed import details_without_full
from paro.errors import listed

RULES = (*MODEL_RULES, *COMPUTE_RULES, *PARALLEL_RULES, *JOB_RULES, *ELSEWHERE_RULES)


def add_compatibility_args(parser: ArgumentParser) -> None:
    """Adds every flag of `RULES`; one that is not given leaves no trace in the namespace."""
    add = parser.add_argument_group(
        "Megatron-LM compatibility",
        "Accepted so that LLaMA scripts run unchanged; every one says why it changes nothing. "
        "docs/megatron.md has those that have no effect, and those that are refused with what to "
        "use instead.",
    ).add_argument
    unset = argparse.SUPPRESS
    for rule in RULES:
        if rule.outcome is not Outcome.ACCEPTED:
            add(rule.flag, nargs="*", default=unset, help=argparse.SUPPRESS)
        elif rule.values:
            accepts, kind = " ".join(map(str, rule.values)), type(rule.values[0])
            add(rule.flag, type=kind, default=unset, metavar="X", help=f"{accepts}: {rule.why}")
        else:
            needed = f"with {rule.beside}: " if rule.beside else ""
            add(rule.flag, action="store_true", default=unset, help=f"{needed}{rule.why}")


def refused(args: Namespace) -> dict[str, list[str]]:
    """Flags that would train another model or need what is not here, by what to do instead."""
    found: dict[str, list[str]] = {}
    for rule, given in _given(args):
        if not _is_accepted(rule, args):
            instead = rule.instead.format(value=getattr(args, rule.dest))
            found.setdefault(instead, []).append(given)
    if details := details_without_full(args):
        found["give --recompute-granularity full with it, or leave it out"] = details
    return found


def refusals(args: Namespace) -> list[str]:
    """A line for each thing to do instead of flags that are refused."""
    return [
        f"{listed(given)} {'is' if len(given) == 1 else 'are'} not supported: {instead}"
        for instead, given in refused(args).items()
    ]


def ignored_lines(args: Namespace) -> tuple[str, ...]:
    """A line for each flag that was given and is not acted upon."""
    return tuple(
        f"{given} has no effect: {rule.why}"
        for rule, given in _given(args)
        if rule.outcome is Outcome.IGNORED
    )


def _given(args: Namespace) -> list[tuple[Rule, str]]:
    """The rules of the flags that were given, and each as it was given."""
    found = []
    for rule in RULES:
        value = getattr(args, rule.dest, None)
        if value is not None:
            words = [] if value is True else value if isinstance(value, list) else [value]
            found.append((rule, " ".join(map(str, (rule.flag, *words)))))
    return found


def _is_accepted(rule: Rule, args: Namespace) -> bool:
    if rule.values:
        return getattr(args, rule.dest) in rule.values
    if rule.beside:
        return bool(getattr(args, rule.beside.removeprefix("--").replace("-", "_")))
    return rule.outcome is not Outcome.REFUSED
