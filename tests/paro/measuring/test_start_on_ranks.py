"""Four ranks measure their machine, choose the same, take the file again; if one dies, all end."""

from __future__ import annotations

import json
import os
import re
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from paro.machine.files import read_machine
from paro.measuring import benchmark, measure
from paro.measuring.device import Effort
from paro.topology import Axes
from tests.helpers.scripts import run_script

MODEL = (
    "--num-layers 3 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --vocab-size 60 "
    "--tokenizer-type NullTokenizer --mock-data --num-workers 0 --micro-batch-size 1 "
    "--global-batch-size 8"
)
FLAGS = f"{MODEL} --lr 0.002 --lr-decay-style constant --eval-iters 0 --log-interval 1 "
FLAGS += "--distributed-backend gloo --peak-tflops 1 --paro-group-size 2"
AUTO = ("--paro-strategy", "auto")


def briefly() -> None:
    """Times each thing once; nothing computes beside links, which tests of benchmarks do."""
    measure._EFFORT = Effort(warmup=1, steps=1, micro_batches=1, seconds=0.1)  # type: ignore[misc]
    measure._LINKS = measure._LEAST_FOR_LINKS = 0.5  # type: ignore[misc]
    benchmark.computing = lambda _: nullcontext()  # type: ignore[assignment]


def one_dies() -> None:
    """Rank 3 ends where it would time links.

    The others ignore torchrun's SIGTERM and know of no launcher, which could end them before they
    say what they met.
    """
    briefly()
    curve = benchmark._curve

    def until_then(*given: Any) -> Any:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.environ.pop("TORCHELASTIC_RUN_ID", None)
        dist.barrier()
        if dist.get_rank() == 3:
            os._exit(9)
        return curve(*given)

    benchmark._curve = until_then  # type: ignore[assignment]


def trained(folder: Path, *flags: object, iterations: int = 2) -> tuple[str, list[float]]:
    """What a run of four ranks prints, and its losses."""
    metrics = folder / f"{len(list(folder.iterdir()))}.jsonl"
    words = (*flags, "--train-iters", iterations, "--metrics-file", metrics)
    done = run_script(["pretrain_llama.py", *FLAGS.split(), *words], 4, before=briefly)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    return done.stdout, [row["lm_loss"] for row in rows]


@pytest.mark.ranks
def test_ranks_measure_once_and_then_train_as_ever(tmp_path: Path) -> None:
    save = tmp_path / "run"
    saving = ("--save", save, "--load", save, "--override-opt_param-scheduler")
    told, losses = trained(tmp_path, *AUTO, *saving)
    (path,) = save.glob("machine-*.json")
    assert "> measuring this machine, about 60 s: links, inter\n" in told
    assert f"machine file {path}, which --paro-machine takes\n" in told
    (chosen,) = re.findall(r"^> strategy: (\S+), 4 ranks in groups of 2", told, re.M)
    assert f"planner: chose {chosen}, " in told
    made = read_machine(path)
    assert (made.name, made.world_size, made.group_size) == (path.stem, 4, 2)
    assert {row.axes for row in made.measured} == {Axes.INTRA, Axes.INTER}
    assert {row.algorithm for row in made.measured} == {"native"}
    assert made.device is not None

    # Continued it keeps its strategy; another run takes the file again. Both measure nothing.
    told, _ = trained(tmp_path, *AUTO, *saving, iterations=3)
    assert f"the run continues with --paro-strategy {chosen}, as its checkpoint in {save}" in told
    assert "> strategy: " + chosen in told
    assert "measuring" not in told
    told, again = trained(tmp_path, *AUTO, "--save", save, "--start-over")
    assert f"> machine file {path}, 0:0" in told
    assert f"planner: chose {chosen}, " in told
    assert "measuring" not in told
    assert again == losses


def one_is_signalled() -> None:
    """Rank 3 gets SIGTERM where it would time links."""
    briefly()
    curve = benchmark._curve

    def until_then(*given: Any) -> Any:
        if dist.get_rank() == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return curve(*given)

    benchmark._curve = until_then  # type: ignore[assignment]


@pytest.mark.ranks
def test_all_ranks_leave_when_one_gets_a_signal_while_measuring(tmp_path: Path) -> None:
    words = (*AUTO, "--save", tmp_path / "run", "--train-iters", 2, "--exit-signal-handler")
    script = ["pretrain_llama.py", *FLAGS.split(), *words]
    done = run_script(script, 4, before=one_is_signalled)
    assert done.returncode == 0, done.stderr
    assert "[exiting program after receiving SIGTERM " in done.stdout
    assert not [*(tmp_path / "run").glob("machine-*.json")]


@pytest.mark.ranks
def test_a_rank_that_dies_while_measuring_ends_all(tmp_path: Path) -> None:
    words = (*AUTO, "--save", tmp_path / "run", "--train-iters", 2)
    done = run_script(["pretrain_llama.py", *FLAGS.split(), *words], 4, before=one_dies)
    assert done.returncode == 1
    assert (
        "error: no connection to another rank, which has ended, hangs or is cut off" in done.stderr
    )
    assert not [*(tmp_path / "run").glob("machine-*.json")]
