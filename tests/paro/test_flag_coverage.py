"""Every flag fills exactly one field, and every field comes from a flag."""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from data.tokenizer import NullTokenizer
from model.config import LoraConfig, RecomputeConfig
from model.trainable import Trainable
from paro.arguments.megatron import rule_of
from paro.arguments.parser import build_parser
from paro.checkpoint.directory import begin_checkpoint, finish_checkpoint
from paro.config import run
from paro.config.resolve import OpenChoices
from paro.config.run import RunConfig
from paro.distributed.world import World
from paro.errors import about
from paro.machine.files import machine_to_json
from paro.machine.machine import Machine
from paro.spec.outer_steps import OuterConfig
from paro.strategy import Strategy
from tests.helpers.training import configured

SMALL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--tokenizer-type NullTokenizer --vocab-size 100 --mock-data "
    "--micro-batch-size 2 --global-batch-size 32 --train-iters 10 --lr 0.1"
)
# Flags whose value is stored under another name. All others have one field of the same name: NAME
# for --paro-NAME, and a field in samples for a length in iterations.
RENAMED = {
    **dict.fromkeys(("bf16", "fp16"), "precision.compute"),
    "group_query_attention": "model.num_query_groups",
    "llama_preset": "model.num_layers",
    **dict.fromkeys(("lora_alpha", "lora_dropout", "lora_rank"), "model.lora"),
    "lora_target_modules": "model.lora",
    "lr_warmup_fraction": "schedule.lr_warmup_samples",
    "make_vocab_size_divisible_by": "model.vocab_size",
    **dict.fromkeys(("recompute_activations", "recompute_granularity"), "model.recompute"),
    **dict.fromkeys(("recompute_method", "recompute_modules"), "model.recompute"),
    **dict.fromkeys(("paro_recompute_keep", "recompute_num_layers"), "model.recompute"),
    "paro_group_size": "sharding.world",
    **{f"paro_{field.name}": "sharding.outer" for field in fields(OuterConfig)},
    "paro_inter_bits_warmup_iters": "train.inter_bits_warmup_samples",
    "use_distributed_optimizer": "strategy",
    "weight_decay": "schedule.start_weight_decay",
}
# Fields with a flag's name that are computed from it, or repeat it for another reader.
ALSO = {
    *("data.seed", "model.vocab_size", "precision.ema_decay", "sharding.nccl_copy_engine"),
    "vocab_size",
}
# Fields that come from no flag.
UNOWNED = {
    "arguments",
    "batches.data_parallel_size",
    "batches.evaluates",  # by --eval-iters
    "command_line",
    "eod",
    "loss_scale.dynamic",
    "model.fuses_fp8_casts",  # by what the device can
    "model.fuses_loss",
    "model.fuses_norms",
    "model.fuses_rotary",
    "model.fuses_swiglu",
    "notices",
    "open",  # by what --paro-machine and flags that say auto ask for
    "schedule.weight_decay_incr_samples",
    "sharding.context.auto",  # flags that say auto
    "tokenizer_is_here",  # by the files that there are
}
# Flags fill these as a whole.
WHOLE = (
    *(LoraConfig, Machine, OpenChoices, OuterConfig, RecomputeConfig, Strategy, Trainable, World),
)
FULL = "--recompute-granularity full"
GPT2 = "--tokenizer-type GPT2BPETokenizer --vocab-file x"
ROPE = "--use-rope-scaling"
UNROUNDED = "--no-yarn-correction-range-round-to-int"
YARN = "--position-embedding-type yarn --yarn-rotary-scaling-factor 4"
SELECTIVE = "--recompute-granularity selective"
STEPS = "--step-batch-size-schedule"
LORA = "--lora-rank 2"
OUTER = "--paro-strategy III --paro-outer-steps 6"
RISING = "--weight-decay-incr-style linear --start-weight-decay 0 --end-weight-decay"
# Flags whose effect needs others, by those flags, or another change than `other_value`.
CHANGES = {
    "": (
        *("--attention-backend math", "--context-parallel-size 2 --cp-comm-type a2a"),
        *("--cp-comm-type a2a", "--exp-avg-dtype bf16", "--exp-avg-sq-dtype bf16"),
        *("--hidden-size 128", "--initial-loss-scale 64", "--lr-decay-style cosine"),
        *("--make-vocab-size-divisible-by 10", "--max-position-embeddings 64"),
        *("--num-attention-heads 8", "--num-query-groups 2 --group-query-attention"),
        *("--paro-collective ho-ring", "--paro-group-size 4", "--paro-machine machine.json"),
        *("--paro-updated-ahead 3", "--eval-global-batch-size 64", "--eval-micro-batch-size 4"),
        *("--decoupled-lr 0.2", "--padded-vocab-size 2000", "--rampup-batch-size 8 8 96", YARN),
        "--paro-outer-steps 4 --paro-strategy III",
        "--tokenizer-type HuggingFaceTokenizer --tokenizer-model gpt",
        "--trainable last-blocks:0.5",
    ),
    "--bf16": ("--grad-reduce-in-bf16",),
    "--decoupled-lr 0.2": ("--decoupled-min-lr 0.1",),
    "--ema-decay 0.9": ("--eval-ema",),
    "--optimizer-cpu-offload": ("--optimizer-offload-fraction 0.5",),
    "--bf16 --context-parallel-size 4": ("--hierarchical-context-parallel-sizes 2 2",),
    LORA: (
        *("--lora-alpha 3", "--lora-base-dtype bf16", "--lora-dropout 0.1"),
        "--lora-target-modules all-linear",
    ),
    "--use-mup": (
        *("--mup-base-hidden-size 32", "--mup-embedding-mult 2", "--mup-output-mult 2"),
        *("--mup-base-head-dim 8", "--mup-attn-scale-power 0.5"),
    ),
    "--paro-inter-grad-bits 4": ("--paro-inter-grad-error-feedback",),
    OUTER: (
        *("--paro-outer-bits 4", "--paro-outer-delay 2", "--paro-outer-fragments 2"),
        *("--paro-outer-lr 0.5", "--paro-outer-momentum 0.5", "--paro-outer-warmup 3"),
    ),
    "--paro-machine dgx-h100 --paro-group-size 2": ("--paro-inter-bits auto",),
    f"--bf16 {FULL}": ("--paro-recompute-keep core_attn",),
    "--paro-materialize rotate": ("--paro-rotate-in-place",),
    "--save-hf x": ("--save-hf-dtype bf16",),
    "--paro-strategy 1,1,2": ("--paro-survive 1",),
    SELECTIVE: ("--recompute-modules layernorm",),
    FULL: ("--recompute-method block", "--recompute-num-layers 2"),
    YARN: (
        *("--yarn-rotary-scaling-factor 2", "--yarn-original-max-position-embeddings 16"),
        *("--yarn-beta-fast 8", "--yarn-beta-slow 2", "--yarn-mscale 2"),
        "--yarn-mscale-all-dim 2",
    ),
    ROPE: (
        *("--rope-scaling-factor 2", "--rope-scaling-high-freq-factor 8"),
        "--rope-scaling-low-freq-factor 2",
        "--rope-scaling-original-max-position-embeddings 16",
    ),
    f"{RISING} 0.5": ("--start-weight-decay 0.1", "--weight-decay-incr-style cosine"),
    f"{GPT2} --merge-file a": ("--vocab-file y",),
}
ADDED = {
    change.split()[0].removeprefix("--").replace("-", "_"): (needed, change)
    for needed, changes in CHANGES.items()
    for change in changes
}
# Flags that replace others: the flags to remove from SMALL, the flags before, and those after.
REPLACED = {
    "end_weight_decay": ((), f"{RISING} 0.5", f"{RISING} 0.6"),
    "global_batch_size": (("global-batch-size",), "", "--global-batch-size 64"),
    "llama_preset": (("num-layers",), "--num-layers 4", "--llama-preset 7B"),
    "micro_batch_size": (("micro-batch-size",), "--micro-batch-size 2", "--micro-batch-size 4"),
    "paro_outer_nesterov": ((), OUTER, f"{OUTER} --no-paro-outer-nesterov"),
    "yarn_correction_range_round_to_int": ((), YARN, f"{YARN} {UNROUNDED}"),
    "merge_file": ((), f"{GPT2} --merge-file a", f"{GPT2} --merge-file b"),
    "step_batch_size_schedule": (("global-batch-size",), "", f"{STEPS} 0:8,1K:16"),
    "train_samples": (("train-iters",), "--train-iters 10", "--train-samples 96"),
}


