"""Runs read every field of their configuration: none is dead."""

import gc
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import FrameType
from typing import Any, get_args, get_type_hints
from unittest.mock import DEFAULT, MagicMock

import pytest

import pretrain_llama
from model.config import LoraConfig
from model.trainable import Trainable
from paro.checkpoint.save import write_states
from paro.config.resolve import OpenChoices
from paro.config.run import RunConfig
from paro.distributed.world import World
from paro.errors import StorageError
from paro.machine.machine import Machine
from tests.helpers.corpora import write_corpus, write_gpt2
from tests.helpers.house import ROOT, is_within
from tests.paro.test_flag_coverage import ROPE, YARN

PRODUCT = ("pretrain_llama", "paro", "model", "data")
# Functions that fill, check, record or compare fields do not use them.
NO_USE = (
    *("paro.arguments", "paro.config", "paro.training.changed_flags"),
    "paro.training.resume.common_record",
)
# Functions that fill `RunSpec` and `ParamGroups`, which the engine reads.
SPECIFIES = (
    *("paro.config.run.RunConfig.spec", "paro.config.run.RunConfig.param_groups"),
    "paro.config.sharding.TrainingTask.settings",
)
# Exceptions: the field itself decides the values of others, or whether the run may start.
DECIDES = {
    "checkpoint.exit_on_missing_checkpoint": "paro.config.checks.check_load",
    "checkpoint.non_persistent_ckpt_type": "paro.config.checks.keeps_copies",
    "checkpoint.non_persistent_save_interval": "paro.config.run.RunConfig.in_memory_interval",
    "checkpoint.use_checkpoint_args": "paro.config.resolve.with_saved",
    "checkpoint.use_checkpoint_opt_param_scheduler": "paro.config.resolve.with_saved",
    "sharding.context.auto": "paro.config.resolve.OpenChoices.decide",
    "sharding.inter_bits": "paro.config.resolve.OpenChoices.decide",
    "sharding.elastic": "paro.config.checks.keeps_copies",
    "launch.ranks_per_node": "paro.config.run.take_early",
    "launch.world_size": "paro.config.run.take_early",
    "precision.inter_grad_error_feedback": "paro.config.planned_checks.check_feedback",
}
TINY = (
    "--distributed-backend gloo --num-layers 1 --hidden-size 8 --num-attention-heads 2 "
    "--ffn-hidden-size 16 --seq-length 4 --micro-batch-size 1 --num-workers 0 "
    "--eval-iters 1 --log-interval 2 --peak-tflops 0.1"
)
TOKENIZER = "--vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt"
# Together they read every field.
RUNS = (
    # With every part that only some flags turn on.
    f"{TINY} {ROPE} {TOKENIZER} --data-path corpus --train-iters 6 --lr 0.002 "
    "--fp16 --initial-loss-scale 8 --recompute-granularity full --manual-gc --exit-signal-handler "
    "--optimizer-cpu-offload "
    "--lr-warmup-iters 1 --lr-decay-style WSD --lr-wsd-decay-iters 3 --decoupled-lr 0.003 "
    "--weight-decay-incr-style linear --start-weight-decay 0 --end-weight-decay 0.1 "
    "--save saved --save-interval 2 --on-save-failure continue --log-progress "
    "--tensorboard-dir board --wandb-project project --timing-log-level 1 "
    "--profile --use-pytorch-profiler --profile-step-start 1 --profile-step-end 2",
    # Continues it with a learning rate at which the loss becomes non-finite.
    f"{TINY} {ROPE} --tokenizer-type NullTokenizer --vocab-size 301 --mock-data "
    "--check-for-spiky-loss --spike-deviations 9 "
    "--train-iters 9 --lr 1e30 --load saved --override-opt_param-scheduler "
    "--non-persistent-ckpt-type local --non-persistent-local-ckpt-dir memory",
    f"{TINY} --tokenizer-type HuggingFaceTokenizer --tokenizer-model files/tokenizer.json "
    "--mock-data --train-iters 1 --lr 1 --lora-rank 2 --dry-run --world-size 8",
    f"{TINY} --tokenizer-type NullTokenizer --vocab-size 301 --mock-data --train-iters 1 --lr 1 "
    f"--optimizer muon --ema-decay 0.9 --eval-ema {YARN} --yarn-mscale 1 --yarn-mscale-all-dim 0",
    f"{TINY} --tokenizer-type NullTokenizer --vocab-size 301 --mock-data --train-iters 2 --lr 1 "
    "--paro-outer-steps 1 --paro-outer-warmup 0 --save-hf written",
)


def is_use(reader: str) -> bool:
    return is_within(reader, PRODUCT) and (reader in SPECIFIES or not is_within(reader, NO_USE))


