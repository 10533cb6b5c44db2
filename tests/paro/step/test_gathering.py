"""What a step's first gather waits for where collectives begin in the order they are queued in."""

from __future__ import annotations

from functools import partial

import pytest

from paro.distributed.comm_stream import Event
from paro.layout import Unit, UnitLayout
from paro.spec.run_spec import Materialize
from paro.step.actions import Buckets, Verb, number_buffers
from paro.step.gathering import ParamAllGatherPolicy
from tests.helpers.late_streams import LateStreams
from tests.paro.planning.cases import costs, order_case, schedule_of

FLAT = UnitLayout((), decayed_stop=0, numel=8)


def gathered_before_the_first_unit(way: Materialize, ahead: int | None, seed: int) -> set[int]:
    """The buffers whose updates have been sent when the first gather, or shift, is done."""
    streams = LateStreams(seed, eager=0.0, in_order=True)
    sent: set[int] = set()
    updated: dict[int, Event] = {}
    inside: dict[int, Event] = {}
    given = order_case("plain", materialize=way, updated_ahead=ahead)
    for verb, number, *_ in schedule_of(costs(given, "IIG")).actions():
        if verb is Verb.PARAM_ALL_GATHER:
            updated[number] = streams.submit("between", partial(sent.add, number))
        elif verb in (Verb.GATHER, Verb.SHIFT):
            inside[number] = streams.submit("inside", lambda: None, after=updated[number])
        elif verb in (Verb.WAIT, Verb.WAIT_SHIFTED) and number in inside:
            inside[number].wait()
            break
        elif verb is Verb.WAIT:
            updated[number].wait()
    return sent


def test_a_bucket_is_sent_while_the_one_before_computes() -> None:
    sizes = (1, 3, 0, 0, 3, 0, 0, 1)
    units = number_buffers(
        [Unit(name=str(n), trainable=FLAT, bucket_size=each) for n, each in enumerate(sizes)]
    )
    policy = ParamAllGatherPolicy([unit.needed for unit in units], 2, Buckets(units))
    at_once = [move for buffer in range(8) for move in policy.updated(buffer)]
    later = {index: policy.before_forward(index) for index in range(8)}
    assert at_once == [(Verb.PARAM_ALL_GATHER, 0), (Verb.PARAM_ALL_GATHER, 1)]
    assert {index: moves for index, moves in later.items() if moves} == {
        0: [(Verb.PARAM_ALL_GATHER, 4)],
        5: [(Verb.PARAM_ALL_GATHER, 7)],
    }


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("way", "own", "num_buffers"),
    # Where weights rotate, the first part needs the norms too.
    [(Materialize.GATHER, {0}, 5), (Materialize.ROTATE, {0, 1}, 9)],
)
def test_the_first_gather_needs_its_own_unit_alone(
    way: Materialize, own: set[int], num_buffers: int, seed: int
) -> None:
    assert gathered_before_the_first_unit(way, 2, seed) == own
    assert gathered_before_the_first_unit(way, None, seed) == {*range(num_buffers - 1)}
