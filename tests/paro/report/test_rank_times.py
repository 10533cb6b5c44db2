"""Timer lines are Megatron's; the rank that others wait for is named with the cause."""

import pytest

from paro.report.rank_times import RankTimes, straggler_line, timer_lines

TIMERS = [{"forward-backward": 2.0, "optimizer": 0.1}, {"forward-backward": 3.0, "optimizer": 0.3}]


@pytest.mark.parametrize(
    ("option", "wanted"),
    [
        (
            "minmax",
            "(min, max) time across ranks (ms):\n"
            "    forward-backward ...............................: (200.00, 300.00)\n"
            "    optimizer ......................................: (10.00, 30.00)",
        ),
        (
            "max",
            "max time across ranks (ms):\n"
            "    forward-backward ...............................: 300.00\n"
            "    optimizer ......................................: 30.00",
        ),
        (
            "all",
            "times across ranks (ms):\n"
            "  forward-backward:\n     rank  0: 200.00\n     rank  1: 300.00\n"
            "  optimizer:\n     rank  0: 10.00\n     rank  1: 30.00",
        ),
    ],
)
def test_timer_lines(option: str, wanted: str) -> None:
    assert timer_lines(TIMERS, option=option, iterations=10) == wanted


@pytest.mark.parametrize(
    ("ranks", "told"),
    [
        # Data, communication and agreement of each rank in a step of 1 s.
        (
            [(0.0, 0.1, 0.3), (0.0, 0.0, 0.0), (0.0, 0.1, 0.3)],
            "slowest rank: 1 | compute (ms): 1000.0 ... compute, 400.0 ms above the median rank",
        ),
        (
            [(0.0, 0.1, 0.3), (0.0, 0.1, 0.3), (0.3, 0.1, 0.0)],
            "slowest rank: 2 ... cause: data, 300.0 ms above",
        ),
        ([(0.0, 0.2, 0.0), (0.0, 0.21, 0.0)], "cause: communication, every rank waits 200.0 ms"),
        ([(0.0, 0.01, 0.0), (0.0, 0.0, 0.01)], "cause: none"),
    ],
)
def test_the_rank_that_others_wait_for_is_named_with_the_cause(
    ranks: list[tuple[float, float, float]], told: str
) -> None:
    times = [
        RankTimes(step=10.0, data=10 * data, communication=10 * sent, agreement=10 * waited)
        for data, sent, waited in ranks
    ]
    line = straggler_line(times, iterations=10)
    assert all(part in line for part in told.split(" ... ")), line


def test_times_add_up() -> None:
    one = RankTimes(step=1.0, data=0.1, communication=0.2, agreement=0.3)
    assert (one + one).compute == pytest.approx(0.8)
