"""Every flag is read by exactly one field, and every field comes from a flag."""

import argparse
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

from data.tokenizer import NullTokenizer
from paro.arguments.megatron import RULES
from paro.arguments.parser import build_parser, parse_args
from paro.checkpoint.directory import begin_checkpoint, finish_checkpoint
from paro.config.run import RunConfig
from paro.distributed.world import World
from paro.planning.machine.files import machine_to_json
from paro.planning.machine.machine import Machine

SMALL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--tokenizer-type NullTokenizer --vocab-size 100 --mock-data "
    "--micro-batch-size 2 --global-batch-size 32 --train-iters 10 --lr 0.1"
)
# Flags whose value ends up under another name. All others lie in one field of their own name.
RENAMED = {
    "bf16": "precision.compute",
    "fp16": "precision.compute",
    "group_query_attention": "model.num_query_groups",
    "llama_preset": "model.num_layers",
    "lr_decay_iters": "schedule.lr_decay_samples",
    "lr_warmup_fraction": "schedule.lr_warmup_samples",
    "lr_warmup_iters": "schedule.lr_warmup_samples",
    "lr_wsd_decay_iters": "schedule.lr_wsd_decay_samples",
    "make_vocab_size_divisible_by": "model.vocab_size",
    "paro_collective": "sharding.collective",
    "paro_group_size": "sharding.group_size",
    "paro_machine": "sharding.machine",
    "paro_materialize": "sharding.materialize",
    "paro_prefetch_units": "sharding.prefetch_units",
    "paro_rotate_in_place": "sharding.rotate_in_place",
    "paro_strategy": "strategy.params",
    "recompute_activations": "model.recompute",
    "recompute_granularity": "model.recompute",
    "padded_vocab_size": "model.vocab_size",
    "recompute_method": "model.recompute",
    "recompute_modules": "model.recompute",
    "recompute_num_layers": "model.recompute",
    "use_distributed_optimizer": "strategy.params",
    "weight_decay": "schedule.start_weight_decay",
}
# Fields that share a flag's name and are computed from it, or repeat it where it is needed too.
ALSO = {"data.seed", "model.vocab_size", "vocab_size"}
# Fields that no flag owns.
UNOWNED = {
    "batches.data_parallel_size",
    "eod",
    "given",
    "loss_scale.dynamic",
    "notices",
    "schedule.weight_decay_incr_samples",
    "strategy.grads",
    "strategy.name",
    "strategy.optim",
}
DRY = "--dry-run --world-size 4"
FULL = "--recompute-granularity full"
GPT2 = "--tokenizer-type GPT2BPETokenizer --vocab-file x"
SELECTIVE = "--recompute-granularity selective"
CORPUS = "--data-path corpus"
PROFILE = "--profile --tensorboard-dir board"
TRAIN = "--train-data-path corpus"
VALID = f"{TRAIN} --valid-data-path corpus"
KEEP = "--use-checkpoint-opt_param-scheduler"
SAVE = "--save new --save-interval 2"
COSINE = "--weight-decay-incr-style cosine"
RISING = "--weight-decay-incr-style linear --start-weight-decay 0 --end-weight-decay"
# How to see a flag's effect, where it takes more than the flag with some other value:
# flags to take out of SMALL, what to give before, and what to give instead.
CASES = {
    "ckpt_step": ((), "--load .", "--load . --ckpt-step 5"),
    "data_path": (("mock-data",), "--mock-data", "--data-path corpus"),
    "data_args_path": (("mock-data",), "--data-path corpus", "--data-args-path blend.json"),
    "device_memory_gb": ((), DRY, f"{DRY} --device-memory-gb 80"),
    "dry_run": ((), "", DRY),
    "end_weight_decay": ((), f"{RISING} 0.5", f"{RISING} 0.6"),
    "exit_on_missing_checkpoint": ((), "--load .", "--load . --exit-on-missing-checkpoint"),
    "fp16": ((), "", "--fp16"),
    "full_validation": (("mock-data",), CORPUS, f"{CORPUS} --full-validation"),
    "global_batch_size": (("global-batch-size",), "", "--global-batch-size 64"),
    "grad_reduce_in_bf16": ((), "--bf16", "--bf16 --grad-reduce-in-bf16"),
    "hidden_size": ((), "", "--hidden-size 128"),
    "initial_loss_scale": ((), "", "--initial-loss-scale 64"),
    "llama_preset": (("num-layers",), "--num-layers 4", "--llama-preset 7B"),
    "log_progress": ((), "--save new", "--save new --log-progress"),
    "lr_decay_style": ((), "", "--lr-decay-style cosine"),
    "lr_warmup_iters": ((), "", "--lr-warmup-iters 3"),
    "lr_warmup_samples": ((), "", "--lr-warmup-samples 50"),
    "make_vocab_size_divisible_by": ((), "", "--make-vocab-size-divisible-by 10"),
    "max_position_embeddings": ((), "", "--max-position-embeddings 64"),
    "micro_batch_size": (("micro-batch-size",), "--micro-batch-size 2", "--micro-batch-size 4"),
    "mock_data": (("mock-data",), "--data-path corpus", "--mock-data"),
    "multiple_validation_sets": (("mock-data",), VALID, f"{VALID} --multiple-validation-sets"),
    "num_attention_heads": ((), "", "--num-attention-heads 8"),
    "num_query_groups": ((), "", "--num-query-groups 2 --group-query-attention"),
    "paro_collective": ((), "", "--paro-collective ho-ring"),
    "paro_group_size": ((), "", "--paro-group-size 4"),
    "paro_machine": ((), "", "--paro-machine machine.json"),
    "paro_rotate_in_place": (
        (),
        "--paro-materialize rotate",
        "--paro-materialize rotate --paro-rotate-in-place",
    ),
    "per_split_data_args_path": (
        ("mock-data",),
        "--data-path corpus",
        "--per-split-data-args-path splits.json",
    ),
    "eval_global_batch_size": ((), "", "--eval-global-batch-size 64"),
    "eval_micro_batch_size": ((), "", "--eval-micro-batch-size 4"),
    "merge_file": ((), f"{GPT2} --merge-file a", f"{GPT2} --merge-file b"),
    "null_tokenizer_eod_id": ((), "", "--null-tokenizer-eod-id 5"),
    "padded_vocab_size": ((), "", "--padded-vocab-size 2000"),
    "profile_ranks": ((), "", "--profile-ranks 1 2"),
    "profile_step_start": ((), "", "--profile-step-start 5"),
    "rampup_batch_size": ((), "", "--rampup-batch-size 8 8 96"),
    "ranks_per_node": ((), DRY, f"{DRY} --ranks-per-node 2"),
    "recompute_modules": ((), SELECTIVE, f"{SELECTIVE} --recompute-modules layernorm"),
    "recompute_method": ((), FULL, f"{FULL} --recompute-method block"),
    "recompute_num_layers": ((), FULL, f"{FULL} --recompute-num-layers 2"),
    "rope_scaling_high_freq_factor": ((), "", "--rope-scaling-high-freq-factor 8"),
    "save_retain_interval": ((), SAVE, f"{SAVE} --save-retain-interval 4"),
    "step_batch_size_schedule": (
        ("global-batch-size",),
        "",
        "--step-batch-size-schedule 0:8,1K:16",
    ),
    "split": ((), "", "--split 98,1,1"),
    "start_over": ((), "--save new", "--save new --start-over"),
    "start_weight_decay": ((), f"{RISING} 0.5", f"{RISING} 0.5 --start-weight-decay 0.1"),
    "test_data_path": (("mock-data",), TRAIN, f"{TRAIN} --test-data-path corpus"),
    "tokenizer_type": ((), "", "--tokenizer-type HuggingFaceTokenizer --tokenizer-model gpt"),
    "train_data_path": (("mock-data",), "--data-path corpus", TRAIN),
    "train_samples": (("train-iters",), "--train-iters 10", "--train-samples 96"),
    "use_pytorch_profiler": ((), PROFILE, f"{PROFILE} --use-pytorch-profiler"),
    "use_checkpoint_args": ((), "--load .", "--load . --use-checkpoint-args"),
    "use_checkpoint_opt_param_scheduler": ((), "--load .", f"--load . {KEEP}"),
    "valid_data_path": (("mock-data",), TRAIN, f"{TRAIN} --valid-data-path corpus"),
    "vocab_file": ((), f"{GPT2} --merge-file a", f"{GPT2} --merge-file a --vocab-file y"),
    "world_size": ((), DRY, "--dry-run --world-size 8"),
    "weight_decay_incr_style": ((), f"{RISING} 0.5", f"{RISING} 0.5 {COSINE}"),
}


