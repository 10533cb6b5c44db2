"""One real rank of many: its links, what arrives, and trainings on them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

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
from tools.bench.link_model.process_group import alone

SCRIPT = "tools/bench/one_rank.py"


MACHINE = machine(world_size=8, group_size=4, nic=Nic.PER_RANK, intra=8, inter=0.8)


@pytest.fixture
def rank() -> Iterator[Links]:
    """Rank 5 of 8 in the default group of this process, whose transfers take no time."""
    links = Links(MACHINE, are_free=True)
    with alone(links):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=5, world_size=8)
        try:
            yield links
        finally:
            dist.destroy_process_group()


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


def test_what_arrives_is_the_ranks_own(rank: Links) -> None:
    own = torch.tensor([1.0, -2.0])
    whole = torch.full((16,), torch.nan)
    dist.all_gather_into_tensor(whole, own)
    assert torch.equal(whole, own.repeat(8))
    whole = torch.arange(16.0)
    dist.all_gather_into_tensor(whole, whole[10:12])  # in place
    assert torch.equal(whole, torch.tensor([10.0, 11.0]).repeat(8))
    total = torch.tensor([3.0])
    dist.all_reduce(total)
    assert total.item() == 24.0  # as if all had it
    dist.all_reduce(total, op=dist.ReduceOp.MAX)
    assert total.item() == 24.0
    part = torch.empty(2)
    dist.reduce_scatter_tensor(part, torch.arange(16.0))
    assert torch.equal(part, 8 * torch.tensor([10.0, 11.0]))
    gathered: list[object] = [None] * 8
    dist.all_gather_object(gathered, {"rank": 5})
    assert gathered == [{"rank": 5}] * 8
    group = dist.new_group([1, 5])
    assert isinstance(group, dist.ProcessGroup)
    dist.all_reduce(total, group=group)
    assert total.item() == 48.0
    assert dist.new_group([0, 4]) == dist.GroupMember.NON_GROUP_MEMBER


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
