"""The planner's memory, times, bytes and choices are the recorded ones, to the last digit."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.paro.planning.fixed_workloads import NUMBER, drawn, predicted, recorded


@pytest.mark.slow("plans 20 workloads")
@pytest.mark.parametrize("part", range(10))
def test_predictions_are_the_recorded_ones(part: int) -> None:
    for index, wanted in recorded():
        if index % 10 == part:
            assert predicted(index) == wanted, f"workload {index}"


def test_the_workloads_have_what_a_step_can_have() -> None:
    kinds: Counter[str] = Counter()
    for index in range(NUMBER):
        workload, candidate = drawn(index)
        model = workload.model
        kinds.update(
            name
            for name, has in {
                "rotation": candidate.materialize.rotates,
                "frozen": workload.trainable.is_part(model),
                "adapters": model.lora is not None,
                "groups of blocks": model.recompute is not None and model.recompute.group_size > 1,
                "tied": model.tie_embeddings_and_output_weights,
                "codes": workload.precision.has_codes,
                "nothing ahead": workload.prefetch_units == 0,
                "degrees": "," in candidate.strategy.name,
                "cores": not workload.machine.is_of_gpus,
            }.items()
            if has
        )
    assert len(kinds) == 9
    assert min(kinds.values()) >= 20, kinds
