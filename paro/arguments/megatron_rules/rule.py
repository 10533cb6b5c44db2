"""One flag of Megatron's that no setting here has, and how the tables write such flags down."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Outcome(Enum):
    """What becomes of a flag."""

    ACCEPTED = "accepted"  # it asks for what happens anyway
    IGNORED = "ignored"  # it changes no result, and the start of the run says that it does nothing
    REFUSED = "refused"  # it asks for something else


@dataclass(frozen=True, slots=True)
class Rule:
    """One flag.

    An accepted flag is a switch, or takes one of `values`; with `beside` it is a switch that
    needs that other flag. What is not accepted of it is refused with `instead`. Ignored and
    refused flags take any values.
    """

    flag: str
    outcome: Outcome
    why: str = ""
    values: tuple[str | int | float, ...] = ()
    beside: str = ""
    instead: str = ""

    @property
    def dest(self) -> str:
        return self.flag.removeprefix("--").replace("-", "_")


def accepted(why: str, flags: str) -> tuple[Rule, ...]:
    """Switches for what happens anyway."""
    return tuple(Rule(flag, Outcome.ACCEPTED, why) for flag in flags.split())


def values(
    flag: str, accepts: str | tuple[str | int | float, ...], why: str, instead: str
) -> tuple[Rule]:
    """A flag of which some values ask for what happens anyway; words stand for several."""
    options = tuple(accepts.split()) if isinstance(accepts, str) else accepts
    return (Rule(flag, Outcome.ACCEPTED, why, values=options, instead=instead),)


def beside(flag: str, other: str, why: str, instead: str) -> tuple[Rule]:
    """A switch that asks for what another flag, given with it, does."""
    return (Rule(flag, Outcome.ACCEPTED, why, beside=other, instead=instead),)


def ignored(why: str, flags: str) -> tuple[Rule, ...]:
    """Flags that change no result and are not acted upon."""
    return tuple(Rule(flag, Outcome.IGNORED, why) for flag in flags.split())


def refused(instead: str, flags: str) -> tuple[Rule, ...]:
    """Flags that ask for something else; `instead` says what to do."""
    return tuple(Rule(flag, Outcome.REFUSED, instead=instead) for flag in flags.split())
