"""What a run takes over from a saved one, and the Hugging Face folder that it leaves."""

from __future__ import annotations

import errno
import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from model import initialization
from model.initialization import ParameterInit
from paro.checkpoint import manifest
from paro.checkpoint.convert import hugging_face, tensor_files
from paro.checkpoint.directory import COMMON, begin_checkpoint, candidates, finish_checkpoint
from paro.checkpoint.manifest import MANIFEST
from paro.distributed.comm_stream import Event
from paro.errors import StorageError, UserError
from paro.report.log import Log
from paro.training.export import prepare_export
from paro.training.resume import FROM_NOTHING, load_run
from paro.training.step import train_step
from tests.end_to_end.test_checkpoint_flags import nodes, on_nodes
from tests.end_to_end.test_training import RUN, launch, run
from tests.helpers.margins import assert_near
from tests.helpers.ranks import run_ranks
from tests.helpers.refusals import refused
from tests.helpers.training import TINY, begun, built, save_run
from tests.tools.conftest import convert

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
    go_on, message = f"--train-iters 2 --load {tmp_path}", "to continue with the same data"
    assert f"give --vocab-size 128 {message}" in run(go_on, "--vocab-size 127")
    assert message not in run(go_on)


def test_a_start_finds_its_checkpoint_once_and_loads_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = f"--train-iters 3 --load {tmp_path} --rampup-batch-size 4 4 8"
    run(load, f"--save {tmp_path} --exit-interval 2")
    load += " --use-checkpoint-args --use-checkpoint-opt_param-scheduler"
    load += " --exit-on-missing-checkpoint --paro-strategy auto"
    part = f"{load} --trainable last-blocks:0.5 --save {tmp_path}/part"
    copies = f"--non-persistent-ckpt-type local --non-persistent-local-ckpt-dir {tmp_path}/memory"
    reads: list[str] = []

    def noted(path: Path, *words: Any, own: Callable[..., Any], **named: Any) -> Any:
        reads.append(path.name)
        return own(path, *words, **named)

    for name in ("read_json", "read_bytes"):
        own = getattr(manifest, name)
        monkeypatch.setattr(manifest, name, partial(noted, own=own))
    for start, times in (
        (f"{part} --dry-run --world-size 1", 1),
        (f"{part} --exit-interval 1 --no-load-optim", 2),
        (f"{load} --save {tmp_path} {copies}", 3),  # again when it holds the folder
    ):
        reads.clear()
        run(start)
        assert Counter(reads) == {MANIFEST: times, COMMON: times}, start


@pytest.mark.slow("trains several times")
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
        message = f"--load {tmp_path}/nope does not exist"
        refused(lambda more=more: launch(missing, more), message)
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


RANKS = 4
FLAGS = (
    f"{TINY} --make-vocab-size-divisible-by 7 --paro-group-size 2 --global-batch-size 4 "
    "--train-iters 2"
)
IN_PLACE = "--paro-materialize rotate --paro-rotate-in-place"
PART = "--trainable last-blocks:0.34"  # block 2 of 3
OUTER = "--paro-outer-steps 2 --paro-outer-delay 1 --paro-outer-warmup 0 --train-iters 3"
BASE = "base"  # the case whose checkpoint others begin with
CASES = {
    BASE: "--paro-strategy III",
    "rotation": f"--paro-strategy IIG {IN_PLACE} --add-qkv-bias --save-hf-dtype bf16",
    "outer": f"--paro-strategy NII {OUTER}",
    "part-of-a-base": f"--paro-strategy GGG --bf16 {PART} --finetune",
}
MORE = {
    "unsharded": "--paro-strategy NNN --bf16 --save-hf-dtype bf16",
    "everywhere": "--paro-strategy GGG --tie-embeddings-and-output-weights --ema-decay 0.5",
    "between": "--paro-strategy NIG --bf16 --add-qkv-bias --qk-layernorm --save-hf-dtype fp16",
    "codes": "--paro-strategy NNI --paro-inter-grad-bits 8 --paro-inter-param-bits 8 --bf16",
    "part": f"--paro-strategy IIG --bf16 {PART}",
}
HALVES = {"unsharded": "bf16", "rotation": "bf16", "between": "fp16"}


def export(root: Path, name: str, flags: str) -> list[str]:
    """On this rank: trains, saves and exports a run; the lines that it logs."""
    out, lines = root / name, list[str]()
    begin = f"--load {root / BASE / 'saved'}" if "--finetune" in flags else ""
    config, training = built(
        f"{FLAGS} {flags} {begin} --save {out / 'saved'} --save-hf {out / 'hf'}"
    )
    log = Log(rank=dist.get_rank(), world_size=RANKS, write=lines.append)
    resumed = load_run(config, training, log) if config.checkpoint.load else FROM_NOTHING
    assert (resumed.base is not None) == ("--finetune" in flags)
    state, source = begun(config, training)
    write = prepare_export(config, training, resumed, state, log)
    for _ in range(config.train.train_iters):
        train_step(training, state, source)
    training.model.wait_for_updated_params()
    save_run(config, training, resumed, state=state)
    write()
    assert prepare_export(config, training, resumed, state, log) is None  # it is complete
    training.close()
    return lines