def configure(words: str) -> RunConfig:
    return configured(words, World(size=4, ranks_per_node=2))


def without(flags: tuple[str, ...]) -> str:
    kept = [part for part in SMALL.split("--") if part and part.split()[0] not in flags]
    return " ".join(f"--{part}" for part in kept)


def fields_of(config: Any, path: str = "") -> dict[str, Any]:
    """Every field by its path, such as `train.seed`."""
    flat: dict[str, Any] = {}
    for field in fields(config):
        name, value = f"{path}{field.name}", getattr(config, field.name)
        is_nested = is_dataclass(value) and not isinstance(value, WHOLE)
        flat |= fields_of(value, f"{name}.") if is_nested else {name: value}
    return flat


def own_actions() -> list[argparse.Action]:
    """The flags a run reads: all but help, the YAML file and Megatron's flags without a field."""
    untie = "--untie-embeddings-and-output-weights"  # the other half of its own counterpart
    return [
        action
        for action in build_parser()._actions
        if action.dest not in ("help", "yaml_cfg")
        and untie not in action.option_strings
        and rule_of(action.option_strings[0]) is None
    ]


@cache
def all_paths() -> frozenset[str]:
    return frozenset(fields_of(configure(SMALL)))


def homes_of(dest: str) -> list[str]:
    if dest in RENAMED:
        return [RENAMED[dest]]
    for name in (dest, dest.removeprefix("paro_"), dest.replace("_iters", "_samples")):
        if homes := [path for path in all_paths() - ALSO if path.split(".")[-1] == name]:
            return homes
    return []


