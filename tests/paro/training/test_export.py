"""--save-hf writes what a conversion of the final checkpoint writes, under every strategy."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from paro.checkpoint.convert import by_ranks, hugging_face
from paro.errors import StorageError, UserError
from paro.report.log import Log
from paro.training.export import prepare_export
from paro.training.resume import FROM_NOTHING, load_run
from paro.training.step import train_step
from tests.helpers.ranks import run_ranks
from tests.helpers.refusals import refused
from tests.helpers.training import TINY, begun, built, save_run
from tests.tools.untrained import convert

RANKS = 4
FLAGS = (
    f"{TINY} --make-vocab-size-divisible-by 7 --paro-group-size 2 --global-batch-size 4 "
    "--train-iters 2"
)
ROTATE = "--paro-materialize rotate"
PART = "--trainable last-blocks:0.34"  # block 2 of 3
OUTER = "--paro-outer-steps 2 --paro-outer-delay 1 --paro-outer-warmup 0 --train-iters 3"
BASE = "base"  # the case whose checkpoint others begin with
CASES = {
    BASE: "--paro-strategy III",
    "not sharded": "--paro-strategy NNN --bf16 --save-hf-dtype bf16",
    "over all": "--paro-strategy GGG --tie-embeddings-and-output-weights",
    "between": "--paro-strategy NIG --bf16 --add-qkv-bias --qk-layernorm --save-hf-dtype fp16",
    "rotation": f"--paro-strategy III {ROTATE} --add-qkv-bias",
    "in place": f"--paro-strategy IIG {ROTATE} --paro-rotate-in-place --save-hf-dtype bf16",
    "context": "--paro-strategy IIG --context-parallel-size 2",
    "outer": f"--paro-strategy NII {OUTER}",
    "averages": "--paro-strategy IGG --ema-decay 0.5",
    "Muon": "--paro-strategy NIG --optimizer muon --muon-fp32-matmul-prec highest",
    "codes": "--paro-strategy NNI --paro-inter-grad-bits 8 --paro-inter-param-bits 8 --bf16",
    "a part": f"--paro-strategy IIG --bf16 {PART}",
    "a part of a base": f"--paro-strategy GGG --bf16 {PART} --finetune",
}
HALVES = {"not sharded": "bf16", "in place": "bf16", "between": "fp16"}


def export(root: Path, name: str, flags: str) -> list[str]:
    """On this rank: trains, saves and exports a run; the lines that it logs."""
    out, lines = root / name, list[str]()
    words = [
        *f"{FLAGS} {flags}".split(),
        "--save",
        str(out / "saved"),
        "--save-hf",
        str(out / "hf"),
    ]
    if "--finetune" in flags:
        words += ["--load", str(root / BASE / "saved")]
    config, training = built(words)
    log = Log(rank=dist.get_rank(), world_size=RANKS, write=lines.append)
    resumed = load_run(config, training, log) if config.checkpoint.load else FROM_NOTHING
    assert (resumed.base is not None) == ("--finetune" in flags)
    state, source = begun(config, training)
    write = prepare_export(config, training, resumed, state, log)
    assert write is not None
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
    config, training = built([*f"{FLAGS} {words}".split(), "--save-hf", str(folder / "hf")])
    state, _ = begun(config, training)
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def write() -> None:
        prepared = prepare_export(config, training, FROM_NOTHING, state, Log(rank=1))
        assert prepared is not None
        is_full = dist.get_rank() == full
        with (
            mock.patch.object(by_ranks.os, "pwrite", side_effect=error)
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


def each(root: Path) -> tuple[dict[str, list[str]], list[str]]:
    """On this rank: the lines of each case, and the errors of those that fail."""
    hugging_face.MAX_FILE_BYTES = 20_000
    lines = {name: export(root, name, flags) for name, flags in CASES.items()}
    failures = root / "failures"
    return lines, [
        fails(failures, "--paro-strategy IGG", full=2),
        fails(failures, "--paro-strategy III --init-method-std 1e6 --save-hf-dtype fp16"),
        fails(failures, "--paro-strategy III", own_folder=True),
    ]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.ranks
def test_it_is_the_conversion_of_the_final_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: Sequence[tuple[dict[str, list[str]], list[str]]] = run_ranks(each, RANKS, tmp_path)
    monkeypatch.setattr(hugging_face, "MAX_FILE_BYTES", 20_000)
    for name in CASES:
        words = ("--dtype", HALVES[name]) if name in HALVES else ()
        converted = convert(
            "paro", "hf", tmp_path / name / "saved", tmp_path / name / "one", *words
        )
        assert contents(tmp_path / name / "hf") == contents(converted), name
        assert (converted / hugging_face.INDEX).exists()
        assert any("successfully wrote the model" in line for line in found[0][0][name])
    for number, (lines, errors) in enumerate(found):
        assert errors[:2] == found[0][1][:2]
        assert "another folder on 2 sets of ranks" in errors[2]
        assert number == 0 or not any(map("".join, lines.values()))
    full, large = found[0][1][:2]
    assert full.startswith("StorageError: --save-hf")
    assert "rank 2: No space left" in full
    assert "UserError" in large
    assert "float16 has no number above" in large


def prepared(words: str, *, iteration: int, lines: list[str]) -> object:
    config, training = built(f"{FLAGS} --paro-group-size 1 {words}")
    state, _ = begun(config, training)
    state.iteration = iteration
    return prepare_export(config, training, FROM_NOTHING, state, Log(write=lines.append))


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