@pytest.fixture
def can_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The environment of RUNS: files, dashboards, early step checks, a save that fails.

    The runs leave the process unchanged.
    """
    for name in ("RANK", "SLURM_PROCID", "SLURM_STEP_TASKS_PER_NODE", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("tensorboard", "torch.utils.tensorboard", "wandb"):
        package = MagicMock(__spec__=ModuleSpec(name, None))
        monkeypatch.setitem(sys.modules, name, package)
    monkeypatch.setattr(gc, "disable", lambda: None)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.chdir(tmp_path)
    write_gpt2(tmp_path)
    (tmp_path / "files").symlink_to(ROOT / "tests" / "fixtures" / "2026-11-21")
    write_corpus("corpus", [[range(13)]] * 30)
    monkeypatch.setattr("paro.schedule.step_checks._WARMUP_STEPS", 2)
    outcomes = [StorageError("the disk is full"), DEFAULT, DEFAULT]
    saves = MagicMock(wraps=write_states, side_effect=outcomes)
    monkeypatch.setattr("paro.checkpoint.save.write_states", saves)


@pytest.mark.usefixtures("can_run")
def test_runs_read_every_field(monkeypatch: pytest.MonkeyPatch) -> None:
    """A field that is only filled, checked, recorded or copied is not used.

    A field reported here is dead, or read only under flags that none of the runs above has.
    """
    with field_reads(
        RunConfig, leaves=(LoraConfig, Machine, OpenChoices, Trainable, World)
    ) as reads:
        for words in RUNS:
            monkeypatch.setattr(sys, "argv", ["pretrain_llama.py", *words.split()])
            pretrain_llama.main()
    read_by_nothing = {path for path, readers in reads.items() if not any(map(is_use, readers))}
    wrong = [
        f"no run reads {path}: the code that uses it is missing; if it runs only under flags that "
        "none of RUNS here has, add them there; if the field decides the values of others, or "
        "whether the run may start, add it with the function that reads it to DECIDES here"
        for path in read_by_nothing - DECIDES.keys()
    ]
    wrong += [
        f"{path} is in DECIDES, but {', '.join(filter(is_use, reads[path]))} uses it: take it out"
        for path in DECIDES.keys() - read_by_nothing
    ]
    wrong += [
        f"{path} is read by {', '.join(reads[path])}, not by {reader}, which DECIDES here names"
        for path, reader in DECIDES.items()
        if reader not in reads[path]
    ]
    assert not wrong, "\n".join(wrong)


# For each field by its path (`train.seed`), its readers, such as `paro.training.step.train_step`.
Reads = dict[str, set[str]]


def config_types(
    root: type, leaves: tuple[type, ...], path: str = ""
) -> Iterator[tuple[type, str]]:
    """A dataclass and all dataclasses in its fields, each with the path prefix of its fields."""
    yield root, path
    for name, hint in get_type_hints(root).items():
        for inner in (hint, *get_args(hint)):
            if isinstance(inner, type) and is_dataclass(inner) and inner not in leaves:
                yield from config_types(inner, leaves, f"{path}{name}.")


@contextmanager
def field_reads(root: type, *, leaves: tuple[type, ...] = ()) -> Iterator[Reads]:
    """Records the readers of each field of `root` and its dataclasses; `leaves` stay whole."""
    reads: Reads = {}
    with pytest.MonkeyPatch.context() as patch:
        for owner, path in config_types(root, leaves):
            paths = {field.name: f"{path}{field.name}" for field in fields(owner)}
            reads |= {name: set() for name in paths.values()}
            patch.setattr(owner, "__getattribute__", _recording(owner, paths, reads))
        yield reads


def _recording(owner: type, paths: dict[str, str], reads: Reads) -> Callable[[object, str], Any]:
    def get(self: object, name: str) -> Any:
        if name in paths:
            reader = _reader(sys._getframe(1), owner, get)
            reads[paths[name]] |= {reader} - {""}
        return object.__getattribute__(self, name)

    return get


def _reader(frame: FrameType | None, owner: type, get: Any) -> str:
    """The first calling function that is not a method of the owner, since methods read for others.

    Empty for generated or generic reads (checks at construction, comparison, hash, repr), and for
    a method that only describes the values.
    """
    while frame is not None:
        code, module = frame.f_code, frame.f_globals["__name__"]
        is_own = module == owner.__module__ and code.co_qualname.startswith(
            owner.__qualname__ + "."
        )
        if code.co_filename == "<string>" or (is_own and code.co_name == "describe"):
            return ""  # dataclasses compile their methods from strings
        if not is_own and module != "functools" and code is not get.__code__:
            return f"{module}.{code.co_qualname.partition('.<locals>')[0]}"
        frame = frame.f_back
    return ""
