"""A rank's actions of exchanging keys and values, on all ranks at once, without tensors."""

from __future__ import annotations

import pytest

from paro.spec.kv_exchange import (
    AttendKV,
    DoubleRing,
    GatheredKV,
    KVAction,
    KVRoute,
    SendKV,
    SendKVGrads,
    WaitKV,
    WaitKVGrads,
)
from paro.topology import make_topology

RINGS = [(1, 1), (4, 1), (1, 3), (2, 2), (3, 4)]


def ring_of(steps: int, turns: int) -> DoubleRing:
    """A double ring of as many ranks inside and between groups."""
    topology = make_topology(world_size=steps * turns, group_size=steps, degrees=())
    cut = topology.axes_between(1, steps), topology.axes_between(steps, steps * turns)
    return DoubleRing(*cut)


def attended(actions: list[KVAction]) -> list[tuple[int, int, int]]:
    """The (turn, step, head) of all attention, sorted."""
    return sorted(
        (one.turn, one.step, head)
        for one in actions
        if isinstance(one, AttendKV)
        for head in one.heads
    )


@pytest.mark.parametrize("heads", [1, 2, 8])
@pytest.mark.parametrize(("steps", "turns"), RINGS)
def test_every_head_of_every_rank_is_attended_to_once(steps: int, turns: int, heads: int) -> None:
    ring = ring_of(steps, turns)
    for exchange, of in ((ring, (turns, steps)), (GatheredKV(ring.inner), (1, steps))):
        every = [(n, m, k) for n in range(of[0]) for m in range(of[1]) for k in range(heads)]
        assert attended([*exchange.forward(heads)]) == every
        assert attended([*exchange.backward(heads, 2)]) == every


@pytest.mark.parametrize(("steps", "turns"), RINGS)
def test_a_sum_has_the_gradients_of_every_turn_and_step_and_is_taken_last(
    steps: int, turns: int
) -> None:
    """Each send of keys and values ends before the next of its route; the last sum comes last."""
    actions = [*ring_of(steps, turns).backward(8, 2)]
    summed = {
        (one.turn, one.step, head)
        for one in actions
        if isinstance(one, SendKVGrads)
        for head in one.heads
    }
    assert summed == {part for part in attended(actions) if part[:2] != (0, 0)}
    under_way: set[KVRoute] = set()
    for one in actions:
        if isinstance(one, SendKV):
            assert one.route not in under_way
            under_way.add(one.route)
        elif isinstance(one, WaitKV):
            under_way.remove(one.route)
    assert not under_way
    taken = [one for one in actions if isinstance(one, WaitKVGrads)]
    if steps * turns > 1:
        assert isinstance(actions[-1], WaitKVGrads)
        assert taken[-1].heads == range(8)
