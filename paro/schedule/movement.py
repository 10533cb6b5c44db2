"""The groups that take part in a round of outer steps, by how far each has moved since the last."""

# A group's movement is compared with running statistics of all groups' movements in the earlier
# rounds of a fragment, as EDiT does (arXiv 2412.07210: a memory of 50 rounds, 3 deviations). The
# statistics include finite movements that were left out, cut to a limit: no single one ruins them,
# and a level that lasts becomes the new mean. They are part of a run's state. Of many groups, one
# that always moves twice as far as the others, as with other data, is an outlier for ever: after
# some rounds in a row it takes part, unless it is far away, or its work would be lost to the end.

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low

from paro.schedule.step_checks import far_above, moments_after

_WARMUP_ROUNDS = 50  # only movements that are not finite are left out before
_DEVIATIONS = 3.0  # an outlier is above the mean by this many standard deviations
_MOST_DEVIATIONS = 10.0  # a movement changes the statistics as one of at most so many deviations
_MOST_IN_A_ROW = 5  # rounds that leave out a group's finite movements
_MOST_MEDIANS = 10.0  # ... in the first rounds, as one of at most so many medians of the round


@dataclass(frozen=True, slots=True)
class MovementStatistics:
    """Running statistics of the norms of all groups' movements in a fragment's rounds."""

    num_rounds: int = 0
    mean: float = 0.0
    variance: float = 0.0
    in_a_row: tuple[int, ...] = ()  # for each group, the last rounds in a row with outliers

    def taking_part(self, norms: Sequence[float]) -> tuple[bool, ...]:
        """Return whether each group, whose movement has this norm, takes part in a round.

        Groups with infinite or NaN norms never do, and outliers not for some rounds in a row.
        """
        widest = far_above(self.mean, _MOST_DEVIATIONS, self.variance)
        return tuple(
            math.isfinite(norm) and (not rounds or (rounds > _MOST_IN_A_ROW and norm <= widest))
            for norm, rounds in zip(norms, self._outliers(norms), strict=True)
        )

    def _outliers(self, norms: Sequence[float]) -> tuple[int, ...]:
        """Count each group's last rounds in a row, up to this one, with outliers.

        An outlier is one among the groups, too: if most of them move further than before, then
        training has changed, and there is none.
        """
        finite = [norm for norm in norms if math.isfinite(norm)]
        if self.num_rounds < _WARMUP_ROUNDS or not finite:
            return (0,) * len(norms)
        limit = far_above(max(self.mean, median_low(finite)), _DEVIATIONS, self.variance)
        before = self.in_a_row if len(self.in_a_row) == len(norms) else (0,) * len(norms)
        return tuple(
            rounds + 1 if limit < norm < math.inf else 0
            for norm, rounds in zip(norms, before, strict=True)
        )

    def after(self, norms: Sequence[float]) -> MovementStatistics:
        """Return the statistics after a round in which groups' movements had these norms."""
        finite = [norm for norm in norms if math.isfinite(norm)]
        if not finite:
            return self
        most = far_above(self.mean, _MOST_DEVIATIONS, self.variance)
        if self.num_rounds < _WARMUP_ROUNDS:
            most = _MOST_MEDIANS * median_low(finite) or math.inf
        finite = [min(norm, most) for norm in finite]
        count = self.num_rounds + 1
        moments = moments_after(finite, count, self.mean, self.variance)
        return MovementStatistics(count, *moments, self._outliers(norms))
