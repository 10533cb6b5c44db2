"""Training of a part: what a run holds, its checkpoints, the base with the rest, adapters."""

from __future__ import annotations

import gc
import math
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from model.config import is_adapter
from model.llama import Llama
from model.units import parameter_shapes
from paro.checkpoint.base import adapters_of, stored_parameters
from paro.checkpoint.convert.native import open_native
from paro.checkpoint.directory import find_checkpoint
from paro.checkpoint.metadata import read_metadata
from paro.config.run import RunConfig
from paro.launch.prediction import checkpoint_bytes
from paro.precision import BYTES_OF
from paro.report.log import Log
from paro.training.resume import FROM_NOTHING, Resumed, load_run
from paro.training.step import Training
from tests.helpers.refusals import refused
from tests.helpers.training import (
    TINY,
    built,
    configured,
    read_common,
    run_steps,
    save_run,
    whole_parameters,
)
from tests.tools.conftest import convert
from tools.generate import open_model

FLAGS = f"{TINY} --train-iters 2 --global-batch-size 2"
LAST = "--trainable last-blocks:0.34"  # block 2 of 3
LORA = "--lora-rank 3 --lora-alpha 6 --lora-dropout 0.1"
BASE_BF16 = "--lora-base-dtype bf16"


def started(words: str) -> tuple[RunConfig, Training, Resumed]:
    config, training = built(f"{FLAGS} {words}")
    is_loaded = config.checkpoint.load is not None
    return config, training, load_run(config, training, Log()) if is_loaded else FROM_NOTHING


def trained(words: str) -> Training:
    """A run of two steps that is saved at its end."""
    config, training, resumed = started(words)
    run_steps(config, training)
    save_run(config, training, resumed)
    return training


def refuses(words: str, *message: str) -> None:
    refused(lambda: started(words), *message)


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


@pytest.mark.parametrize("trains", [LAST, f"--bf16 {LAST}", LORA, f"{LORA} {BASE_BF16}"])
def test_it_resumes_bit_for_bit(base: Path, tmp_path: Path, trains: str) -> None:
    out = tmp_path / "part"
    saved = trained(f"{trains} --load {base} --finetune --save {out}")
    names = stored_parameters(out / "iter_0000000")
    assert names
    assert all(is_adapter(name) or name.startswith("blocks.2.") for name in names)
    _, training, resumed = started(f"{trains} --load {out} --save {out}")
    assert_equal(training, saved)
    assert resumed.state is not None
    assert resumed.base["folder"] == str(base)


def test_the_rest_stays_in_a_base_that_is_as_it_was(base: Path, part: Path, tmp_path: Path) -> None:
    save = f"--save {tmp_path / 'next'}"
    for words, is_kept in (
        (f"{LAST} --load {part} {save}", True),
        (f"--trainable names:blocks.2.*,head.* --load {part} {save} --no-load-optim", True),
        (f"--trainable names:head.* --load {part} {save} --finetune", False),  # block 2 moved
        (f"--load {part} {save} --finetune", False),  # everything trains
        (f"{LAST} --load {part} {save} --save-frozen", False),
        (f"{LAST} --load {base} --save {base}", False),  # saves may remove it
        (f"{LAST} --load {base}", False),
    ):
        assert (started(words)[2].base is not None) is is_kept, words


@pytest.mark.slow("trains and saves")
@pytest.mark.parametrize("trains", [LAST, f"{LORA} {BASE_BF16}"])
def test_all_is_saved_without_a_base_or_where_it_is_asked_for(
    base: Path, tmp_path: Path, trains: str
) -> None:
    begins = f"--load {base} --finetune --save-frozen --save {tmp_path / 'asked'}"
    for name, more in (("alone", f"--save {tmp_path / 'alone'}"), ("asked", begins)):
        saved = trained(f"{trains} {more}")
        assert read_common(tmp_path / name)["base"] is None
        assert_equal(started(f"{trains} --load {tmp_path / name}")[1], saved)


