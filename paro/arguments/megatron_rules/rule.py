"""The rule for one Megatron flag without an equivalent in PaRO, and helpers to write tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum


class Outcome(Enum):
    """How a flag is treated."""

    ACCEPTED = "accepted"  # it requests what PaRO does anyway
    IGNORED = "ignored"  # it changes no result; the run's first lines report that it has no effect
    REFUSED = "refused"  # it requests something else


@dataclass(frozen=True, slots=True)
class Rule:
    """How one flag is treated, and why.

    An accepted flag is a switch, or takes one of `values`; with `paired_with` it is a switch that
    requires that other flag, with `unless` one that may not go with a refused value of that other
    flag. Other uses of it are refused, and the error gives `instead`. Ignored and refused flags
    take any values. `becomes` has the words to give in place of a refused value, or of any under
    an empty text.
    """

    flag: str
    outcome: Outcome
    why: str = ""
    values: tuple[str | int | float, ...] = ()
    paired_with: str = ""
    unless: str = ""
    instead: str = ""
    becomes: Mapping[str, str] = field(default_factory=dict)

    @property
    def dest(self) -> str:
        return self.flag.removeprefix("--").replace("-", "_")

    def replacement(self, values: Sequence[str]) -> list[str]:
        """The words to give instead of the flag with these values; none if it is to be left out."""
        value = " ".join(values)
        text = self.becomes.get(value, self.becomes.get("", ""))
        return [word.format(value=value) for word in text.split()]


def becoming(text: str | Mapping[str, str], rules: Iterable[Rule]) -> tuple[Rule, ...]:
    """The rules, of which any value becomes `text`, or each value that of its own."""
    becomes = {"": text} if isinstance(text, str) else text
    return tuple(replace(rule, becomes=becomes) for rule in rules)


def accepted(why: str, flags: str) -> tuple[Rule, ...]:
    """Rules for switches that request what PaRO does anyway."""
    return tuple(Rule(flag, Outcome.ACCEPTED, why) for flag in flags.split())


def values(
    flag: str, accepts: str | tuple[str | int | float, ...], why: str, instead: str
) -> tuple[Rule]:
    """A flag with values that request what PaRO does anyway; a string lists several."""
    options = tuple(accepts.split()) if isinstance(accepts, str) else accepts
    return (Rule(flag, Outcome.ACCEPTED, why, values=options, instead=instead),)


def paired_with(flag: str, other: str, why: str, instead: str) -> tuple[Rule]:
    """A switch that requests what another flag, given together with it, does."""
    return (Rule(flag, Outcome.ACCEPTED, why, paired_with=other, instead=instead),)


def unless(flag: str, other: str, why: str, instead: str) -> tuple[Rule]:
    """A switch that requests what PaRO does anyway, unless another flag's value is refused."""
    return (Rule(flag, Outcome.ACCEPTED, why, unless=other, instead=instead),)


def ignored(why: str, flags: str) -> tuple[Rule, ...]:
    """Rules for flags that change no result and have no effect."""
    return tuple(Rule(flag, Outcome.IGNORED, why) for flag in flags.split())


def refused(instead: str, flags: str) -> tuple[Rule, ...]:
    """Rules for flags that request something PaRO does not do; `instead` is what to do."""
    return tuple(Rule(flag, Outcome.REFUSED, instead=instead) for flag in flags.split())