def test_every_flag_is_one_field_and_every_field_comes_from_a_flag() -> None:
    homes = {action.dest: homes_of(action.dest) for action in own_actions()}
    wrong = [home_missing(dest, found) for dest, found in homes.items() if len(found) != 1]
    assert not wrong, "\n".join(wrong)
    of_flags = {home for found in homes.values() for home in found}
    known = UNOWNED | ALSO - of_flags
    wrong = [
        f"the field {path} comes from no flag: add a flag of its name in paro/arguments/; if it is "
        "computed, its path to UNOWNED here"
        for path in all_paths() - of_flags - known
    ]
    wrong += [
        f"{path} is in UNOWNED or ALSO, but {'a flag' if path in of_flags else 'no field'}: "
        "take it out"
        for path in known - (all_paths() - of_flags)
    ]
    assert not wrong, "\n".join(wrong)


def home_missing(dest: str, found: Sequence[str]) -> str:
    """Says what to add where a flag fills no field, or several."""
    flag, name = f"--{dest.replace('_', '-')}", dest.removeprefix("paro_")
    if found:
        return (
            f"{flag} fills several fields, {', '.join(found)}: give all but one another name; what "
            "repeats it for another reader belongs in ALSO here"
        )
    return (
        f"{flag} fills no field: add `{name}` to the frozen dataclass of its subject, such as "
        "paro/config/train.py, which paro/config/run.py fills; if a field of another name has its "
        "value, add the path of that to RENAMED here; if it is Megatron-LM's and changes nothing, "
        "a row of paro/arguments/megatron_rules.toml"
    )


def other_value(action: argparse.Action) -> str:
    if action.nargs == 0:
        return ""
    if action.choices is not None:
        return [str(choice) for choice in action.choices if choice != action.default][-1]
    if getattr(action.type, "__name__", "") == "int":
        return str(2 * (action.default or 1))
    if action.type is float:
        return str((action.default or 0.02) / 2)
    return "GGG" if action.dest == "paro_strategy" else "some-text"


# Configurations whose every field has the name of its flag: `take` fills these, and nothing else.
BY_NAME = {name for name, make in run._MAKERS if "_filled" in make.__qualname__}
OTHERS = [
    a for a in own_actions() if {h.split(".")[0] for h in homes_of(a.dest)}.isdisjoint(BY_NAME)
]


@pytest.mark.parametrize("action", OTHERS, ids=lambda action: action.dest)
def test_a_flag_changes_its_field(
    action: argparse.Action, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    dest = action.dest
    monkeypatch.setattr("paro.spec.optim_config.check_apex", lambda: None)  # as if installed
    monkeypatch.setattr("paro.config.run.build_tokenizer", lambda _: NullTokenizer(1000))
    monkeypatch.chdir(tmp_path)
    saved = configure(SMALL)
    sizes = {"model": asdict(saved.model), "schedule": asdict(saved.schedule)}
    finish_checkpoint(begin_checkpoint(tmp_path, 5), 5, sizes)
    machine = Machine(name="two by two", source="", world_size=4, group_size=2)
    (tmp_path / "machine.json").write_text(machine_to_json(machine))
    before, change = ADDED.get(dest, ("", f"{action.option_strings[0]} {other_value(action)}"))
    taken_out, before, after = REPLACED.get(dest, ((), before, f"{before} {change}"))
    base, homes = without(taken_out), homes_of(dest)
    assert len(homes) == 1, home_missing(dest, homes)
    flags = "flags: add what it needs to CHANGES here, or to REPLACED if it takes others' place"
    with about(suffix=f"; refused under these {flags}"):
        old = fields_of(configure(f"{base} {before}"))[homes[0]]
        new = fields_of(configure(f"{base} {after}"))[homes[0]]
    assert old != new, f"{homes[0]} stays {old!r} under '{after}', compared with '{before}' {flags}"