def configure(words: str) -> RunConfig:
    return RunConfig.from_args(parse_args(words.split()), World(size=4, ranks_per_node=2))


def without(flags: tuple[str, ...]) -> str:
    """SMALL without some flags and their values."""
    kept = [part for part in SMALL.split("--") if part and part.split()[0] not in flags]
    return " ".join(f"--{part}" for part in kept)


def flatten(value: Any, path: str = "") -> dict[str, Any]:
    """Every leaf of nested dataclasses by its path; a machine is one."""
    if not is_dataclass(value) or isinstance(value, Machine):
        return {path: value}
    return {
        name: leaf
        for field in fields(value)
        for name, leaf in flatten(getattr(value, field.name), f"{path}.{field.name}").items()
    }


def own_actions() -> list[argparse.Action]:
    """The flags that a run reads: all but help, the YAML file and Megatron's leftovers."""
    other = {rule.dest for rule in RULES} | {"help", "yaml_cfg"}
    untie = "--untie-embeddings-and-output-weights"  # the other half of its own counterpart
    return [
        action
        for action in build_parser()._actions
        if action.dest not in other and untie not in action.option_strings
    ]


def fields_of(config: RunConfig) -> dict[str, Any]:
    """Every field by its path, such as `train.seed`; recomputation is one field of the model."""
    flat = {path.removeprefix("."): value for path, value in flatten(config).items()}
    flat = {path: value for path, value in flat.items() if "recompute" not in path}
    return flat | {"model.recompute": config.model.recompute}


