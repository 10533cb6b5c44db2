"""Formulas of traffic and model state, compared with the paper's table and the real layouts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from model.units import UnitSpec
from paro.distributed.byte_counter import Sent
from paro.planning.cost_model import (
    ModelStateBytes,
    UnitSize,
    model_state_bytes,
    size_units,
    traffic_per_step,
)
from paro.precision import PrecisionConfig
from paro.strategy import legal_letters
from paro.training.placement import describe_placement
from tests.helpers.closed_form import letter_traffic
from tests.paro.planning.on_ranks import on_ranks

# 7B parameters on 4 nodes of 8, 10 micro-batches, bf16 gradients: GB of model state per rank, GB
# sent per rank and step inside a node and between nodes. Copied from the table, digit by digit.
PUBLISHED_7B = {
    "NNN": ("112.00", "24.5", "2.62"),
    "NNI": ("38.50", "24.5", "2.62"),
    "NNG": ("30.62", "24.5", "2.62"),
    "NII": ("26.25", "134.8", "2.62"),
    "NIG": ("18.38", "134.8", "2.62"),
    "NGG": ("17.06", "134.8", "14.44"),
    "INI": ("26.25", "257.2", "2.62"),
    "ING": ("18.38", "257.2", "2.62"),
    "III": ("14.00", "367.5", "2.62"),
    "IIG": ("6.12", "367.5", "2.62"),
    "IGG": ("4.81", "367.5", "14.44"),
    "GNG": ("17.06", "257.2", "27.56"),
    "GIG": ("4.81", "367.5", "27.56"),
    "GGG": ("3.50", "367.5", "39.38"),
}
PAPER_PRECISION = PrecisionConfig(compute="bf16", grad_reduce_in_bf16=True)

MODEL = (
    UnitSpec(name="embedding", shapes={"w": (51, 12)}, backward_needs_weight=False),
    UnitSpec(name="blocks.0", shapes={"norm": (12,), "up": (20, 12)}),
    UnitSpec(name="blocks.1", shapes={"norm": (12,), "up": (20, 12)}),
    UnitSpec(name="head", shapes={"norm": (12,), "w": (51, 12)}),
)
TIED = (*MODEL[:3], UnitSpec(name="head", shapes={"norm": (12,)}, borrows=("embedding",)))


def one_unit(numel: int, *, frozen: int = 0) -> tuple[UnitSize, ...]:
    """A model as the paper counts it: everything is gathered twice per micro-batch."""
    return (
        UnitSize(name="all", trainable_numel=numel, frozen_numel=frozen, gathers_per_micro_batch=2),
    )


def test_the_table_has_every_legal_strategy() -> None:
    assert set(PUBLISHED_7B) == set(legal_letters())


@pytest.mark.parametrize("letters", PUBLISHED_7B)
def test_published_figures_for_7b(letters: str) -> None:
    strategy, topology = on_ranks(letters, world_size=32, group_size=8)
    units = one_unit(7 * 10**9)
    states = model_state_bytes(strategy, units, PAPER_PRECISION)
    sent = traffic_per_step(strategy, topology, units, PAPER_PRECISION, 10)
    memory, intra, inter = PUBLISHED_7B[letters]
    assert f"{states.total / 1e9:.2f}" == memory
    assert f"{sent.intra / 1e9:.1f}" == intra
    assert f"{sent.inter / 1e9:.2f}" == inter


@pytest.mark.parametrize("letters", PUBLISHED_7B)
@pytest.mark.parametrize(("world_size", "group_size"), [(32, 8), (8, 2), (6, 3), (4, 4), (5, 1)])
@pytest.mark.parametrize("frozen", [0, 15])
def test_axes_and_closed_form_agree(
    letters: str, world_size: int, group_size: int, frozen: int
) -> None:
    strategy, topology = on_ranks(letters, world_size=world_size, group_size=group_size)
    unit = 1000 * world_size
    sent = traffic_per_step(
        strategy, topology, one_unit(unit, frozen=frozen * unit), PrecisionConfig(compute="bf16"), 3
    )
    assert sent == letter_traffic(
        letters,
        params_bytes=2 * (1 + frozen) * unit,
        trained_bytes=2 * unit,
        world_size=world_size,
        group_size=group_size,
        num_micro_batches=3,
    )


def test_degrees_between_the_letters() -> None:
    """Params over 2, grads over 4, optimizer over 8 ranks in groups of 4, counted by hand."""
    strategy, topology = on_ranks("2,4,8", world_size=8, group_size=4)
    sent = traffic_per_step(strategy, topology, one_unit(800), PrecisionConfig(compute="bf16"), 3)
    intra = 3 * (2 * 800) + 3 * (800 + 400) + 400  # gathers; reductions 1-2-4; gather_updated 4-2
    inter = 200 + 200  # step_reduce 4-8, gather_updated 8-4: a quarter of 1600 bytes
    assert sent == Sent(intra, inter)


def test_wire_type_counts_for_gradients_and_compute_type_for_parameters() -> None:
    strategy, topology = on_ranks("GNG", world_size=4, group_size=4)
    in_bf16 = PrecisionConfig(compute="bf16")
    in_fp32 = PrecisionConfig(compute="bf16", accumulate_allreduce_grads_in_fp32=True)
    gathers = 2 * 2 * 300
    assert traffic_per_step(strategy, topology, one_unit(400), in_bf16, 1) == Sent(
        gathers + 2 * 300, 0
    )
    assert traffic_per_step(strategy, topology, one_unit(400), in_fp32, 1) == Sent(
        gathers + 4 * 300, 0
    )


def test_one_rank_sends_nothing_and_holds_everything() -> None:
    strategy, topology = on_ranks("IIG", world_size=1, group_size=1)
    fp32 = PrecisionConfig(compute="fp32")
    assert traffic_per_step(strategy, topology, one_unit(100), fp32, 4) == Sent(0, 0)
    assert model_state_bytes(strategy, one_unit(100), fp32) == ModelStateBytes(
        params=400, grads=400, optim=800
    )


def test_the_master_is_stored_unless_it_is_the_parameter_shard() -> None:
    fp32, bf16 = PrecisionConfig(compute="fp32"), PrecisionConfig(compute="bf16")
    gig, _ = on_ranks("GIG", world_size=4, group_size=2)
    iig, _ = on_ranks("IIG", world_size=4, group_size=2)
    assert model_state_bytes(gig, one_unit(400), fp32).optim == 8 * 100
    assert model_state_bytes(iig, one_unit(400), fp32).optim == 12 * 100
    rounded = replace(fp32, exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16")
    assert model_state_bytes(iig, one_unit(400), rounded).optim == 8 * 100
    assert model_state_bytes(gig, one_unit(400), bf16).optim == 12 * 100


def test_frozen_parameters_are_stored_as_parameters_only() -> None:
    strategy, _ = on_ranks("IIG", world_size=4, group_size=2)
    assert model_state_bytes(
        strategy, one_unit(80, frozen=400), PrecisionConfig(compute="bf16")
    ) == ModelStateBytes(params=2 * 240, grads=4 * 40, optim=12 * 20)


def gathers(units: tuple[UnitSize, ...]) -> list[int]:
    return [unit.gathers_per_micro_batch for unit in units]


def test_gathers_of_each_kind_of_unit() -> None:
    assert gathers(size_units(MODEL, world_size=4)) == [1, 2, 2, 1]


def test_a_tied_head_gathers_the_embedding_again() -> None:
    assert gathers(size_units(TIED, world_size=4)) == [2, 2, 2, 1]


def test_nothing_is_gathered_for_backward_below_the_first_trained_unit() -> None:
    units = size_units(MODEL, world_size=4, is_trained=lambda name: name == "blocks.1.norm")
    assert gathers(units) == [1, 1, 2, 1]
    units = size_units(MODEL, world_size=4, is_trained=lambda name: name == "head.norm")
    assert gathers(units) == [1, 1, 1, 1]


def test_units_are_padded_by_box_and_by_world() -> None:
    """Embedding of 612 elements; block of 12 frozen and 240 trained elements."""
    expected = {  # ranks: (embedding, block trained, block frozen)
        1: (616, 240, 16),
        3: (624, 240, 24),
        4: (640, 256, 32),
        96: (768, 768, 768),  # fewer aligned shards than ranks: most contain only padding
    }
    for world_size, numels in expected.items():
        units = size_units(MODEL, world_size=world_size, is_trained=lambda name: "norm" not in name)
        embedding, block = units[:2]
        assert (embedding.trainable_numel, block.trainable_numel, block.frozen_numel) == numels
        assert embedding.frozen_numel == 0


def test_placement_names_level_copies_and_bytes() -> None:
    strategy, topology = on_ranks("NIG", world_size=32, group_size=8)
    states = ModelStateBytes(params=14_000_000_000, grads=1_750_000_000, optim=2_625_000_000)
    assert [line.split() for line in describe_placement(strategy, topology, states)[1:]] == [
        ["params", "N", "1", "32", "0", "1", "..", "31", "14000.00"],
        ["grads", "I", "8", "4", "0-7", "8-15", "16-23", "24-31", "1750.00"],
        ["optimizer", "G", "32", "1", "0-31", "2625.00"],
    ]


def test_placement_of_degrees_without_a_letter() -> None:
    strategy, topology = on_ranks("2,4,8", world_size=8, group_size=4)
    states = ModelStateBytes(params=10_000, grads=20_000, optim=30_000)
    levels = [line.split()[1:4] for line in describe_placement(strategy, topology, states)[1:]]
    assert levels == [["-", "2", "4"], ["I", "4", "2"], ["G", "8", "1"]]
