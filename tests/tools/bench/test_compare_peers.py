"""All contenders train equally through the command line, and store what their names promise."""

from __future__ import annotations

import json
import math
import os
import sys
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from paro.distributed.world import World
from paro.errors import UserError
from tests.helpers.refusals import refused
from tests.helpers.scripts import run_script
from tools.bench import compare_peers
from tools.bench.compare_peers import main, make_parser, plan_of
from tools.bench.peers.deepspeed_zero import MODES, lacks_deepspeed
from tools.bench.peers.figures import DisagreementError, TimedRun, check_agreement, compare
from tools.bench.peers.run import in_own_process
from tools.bench.peers.task import state_bytes

SCRIPT = "tools/bench/compare_peers.py"
WORLD = World(rank=0, size=4, local_rank=0, ranks_per_node=4)
# Vocabulary rows that four ranks cannot divide equally.
TINY = (
    "--group-size 2 --num-layers 2 --hidden-size 32 --num-attention-heads 2 --ffn-hidden-size 64 "
    "--vocab-size 130 --seq-length 16 --micro-batches 2 --rounds 1 --steps 1"
)
NUM_PARAMETERS = 2 * 130 * 32 + 2 * (4 * 32 * 32 + 3 * 32 * 64 + 2 * 32) + 32

# Bytes per parameter in bf16, on 4 ranks in groups of 2: compute copy, gradient, master and two
# moments, each with its sharding degree.
BYTES = {
    "ddp": 2 + 2 + 12,
    **dict.fromkeys(("fsdp2", "fsdp2-ahead"), (4 + 4 + 8) / 4),
    **dict.fromkeys(("fsdp2+p2p/4", "fsdp2-ahead+allgather/2"), (4 + 4 + 8) / 4),
    "fsdp2-hybrid": (4 + 4 + 8) / 2,
    "fsdp2-hybrid-kept": 2 + 2 + 12 / 2,
    **dict.fromkeys(("fsdp2-kept", "paro:NNG@flat"), 2 + 2 + 12 / 4),
    **dict.fromkeys(("paro:IIG", "paro:IIG+a2a+p2p/2/2"), 2 / 2 + 2 / 2 + 12 / 4),
    "paro:GGG+p2p/4": (2 + 2 + 12) / 4,
}
DEEPSPEED_BYTES = {
    "deepspeed-1": 2 + 2 + 12 / 4,
    "deepspeed-2": 2 + 2 / 4 + 12 / 4,
    "deepspeed-3": (2 + 2 + 12) / 4,
    "deepspeed-hpz": (2 + 2 + 12) / 4 + 2 / 2,
}


def run(path: Path, contenders: str, *flags: str) -> tuple[dict[str, Any], str]:
    file = path / "figures.json"
    command = [SCRIPT, *TINY.split(), "--contenders", contenders, "--json", file, *flags]
    done = run_script(command, nproc=4, env={"GLOO_SOCKET_IFNAME": "lo"})
    assert done.returncode == 0, done.stderr
    return json.loads(file.read_text()), done.stdout


def check_bytes(figures: dict[str, Any], expected: dict[str, float]) -> None:
    held = {row["contender"]: row["state_bytes"] / NUM_PARAMETERS for row in figures["rows"]}
    for name, count in expected.items():
        # The excess is rows that a rank pads.
        assert count <= held[name] < 1.05 * count, f"{name}: {held[name]}, not {count}"


@pytest.mark.verify
@pytest.mark.ranks
def test_pytorch_and_this_project_train_alike_and_hold_what_they_promise(tmp_path: Path) -> None:
    names = ["zero-redundancy", *BYTES]
    figures, printed = run(tmp_path, ",".join(names), "--baselines", "ddp,fsdp2-hybrid")
    assert [row["contender"] for row in figures["rows"]] == names
    check_bytes(figures, BYTES)
    # Whole parameters are assigned to ranks, so one has more than a quarter.
    held = {row["contender"]: row["state_bytes"] for row in figures["rows"]}
    assert held["paro:NNG@flat"] < held["zero-redundancy"] < held["ddp"]
    first, *others = (turn["losses"] for turn in figures["turns"])
    assert len(first) == 3
    assert first[2] < first[0] - 0.01, "nothing was learned"
    assert all(losses == pytest.approx(first, rel=2e-3) for losses in others)
    assert "against ddp" in printed
    assert "against fsdp2-hybrid" in printed
    assert all(row["seconds"] > 0.0 and row["nic_bytes"] is None for row in figures["rows"])
    waited = {row["contender"]: row["context_seconds"] for row in figures["rows"]}
    assert waited["paro:IIG"] == 0.0
    assert waited["fsdp2+p2p/4"] is None
    assert waited["paro:GGG+p2p/4"] > 0.0


@pytest.mark.ranks
@pytest.mark.verify
@pytest.mark.skipif(lacks_deepspeed() is not None, reason=str(lacks_deepspeed()))
def test_deepspeed_trains_alike_and_holds_what_it_promises(tmp_path: Path) -> None:
    figures, _ = run(tmp_path, ",".join(["paro:GGG", *MODES]))
    assert figures["left_out"] == {}
    assert len(figures["rows"]) == 1 + len(MODES)
    check_bytes(figures, DEEPSPEED_BYTES)


@pytest.mark.verify
@pytest.mark.ranks
def test_fp32_agrees_closely_and_is_drawn(tmp_path: Path) -> None:
    picture = tmp_path / "peers.svg"
    # Muon's losses are others: with those of AdamW they would not agree.
    names = "paro:GGG,fsdp2,paro:GGG+muon,paro:IIG+muon,paro:NIG+allgather/2,fsdp2+allgather/4"
    names += ",fsdp2-hybrid+p2p/2"
    flags = ["--dtype", "fp32", "--recompute", "--num-query-groups", "1", "--plot", str(picture)]
    run(tmp_path, names, *flags)
    drawn = picture.read_text()
    assert drawn.startswith("<?xml")
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".tmp"] == []


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "localhost")


