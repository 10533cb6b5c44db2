"""Groups that train alone (workers of DiLoCo) in the loop: a common last step, means in logs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import compress
from statistics import fmean
from typing import Any

import numpy as np

from paro.checkpoint.in_memory.recovery import Recovery
from paro.errors import count_text
from paro.files.schema import conform
from paro.optim.finite import not_finite
from paro.optim.outer import OuterRoundResult
from paro.report.record import GroupsRecord, IterationRecord
from paro.schedule.loss_scale import LossScaleState
from paro.schedule.movement import MovementStatistics
from paro.schedule.step_checks import Expectation
from paro.spec.states import SHARED_BY_GROUPS
from paro.training.exit_signal import ExitReasons
from paro.training.step import Training, TrainState

# [Note: the step after which groups stop]
# No group waits in training for another to agree. Each counts its steps in the TCPStore of all
# ranks. A group that wants to stop marks all counters, and names a step that no group has passed. A
# group sees the mark when it counts its next step.
_MARK = 1 << 40  # above any number of steps
_STEP, _COUNTERS = "stop/step", "stop/steps/"


class GroupsAlone:
    """The agreement of groups that train alone on a last step and on logs; idle in other runs."""

    def __init__(self, training: Training, start: int = 0) -> None:
        """Prepare for a run, of which the furthest group starts after iteration `start`.

        Other groups are behind until they are there: what all groups did together is not repeated.
        """
        self._training = training
        self._control = training.control
        self._start = start
        outer, is_first = training.optimizer.outer, training.group_control.world.rank == 0
        # The store, on the first rank of each group, and the last step that it counted there.
        self._store = training.control.store if outer.is_on and is_first else None
        self._counted = 0
        self._stop_after = 0  # the iteration after which all groups stop; 0: none
        self._reasons = ExitReasons()  # of this group's ranks since the run began
        # Iterations since the last log line, each with the round that ended in it.
        self._records: list[tuple[IterationRecord, OuterRoundResult | None]] = []

    def is_behind(self, iteration: int) -> bool:
        """Return whether another group had ended `iteration` before this run started."""
        return iteration <= self._start

    def are_alone(self, iteration: int) -> bool:
        """Return whether groups train alone in the step that ends `iteration`."""
        return self._training.control_of_step(iteration - 1) is not self._control

    def reasons(self, of_rank: ExitReasons, iteration: int) -> ExitReasons:
        """Add the step after which all groups stop, if any wants to, to a rank's reasons to stop.

        Counts the step that this group is about to end, `iteration`. The call waits for another
        group only while that group names the step.
        """
        store, outer = self._store, self._training.optimizer.outer
        if store is None or not self.are_alone(iteration):
            return of_rank
        counted = store.add(f"{_COUNTERS}{outer.group}", iteration - self._counted)
        self._counted = iteration
        wants_to_stop = any((*of_rank, *self._reasons))
        if wants_to_stop and store.add("stop/claims", 1) == 1:
            keys = (f"{_COUNTERS}{group}" for group in range(outer.num_groups))
            counters = (store.add(key, _MARK) % _MARK for key in keys)
            store.set(_STEP, str(max(self._start + 1, *counters) + 1))
        is_marked = wants_to_stop or counted >= _MARK
        return of_rank._replace(stop_after=int(store.get(_STEP)) if is_marked else 0)

    def reasons_of_all(self, reasons: ExitReasons, iteration: int) -> ExitReasons:
        """Return the reasons for which all groups stop after `iteration`; `reasons` are of a step.

        Collective over all groups at the step after which they stop.
        """
        if not self.are_alone(iteration):
            return reasons
        self._reasons = self._reasons.joined(reasons)
        self._stop_after = reasons.stop_after or self._stop_after
        if iteration != self._stop_after:
            return ExitReasons()
        # All groups are at this step now, and must do the same from here on.
        return reduce(ExitReasons.joined, self._control.gather(self._reasons))

    def left_out_line(self, iteration: int) -> str | None:
        """Say which groups the round that begins after `iteration` leaves out; None if none."""
        outer = self._training.optimizer.outer
        fragment = outer.config.begins(iteration)
        if fragment is None or outer.norms is None or all(outer.taking_part):
            return None
        left_out = [
            f"group {group}, which moved by {norm:.3g}"
            for group, norm in enumerate(outer.norms)
            if not outer.taking_part[group]
        ]
        return (
            f" the round after iteration {iteration} leaves out {', '.join(left_out)} | "
            f"usual {outer.usual[fragment].mean:.3g} |"
        )

    def records(self, record: IterationRecord, *, due: bool) -> Iterator[IterationRecord]:
        """Yield records to report: at a log line, those of all groups' steps since the last one.

        Loss, gradient norm and z-loss are means over the groups whose step was not skipped.
        """
        outer = self._training.optimizer.outer
        if not self.are_alone(record.iteration):
            yield record
            return
        if self.is_behind(record.iteration):
            return
        self._records.append((record, outer.ended))
        if not due:
            return
        mine = [
            [each.lm_loss, each.grad_norm, each.z_loss or 0.0, float(each.skipped), square]
            for each, ended in self._records
            for square in [0.0 if ended is None else float(ended.square)]
        ]
        numbers = self._control.gather_numbers([value for row in mine for value in row])
        # By rank, step and kind; all but the squares are equal on the ranks of a group.
        of_ranks = np.reshape(numbers, (-1, *np.shape(mine)))
        of_groups = of_ranks[:: self._control.world.group_size, :, :-1].transpose(1, 2, 0)
        squares = of_ranks[:, :, -1].sum(axis=0)
        for (each, ended), rows, square in zip(self._records, of_groups, squares, strict=True):
            yield _of_groups(each, ended, rows.tolist(), float(square))
        self._records.clear()


def _of_groups(
    record: IterationRecord,
    ended: OuterRoundResult | None,
    rows: Sequence[Sequence[float]],
    square: float,
) -> IterationRecord:
    """Return the record of a step of all groups, and of the round that ended in it."""
    *measured, skipped = rows
    trained = [True] if all(skipped) else [not skips for skips in skipped]
    loss, grad_norm, z_loss = (fmean(compress(of_groups, trained)) for of_groups in measured)
    losses = (math.nan if skips else each for each, skips in zip(rows[0], skipped, strict=True))
    groups = GroupsRecord(lm_losses=tuple(losses))
    if ended is not None:
        norm = math.sqrt(square)
        cosine = norm / ended.moved if ended.moved else math.nan
        groups = replace(
            groups, outer_grad_norm=norm, outer_grad_cosine=cosine, num_left_out=ended.num_left_out
        )
    return replace(
        record,
        lm_loss=loss,
        grad_norm=grad_norm,
        z_loss=None if record.z_loss is None else z_loss,
        skipped=all(skipped),
        groups=groups,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupState:
    """The state of a group that trains alone, which differs from that of other groups."""

    loss_scale: LossScaleState
    expected: Expectation
    num_optimizer_steps: int
    taken: tuple[bool, ...]  # whether each group takes part in the outer round in flight
    in_flight: int | None  # the fragment whose round has begun and not ended
    usual: tuple[MovementStatistics, ...] = ()  # of each fragment; the groups' are equal


def wrong_state(training: Training) -> str | None:
    """Name a state that is not finite, of those that are equal in all groups; collective."""
    alone = training.optimizer.outer.is_on
    shards = training.optimizer.flat_shards()
    shared = (shard for shard in shards if not alone or shard.state in SHARED_BY_GROUPS)
    return not_finite(shared, training.control)


def record_of_groups(
    training: Training, state: TrainState, *, of_one: bool = False
) -> list[GroupState]:
    """Return the states of groups that train alone; collective, and empty if none do.

    With `of_one` this rank's group stands for all: not collective.
    """
    outer, control = training.optimizer.outer, training.control
    if not outer.is_on:
        return []
    mine = GroupState(
        loss_scale=state.loss_scale,
        expected=state.expected,
        num_optimizer_steps=training.optimizer.num_steps,
        taken=outer.taking_part,
        in_flight=outer.in_flight,
        usual=tuple(outer.usual),
    )
    if of_one:
        return [mine] * outer.num_groups
    everywhere: list[GroupState] = control.gather(mine)
    return everywhere[:: control.world.group_size]


def resume_group(common: Mapping[str, Any], training: Training) -> GroupState | None:
    """Resume the rounds of this rank's group, and return its state; None without equal groups."""
    outer, before = training.optimizer.outer, common.get("groups_alone")
    if before is None or before != training.groups_alone:
        return None
    recorded = common["groups"][outer.group]
    group: GroupState = conform(recorded, GroupState, "groups in common.json")
    outer.taking_part = group.taken
    outer.usual = [*group.usual] or outer.usual
    if common.get("has_moments", True):  # else masters were not saved: all are the reference
        outer.in_flight = group.in_flight
    return group


