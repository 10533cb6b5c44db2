"""One real rank of many: its links, mistakes, and trainings on them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paro.collectives.schedule import Op
from paro.machine.collective_time import CollectiveTimes
from paro.machine.files import machine_to_json
from paro.machine.machine import Nic
from paro.topology import Axis, Link
from tests.helpers.refusals import refused
from tests.helpers.scripts import run_script
from tests.paro.planning.cases import machine
from tools.bench import one_rank
from tools.bench.link_model.links import Links

SCRIPT = "tools/bench/one_rank.py"


MACHINE = machine(world_size=8, group_size=4, nic=Nic.PER_RANK, intra=8, inter=0.8)


@pytest.mark.parametrize(
    ("ranks", "inner", "outer"),
    [((4, 5, 6, 7), 1, 4), ((1, 5), 4, 8), (tuple(range(8)), 1, 8), ((4, 6), 2, 4)],
)
def test_a_collective_lasts_as_the_planner_counts(
    ranks: tuple[int], inner: int, outer: int
) -> None:
    axis = Axis(index=0, inner=inner, outer=outer, link=Link.INTRA)
    job = Links(MACHINE).job(Op.ALL_GATHER, ranks, 8_000_000)
    assert job is not None
    expected = CollectiveTimes(MACHINE, "native").seconds(Op.ALL_GATHER, (axis,), 8_000_000)
    assert job.seconds == expected > 0.0
    assert bool(job.inter) == (outer > MACHINE.group_size)
    message = Links(MACHINE).job(None, ranks, 8_000_000)
    assert message is not None
    assert message.seconds > 0.0
    assert Links(MACHINE, are_free=True).job(Op.ALL_GATHER, ranks, 8_000_000) is None


def test_mistakes() -> None:
    base = ["--ranks", "8", "--machine"]
    refused(lambda: one_rank.main([*base, "nowhere.json"]), "nowhere.json", "dgx-h100")
    refused(lambda: one_rank.main([*base, "dgx-h100", "--contenders", "ddq"]), "ddq", "fsdp2")
    refused(lambda: one_rank.main(["--ranks", "1", "--machine", "dgx-h100"]), "--ranks 1")


@pytest.mark.verify
@pytest.mark.process
def test_a_rank_trains_by_this_project_and_by_fsdp2(tmp_path: Path) -> None:
    path, file = tmp_path / "machine.json", tmp_path / "figures.json"
    path.write_text(machine_to_json(MACHINE))
    shape = "--num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --vocab-size 64 --seq-length 16"
    contenders = "paro:IIG@ho-ring,fsdp2-hybrid"
    command = [SCRIPT, "--ranks", 8, "--machine", path, "--contenders", contenders, "--steps", 1]
    done = run_script([*command, *shape.split(), "--json", file])
    assert done.returncode == 0, done.stderr
    turns = json.loads(file.read_text())["turns"]
    assert [*turns] == contenders.split(",")
    for name, figures in turns.items():
        assert min(figures["s/step"], figures["host s/step"]) > 0.0
        assert name in done.stdout