def test_a_base_that_moved_is_named(base: Path, part: Path, tmp_path: Path) -> None:
    saved = started(f"{LAST} --load {part}")[1]
    base.rename(tmp_path / "moved")
    message = f"{base}, iteration 0, the base of {part / 'iter_0000000'}, cannot be read"
    refuses(f"{LAST} --load {part}", message, "give --base DIR")
    moved = f"--base {tmp_path / 'moved'}"
    _, training, resumed = started(f"{LAST} --load {part} {moved} --save {part}")
    assert_equal(training, saved)
    assert resumed.base["folder"] == str(tmp_path / "moved")
    refuses(f"{LAST} --load {part} --base {tmp_path}", "give another --base")


def test_a_base_that_is_damaged_or_another_is_refused(base: Path, part: Path) -> None:
    (path,) = base.glob("iter_*/*.distcp")
    content = bytearray(path.read_bytes())
    path.write_bytes(content[:-1])
    refuses(f"{LAST} --load {part}", f"{path} is truncated")
    for index in range(0, len(content), 97):  # in every tensor
        content[index] ^= 4
    path.write_bytes(content)
    refuses(f"{LAST} --load {part}", f"{path} is damaged")
    shutil.rmtree(base)
    trained(f"--save {base} --seed 7")
    refuses(f"{LAST} --load {part}", f"{base}, iteration 0, the base of ... has changed since")


def test_a_complete_checkpoint_takes_no_base(base: Path) -> None:
    refuses(f"--load {base} --base {base}", f"--base {base} ... leave --base out")
    refuses(f"--base {base}", "--base needs --load")


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
    refused(lambda: open_model(part), "the base of ... cannot be read")


ADAPTERS = "--lora-rank 4 --lora-target-modules all-linear"


def alive_bytes() -> int:
    """The bytes of every tensor's storage made since `gc.freeze` and alive, each counted once."""
    gc.collect()
    tensors = [found for found in gc.get_objects() if isinstance(found, Tensor)]
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


@pytest.mark.parametrize(
    ("words", "part"), [("--bf16", LAST), ("", ADAPTERS), ("", f"{ADAPTERS} {BASE_BF16}")]
)
def test_frozen_parameters_add_their_copy_to_compute_with_and_nothing_else(
    words: str, part: str
) -> None:
    flags = f"{FLAGS} {words} {part}"
    gc.freeze()  # what earlier tests left is neither collected nor listed
    run_steps(*built(flags))  # fills what is kept for all runs
    before = alive_bytes()
    config, training = built(flags)
    run_steps(config, training)
    held = alive_bytes() - before
    shapes, of_frozen = parameter_shapes(config.model), BYTES_OF[config.precision.frozen]
    frozen = sum(math.prod(shapes[name]) for name in shapes.keys() - config.trained)
    trained = sum(math.prod(shapes[name]) for name in config.trained)
    of_trained = 2 + 4 + 12 if words else 4 + 4 + 8  # in fp32 no master of its own
    assert held == pytest.approx(of_trained * trained + of_frozen * frozen, rel=0.02)
    assert training.optimizer.model_state_bytes() == pytest.approx(held, rel=0.02)


def test_a_checkpoint_without_the_moments_of_what_trains_now_is_refused(tmp_path: Path) -> None:
    save_run(*built(f"{FLAGS} {LAST} --save {tmp_path}"))
    refuses(f"--load {tmp_path}", "has no exp_avg of ... --no-load-optim or --finetune")
    for flag in ("--finetune", "--no-load-optim"):
        started(f"--load {tmp_path} {flag}")


def written_bytes(root: Path) -> int:
    """Of all tensors of the latest checkpoint."""
    folder = find_checkpoint(root)
    written = 0
    for tensor in read_metadata(folder).state_dict_metadata.values():
        written += tensor.size.numel() * tensor.properties.dtype.itemsize
    return written


