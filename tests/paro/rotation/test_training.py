"""Rotating and gathering runs compared: types, evaluation, checkpoints, late slices."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from paro.collectives.shifts import Turn
from paro.collectives.wire import Pending
from paro.training.step import Training, evaluate
from tests.helpers.ranks import run_ranks
from tests.helpers.training import Trained, begun, built, run_steps, train, whole_parameters
from tests.paro.checkpoint.toy_run import load_checkpoint, save_checkpoint
from tests.paro.test_parity_rotation import MODEL, ROTATE

IN_PLACE = "--paro-rotate-in-place"
ROTATED = f"{MODEL} {ROTATE} --num-attention-heads 4 --global-batch-size 16 --micro-batch-size 2"
GATHERED = ROTATED.replace("rotate", "gather")
BF16 = [
    "--bf16 --paro-strategy IIG",
    "--bf16 --paro-strategy IIG --paro-rotate-in-place",
    "--bf16 --paro-strategy III --grad-reduce-in-bf16",
    "--bf16 --paro-strategy IIG --accumulate-allreduce-grads-in-fp32",
    "--fp16 --loss-scale 1024 --paro-strategy III",
]


def train_all(base: str, flag_lists: Sequence[str]) -> list[Trained]:
    return [train(f"{base} --train-iters 2 {flags}", group_size=2) for flags in flag_lists]


@pytest.mark.ranks
def test_two_byte_types_follow_the_gathered_run() -> None:
    rotated = run_ranks(train_all, 4, ROTATED, BF16)
    references = list(dict.fromkeys(flags.replace(IN_PLACE, "").strip() for flags in BF16))
    gathered = run_ranks(train_all, 4, GATHERED, references)[0]
    for number, flags in enumerate(BF16):
        wanted = gathered[references.index(flags.replace(IN_PLACE, "").strip())]
        for by_rank in rotated:
            for step, step_wanted in zip(by_rank[number].steps, wanted.steps, strict=True):
                assert step.loss == pytest.approx(step_wanted.loss, rel=0.01), flags
                assert step.grad_norm == pytest.approx(step_wanted.grad_norm, rel=0.03), flags
                # Gathers of the embedding and of the head differ; steps between groups do not.
                assert step.sent.inter == pytest.approx(step_wanted.sent.inter, rel=0.2), flags


class Kept(NamedTuple):
    """The state of a run on one rank after saving or loading it."""

    parameters: dict[str, Tensor]
    held_out: float
    next_slot: list[float]  # losses of the next steps


def save_or_load(flags: str, root: Path, *, load: bool) -> Kept:
    config, training = built(f"{flags} --train-iters 3 --paro-group-size 2")
    optimizer = training.optimizer
    if load:
        common = load_checkpoint(root, optimizer.flat_shards())
        optimizer.loaded(num_steps=common["num_steps"])
    else:
        run_steps(config, training)
        save_checkpoint(root, 3, optimizer.flat_shards(), {"num_steps": optimizer.num_steps})
    parameters = whole_parameters(training)
    held_out = evaluate(training, begun(config, training)[1], 2).loss
    next_slot = [step.loss for step in run_steps(config, training)]
    training.close()
    return Kept(parameters, held_out, next_slot)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        (f"{ROTATED} --paro-strategy IIG", f"{GATHERED} --paro-strategy GGG"),
        (f"{GATHERED} --paro-strategy NIG", f"{ROTATED} --paro-strategy III {IN_PLACE}"),
    ],
    ids=["to gathered", "from gathered"],
)
def test_a_checkpoint_moves_between_rotated_and_gathered(
    tmp_path: Path, saved: str, loaded: str
) -> None:
    before = run_ranks(save_or_load, 4, saved, tmp_path, load=False)[0]
    after = run_ranks(save_or_load, 4, loaded, tmp_path, load=True)[0]
    assert before.parameters.keys() == after.parameters.keys()
    for name, values in before.parameters.items():
        assert torch.equal(values, after.parameters[name]), name
    assert after.held_out == pytest.approx(before.held_out, rel=1e-5)
    # Moments and step count were loaded; otherwise Adam would diverge.
    assert after.next_slot == pytest.approx(before.next_slot, rel=1e-5)


class LateMessage:
    """A message that starts long after the training thread has continued."""

    def __init__(self, send: Callable[[], Pending]) -> None:
        self._send = send
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        time.sleep(0.003)
        self._message = self._send()

    def wait(self) -> None:
        self._thread.join()
        self._message.wait()


def delay_shifts(training: Training) -> None:
    """Delays every slice."""
    model = training.model
    send = model._ring._send

    def late(tensor: Tensor, turn: Turn, tag: int) -> LateMessage:
        return LateMessage(lambda: send(tensor, turn, tag))

    model._ring._send = late  # type: ignore[assignment, method-assign]


def train_late(flags: str) -> tuple[Trained, Trained, Trained]:
    flags = f"{ROTATED} --train-iters 2 {flags}"
    dist_size = dist.get_world_size()
    return (
        train(flags, group_size=dist_size),
        train(flags, group_size=dist_size, before=delay_shifts),
        train(f"{flags} --paro-prefetch-units 0", group_size=dist_size),
    )


@pytest.mark.ranks
@pytest.mark.parametrize(
    "more",
    [
        "--tie-embeddings-and-output-weights",
        pytest.param(IN_PLACE, marks=pytest.mark.verify),
    ],
)
def test_late_slices_change_nothing(more: str) -> None:
    """Not by a bit: sums have one order, with any delays, and without overlap too."""
    for prompt, late, without in run_ranks(train_late, 4, f"--paro-strategy III {more}"):
        for other in (late, without):
            for step, wanted in zip(other.steps, prompt.steps, strict=True):
                assert (step.loss, step.grad_norm) == (wanted.loss, wanted.grad_norm)
                assert step.sent == wanted.sent
            for name, values in prompt.parameters.items():
                assert torch.equal(values, other.parameters[name]), name
        for step in without.steps:  # without overlap, all time of shifts is exposed
            exposed = step.exposed
            assert min(exposed.gather, exposed.reduce) > 0.0
            assert 0.0 < exposed.intra <= exposed.total
