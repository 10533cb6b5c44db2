"""Rotation in the simulated step: what its parts cost, and where it is chosen."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paro.planning.planner import plan
from paro.planning.search_space import SearchSpace
from paro.planning.step_costs import simulate
from paro.precision import PrecisionConfig
from paro.spec.run_spec import Materialize
from paro.step.actions import Verb
from tests.helpers.refusals import refused
from tests.paro.planning.cases import BF16, DEVICE, costs, machine, plan_request
from tools.planning.tables import letter_rows, rotated_rows


def test_a_part_costs_what_its_slices_do() -> None:
    """On rings of 4: FLOPs of the whole, and for 3 extra slices their cost and their sums."""
    device = replace(DEVICE, piece_seconds=3e-3)
    given = plan_request(machine=machine(device=device), materialize=Materialize.ROTATE)
    config, tokens = given.model, given.micro_batch_size * given.seq_length
    (query, hidden) = (config.num_attention_heads * config.kv_channels, config.hidden_size)
    residual = 2 * tokens * hidden / device.memory_bytes_per_second
    forward_slices, backward_slices = 3 * (1e-3 + 3 * residual), 3 * (2e-3 + 3 * residual)

    def seconds(weights: int, attention: int = 0) -> float:
        return 2 * tokens * (weights + attention) / device.sustained_flops

    of_attention = seconds(4 * query * hidden, 2 * given.seq_length * query)
    of_mlp = seconds(3 * config.ffn_hidden_size * hidden)
    of_logits = seconds(config.vocab_size * hidden)
    embedding, attention, mlp, *_, head = costs(given, "4,4,8").computing.per_unit
    for part, forward, backward in (
        (embedding, 2 * residual, 3 * residual),
        (attention, of_attention, 2 * of_attention),
        (mlp, of_mlp, 2 * of_mlp),
        (head, of_logits, 3 * of_logits),  # recomputed for the loss's gradients
    ):
        assert part[Verb.FORWARD] == pytest.approx(forward + forward_slices)
        both = part[Verb.BACKWARD] + part.get(Verb.GRADIENTS, 0.0)
        assert both == pytest.approx(backward + backward_slices)


@pytest.mark.parametrize(
    ("precision", "wire", "accumulator"),
    [
        (BF16, 2, 2),
        (PrecisionConfig(compute="bf16"), 2, 4),
        (PrecisionConfig(compute="bf16", accumulate_allreduce_grads_in_fp32=True), 4, 4),
    ],
)
def test_gradients_are_added_on_their_way_and_at_home(
    precision: PrecisionConfig, wire: int, accumulator: int
) -> None:
    """On rings of 4: 3 of 4 ranks read the incoming slice, all read their own and write the sum."""
    given = plan_request(materialize=Materialize.ROTATE, precision=precision)
    of_element = 2 + 0.75 * wire + wire
    at_home = (wire + 2 * accumulator) / 4
    taken = costs(given, "4,4,8").collect_seconds(1_000_000)
    assert taken == pytest.approx(1e6 * (of_element + at_home) / DEVICE.memory_bytes_per_second)


def test_weights_and_gradients_of_cpu_ranks_pass_each_other() -> None:
    """Other devices have one comm stream for both, as the ring in paro/rotation/."""
    for cores, together in ((None, False), (1.0, True)):
        device = replace(DEVICE, cores=cores)
        given = plan_request(
            machine=machine(intra=50, device=device), materialize=Materialize.ROTATE
        )
        activities = simulate(costs(given, "III"), record=True).activities
        weights, gradients = (
            [s for s in activities if s.kind == kind] for kind in ("gather", "reduce")
        )
        met = any(
            g.start < w.end - 1e-9 and w.start < g.end - 1e-9 for w in weights for g in gradients
        )
        assert weights
        assert gradients
        assert met == together


def test_rows_show_what_may_rotate_beside_what_is_gathered() -> None:
    given = plan_request()
    rows = {row.candidate.name: row for row in (*letter_rows(given), *rotated_rows(given))}
    assert {name for name in rows if " " in name} == {
        "III rotated", "III rotated in place", "IIG rotated", "IIG rotated in place",
    }  # fmt: skip
    for name in ("III", "IIG"):
        gathered, rotated = rows[name], rows[f"{name} rotated"]
        assert rotated.memory_bytes < gathered.memory_bytes
        assert rotated.sent.inter == pytest.approx(gathered.sent.inter, rel=1e-3)


def test_a_search_keeps_to_the_way_of_the_case() -> None:
    few = SearchSpace(collectives=("native",), recomputes=(None,), micro_batch_sizes=(2,))
    for way in Materialize:
        found = plan(plan_request(materialize=way), few)
        assert {e.candidate.materialize for e in (*found.front, found.least)} == {way}
        if way.rotates:
            degrees = {e.candidate.strategy.degrees for e in found.front}
            assert all(1 < params == grads <= 8 for params, grads, _ in degrees)


def test_a_model_that_cannot_rotate_is_refused_with_what_could() -> None:
    given = plan_request(materialize=Materialize.ROTATE)
    odd = replace(given, model=replace(given.model, num_attention_heads=3, num_query_groups=3))
    refused(lambda: plan(odd), "cannot cut --num-attention-heads 3")
