"""The fixed runs: their coverage; a record shows every difference."""

from __future__ import annotations

import copy

from paro.strategy import legal_letters
from tools.bench.fixed_runs import FIELDS, differences, fixed_runs

STEPS = [dict.fromkeys(FIELDS, float(number)) for number in range(2)]


def test_every_strategy_is_run_and_what_is_loaded_was_saved_before() -> None:
    names = [run.name for run in fixed_runs()]
    assert len(set(names)) == len(names)
    assert {*legal_letters()} <= {*names}
    saved = False
    for run in fixed_runs():
        assert saved or not run.load
        saved |= run.save
    assert saved


def test_the_last_bit_of_a_figure_and_a_missing_run_or_step_are_differences() -> None:
    before = {"IIG": STEPS}
    assert not list(differences(before, copy.deepcopy(before)))
    after = copy.deepcopy(before)
    after["IIG"][1]["lm_loss"] += 2.0**-52
    (line,) = differences(before, after)
    assert line.startswith("IIG, iteration 1.0: lm_loss 1.0 before, 1.0000000000000002 after")
    assert list(differences({"IIG": STEPS}, {})) == ["IIG: only before"]
    assert list(differences({}, {"IIG": STEPS})) == ["IIG: only after"]
    assert list(differences({"IIG": STEPS}, {"IIG": STEPS[:1]})) == ["IIG: 2 steps before, 1 after"]