@pytest.mark.parametrize(
    ("words", "more", "part"),
    [
        ("--bf16 --ema-decay 0.9", LAST, 0.5),
        ("", "--optimizer muon --exp-avg-dtype bf16", 1.0),  # one moment of what Muon updates
    ],
)
def test_a_checkpoint_has_the_moments_that_a_run_has(
    tmp_path: Path, words: str, more: str, part: float
) -> None:
    config, training = built(f"{FLAGS} {words} {more} --save {tmp_path}")
    save_run(config, training)
    written = written_bytes(tmp_path)
    usual = configured(f"{FLAGS} {words}")
    saved, of_usual = (
        checkpoint_bytes(each.spec, has_base=False, has_moments=True) for each in (config, usual)
    )
    assert written == saved < part * of_usual


@pytest.fixture(scope="module")
def whole_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("whole_model")
    trained(f"--save {root}")
    return root


@pytest.fixture(scope="module")
def adapters(whole_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    trained(f"{LORA} --load {whole_model} --save {root}")
    return root


def test_adapters_begin_on_a_model_without_them(whole_model: Path) -> None:
    _, plain, _ = started(f"--load {whole_model} --finetune")
    _, training, resumed = started(f"{LORA} --load {whole_model}")
    assert resumed.state is None
    ours = {s.layout.chunks[0].chunk.name: s for s in training.optimizer.flat_shards(frozen=True)}
    _, fresh, _ = started(LORA)
    assert training.optimizer.num_steps == 0
    for there, here in zip(
        fresh.optimizer.flat_shards(), training.optimizer.flat_shards(), strict=True
    ):
        if is_adapter(here.layout.chunks[0].chunk.name):
            assert torch.equal(there.values, here.values)
    for shard in plain.optimizer.flat_shards():
        name = shard.layout.chunks[0].chunk.name
        if shard.state == "param":
            assert torch.equal(ours[name].values, shard.values)


def test_other_adapters_are_refused(adapters: Path) -> None:
    for words, message in (
        ("", "adapters of rank 3 on wq, wv: give the --lora-* flags of its run, or merge"),
        ("--lora-rank 4 --lora-alpha 6", "--lora-rank 3 ... has 4: give that"),
        ("--lora-rank 3", "--lora-alpha 6 ... has 8: give that"),
        (f"{LORA} --lora-target-modules k_proj", "--lora-target-modules wq,wv ... has wk"),
    ):
        refuses(f"{words} --load {adapters}", message)


def logits_of(training: Training, tokens_BS: Tensor) -> Tensor:
    """What a run's model computes, from its shards on one process."""
    with training.traffic.paused():
        model = Llama(training.model.model.config)  # type: ignore[arg-type]
        values = whole_parameters(training)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(values[name])
            out: Tensor = model(tokens_BS)
    return out


def test_tools_merge_what_was_trained(adapters: Path, whole_model: Path, tmp_path: Path) -> None:
    tokens_BS = torch.arange(24).view(2, 12)
    wanted, plain = (
        logits_of(started(words)[1], tokens_BS)
        for words in (f"{LORA} --load {adapters}", f"--load {whole_model} --finetune")
    )
    assert (plain - wanted).abs().max() > 1e-4
    more = ("--make-vocab-size-divisible-by", "1", "--merge")
    whole = convert("paro", "paro", adapters, tmp_path / "whole", *more)
    again = started(f"--load {whole}")[1]
    torch.testing.assert_close(logits_of(again, tokens_BS), wanted)


def test_damaged_words_about_adapters_are_refused() -> None:
    for lora, message in (
        ({"rank": "many"}, "common.json: lora: rank"),
        ([3], "common.json: lora"),
        ({"rank": 0}, "--lora-rank 0 must be at least 1"),
        ({"rank": 2, "targets": ["x"]}, "adapters of x"),
        ({"rank": 2, "more": 1}, "common.json: lora"),
    ):
        refused(lambda lora=lora: adapters_of({"lora": lora}, Path("folder")), message)
