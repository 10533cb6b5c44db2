"""Flags are resolved and configured once: also where the planner decides, and where it measures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from pathlib import Path

import pytest
import torch

from paro.arguments.parser import parse_args
from paro.checkpoint.config import saved_fields
from paro.checkpoint.directory import begin_checkpoint, finish_checkpoint
from paro.config import resolve, run
from paro.config.context_parallel import AUTO
from paro.config.record import recorded_arguments
from paro.distributed.control import PlannedControl
from paro.distributed.world import World
from paro.machine.files import machine_to_json
from paro.training.assembly import build_training
from paro.training.in_memory import identifying_flags
from tests.paro.config.test_run import SMALL
from tests.paro.planning.cases import DEVICE, machine

WORLD = World(size=8, ranks_per_node=4)
MACHINE = machine(world_size=8, group_size=4, inter=20, device=DEVICE)
CHOSEN = "--paro-strategy auto --paro-inter-bits auto --bf16"


@pytest.mark.parametrize(
    ("words", "is_open"),
    [
        ("--paro-strategy IIG", False),
        (f"{CHOSEN} --paro-machine FILE", False),
        (f"{CHOSEN} --context-parallel-size auto --cp-comm-type auto --paro-machine FILE", False),
        (CHOSEN, True),
        (f"{CHOSEN} --context-parallel-size auto --cp-comm-type auto", True),
        (f"{CHOSEN} --context-parallel-size 2 --cp-comm-type auto --paro-elastic", True),
    ],
)
def test_each_part_is_made_once(
    words: str, is_open: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "machine.json"
    path.write_text(machine_to_json(MACHINE), encoding="utf-8")
    made: Counter[str] = Counter()

    def counted(name: str, make: Callable[..., object]) -> Callable[..., object]:
        @wraps(make)
        def call(*needed: object, **fields: object) -> object:
            made[name] += 1
            return make(*needed, **fields)

        return call

    makers = tuple((name, counted(name, make)) for name, make in run._MAKERS)
    monkeypatch.setattr(run, "_MAKERS", makers)
    monkeypatch.setattr(run, "with_saved", counted("with_saved", resolve.with_saved))
    monkeypatch.setattr(run.RunConfig, "__init__", counted("RunConfig", run.RunConfig.__init__))
    args = parse_args(f"{SMALL} {words}".replace("FILE", str(path)).split())
    config = run.configure(args, WORLD)
    assert (config.open is not None) is is_open
    if is_open:
        config = config.on_measured(MACHINE)
    assert config.open is None
    assert made.pop("RunConfig") == 1 + is_open, "once, and once with what was open"
    of_others = {"checkpoint", "batches", "precision"}  # of with_saved, and of the decision
    assert {*made} | of_others == {name for name, _ in makers} | {"with_saved"}
    assert set(made.values()) == {1}
    assert AUTO not in (config.context.cp_comm_type, config.strategy.name)
    assert (config.sharding.machine is None) is (words == "--paro-strategy IIG")


def test_ranks_that_met_before_it_was_measured_share_samples_as_is_then_chosen() -> None:
    long = "--seq-length 65536 --max-position-embeddings 65536 --distributed-backend gloo"
    own = replace(MACHINE, device=replace(DEVICE, memory_bytes=3 * 10**8))
    flags = f"{SMALL} {long} --paro-strategy auto --context-parallel-size auto"
    config = run.configure(parse_args(flags.split()), WORLD)
    control = PlannedControl(config.world, torch.device("meta"))
    chosen = config.on_measured(own)
    size = chosen.context.context_parallel_size
    assert size > 1 == config.context.context_parallel_size
    assert chosen.batches.data_parallel_size == 8 // size
    assert build_training(chosen, control).num_sharing == size


@pytest.mark.parametrize(
    "words",
    [
        CHOSEN,
        f"{CHOSEN} --context-parallel-size auto --cp-comm-type auto",
        f"{SMALL} --use-checkpoint-args --llama-preset 7B --global-batch-size 32",
    ],
)
def test_a_run_is_known_by_its_command_line_once_it_continues_as_chosen(
    words: str, tmp_path: Path
) -> None:
    args = f"{SMALL} {words} --non-persistent-ckpt-type local --save {tmp_path} --load {tmp_path}"
    first = run.configure(parse_args(args.split()), WORLD)
    used = first if first.open is None else first.on_measured(MACHINE)
    record = {"arguments": recorded_arguments(used), "model": saved_fields(used.model)}
    finish_checkpoint(begin_checkpoint(tmp_path, 5), 5, record | {"state": {}})
    again = run.configure(parse_args(args.split()), WORLD)
    assert again.arguments != first.arguments, "values of the checkpoint are filled in"
    assert identifying_flags(again.command_line) == identifying_flags(first.command_line)
    other = run.configure(parse_args(f"{args} --lr 0.5".split()), WORLD)
    assert identifying_flags(other.command_line) != identifying_flags(first.command_line)
