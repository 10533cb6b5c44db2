"""The launch that a plan ends with is its choice; machines of three figures; why not another."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from paro.launch.dry_run import RunPrediction, predict_run
from paro.machine.files import find_machine
from paro.machine.machine import Nic
from tests.helpers.commands import measured
from tests.helpers.flags import configured
from tests.tools.test_plan import planned
from tools.plan import main

SIZES = "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 256 --bf16"
TOKENS = "--vocab-size 1000 --global-batch-size 64 --world-size 16"
MODEL = f"{SIZES} {TOKENS}"
MEASURED = (
    "--paro-machine examples/measured/steps-100mbit/steps-per-rank-deep-1.json --num-layers 2 "
    "--hidden-size 64 --num-attention-heads 4 --vocab-size 64 --seq-length 32 --world-size 8"
)


def dry_run(lines: list[str]) -> RunPrediction:
    """The dry run among the lines of a launch, as bash would start it."""
    begin, end = lines.index("FLAGS=("), lines.index(")")
    flags = shlex.split(" ".join(lines[begin + 1 : end]))
    (command,) = (line for line in lines if line.startswith("python pretrain_llama.py "))
    program, array, *words = shlex.split(command)[1:]
    assert (program, array) == ("pretrain_llama.py", "${FLAGS[@]}")
    return predict_run(configured([*flags, *words]))


@pytest.mark.slow("searches all candidates of a model, and builds it")
@pytest.mark.parametrize(
    "flags",
    [
        f"{MODEL} --paro-machine dgx-h100 --grad-reduce-in-bf16 --optimizer muon",
        f"{MODEL} --paro-machine=dgx-a100-roce100 --paro-inter-bits auto --seq-length=512",
        f"{MODEL} --paro-machine dgx-h100 --paro-materialize rotate --paro-rotate-in-place",
        f"{MODEL} --paro-machine dgx-h100 --device-memory-gb 4.1 --micro-batch-size 2",
        f"{MODEL} --paro-machine a800-ib800 --paro-survive 1 --trainable last-blocks:0.5",
        f"{MODEL} --gpu h100 --gpus-per-node 4 --inter 25gbit --world-size 8 --global-batch-size 4 "
        "--context-parallel-size auto --cp-comm-type auto",
        f"{MODEL} --gpu h100 --gpus-per-node 4 --inter 25gbit --lora-rank 4",
        "--llama-preset 7B --num-layers 2 --seq-length 4096 --bf16 --gpu a100 --gpus-per-node 2 "
        "--recompute-activations --paro-prefetch-units 2",
        f"{MEASURED} --paro-collective auto",
    ],
)
def test_a_launch_is_the_choice_of_its_plan(tmp_path: Path, flags: str) -> None:
    if "--gpu" in flags:
        flags += f" --machine-file {tmp_path}/machine.json"
    fields = planned(flags)
    best, run = fields["best"], dry_run(fields["launch"])
    chosen, degrees = run.launch.candidate, list(run.config.strategy.degrees)
    assert degrees == best["degrees"]
    assert (chosen.collective, run.fits) == (best["collective"], True)
    assert run.launch.seconds == pytest.approx(best["step_seconds"])
    assert run.memory.total == pytest.approx(best["memory_bytes"], rel=1e-3)
    assert run.launch.sent.inter == best["inter_bytes"]


@pytest.mark.slow("searches all candidates of a model")
def test_both_ways_to_launch_start_every_rank() -> None:
    several = planned(f"{MODEL} --gpu h100 --gpus-per-node 4 --inter 25gbit")["launch"]
    torchrun, srun = several[-3], several[-1]
    assert "torchrun --nnodes 4 --nproc-per-node 4 --node-rank $NODE_RANK " in torchrun
    assert " srun --nodes 4 --ntasks-per-node 4 --gpus-per-node 4 python " in srun
    assert "0 to 3 in NODE_RANK" in several[-4]
    lone = planned(f"{MODEL} --gpu h100 --gpus-per-node 16")["launch"]
    assert lone[-3].startswith("bash examples/one_machine.sh --nproc-per-node 16 pretrain_llama.py")
    of_cpus = planned(MEASURED)["launch"]
    assert not any("gpus-per-node" in line or "PYTORCH_ALLOC" in line for line in of_cpus)


@pytest.mark.slow("searches all candidates of a model")
def test_a_machine_of_three_figures(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    machine = "--gpu h100 --gpus-per-node 4 --inter 25gbit --intra 64gbit"
    planned(f"{MODEL} {machine} --machine-file {path}")
    made, shipped = find_machine(str(path)), find_machine("dgx-h100")
    assert (made.world_size, made.group_size, made.nic) == (16, 4, Nic.SHARED)
    assert made.intra.bits_per_second == 64e9
    assert made.inter.bits_per_second == 25e9
    assert made.device == shipped.device
    assert dict(made.sources)["links.inter.bandwidth"] == "--inter 25gbit"
    assert dict(made.sources)["device.sustained_flops"] == "an assumption: 0.45 of the peak"
    planned(f"{MODEL} {machine.split(' --intra')[0]} --nic per-rank --machine-file {path}")
    per_rank = find_machine(str(path))
    assert (per_rank.nic, per_rank.intra) == (Nic.PER_RANK, shipped.intra)


@pytest.mark.slow("searches all candidates of a model")
def test_why_another_strategy_is_not_the_best() -> None:
    slow = f"{MODEL} --gpu a100 --gpus-per-node 4 --inter 1gbit --device-memory-gb 4"

    def told(strategy: str, more: str = "") -> list[str]:
        out, fields = measured(main, *f"{slow} {more} --why-not {strategy}".split())
        lines = out.splitlines()
        first = next(i for i, line in enumerate(lines) if line.startswith(f"why not {strategy}"))
        assert lines[first + 2] == ""
        degrees = ",".join(map(str, fields["best"]["degrees"]))
        assert ("it is the best" in lines[first]) is (strategy == degrees)
        return [*lines[first : first + 2], degrees]

    cost, spends, degrees = told("zero3")
    slower = re.search(r", is ([\d.]+)% slower: ", cost)
    assert slower
    assert float(slower[1]) > 0
    assert "for gathers, " in spends
    told(degrees)
    cost, needs, _ = told("ddp", "--num-layers 40 --device-memory-gb 4")
    assert "it does not fit, the least is " in cost
    assert "model states " in needs
    cost, reason, _ = told("GGG", "--paro-survive 1")
    assert cost == "why not GGG: it is not among the candidates"
    assert reason.startswith("--paro-survive 1: under GGG no rank may be lost")
