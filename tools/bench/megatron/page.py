"""The page of Megatron-LM's flags: how each is treated here, and its own configurations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from paro.arguments.megatron import RULES, Outcome, Rule, rule_of

HEAD = """\
<!-- Written by tools/bench/megatron_flags.py MEGATRON_CHECKOUT --output docs/megatron.md. -->
# Megatron-LM's flags

A Megatron-LM launch script of a dense LLaMA starts here with the script's name changed. Flags that
have a setting here keep their name, their default and their meaning, and are in `--help`. The
others are below: accepted, without effect, or refused; `--moe-*` stands for all that begin so and
have no row of their own. One start names all flags that are refused, unknown or missing and all
values that are wrong, each with what to do. If flags are refused, it ends with those that are left,
ready to paste: without what is refused, unknown or has no effect, with what replaces it
(`--paro-strategy GGG` for tensor or pipeline parallelism), with batch sizes that divide by the
ranks, all of which take a part of the batch, and with the tokenizer type that reads the given files
where Megatron-LM's forks have another name. Other values that are refused are left out, which a
line says: then the default holds.

The model is a LLaMA whether its flags are given or not: where a script leaves out `--swiglu`,
`--normalization RMSNorm`, `--position-embedding-type rope`, `--disable-bias-linear` or the dropouts
of 0, Megatron-LM trains another model, and this one trains a LLaMA of the same sizes. A line at the
start says which parts are others.
"""
MOST_CHARACTERS = 60  # of a flag with its value


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """The outcomes for Megatron-LM's configurations."""

    commit: str
    date: str
    configurations: int
    data_parallel: int  # those that split neither model nor sequences
    untouched: int  # pass a dry run as they are
    without_refused: int  # pass it without refused and unknown flags
    data_parallel_without_refused: int
    refused: Mapping[str, Mapping[str, set[str]]]  # configurations by flag with value, by advice
    unknown: Sequence[str]  # one entry per configuration that has the flag
    given: Sequence[str]
    failures: Mapping[str, str]

    def lines(self) -> Iterator[str]:
        """The counts as Markdown."""
        outcomes = Counter(_outcome(flag, {*self.unknown}) for flag in set(self.given))
        yield "| | configurations | of them with whole models on every rank |"
        yield "|---|---|---|"
        yield f"| in all | {self.configurations} | {self.data_parallel} |"
        yield f"| pass a dry run as they are | {self.untouched} | {self.untouched} |"
        yield (
            f"| pass without the flags that the refusal names | {self.without_refused} "
            f"| {self.data_parallel_without_refused} |"
        )
        yield ""
        yield (
            f"They have {len(set(self.given))} different flags: {outcomes['setting']} are settings "
            f"here, {outcomes['accepted']} are accepted, {outcomes['ignored']} have no effect, "
            f"{outcomes['refused']} are refused whatever their value, {outcomes['unknown']} are "
            "unknown."
        )
        yield from ("", "| refused | in configurations | what to do |", "|---|---|---|")
        ordered = sorted(self.refused.items(), key=lambda item: -len(_union(item[1])))
        for advice, flags in ordered:
            given = ", ".join(f"`{_short(flag)}`" for flag in sorted(flags))
            yield f"| {given} | {len(_union(flags))} | {advice} |"
        if self.unknown:
            yield from ("", "| unknown | in configurations |", "|---|---|")
            for flag, times in sorted(Counter(self.unknown).items()):
                yield f"| `{flag}` | {times} |"
        if self.failures:
            yield from ("", "| still fails | why |", "|---|---|")
            for name, why in self.failures.items():
                yield f"| {name} | {why} |"


def page(count: Count) -> str:
    """The whole page in Markdown."""
    lines = [
        HEAD,
        *rule_lines(),
        "## Megatron-LM's own configurations",
        "",
        f"The {count.configurations} configurations `gpt3*` of Megatron-LM's functional tests at "
        f"{count.commit} ({count.date}). Each is checked with its own flags and values, then "
        "makes a dry run without what was refused or unknown, on those of 8 ranks that are left to "
        "data parallelism and that its batch feeds. Files of tokenizers are not in a checkout: "
        "`NullTokenizer` stands in for them. The figures are those of",
        "",
        "```bash",
        "python tools/bench/megatron_flags.py MEGATRON_CHECKOUT --output docs/megatron.md",
        "```",
        "",
        *count.lines(),
    ]
    return "\n".join(lines) + "\n"


def rule_lines() -> Iterator[str]:
    """The tables of flags that have no effect of their own here: accepted, ignored, refused."""
    yield from ("## Accepted: it happens anyway", "", "| flag | because |", "|---|---|")
    yield from _rows(Outcome.ACCEPTED)
    yield from ("", "## Accepted without effect", "")
    yield "Results are the same; the start of a run says so in a line for each."
    yield from ("", "| flag | because |", "|---|---|")
    yield from _rows(Outcome.IGNORED)
    yield from ("", "## Refused", "", "| flag | what to do |", "|---|---|")
    yield from _rows(Outcome.REFUSED)
    yield ""


def _rows(outcome: Outcome) -> Iterator[str]:
    """A row for each reason, with all the flags that share it."""
    by_reason: dict[str, list[str]] = {}
    for rule in RULES:
        if rule.outcome is outcome:
            by_reason.setdefault(_reason(rule), []).append(_spelled(rule))
    for reason, flags in by_reason.items():
        yield f"| {' '.join(flags)} | {reason} |"


def _reason(rule: Rule) -> str:
    if rule.outcome is Outcome.REFUSED:
        return rule.instead
    other = f"; else refused: {rule.instead}" if rule.instead else ""
    return f"{rule.why}{other}".replace("{value}", "X")


def _spelled(rule: Rule) -> str:
    return " ".join((f"`{rule.flag}`", ", ".join(f"`{value}`" for value in rule.values))).strip()


def _outcome(flag: str, unknown: set[str]) -> str:
    if flag in unknown:
        return "unknown"
    rule = rule_of(flag)
    return rule.outcome.value if rule else "setting"


def _short(given: str) -> str:
    """A flag with its value; without the value if that is long."""
    return given if len(given) <= MOST_CHARACTERS else given.split()[0]


def _union(flags: Mapping[str, set[str]]) -> set[str]:
    return set().union(*flags.values())
