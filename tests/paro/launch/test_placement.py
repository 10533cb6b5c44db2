"""The placement of every model state as a table: level, copies, ranks and bytes."""

from __future__ import annotations

from paro.launch.placement import describe_placement
from paro.spec.sharding_spec import ModelStateBytes
from tests.paro.planning.on_ranks import on_ranks


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
