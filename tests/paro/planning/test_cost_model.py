"""Formulas of traffic and model state, compared with the paper's table and the real layouts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paro.launch.placement import describe_placement
from paro.layout import Unit, UnitLayout
from paro.planning.sending import Sender, traffic_of
from paro.precision import PrecisionConfig
from paro.spec.sharding_spec import ModelStateBytes, specs_of, state_bytes
from paro.step.actions import Move, Verb
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


def one_unit(numel: int, *, frozen: int = 0) -> tuple[Unit, ...]:
    """A model as the paper counts it: everything is gathered twice per micro-batch."""
    trainable, rest = (UnitLayout((), decayed_stop=0, numel=size) for size in (numel, frozen))
    return (Unit(name="all", trainable=trainable, frozen=rest),)


def moves(count: int, *, frozen: int = 0) -> dict[Move, int]:
    """How often its collectives come in a step of `count` micro-batches."""
    of_step = {(Verb.GRAD_SYNC, 0): 1, (Verb.PARAM_ALL_GATHER, 0): 1, (Verb.REDUCE, 0): count}
    return of_step | {(Verb.GATHER, buffer): 2 * count for buffer in range(1 + bool(frozen))}


@pytest.mark.parametrize("letters", PUBLISHED_7B)
def test_published_figures_for_7b(letters: str) -> None:
    strategy, topology = on_ranks(letters, world_size=32, group_size=8)
    specs = specs_of(one_unit(7 * 10**9), strategy, topology, PAPER_PRECISION)
    states = state_bytes(specs)
    sender = Sender(group_size=8, rank=None)
    sent = traffic_of(moves(10), specs, sender)
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
    units = one_unit(unit, frozen=frozen * unit)
    bf16 = PrecisionConfig(compute="bf16")
    sender = Sender(group_size=group_size, rank=None)
    specs = specs_of(units, strategy, topology, bf16)
    sent = traffic_of(moves(3, frozen=frozen), specs, sender)
    assert sent == letter_traffic(
        letters,
        params_bytes=2 * (1 + frozen) * unit,
        trained_bytes=2 * unit,
        world_size=world_size,
        group_size=group_size,
        num_micro_batches=3,
    )


def test_the_master_is_stored_unless_it_is_the_parameter_shard() -> None:
    fp32, bf16 = PrecisionConfig(compute="fp32"), PrecisionConfig(compute="bf16")
    rounded = replace(fp32, exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16")
    for letters, precision, of_element in (
        ("GIG", fp32, 8),
        ("IIG", fp32, 12),
        ("IIG", rounded, 8),
        ("GIG", bf16, 12),
    ):
        placed = on_ranks(letters, world_size=4, group_size=2)
        states = state_bytes(specs_of(one_unit(400), *placed, precision))
        assert states.optim == of_element * 100


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