def fails(root: Path, words: str, *, own_folder: bool = False, full: int | None = None) -> str:
    """On this rank: the error of an export, of which the disk of the rank `full` may be full."""
    folder = root / (f"node{dist.get_rank() // 2}" if own_folder else "shared")
    config, training = built(f"{FLAGS} {words} --save-hf {folder / 'hf'}")
    state, _ = begun(config, training)
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def write() -> None:
        prepared = prepare_export(config, training, FROM_NOTHING, state, Log(rank=1))
        is_full = dist.get_rank() == full
        with (
            mock.patch.object(tensor_files.os, "fsync", side_effect=error)
            if is_full
            else nullcontext()
        ):
            prepared()

    with pytest.raises((UserError, StorageError)) as caught:
        write()
    dist.barrier()
    assert [path for path in root.rglob("*") if "hf" in path.name] == []
    dist.barrier()
    return f"{type(caught.value).__name__}: {caught.value}"


def each(root: Path, cases: dict[str, str]) -> dict[str, list[str]]:
    """On this rank: the lines of each case."""
    hugging_face.MAX_FILE_BYTES = 20_000
    return {name: export(root, name, flags) for name, flags in cases.items()}


def all_that_fail(failures: Path) -> list[str]:
    """On this rank: the errors of exports that fail."""
    return [
        fails(failures, "--paro-strategy IGG", full=2),
        fails(failures, "--paro-strategy III --init-method-std 1e6 --save-hf-dtype fp16"),
        fails(failures, "--paro-strategy III", own_folder=True),
    ]


@pytest.mark.ranks
@pytest.mark.parametrize("cases", [CASES, pytest.param(MORE, marks=pytest.mark.verify)])
def test_it_is_the_conversion_of_the_final_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cases: dict[str, str]
) -> None:
    first, *others = run_ranks(each, RANKS, tmp_path, cases)
    monkeypatch.setattr(hugging_face, "MAX_FILE_BYTES", 20_000)
    for name in cases:
        words = ("--dtype", HALVES[name]) if name in HALVES else ()
        converted = convert(
            "paro", "hf", tmp_path / name / "saved", tmp_path / name / "one", *words
        )
        both = (sorted(folder.iterdir()) for folder in (tmp_path / name / "hf", converted))
        for ours, theirs in zip(*both, strict=True):
            assert (ours.name, ours.read_bytes()) == (theirs.name, theirs.read_bytes()), name
        assert (converted / hugging_face.INDEX).exists()
        assert any("successfully wrote the model" in line for line in first[name])
    assert not any("".join(lines) for rank in others for lines in rank.values())


@pytest.mark.ranks
def test_all_ranks_have_the_error_of_one(tmp_path: Path) -> None:
    errors: Sequence[list[str]] = run_ranks(all_that_fail, RANKS, tmp_path)
    for full, large, own in errors:
        assert [full, large] == errors[0][:2]
        assert "another folder on 2 sets of ranks" in own
    assert full.startswith("StorageError: --save-hf")
    assert "rank 2: No space left" in full
    assert "UserError" in large
    assert "float16 has no number above" in large


def prepared(words: str, *, iteration: int, lines: list[str]) -> object:
    config, training = built(f"{FLAGS} --paro-group-size 1 {words}")
    state, _ = begun(config, training)
    state.iteration = iteration
    return prepare_export(config, training, FROM_NOTHING, state, Log(write=lines.append))


def test_messages_of_a_round_in_flight_are_in_the_model(tmp_path: Path) -> None:
    words = f"{FLAGS} {OUTER} --paro-group-size 1 --save-hf {tmp_path / 'hf'}"
    config, training = built(words)
    write = prepare_export(config, training, FROM_NOTHING, begun(config, training)[0], Log(rank=1))
    embedding = training.optimizer.outer.units[0]

    class Message(Event):
        def wait(self) -> None:
            embedding.reference.fill_(0.25)

    embedding._reduced = Message()
    write()
    written = load_file(tmp_path / "hf" / "model.safetensors")["model.embed_tokens.weight"]
    assert set(written.flatten().tolist()) == {0.25}


def test_a_folder_that_exists_is_left_by_a_run_that_is_complete(tmp_path: Path) -> None:
    words, lines = f"--load {tmp_path} --save {tmp_path} --save-hf {tmp_path / 'hf'}", list[str]()
    assert prepared(words, iteration=1, lines=lines) is not None
    assert prepared(words, iteration=2, lines=lines) is not None
    (tmp_path / "hf").mkdir()
    assert lines == []
    assert prepared(words, iteration=2, lines=lines) is None
    assert "is left as it is" in lines[0]
    refused(lambda: prepared(words, iteration=1, lines=lines), "--save-hf", "exists")
    assert prepared("", iteration=1, lines=lines) is None
