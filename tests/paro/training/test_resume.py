"""What a run takes over from a saved one, and what it restarts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from torch import Tensor

from model import initialization
from model.initialization import ParameterInit
from paro.checkpoint.directory import begin_checkpoint, candidates, finish_checkpoint
from tests.end_to_end.test_checkpoint_flags import nodes, on_nodes
from tests.end_to_end.test_training import RUN, launch, run
from tests.helpers.margins import assert_near
from tests.helpers.refusals import refused

__all__ = ["nodes"]  # a fixture


def scales(printed: str) -> list[float]:
    return [float(scale) for scale in re.findall(r"loss scale: ([\d.]+)", printed)]


def losses(printed: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"lm loss: (\S+)", printed)]


FP16 = "--fp16 --initial-loss-scale 1024 --loss-scale-window 2"


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("--bf16", FP16, 1024),
        ("--loss-scale 8", "--loss-scale 16", 16),
        (FP16, FP16, 2048),  # found in training, and kept
    ],
)
def test_the_loss_scale_is_kept_only_where_both_runs_search_for_it(
    tmp_path: Path, before: str, after: str, expected: float
) -> None:
    go_on = f"--train-iters 3 --save {tmp_path} --load {tmp_path}"
    run(go_on, before, "--exit-interval 2")
    assert scales(run(go_on, after)) == [expected]


@pytest.mark.parametrize(
    "more",
    [
        "--fp8-format hybrid",
        "--no-rope-fusion --no-bias-swiglu-fusion",
        pytest.param("--torch-compile aot_eager", marks=pytest.mark.verify),
    ],
)
def test_kernels_and_fp8_may_change(tmp_path: Path, more: str) -> None:
    go_on = f"--train-iters 3 --save {tmp_path} --load {tmp_path} --ffn-hidden-size 96"
    run(go_on, "--exit-interval 2")
    assert len(losses(run(go_on, more))) == 1


def test_a_complete_run_says_so_when_it_starts_again(tmp_path: Path) -> None:
    go_on = f"--train-iters 2 --save {tmp_path} --load {tmp_path}"
    assert "the run is complete" not in run(go_on)
    again = run(go_on, "--tensorboard-dir", tmp_path / "board")
    assert "the run is complete with iteration 2: nothing is left to train (raise --train" in again
    assert losses(again) == []


def test_a_schedule_of_batches_goes_on_where_it_was(tmp_path: Path) -> None:
    base = " ".join(RUN).replace("--global-batch-size 8 ", "").split()
    # After 3 samples of 32 tokens the batch grows from 2 samples to 4.
    schedule = "--step-batch-size-schedule '0:2 96:4' --train-iters 5"
    straight = losses(run(schedule, base=base))
    load = f"--save {tmp_path} --load {tmp_path}"
    first = losses(run(schedule, load, "--exit-interval 3", base=base))
    # The size 2, which micro-batches of 4 do not divide, is in the past.
    again = run(schedule, load, "--micro-batch-size 4", base=base)
    assert_near(first + losses(again), straight, 1e-5, "resumed")


def test_a_null_tokenizer_that_counted_otherwise_is_told(tmp_path: Path) -> None:
    run("--train-iters 2 --exit-interval 1 --save", tmp_path)
    go_on, told = f"--train-iters 2 --load {tmp_path}", "to continue with the same data"
    assert f"give --vocab-size 128 {told}" in run(go_on, "--vocab-size 127")
    assert told not in run(go_on)


def test_starting_over_sets_aside_what_was_there(tmp_path: Path) -> None:
    root = tmp_path / "ckpt"
    save = f"--train-iters 4 --save {root}"
    run(save, "--save-interval 2")
    printed = run(save, "--start-over --exit-interval 1")
    assert f"what --save {root} held is in {root / 'earlier_1'} now" in printed
    assert printed.splitlines()[-1] == (
        f"iteration 1 is saved in {root}: to continue give --load {root} and leave --start-over out"
    )
    # The newer iterations of the old run are not part of the new one.
    resumed = run(save, "--load", root)
    assert f"successfully loaded checkpoint from {root} at iteration 1" in resumed
    assert "passing over" not in resumed
    assert "at iteration 4" in run("--train-iters 4 --load", root / "earlier_1")


def test_a_folder_to_load_that_is_nowhere_is_refused(tmp_path: Path) -> None:
    missing = f"--mock-data --train-iters 2 --load {tmp_path}/nope"
    for more in ("", f"--save {tmp_path}/new", f"--save {tmp_path}/nope --finetune"):
        told = f"--load {tmp_path}/nope does not exist"
        refused(lambda more=more: launch(missing, more), told)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.ranks
def test_starting_over_takes_one_name_on_all_nodes(tmp_path: Path, nodes: list[str]) -> None:
    """One node has another run's checkpoints, and one has those of two."""
    for root, iteration in (("a/ckpt", 3), ("b/ckpt/earlier_1", 2), ("b/ckpt", 3)):
        finish_checkpoint(begin_checkpoint(tmp_path / root, iteration), iteration, {})
    flags = "--train-iters 4 --exit-interval 1 --paro-group-size 2 --save ckpt --start-over"
    ended = on_nodes([*RUN, *flags.split()], nodes)
    assert [rank.mistake for rank in ended] == [None] * 4
    assert "--start-over: what --save ckpt held is in ckpt/earlier_2 now" in ended[0].printed
    for node in ("a", "b"):
        assert candidates(tmp_path / node / "ckpt") == ([1], None)
        assert candidates(tmp_path / node / "ckpt" / "earlier_2") == ([3], None)
    assert candidates(tmp_path / "b" / "ckpt" / "earlier_1") == ([2], None)


@pytest.mark.parametrize("more", [(), ("--lora-rank", 2)])
def test_no_initial_value_is_drawn_for_what_is_loaded(
    tmp_path: Path, more: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = []
    draw = initialization._draw

    def counted(values: Tensor, seed: int, spec: ParameterInit, block: int) -> None:
        drawn.append(spec.name)
        draw(values, seed, spec, block)

    monkeypatch.setattr(initialization, "_draw", counted)
    flags = f"--train-iters 4 --exit-interval 2 --load {tmp_path}"
    run(flags, "--save", tmp_path)
    assert "head.weight" in drawn
    drawn.clear()
    run(flags, *more)
    assert all("lora_a" in name for name in drawn), drawn
    assert bool(drawn) == bool(more)