def test_a_plan_that_cannot_be_is_refused() -> None:
    for flags, message in (
        ("--warmup-steps 1", "--warmup-steps 1 must be at least 2"),
        ("--contenders ddp,horovod", "not 'horovod'"),
        ("--contenders paro:GNI", "GNI is not legal"),
        ("--contenders paro:IIG+twirl", "twirl is none of"),
        ("--contenders paro:IIG+p2p/3", "--context-parallel-size 3 does not divide the 4 ranks"),
        ("--contenders fsdp2+a2a/2", "FSDP2's share samples, by allgather or p2p"),
        ("--contenders ddp+p2p/2", "FSDP2's share samples"),
        ("--contenders ddp --global-batch-size 6", "--global-batch-size 6"),
        ("--contenders ,", "none is left: no name is given"),
        ("--contenders ddp --baselines fsdp2", "--baselines fsdp2: not among ddp"),
        ("--group-size 3", "--group-size 3 does not divide the 4 ranks"),
    ):
        args = partial(make_parser().parse_args, flags.split())
        refused(lambda args=args: plan_of(args(), WORLD), message)


def test_a_file_that_could_not_be_written_is_told_before_the_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compare_peers, "read_world", lambda: WORLD)
    monkeypatch.delattr(compare_peers, "run_rounds")
    for flag, name, message in (
        ("--json", "no/a.json", "written"),
        ("--plot", "a.txt", "end in .png"),
    ):
        monkeypatch.setattr(sys, "argv", ["compare_peers.py", flag, name])
        refused(main, f"{flag} {name} ... {message}")
    monkeypatch.setattr(compare_peers, "read_world", World)
    refused(main, "start it on 2 ranks or more")


def test_without_deepspeed_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = "DeepSpeed is not installed"
    monkeypatch.setattr(compare_peers, "lacks_deepspeed", lambda: missing)
    args = make_parser().parse_args(["--contenders", "deepspeed-1,ddp,deepspeed-hpz,paro:4/4/4"])
    plan = plan_of(args, WORLD)
    assert list(plan.tasks) == ["ddp", "paro:4/4/4"]
    assert plan.baselines == ["ddp"]
    assert plan.left_out == dict.fromkeys(["deepspeed-1", "deepspeed-hpz"], missing)
    args = make_parser().parse_args(["--contenders", "deepspeed-3"])
    refused(lambda: plan_of(args, WORLD), f"none is left: {missing}")


def timed_run(name: str, seconds: float = 1.0, **changed: Any) -> TimedRun:
    figures: dict[str, Any] = {
        "cpu_seconds": 4.0 * seconds,
        "state_bytes": 1_000_000,
        "peak_bytes": 3_000_000,
        "nic_bytes": 500_000,
        "losses": [5.0, 4.0],
        "grad_norms": [1.0, 2.0],
    }
    return TimedRun(contender=name, seconds=seconds, **{**figures, **changed})


def test_a_ratio_is_the_median_of_pairs_and_not_the_ratio_of_medians() -> None:
    rounds = {
        "slow": [timed_run("slow", 4.0), timed_run("slow", 10.0), timed_run("slow", 6.0)],
        "fast": [timed_run("fast", 2.0), timed_run("fast", 9.0), timed_run("fast", 2.0)],
    }
    slow, fast = compare(rounds, "slow")
    assert (slow["speed"], slow["slowest"], slow["fastest"]) == (1.0, 1.0, 1.0)
    assert fast["speed"] == 2.0  # median of 2, 10/9 and 3; the ratio of medians is 6 / 2
    assert (fast["slowest"], fast["fastest"]) == (10.0 / 9.0, 3.0)


def test_who_differs_is_named() -> None:
    first = timed_run("ddp")
    check_agreement(first, timed_run("near", losses=[5.0, 4.0004]), tolerance=1e-4)
    with pytest.raises(DisagreementError, match=r"far differs from ddp: losses 4\.1 .* in step 2"):
        check_agreement(first, timed_run("far", losses=[5.0, 4.1]), tolerance=1e-2)
    with pytest.raises(DisagreementError, match="losses nan"):
        check_agreement(first, timed_run("lost", losses=[5.0, math.nan]), tolerance=1e-2)
    scaled = timed_run("scaled", grad_norms=[4.0, 8.0])  # which Adam does not feel
    with pytest.raises(DisagreementError, match=r"scaled differs from ddp: grad_norms 4 and 1"):
        check_agreement(first, scaled, tolerance=1e-2)


def fail(kind: type[Exception]) -> None:
    raise kind("the peer is broken")


@pytest.mark.process
def test_what_a_function_returns_or_raises_comes_back_from_another_process() -> None:
    assert in_own_process(os.getpid) != os.getpid()
    refused(lambda: in_own_process(partial(fail, UserError)), "the peer is broken")
    with pytest.raises(ArithmeticError, match="the peer is broken"):
        in_own_process(partial(fail, ArithmeticError))
    with pytest.raises(BrokenProcessPool):
        in_own_process(partial(os._exit, 7))


def test_a_storage_counts_once_and_whole_unless_it_is_given_up_or_a_scalar() -> None:
    flat, other = torch.zeros(100, dtype=torch.bfloat16), torch.zeros(7)
    given_up = torch.zeros(100)
    given_up.untyped_storage().resize_(0)
    held = [flat[:10], flat[50:], other, other.view(7, 1), torch.tensor(3.0), given_up]
    assert state_bytes(held) == 200 + 28
