"""Checkpoints that hold what was trained, and the base that holds the rest."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from paro.arguments.parser import parse_args
from paro.checkpoint.base import stored_parameters
from paro.checkpoint.convert.native import open_native
from paro.checkpoint.directory import read_common
from paro.config.run import RunConfig
from paro.distributed.control import Control
from paro.distributed.world import World
from paro.errors import UserError
from paro.report.log import Log
from paro.training.assembly import build_data, build_training
from paro.training.dry_run import run_dry
from paro.training.resume import load_run
from paro.training.resumed import FROM_NOTHING, Resumed
from paro.training.step import Training
from tests.helpers.training import TINY, run_steps, save_run
from tools.generate import open_model

FLAGS = f"{TINY} --train-iters 2 --global-batch-size 2"
LAST = "--trainable last-blocks:0.34"  # block 2 of 3


def started(words: str) -> tuple[RunConfig, Training, Resumed]:
    config = RunConfig.from_args(parse_args(f"{FLAGS} {words}".split()), World())
    training = build_training(config, Control(World(), torch.device("cpu")))
    is_loaded = config.checkpoint.load is not None
    return config, training, load_run(config, training, Log()) if is_loaded else FROM_NOTHING


def trained(words: str) -> Training:
    """A run of two steps that is saved at its end."""
    config, training, resumed = started(words)
    run_steps(config, training, build_data(config))
    save_run(config, training, resumed)
    return training


def loading(words: str) -> str:
    """What a run that loads says."""
    with pytest.raises(UserError) as caught:
        started(words)
    return str(caught.value)


def assert_equal(here: Training, there: Training) -> None:
    pairs = zip(here.optimizer.flat_shards(), there.optimizer.flat_shards(), strict=True)
    for ours, theirs in pairs:
        assert ours.state == theirs.state
        assert torch.equal(ours.values, theirs.values)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    trained(f"--save {tmp_path / 'base'}")
    return tmp_path / "base"


@pytest.fixture
def part(base: Path, tmp_path: Path) -> Path:
    """A run of the last block that began with the base."""
    trained(f"{LAST} --load {base} --finetune --save {tmp_path / 'part'}")
    return tmp_path / "part"


@pytest.mark.parametrize("compute", ["", "--bf16"])
def test_it_resumes_bit_for_bit(base: Path, tmp_path: Path, compute: str) -> None:
    out = tmp_path / "part"
    saved = trained(f"{compute} {LAST} --load {base} --finetune --save {out}")
    names = stored_parameters(out / "iter_0000000")
    assert {name.rpartition(".")[0] for name in names} == {"blocks.2"}
    _, training, resumed = started(f"{compute} {LAST} --load {out} --save {out}")
    assert_equal(training, saved)
    assert resumed.base is not None
    assert resumed.base["folder"] == str(base)
    save = f"--save {tmp_path / 'next'}"
    for words, is_kept in (
        (f"{LAST} --load {out} {save}", True),
        (f"--trainable names:blocks.2.*,head.* --load {out} {save} --no-load-optim", True),
        (f"--trainable names:head.* --load {out} {save} --finetune", False),  # block 2 moved
        (f"--load {out} {save} --finetune", False),  # everything trains
        (f"{LAST} --load {out} {save} --save-frozen", False),
        (f"{LAST} --load {base} --save {base}", False),  # saves may remove it
        (f"{LAST} --load {base}", False),
    ):
        assert (started(f"{compute} {words}")[2].base is not None) is is_kept, words


def test_a_run_without_a_checkpoint_to_begin_with_saves_all(tmp_path: Path) -> None:
    saved = trained(f"{LAST} --save {tmp_path}")
    common = read_common(tmp_path)
    assert common is not None
    assert common["base"] is None
    assert_equal(started(f"{LAST} --load {tmp_path}")[1], saved)


def test_frozen_parameters_are_saved_if_asked_for(base: Path, tmp_path: Path) -> None:
    saved = trained(f"{LAST} --load {base} --finetune --save-frozen --save {tmp_path / 'whole'}")
    shutil.rmtree(base)
    assert_equal(started(f"{LAST} --load {tmp_path / 'whole'}")[1], saved)


def test_a_base_that_moved_is_named(base: Path, part: Path, tmp_path: Path) -> None:
    saved = started(f"{LAST} --load {part}")[1]
    base.rename(tmp_path / "moved")
    told = loading(f"{LAST} --load {part}")
    assert f"{base}, iteration 0, the base of {part / 'iter_0000000'}, cannot be read" in told
    assert told.endswith("give --base DIR where it is now")
    moved = f"--base {tmp_path / 'moved'}"
    _, training, resumed = started(f"{LAST} --load {part} {moved} --save {part}")
    assert_equal(training, saved)
    assert resumed.base is not None
    assert resumed.base["folder"] == str(tmp_path / "moved")
    assert "give another --base" in loading(f"{LAST} --load {part} --base {tmp_path}")


def test_a_base_that_changed_is_refused(base: Path, part: Path) -> None:
    shutil.rmtree(base)
    trained(f"--save {base} --seed 7")
    told = loading(f"{LAST} --load {part}")
    assert f"{base}, iteration 0, the base of" in told
    assert "has changed since" in told


def test_a_damaged_base_is_refused(base: Path, part: Path) -> None:
    (path,) = base.glob("iter_*/*.distcp")
    content = bytearray(path.read_bytes())
    path.write_bytes(content[:-1])
    assert f"{path} is truncated" in loading(f"{LAST} --load {part}")
    for index in range(0, len(content), 97):  # in every tensor
        content[index] ^= 4
    path.write_bytes(content)
    assert f"{path} is damaged" in loading(f"{LAST} --load {part}")


def test_a_complete_checkpoint_takes_no_base(base: Path) -> None:
    told = loading(f"--load {base} --base {base}")
    assert told.endswith(f"--base {base}: {base / 'iter_0000000'} needs no base: leave --base out")
    with pytest.raises(UserError, match="--base needs --load"):
        started(f"--base {base}")


def test_tools_read_both(base: Path, part: Path, tmp_path: Path) -> None:
    (ours, theirs), known = (
        (open_native(root) for root in (part, base)),
        stored_parameters(part / "iter_0000000"),
    )
    assert ours.tensors.keys() == theirs.tensors.keys()
    for name, tensor in ours.tensors.items():
        same = torch.equal(tensor.whole(torch.float32), theirs.tensors[name].whole(torch.float32))
        assert same is (name not in known), name
    base.rename(tmp_path / "moved")
    assert open_model(part, base=str(tmp_path / "moved")).tensors.keys() == ours.tensors.keys()
    with pytest.raises(UserError, match=r"the base of .* cannot be read"):
        open_model(part)


def test_a_dry_run_says_where_the_rest_is(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"{FLAGS} {LAST} --load {base} --save {tmp_path / 'out'} --dry-run --world-size 2"
    args = parse_args(words.split())
    run_dry(RunConfig.from_args(args, World(size=2)))
    out = capsys.readouterr().out
    assert f"/out: {12 * 3860 / 1e3:.1f} kB a checkpoint" in out
    assert f"without what is frozen, which is in {base}" in out
