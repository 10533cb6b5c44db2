"""An emulated cluster: its names, output in whole lines, and NICs that send the formula's bytes."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from paro.distributed.world import World
from paro.planning.run_memory import RunMemory
from paro.strategy import legal_letters
from paro.topology import Sent
from tests.helpers.ranks import ROOT
from tests.helpers.refusals import refused
from tests.helpers.training import configured
from tests.tools.cluster.nic_bytes import FLAGS, STEPS, WAYS
from tools.cluster.launch import NodeOutput, run
from tools.cluster.lifecycle import cluster
from tools.cluster.spec import ClusterSpec, is_namespace_of


def spec(name: str = "a", **fields: object) -> ClusterSpec:
    sizes = {"nodes": 2, "ranks_per_node": 2, "inter": "100mbit"}
    return ClusterSpec(name=name, **{**sizes, **fields})  # type: ignore[arg-type]


def test_what_cannot_be_built_is_refused() -> None:
    refused(lambda: spec(nodes=0), "--nodes 0")
    refused(lambda: spec(ranks_per_node=300), "--ranks-per-node 300")
    refused(lambda: spec(nodes=200, ranks_per_node=8), "1600 ports")
    refused(lambda: spec(inter="quick"), "--inter: 'quick'")
    refused(lambda: spec(intra="quick"), "--intra: 'quick'")
    refused(lambda: spec(nic="two"), "--nic two")
    refused(lambda: spec("../x"), "--name '../x'")


def test_namespaces_of_other_clusters_are_told_apart() -> None:
    ours = spec("a", nodes=12).namespaces
    assert all(is_namespace_of("a", namespace) for namespace in ours)
    for name in ("b", "a-node1", "a-switch"):
        assert not any(is_namespace_of("a", namespace) for namespace in spec(name).namespaces)


# A line in two pieces, an empty one, and a last one without an end.
PIECES = "printf 'one l'; sleep 0.2; printf 'ine\\n\\n'; echo mistake >&2; printf end"


@pytest.mark.process
def test_lines_are_whole_and_named(capfd: pytest.CaptureFixture[str]) -> None:
    nodes = {
        node: subprocess.Popen(["sh", "-c", PIECES], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for node in (1, 12)
    }
    output = NodeOutput(nodes)
    output.finish(seconds=10.0)
    printed = capfd.readouterr()
    lines = printed.out.splitlines(keepends=True)
    for node, process in nodes.items():
        assert process.wait() == 0
        own = [line for line in lines if line.startswith(f"node {node}: ")]
        assert own == [f"node {node}: {text}\n" for text in ("one line", "", "end")]
    assert len(lines) == 6
    assert set(printed.err.splitlines()) == {"node 1: mistake", "node 12: mistake"}


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


@pytest.mark.verify
def test_nics_count_what_the_formula_says(tmp_path: Path) -> None:
    check(("III+in-place", "III+outer-16"), ("ho-ring",), tmp_path, group_size=2)
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


OF_WAYS = {  # by name, and how near
    # Gradients and updates as codes; under III and NNN several ranks own a piece of a sum.
    "fewer_bits": (("IIG+4-bit", "III+4-bit", "NNN+4-bit", "IIG+8-bit"), 0.01),
    # Of groups that train alone and meet after every step, under all widths.
    "rounds": ([f"NNI+outer-{bits}" for bits in (32, 16, 8, 4)], 0.01),
    # Frozen parameters are gathered and nothing of them is reduced or updated.
    "a part": (
        [f"{letters}+{way}" for letters in legal_letters() for way in ("last", "lora")],
        0.03,
    ),
}


@pytest.mark.verify
@pytest.mark.parametrize("name", OF_WAYS)
def test_nics_count_what_the_formula_says_of(tmp_path: Path, name: str) -> None:
    ways, within = OF_WAYS[name]
    check(tuple(ways), ("ho-ring",), tmp_path, group_size=2, within=within)
    assert formula("IIG+4-bit", 2).inter < 0.27 * formula("IIG", 2).inter
    sizes = [formula(way, 2).inter for way in OF_WAYS["rounds"][0]]
    assert [round(size / sizes[1], 1) for size in sizes] == [2.0, 1.0, 0.5, 0.3]
    for way in ("last", "lora"):
        assert formula(f"ING+{way}", 2).inter < formula("ING", 2).inter
