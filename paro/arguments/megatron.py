"""Megatron's flags that PaRO does not have: accepted if they change nothing, ignored or refused."""

# So a LLaMA script for Megatron-LM without tensor, pipeline or context parallelism runs unchanged;
# for other scripts the error names the PaRO configuration that fits the same model.

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
RULES = (*MODEL_RULES, *COMPUTE_RULES, *PARALLEL_RULES, *JOB_RULES, *ELSEWHERE_RULES)


def add_compatibility_args(parser: ArgumentParser) -> None:
    """Adds every flag of `RULES`; one that is not given does not appear in the namespace."""
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
            needed = f"with {rule.paired_with}: " if rule.paired_with else ""
            add(rule.flag, action="store_true", default=unset, help=f"{needed}{rule.why}")


def refused(args: Namespace) -> dict[str, list[str]]:
    """The given flags that are refused, grouped by what to do instead.

    They would train another model or need an unsupported feature.
    """
    found: dict[str, list[str]] = {}
    for rule, given in _given(args):
        if not _is_accepted(rule, args):
            instead = rule.instead.format(value=getattr(args, rule.dest))
            found.setdefault(instead, []).append(given)
    if details := details_without_full(args):
        found["give --recompute-granularity full with it, or leave it out"] = details
    return found


def refusals(args: Namespace) -> list[str]:
    """One line per alternative to the flags that are refused."""
    return [
        f"{listed(given)} {'is' if len(given) == 1 else 'are'} not supported: {instead}"
        for instead, given in refused(args).items()
    ]


def ignored_lines(args: Namespace) -> tuple[str, ...]:
    """One line per given flag that has no effect."""
    return tuple(
        f"{given} has no effect: {rule.why}"
        for rule, given in _given(args)
        if rule.outcome is Outcome.IGNORED
    )


def rule_against(flag: str, args: Namespace) -> Rule | None:
    """The rule by which a given flag is refused or has no effect; None if it may stay."""
    for rule in RULES:
        if rule.flag == flag:
            stays = rule.outcome is not Outcome.IGNORED and _is_accepted(rule, args)
            return None if stays else rule
    return None


def changed_parts(args: Namespace) -> tuple[str, ...]:
    """A line with the parts of the model that Megatron-LM would make differently; or none.

    Flags that Megatron-LM alone has tell its script from one of this project, which asks for none.
    """
    given = _given(args)
    asked = {rule.flag for rule, _ in given if _is_accepted(rule, args)}
    if args.tie_embeddings_and_output_weights is not None:
        asked.add("--tie-embeddings-and-output-weights")
    parts = _PARTS if given or args.vocab_file else [part for part in _PARTS if "tie" in part[1]]
    changed = [part for part, flags in parts if not asked.intersection(flags.split())]
    if not changed or args.llama_preset is not None or args.use_checkpoint_args:
        return ()
    return (f"Megatron-LM makes another model of these flags: this LLaMA has {listed(changed)}",)


def _given(args: Namespace) -> list[tuple[Rule, str]]:
    """The rules of the given flags, each with the flag as it was given."""
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
    if rule.paired_with:
        return bool(getattr(args, rule.paired_with.removeprefix("--").replace("-", "_")))
    if rule.unless:
        (other,) = (found for found in RULES if found.flag == rule.unless)
        return not hasattr(args, other.dest) or _is_accepted(other, args)
    return rule.outcome is not Outcome.REFUSED
