"""The benchmark of collectives: its figures, checks, files, and refusals."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from paro.collectives.api import make_collectives
from paro.collectives.choice import AlgorithmChoice
from paro.collectives.interface import CollectiveRequest
from paro.collectives.schedule import Op
from paro.distributed.comm_stream import Event
from paro.distributed.world import World
from paro.machine.files import machine_to_json, read_machine
from paro.machine.machine import BandwidthSource, Nic, fastest_algorithm
from paro.measuring import benchmark
from paro.measuring.benchmark import (
    LEAST_REPEATS,
    MOST_BYTES,
    MOST_REPEATS,
    CheckedInput,
    CollectiveResult,
    TimedCollective,
    count_repeats,
    with_measured,
)
from paro.measuring.device import Effort, measure_device
from paro.topology import Axes, AxisSpan, make_topology
from tests.helpers.ranks import run_ranks
from tests.helpers.refusals import refused
from tests.paro.planning.cases import machine
from tools.bench_collectives import Settings, main, make_parser, row_of, settings_of, table
from tools.collective_timing.results import plot
from tools.collective_timing.rounds import random_input

CPU = torch.device("cpu")
TOPOLOGY = make_topology(world_size=4, group_size=2, degrees=())
RANKS = range(4)
TYPES = (torch.float32, torch.bfloat16, torch.float16)


def settings(*words: str, size: int = 8, group_size: int = 4) -> Settings:
    args = make_parser().parse_args(["--group-size", str(group_size), *words])
    return settings_of(args, World(size=size, ranks_per_node=group_size))


def result(
    seconds: Sequence[float], *, op: Op = Op.ALL_GATHER, correct: bool = True
) -> CollectiveResult:
    span = settings().topology.axes
    timed = TimedCollective(op=op, span=span, numel=8_000_000, dtype=torch.float32)
    measured = {"repeats": 1, "seconds_by_round": tuple(seconds), "correct": correct}
    return CollectiveResult(collective=timed, algorithm="ho-ring", **measured)  # type: ignore[arg-type]


# Communication and its check


def inputs(op: Op, dtype: torch.dtype, span: AxisSpan = TOPOLOGY.axes) -> list[CheckedInput]:
    timed = TimedCollective(op=op, span=span, numel=4 * 64, dtype=dtype)
    return [random_input(timed, TOPOLOGY.members(span, rank), rank, CPU) for rank in RANKS]


def carried_out(
    made: Sequence[CheckedInput], comm_dtype: torch.dtype | None = None
) -> list[Tensor]:
    """Every rank's buffer after the collective over all, computed here; sums in `comm_dtype`."""
    buffers = [torch.zeros_like(made[0].values.new_empty(4 * 64)) for _ in made]
    for checked, buffer in zip(made, buffers, strict=True):
        checked.fill(buffer)
    if made[0].collective.op is Op.ALL_GATHER:
        for buffer in buffers:
            for checked, source in zip(made, [b.clone() for b in buffers], strict=True):
                buffer[checked.shard] = source[checked.shard]
        return buffers
    total = sum(buffer.to(comm_dtype or buffer.dtype) for buffer in buffers)
    return [total.to(buffer.dtype, copy=True) for buffer in buffers]


@pytest.mark.parametrize("op", Op)
@pytest.mark.parametrize("dtype", TYPES)
def test_nothing_done_and_one_wrong_element_are_wrong(op: Op, dtype: torch.dtype) -> None:
    made = inputs(op, dtype)
    for checked, buffer in zip(made, carried_out(made), strict=True):
        untouched = torch.zeros_like(buffer)
        checked.fill(untouched)
        assert not checked.is_right(untouched)
        assert checked.is_right(buffer)
        buffer[checked.shard][-1] += 1
        assert not checked.is_right(buffer)


def test_a_sum_that_travelled_in_a_smaller_type_and_a_shard_at_a_wrong_place_are_wrong() -> None:
    for op in (Op.REDUCE_SCATTER, Op.ALL_REDUCE):
        made = inputs(op, torch.float32)
        for checked, buffer in zip(made, carried_out(made, torch.bfloat16), strict=True):
            assert not checked.is_right(buffer)
    made = inputs(Op.ALL_GATHER, torch.float32)
    for checked, buffer in zip(made, carried_out(made), strict=True):
        others = [other.shard for other in made if other.shard != checked.shard]
        one, another = buffer[others[0]].clone(), buffer[others[1]].clone()
        buffer[others[0]], buffer[others[1]] = another, one
        assert not checked.is_right(buffer)


# Timing