def restore_group(recovery: Recovery, training: Training) -> list[str]:
    """Complete this rank's group after a recovery from local copies; collective.

    Return lines about groups that are not as far as another, or begin as another one is.
    """
    outer, batches = training.optimizer.outer, training.batches
    if not outer.is_on:
        return []
    outer.restore(masters=outer.group not in recovery.groups, reference=recovery.lost_reference)
    resume_group(recovery.common, training)
    met, newest = recovery.met[0], recovery.furthest_iteration
    last = recovery.furthest["state"]["consumed_train_samples"]
    first, every = batches.samples_before(last, newest - met), batches.samples_per_micro_batch
    share, lines = every // outer.num_groups, []
    for group in range(outer.num_groups):
        where = f"  group {group} of those that train alone"
        if group in recovery.groups:
            lines.append(f"{where} continues after its iteration {recovery.groups[group]}")
            continue
        lines.append(
            f"{where} is lost: it continues after iteration {newest} with the parameters on which "
            f"groups agreed after iteration {met} and another's moments"
        )
        if first < last:
            lines[-1] += (
                f"; of samples {first + 1} to {last} its share, {group * share + 1} to "
                f"{group * share + share} of every {every}, is not trained on"
            )
    if num_lost := sum(training.control.gather(recovery.lost_reference)):
        lines.append(f"  outer momentum of {count_text(num_lost, 'rank')} is lost: it is 0 there")
    return lines


def regrouped_lines(source: str, common: Mapping[str, Any], training: Training) -> Iterator[str]:
    """Yield a line if the checkpoint's groups that trained alone do not go on as they were."""
    before = common.get("groups_alone")
    if before not in (None, training.groups_alone):
        yield (
            f"{source}: {count_text(before['number'], 'group')} trained alone, by other flags or "
            "ranks: the run continues from the parameters on which they agreed, with the first "
            "one's moments"
        )
