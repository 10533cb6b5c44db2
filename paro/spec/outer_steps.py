"""Outer steps: groups train alone and meet every H steps; settings, rounds and fragments."""

# [Note: outer steps]
# After a warm-up in which all ranks train in step, the ranks of each group train with AdamW or Muon
# as if there were no other groups. Every H steps groups meet in a round: the mean of how far their
# parameters have moved is a gradient for an outer optimizer, SGD with Nesterov momentum, whose
# result all groups take (DiLoCo, arXiv 2311.08105). With m ranks in a group and n in all:
#
#     state       elements    meaning
#     anchor      1/m         parameters on which groups last agreed, with equal bits in all
#     reference   1/n         the outer optimizer's parameters: the anchor before rounding
#     momentum    1/n         the outer momentum u
#
#     D = mean over groups of anchor - master        reduce-scatter between groups
#     u = mu u + D,  reference -= lr (D + mu u)      on 1/n
#     anchor -= anchor - reference, as it was sent   all-gather between groups
#     master = anchor + (master - master at the begin of the round)
#
# With P fragments (Streaming DiLoCo, arXiv 2501.18512) each round is of some units only, and rounds
# are H / P steps apart. With a delay the messages of a round travel under the next steps.

from __future__ import annotations

from dataclasses import dataclass

from paro.errors import UserError, check_least


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterConfig:
    """Settings of outer steps."""

    outer_steps: int  # steps of a group between two rounds of a fragment
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    outer_nesterov: bool = True
    outer_bits: int = 16  # of a value that crosses groups: 32 fp32, 16 bf16, 8 and 4 quantized
    outer_fragments: int = 1
    outer_delay: int = 0  # steps under which the messages of a round travel
    outer_warmup: int = 100  # steps at the start in which all groups train in step

    def __post_init__(self) -> None:
        check_least(1, paro_outer_steps=self.outer_steps, paro_outer_fragments=self.outer_fragments)
        check_least(0, paro_outer_delay=self.outer_delay, paro_outer_warmup=self.outer_warmup)
        if not self.outer_lr > 0.0:
            raise UserError(f"--paro-outer-lr {self.outer_lr} must be positive")
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
        after = f"after {self.outer_warmup} steps in step " if self.outer_warmup else ""
        parts = f" in {self.outer_fragments} fragments" if self.outer_fragments > 1 else ""
        delay = f", merged {self.outer_delay} steps later" if self.outer_delay else ""
        kind = "Nesterov momentum" if self.outer_nesterov else "momentum"
        return (
            f"{after}groups train alone and meet every {self.outer_steps} steps{parts}{delay}, in "
            f"{self.outer_bits} bits; learning rate {self.outer_lr:g}, {kind} "
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