def test_short_runs_are_repeated() -> None:
    for device_type, numel, seconds, repeats in (
        *(("cpu", 1000, seconds, n) for seconds, n in ((1e-6, MOST_REPEATS), (5e-3, 4), (0.5, 1))),
        ("cpu", 1000, 0.1, LEAST_REPEATS),
        ("cpu", MOST_BYTES["cpu"] // 4, 1e-6, LEAST_REPEATS),
        ("cuda", MOST_BYTES["cuda"] // 16, 1e-3, 4),
    ):
        of_size = {"op": Op.ALL_GATHER, "span": TOPOLOGY.axes, "numel": numel}
        timed = TimedCollective(**of_size, dtype=torch.float32)
        assert count_repeats(timed, seconds, device_type) == repeats


def test_the_figures_of_a_row() -> None:
    row = row_of(result([0.5, 0.4, 0.9]), settings("--inter-bandwidth", "100mbit"))
    wanted = {"seconds": 0.5, "bytes": 32_000_000, "correct": True, "algorithm_bandwidth": 64e6}
    wanted |= {"bus_bandwidth": 64e6 * 7 / 8, "bound_seconds": 0.32, "fraction_of_bound": 0.64}
    assert {name: row[name] for name in wanted} == pytest.approx(wanted)
    twice = row_of(result([0.5], op=Op.ALL_REDUCE), settings("--inter-bandwidth", "100mbit"))
    assert twice["bus_bandwidth"] == 64e6 * 14 / 8
    assert twice["bound_seconds"] == pytest.approx(0.64)
    assert row_of(result([0.5]), settings())["fraction_of_bound"] is None


def test_a_wrong_algorithm_is_told_and_never_written_down_as_fast() -> None:
    rows = [row_of(result([0.5], correct=correct), settings()) for correct in (True, False)]
    assert ["WRONG" in line for line in table(rows).strip().splitlines()] == [False, False, True]
    measured = [replace(result([0.1], correct=False), algorithm="ring"), result([0.5])]
    found = with_measured(settings().machine, measured, None, source="a test")
    assert fastest_algorithm(found, Op.ALL_GATHER, Axes.BOTH, 1_000) == "ho-ring"


# Flags


def test_sizes_are_bytes_that_divide_among_several_ranks() -> None:
    asked = settings("--sizes", "4,4K,64k,1.5M,32M", size=6, group_size=3)
    timed = asked.collectives(Op.ALL_GATHER, asked.topology.axes)
    assert [one.num_bytes for one in timed] == [24, 4_008, 64_008, 1_500_000, 32_000_016]
    asked = settings("--sizes", "1,2,64", "--dtype", "bfloat16")
    timed = asked.collectives(Op.ALL_GATHER, asked.topology.axes)
    assert [one.num_bytes for one in timed] == [16, 64]
    refused(lambda: settings(size=1, group_size=1), "one process has no peer ... torchrun")


def test_links_come_from_flags_before_the_machine(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_text(machine_to_json(machine(intra=9, inter=9, nic=Nic.SHARED)), encoding="utf-8")
    found = settings("--paro-machine", str(path), "--inter-bandwidth", "25mbit").machine
    assert (found.world_size, found.group_size, found.nic) == (8, 4, Nic.SHARED)
    assert (found.intra.bits_per_second, found.inter.bits_per_second) == (9 * 10**9, 25 * 10**6)


def test_mistakes_say_what_and_where() -> None:
    for words, message in (
        (["--ops", "all_gather,gossip"], "--ops 'gossip' is none of all_gather, reduce_scatter"),
        (["--algorithms", "ring", "--distributed-backend", "nccl"], "'ring' ... ho-ring"),
        (["--sizes", "4K,big"], "--sizes 'big' is no size: write it as 4096, 64K or 1.5M"),
        (["--group-size", "3"], "--group-size 3 does not divide the 8 ranks"),
        (["--rounds", "0"], "--rounds 0 must be at least 1"),
        (["--inter-bandwidth", "12GB/s"], "--inter-bandwidth: '12GB/s' is no rate"),
        (["--plot", "picture.jpeg2"], "--plot picture.jpeg2: the name must end in .png, .svg"),
        (["--machine-file", "m.json", "--train=--llama-preset 7B"], "--train: --seq-length"),
    ):
        refused(partial(settings, *words), message)


def test_the_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "picture.png"
    bounded, unknown = settings("--inter-bandwidth", "100mbit"), settings()
    rows = [row_of(result([0.5]), bounded), row_of(result([0.5], op=Op.ALL_REDUCE), unknown)]
    plot(path, "a title", rows)
    assert path.read_bytes().startswith(b"\x89PNG")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    refused(lambda: settings("--plot", "picture.png"), "--plot needs matplotlib: pip install")


# On ranks

TRAIN = "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --vocab-size 64"
ONCE = Effort(warmup=1, steps=1, micro_batches=1)
FLAGS = ["--distributed-backend", "gloo", "--group-size", "2", "--sizes", "64,4K", "--rounds", "1"]


def bench(folder: str, *words: str, wrong: bool = False) -> tuple[object, str]:
    """The exit status and the output of this rank; the last one may get a wrong all-reduce."""

    def make(choice: AlgorithmChoice, *given: Any) -> Any:
        made = make_collectives(choice, *given)
        run = made.run

        def off(request: CollectiveRequest) -> Event:
            event = run(request)
            event.wait()
            if request.op is Op.ALL_REDUCE and os.environ["RANK"] == "3":
                request.whole[7] += 1
            return event

        if wrong and choice.names == ("ring",):
            made.run = off  # type: ignore[method-assign]
        return made

    flags = [*FLAGS, "--inter-bandwidth", "8gbit", "--json", f"{folder}/rows.json", *words]
    printed, status = StringIO(), None
    with (
        mock.patch.multiple(benchmark, make_collectives=make, LEAST_REPEATS=1, MOST_REPEATS=1),
        mock.patch.dict(measure_device.__kwdefaults__, effort=ONCE),
        redirect_stdout(printed),
    ):
        try:
            main(flags)
        except SystemExit as leaving:
            status = leaving.code
    return status, printed.getvalue()


@pytest.mark.verify
@pytest.mark.ranks
def test_the_command_line_on_four_ranks(tmp_path: Path) -> None:
    rows_file, machine_file = tmp_path / "rows.json", tmp_path / "four.json"
    names = ("native", "ho-ring")
    files = ("--machine-file", str(machine_file), "--train", TRAIN)
    words = ("--algorithms", ",".join(names), *files)
    ended = run_ranks(bench, 4, str(tmp_path), *words, init=False)
    assert [status for status, _ in ended] == [None] * 4
    printed = "".join(text for _, text in ended)
    assert f"\n--paro-machine {machine_file} plans with it: tools/plan.py; " in printed
    found = json.loads(rows_file.read_text(encoding="utf-8"))
    assert (found["world_size"], found["group_size"], found["backend"]) == (4, 2, "gloo")
    assert (found["intra_bandwidth"], found["inter_bandwidth"]) == (None, "8gbit")
    assert (found["torch"], found["rounds"]) == (torch.__version__, 1)
    expected = {(op.value, name, size) for op in Op for name in names for size in (64, 4_000)}
    rows = found["rows"]
    assert len(rows) == len(expected)
    assert {(row["op"], row["algorithm"], row["bytes"]) for row in rows} == expected
    for row in (*rows, *found["axis_rows"]):
        assert row["correct"] is True, row
        assert row["algorithm_bandwidth"] == pytest.approx(row["bytes"] / row["seconds"])
        assert (row["axes"], row["ranks"]) in (("both", 4), ("intra", 2), ("inter", 2))
        assert (row["bound_seconds"] is None) is (row["axes"] == "intra")
    four = read_machine(machine_file)
    assert (four.name, four.world_size, four.group_size) == ("four", 4, 2)
    measured = {(row.axes, row.op.value, row.algorithm, row.bytes) for row in four.measured}
    assert measured == {(axes, *key) for axes in Axes for key in expected}
    typed = [link.bandwidth_source is BandwidthSource.TYPED for link in (four.inter, four.intra)]
    assert typed == [True, False]
    assert 0 < four.device.sustained_flops <= four.device.peak_flops
    assert None not in (four.device.attention_flops, four.device.cores)
    assert fastest_algorithm(four, Op.ALL_REDUCE, Axes.BOTH, 1_000) in names


@pytest.mark.ranks
def test_a_wrong_result_on_one_rank_is_seen_by_all(tmp_path: Path) -> None:
    words = ("--algorithms", "ring,native", "--ops", "all_gather,all_reduce")
    ended = run_ranks(bench, 4, str(tmp_path), *words, wrong=True, init=False)
    assert [status for status, _ in ended] == [1, 1, 1, 1]
    for row in json.loads((tmp_path / "rows.json").read_text(encoding="utf-8"))["rows"]:
        wrong = (row["op"], row["algorithm"]) == ("all_reduce", "ring")
        assert row["correct"] is not wrong, row