def homes_of(dest: str) -> list[str]:
    if dest in RENAMED:
        return [RENAMED[dest]]
    return [
        path
        for path in fields_of(configure(SMALL))
        if path.split(".")[-1] == dest and path not in ALSO
    ]


@pytest.mark.parametrize("dest", sorted({action.dest for action in own_actions()}))
def test_every_flag_is_one_field(dest: str) -> None:
    assert len(homes_of(dest)) == 1, f"{dest} is read by {homes_of(dest) or 'nobody'}"


def test_every_field_comes_from_a_flag() -> None:
    homes = {home for action in own_actions() for home in homes_of(action.dest)}
    assert set(fields_of(configure(SMALL))) - homes == UNOWNED | ALSO - homes


def other_value(action: argparse.Action) -> str:
    if action.nargs == 0:
        return ""
    if action.choices is not None:
        return [str(choice) for choice in action.choices if choice != action.default][-1]
    if action.type is int:
        return str(2 * (action.default or 1))
    if action.type is float:
        return str((action.default or 0.02) / 2)
    return "GGG" if action.dest == "paro_strategy" else "some-text"


@pytest.mark.parametrize("action", own_actions(), ids=lambda action: action.dest)
def test_a_flag_changes_its_field(
    action: argparse.Action,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr("paro.optim.optimizer.find_apex", lambda: None)  # as if it were there
    monkeypatch.setattr("paro.config.run.build_tokenizer", lambda _: NullTokenizer(1000))
    monkeypatch.chdir(tmp_path)
    saved = configure(SMALL)
    sizes = {"model": asdict(saved.model), "schedule": asdict(saved.schedule)}
    finish_checkpoint(begin_checkpoint(tmp_path, 5), 5, sizes)
    (tmp_path / "blend.json").write_text('[1, "corpus", 2, "another"]')
    (tmp_path / "splits.json").write_text('{"train": ["corpus"]}')
    machine = Machine(name="two by two", source="", world_size=4, group_size=2)
    (tmp_path / "machine.json").write_text(machine_to_json(machine))
    plain = ((), "", f"{action.option_strings[0]} {other_value(action)}")
    taken_out, before, after = CASES.get(action.dest, plain)
    base = without(taken_out)
    (home,) = homes_of(action.dest)
    old = fields_of(configure(f"{base} {before}"))[home]
    new = fields_of(configure(f"{base} {after}"))[home]
    assert old != new
