"""Outer steps (DiLoCo): settings, and the steps after which groups of ranks synchronize."""

# [Note: outer steps]
# A group is the m neighbouring ranks with fast links, such as a node; n is the number of all ranks.
# After the warm-up each group does inner steps with AdamW or Muon, as a data-parallel run of its
# own. Every H inner steps groups synchronize in a round: the mean over groups of how far their
# parameters have moved is the outer gradient of an outer optimizer, SGD with Nesterov momentum, and
# all groups take its parameters (arXiv 2311.08105). States of a rank, in fp32:
#
#     master       1 / inner degree    this group's parameters, which inner steps update
#     anchor       1 / m               parameters on which groups last agreed, equal bit for bit
#     reference    1 / n               the outer optimizer's parameters, before rounding
#     momentum     1 / n               the outer momentum u
#
# A round, with Q(x) for x as it is sent (rounded to bf16 or quantized):
#
#     D = mean over groups of Q(anchor - master)       reduce-scatter between groups
#     u = mu u + D;  reference -= lr (D + mu u)        on 1 / n
#     anchor -= Q(anchor - reference)                  all-gather between groups
#     master = anchor
#
# What Q loses remains in anchor - reference, and is part of the next round. With a delay the
# communication of a round overlaps with the next inner steps. D is of the masters at the beginning
# of the round, and what a group trained since stays: master += anchor - master at the beginning.
# With P fragments (arXiv 2501.18512) a round is of some units, and rounds are H / P steps apart.

from __future__ import annotations

import sys
from dataclasses import dataclass

from paro.errors import UserError, check_least, check_positive


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterConfig:
    """Settings of outer steps (DiLoCo): groups of ranks train alone and synchronize in rounds."""

    outer_steps: int  # H, the inner steps between two rounds of a fragment
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    outer_nesterov: bool = True
    outer_bits: int = 16  # of a value between groups: 32 fp32, 16 bf16, 8 and 4 quantized
    outer_fragments: int = 1  # P, the parts of the model that have rounds of their own
    outer_delay: int = 0  # inner steps with which the communication of a round overlaps
    outer_warmup: int = 100  # steps at the start of the run with all ranks synchronous

    def __post_init__(self) -> None:
        check_least(1, paro_outer_steps=self.outer_steps, paro_outer_fragments=self.outer_fragments)
        check_least(0, paro_outer_delay=self.outer_delay, paro_outer_warmup=self.outer_warmup)
        check_positive(paro_outer_lr=self.outer_lr)
        if not 0.0 <= self.outer_momentum < 1.0:
            raise UserError(f"--paro-outer-momentum {self.outer_momentum} must be in [0, 1)")
        if self.outer_fragments > self.outer_steps:
            raise UserError(
                f"--paro-outer-fragments {self.outer_fragments} are more than --paro-outer-steps "
                f"{self.outer_steps}: one round begins in a step at most"
            )
        if self.outer_delay and self.outer_delay >= self.outer_steps // self.outer_fragments:
            raise UserError(
                f"--paro-outer-delay {self.outer_delay}: rounds begin every "
                f"{self.outer_steps // self.outer_fragments} steps, and the messages of one travel "
                "at a time: give less"
            )

    def describe(self) -> str:
        """Describe the rounds in a line."""
        after = f"after {self.outer_warmup} synchronous steps " if self.outer_warmup else ""
        parts = f" in {self.outer_fragments} fragments" if self.outer_fragments > 1 else ""
        delay = f", merged {self.outer_delay} steps later" if self.outer_delay else ""
        kind = "Nesterov momentum" if self.outer_nesterov else "momentum"
        return (
            f"{after}groups train alone and synchronize every {self.outer_steps} steps{parts}"
            f"{delay}, in {self.outer_bits} bits; learning rate {self.outer_lr:g}, {kind} "
            f"{self.outer_momentum:g}"
        )

    def begins(self, iteration: int) -> int | None:
        """Return the fragment whose round begins after `iteration` steps of the run; None if none.

        Fragment f meets (f + 1) H / P steps after the warm-up, rounded down, then every H steps.
        """
        alone = iteration - self.outer_warmup
        for fragment in range(self.outer_fragments) if alone > 0 else ():
            offset = (fragment + 1) * self.outer_steps // self.outer_fragments
            if (alone - offset) % self.outer_steps == 0:
                return fragment
        return None

    def met(self, iteration: int) -> int:
        """Return the last of `iteration` steps that was synchronous or began a round."""
        alone = range(iteration, self.outer_warmup, -1)
        begun = (at for at in alone if self.begins(at) is not None)
        return next(begun, min(iteration, self.outer_warmup))

    def merges(self, iteration: int) -> int | None:
        """Return the fragment whose round ends after `iteration` steps of the run; None if none."""
        return self.begins(iteration - self.outer_delay)

    def fragment_of(self, unit: int, num_units: int) -> int:
        """Return the fragment of a unit, for a model of `num_units` units in forward order.

        Units take turns. Of 4 or more fragments two are the embedding and the head alone.
        """
        of_ends = 2 if self.outer_fragments >= 4 else 0
        if of_ends and unit in (0, num_units - 1):
            return int(unit > 0)
        return of_ends + (unit - of_ends // 2) % (self.outer_fragments - of_ends)


# All ranks train synchronously to the end of the run.
SYNCHRONOUS = OuterConfig(outer_steps=1, outer_warmup=sys.maxsize)
