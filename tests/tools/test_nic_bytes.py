"""The bytes that NICs send while a model trains equal the formula."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paro.distributed.world import World
from paro.planning.run_memory import RunMemory
from paro.strategy import legal_letters
from paro.topology import Sent
from tests.helpers.flags import configured
from tests.helpers.ranks import ROOT
from tests.tools.cluster.nic_bytes import FLAGS, STEPS, WAYS
from tools.cluster.launch import run
from tools.cluster.lifecycle import cluster
from tools.cluster.spec import ClusterSpec

pytestmark = [pytest.mark.root, pytest.mark.ranks, pytest.mark.usefixtures("warm_nodes")]


def formula(strategy: str, group_size: int, nodes: int = 2) -> Sent:
    """Bytes that all ranks send in a step, and in a round after each; a group is a node."""
    size = nodes * group_size
    letters, _, way = strategy.partition("+")
    words = f"{FLAGS} --paro-strategy {letters} {WAYS[way]} --global-batch-size {2 * size}"
    world = World(size=size, ranks_per_node=group_size)
    config = configured(words, world)
    num_micro_batches = config.batches.num_micro_batches_at(0)
    memory = RunMemory(None)
    sent = memory.sent(config.spec, num_micro_batches) + memory.sent_in_rounds(config.spec)
    return Sent(size * sent.intra, size * sent.inter)


def check(
    strategies: tuple[str, ...],
    collectives: tuple[str, ...],
    folder: Path,
    *,
    group_size: int,
    nodes: int = 2,
    within: float = 0.02,
) -> dict[str, float]:
    """Compares `collectives` with the formula; the bytes of all NICs in a step, by case."""
    figures = folder / "bytes.json"
    script = ROOT / "tests/tools/cluster/nic_bytes.py"
    spec = ClusterSpec(nodes=nodes, ranks_per_node=group_size, inter="1gbit", name="nic-bytes")
    with cluster(spec) as made:
        words = [str(script), str(figures), "/".join(strategies), ",".join(collectives)]
        assert run(made, words) == 0
    found = json.loads(figures.read_text(encoding="utf-8"))
    assert 1.0 < found["calibration"] < 1.10
    for strategy in strategies:
        wanted = formula(strategy, group_size, nodes)
        for collective in collectives:
            row = found[f"{strategy} {collective}"]
            if collective in ("h-ring", "ho-ring"):
                assert row["counted"] == STEPS * wanted.inter
                # Otherwise gloo's own run inside groups and deviate.
                if "rotate" in WAYS[strategy.partition("+")[2]]:
                    assert row["counted_inside"] == STEPS * wanted.intra
                    inside = row["loopbacks"] / row["counted_inside"]
                    print(f"{strategy} {collective}: loopbacks {inside:.4f} of what was counted")
                    assert inside == pytest.approx(found["calibration_inside"], rel=0.03)
            ratio = row["nics"] / row["counted"]
            print(f"{strategy} {collective}: NICs {ratio:.4f} of what was counted")
            assert ratio == pytest.approx(found["calibration"], rel=within), (strategy, collective)
            assert ratio < 1.10
    return {name: row["nics"] / STEPS for name, row in found.items() if name[:5] != "calib"}


def test_nics_count_what_the_formula_says(tmp_path: Path) -> None:
    check(("III+in-place", "III+outer-16"), ("ho-ring",), tmp_path, group_size=2)


@pytest.mark.verify
def test_nics_count_what_the_formula_says_for_all(tmp_path: Path) -> None:
    ways = [f"{letters}+{way}" for letters in ("III", "IIG") for way in ("rotate", "in-place")]
    check(tuple(ways), ("ho-ring",), tmp_path, group_size=4)
    check(legal_letters(), ("ring", "ho-ring"), tmp_path, group_size=4)


@pytest.mark.verify
def test_more_copies_of_optimizer_shards_send_not_one_byte_more(tmp_path: Path) -> None:
    strategies = ("2,2,2", "2,2,4", "2,2,8")  # on 4, on 2 and on 1 of 4 nodes
    nics = check(strategies, ("ho-ring",), tmp_path, group_size=2, nodes=4)
    sent = {formula(strategy, 2, 4).inter for strategy in strategies}
    assert len(sent) == 1
    print({name: f"{size / sent.copy().pop():.4f} of the formula" for name, size in nics.items()})
    assert max(nics.values()) / min(nics.values()) < 1.01


@pytest.mark.verify
def test_nics_count_what_the_formula_says_of_fewer_bits(tmp_path: Path) -> None:
    """Gradients and updates as codes; under III and NNN several ranks own a piece of a sum."""
    strategies = ("IIG+4-bit", "III+4-bit", "NNN+4-bit", "IIG+8-bit")
    check(strategies, ("ho-ring",), tmp_path, group_size=2, within=0.01)
    assert formula("IIG+4-bit", 2).inter < 0.27 * formula("IIG", 2).inter


@pytest.mark.verify
def test_nics_count_what_the_formula_says_of_rounds(tmp_path: Path) -> None:
    """Of groups that train alone and meet after every step, under all widths."""
    ways = [f"NNI+outer-{bits}" for bits in (32, 16, 8, 4)]
    check(tuple(ways), ("ho-ring",), tmp_path, group_size=2, within=0.01)
    sizes = [formula(way, 2).inter for way in ways]
    assert [round(size / sizes[1], 1) for size in sizes] == [2.0, 1.0, 0.5, 0.3]


@pytest.mark.verify
def test_nics_count_what_the_formula_says_where_a_part_trains(tmp_path: Path) -> None:
    """Frozen parameters are gathered and nothing of them is reduced or updated."""
    ways = [f"{letters}+{way}" for letters in legal_letters() for way in ("last", "lora")]
    check(tuple(ways), ("ho-ring",), tmp_path, group_size=2, within=0.03)
    for way in ("last", "lora"):
        assert formula(f"ING+{way}", 2).inter < formula("ING", 2).inter
