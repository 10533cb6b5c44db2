"""A change of the policy changes what is predicted and what the engine does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paro.planning.estimator import Estimator
from paro.planning.step_costs import simulate
from paro.spec.run_spec import Materialize
from paro.step import schedule
from paro.step.actions import Move
from paro.step.gathering import GatheringPolicy
from paro.step.rotating import RotationPolicy
from paro.topology import Sent
from tests.paro.late_mutations import Mutation
from tests.paro.planning import cases
from tests.paro.planning.cases import TINY, costs, machine, order_case, plan_request
from tests.paro.planning.lone_rank import silence
from tests.paro.step.test_schedule import engine

WHOLE_GRADS = "MAX_WHOLE_GRADS if shape.prefetch_units else 1"
MUTATIONS = {
    "another live unit": (
        "GGG",
        "__init__",
        "1 + shape.prefetch_units",
        "2 + shape.prefetch_units",
    ),
    "nothing is released before the end of backward": (
        "GGG",
        "_release_if_done",
        "return self._release(index) + self._prefetch()",
        "return []",
    ),
    "one whole gradient": ("NGG", "__init__", WHOLE_GRADS, "1"),
    "three whole gradients": ("NGG", "__init__", WHOLE_GRADS, "3"),
}
# Links are about as busy as the device, so that every wait counts.
DEVICE = replace(cases.DEVICE, sustained_flops=4e10)
GIVEN = plan_request(
    replace(TINY, ffn_hidden_size=512),
    machine=machine(world_size=4, group_size=2, intra=20, inter=5, device=DEVICE),
    group_size=2,
    seq_length=16,
    micro_batch_size=1,
    global_batch_size=8,
)


@pytest.mark.parametrize("name", MUTATIONS)
def test_predictions_and_engine_follow_the_policy(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    silence(monkeypatch)
    strategy, method, old, new = MUTATIONS[name]

    def found() -> tuple[int, float, list[Move]]:
        schedule.step_schedule.cache_clear()
        estimator = Estimator(GIVEN)
        candidate = GIVEN.candidate(GIVEN.strategy(strategy))
        rank = engine(GIVEN, strategy)
        rank.model.record = record = []
        rank.step(2)
        memory = estimator.memory(candidate).allocated
        return memory, simulate(estimator.costs(candidate)).seconds, [*record]

    before = found()
    with Mutation(GatheringPolicy, method, old, new, strategy).removed():
        after = found()
    schedule.step_schedule.cache_clear()
    same_memory, same_time, same_record = (a == b for a, b in zip(before, after, strict=True))
    assert not same_memory
    assert same_time == ("three" in name), "a third gains nothing: reductions follow one another"
    assert not same_record
    assert found() == before


def test_gathers_below_the_first_unit_that_trains_are_noticed() -> None:
    changed = Mutation(GatheringPolicy, "__init__", " and index >= first ", " ", "GGG")
    schedule.step_schedule.cache_clear()
    with changed.removed(), pytest.raises(AssertionError, match="the step has more to run"):
        simulate(costs(order_case("mostly frozen"), "GGG"))


@pytest.mark.parametrize(
    ("method", "old", "new"),
    [
        ("after_backward", "actions.append((Verb.GRAD_SYNC, buffer))", "pass"),
        ("last_gradient", "if self._last", "if False"),
    ],
    ids=["slices", "norms"],
)
def test_reductions_that_the_policy_of_rotation_drops_are_neither_sent_nor_predicted(
    method: str, old: str, new: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    silence(monkeypatch)
    given = order_case("tied", materialize=Materialize.ROTATE)

    def found() -> tuple[Sent, Sent]:
        schedule.step_schedule.cache_clear()
        rank = engine(given, "IIG")
        rank.step(1)  # what it updates is sent in the next one
        return rank.step(2), Estimator(given).sent(given.candidate(given.strategy("IIG")))

    (sent, predicted), mutation = found(), Mutation(RotationPolicy, method, old, new, "IIG")
    with mutation.removed():
        sent_without, predicted_without = found()
    schedule.step_schedule.cache_clear()
    assert sent == predicted
    assert sent_without == predicted_without
    assert sent_without.inter < sent.inter
