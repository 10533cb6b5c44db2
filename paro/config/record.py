"""The arguments in effect: logged, saved in checkpoints, and compared between ranks."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import fields
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import data
import model
import paro
from data.blend import number_in
from model.units import num_parameters, parameter_shapes
from paro.arguments.flag_parser import PATHS
from paro.arguments.parser import build_parser, option_of, value_text
from paro.errors import count_text
from paro.spec.param_groups import BY_SHAPE, GroupFactors

if TYPE_CHECKING:
    from paro.config.run import RunConfig


def recorded_arguments(config: RunConfig) -> dict[str, Any]:
    """Return every argument by name, for the log, the run record and checkpoints.

    Values that come from --llama-preset, --load, the launcher, the planner or another flag are
    filled in, as Megatron-LM does with its arguments.
    """
    model, schedule, tokenizer = config.model, config.schedule, config.tokenizer
    concerns = (model, config.batches, config.train, schedule, config.data, tokenizer)
    in_use = {of.name: getattr(concern, of.name) for concern in concerns for of in fields(concern)}
    sharding, ahead = config.sharding, config.sharding.updated_ahead
    for concern in (sharding,) if sharding.outer is None else (sharding, sharding.outer):
        values = {f"paro_{of.name}": getattr(concern, of.name) for of in fields(concern)}
        in_use |= {n: value for n, value in values.items() if isinstance(value, str | int | float)}
    filled_in = {name: in_use.get(name, value) for name, value in config.arguments.items()}
    recompute = model.recompute
    if recompute is not None:
        filled_in["recompute_granularity"] = recompute.granularity
    if recompute is not None and not recompute.core_attention:
        filled_in |= {
            "recompute_method": recompute.method,
            "recompute_num_layers": recompute.num_layers,
            "paro_recompute_keep": "core_attn" if recompute.keeps_core else None,
        }
    if schedule.weight_decay_incr_style == "constant":
        filled_in["weight_decay"] = schedule.start_weight_decay
    return filled_in | {
        "group_query_attention": model.num_query_groups < model.num_attention_heads,
        "padded_vocab_size": model.vocab_size,
        "paro_group_size": config.world.group_size,
        "paro_inter_bits": None,  # auto is resolved into the bit widths below
        "paro_inter_grad_bits": config.precision.inter_grad_bits,
        "paro_inter_grad_error_feedback": config.precision.inter_grad_error_feedback,
        "paro_inter_param_bits": config.precision.inter_param_bits,
        "paro_strategy": config.strategy.name,
        "paro_updated_ahead": "all" if ahead is None else str(ahead),
        "split": config.data.split_in_use,
        "vocab_size": tokenizer.vocab_size or config.vocab_size,
    }


def precision_line(config: RunConfig) -> str:
    """Describe the types of states, messages and fp8 matmuls in a line of the log."""
    fp8, text = config.model.fp8_format, config.precision.describe()
    how = f"({fp8}, recipe tensorwise: a scale per tensor)"
    return f"{text}; blocks multiply in fp8 {how}" if fp8 else text


def model_lines(config: RunConfig) -> Iterator[str]:
    """Yield log lines about the model's sizes, parameter groups and trainable parameters."""
    model, lora = config.model, config.model.lora
    grouped = model.num_query_groups < model.num_attention_heads
    groups = f" in {model.num_query_groups} query groups" if grouped else ""
    tied = "tied" if model.tie_embeddings_and_output_weights else "untied"
    yield (
        f"> model: {num_parameters(model):,} parameters, {model.num_layers} layers, hidden size "
        f"{model.hidden_size}, FFN {model.ffn_hidden_size}, {model.num_attention_heads} heads of "
        f"{model.kv_channels}{groups}, sequences of {config.data.seq_length}, vocabulary of "
        f"{config.vocab_size:,} padded to {model.vocab_size:,}, output layer {tied}"
    )
    yield from _group_lines(config)
    if not config.trainable.is_part(model):
        return
    what = f"--trainable {config.trainable}"
    if lora is not None:
        what = (
            f"adapters of rank {lora.rank}, alpha {lora.alpha:g}, dropout {lora.dropout:g} on "
            f"{', '.join(lora.targets)}"
        )
    shapes = parameter_shapes(model)
    trained, total = config.trainable.names(model), num_parameters(model)
    count = sum(math.prod(shapes[name]) for name in trained)
    yield (
        f"> {what}: {count:,} of {total:,} parameters "
        f"({count / total:.2%}) in {len(trained)} of {len(shapes)} tensors train"
    )


def _group_lines(config: RunConfig) -> Iterator[str]:
    """Yield a log line for parameters with factors that a run without groups would not have."""
    names, groups = defaultdict[GroupFactors, list[str]](list), config.param_groups
    for name, shape in parameter_shapes(config.model).items():
        factors = groups.of(name, shape)
        if name in config.trained and factors != BY_SHAPE.of(name, shape):
            names[factors].append(name)
    for factors, tensors in names.items():
        yield f"> {factors}: {count_text(len(tensors), 'tensor')}, the first {tensors[0]}"


_HASH_DIGITS = 12


def settings_of(config: RunConfig) -> dict[str, str]:
    """Collect the settings of this rank by name, for a comparison of all ranks.

    Paths may differ between nodes. Path flags keep only the number of paths and blend weights.
    """
    arguments = {n: value for n, value in config.arguments.items() if n != "ranks_per_node"}
    paths = path_flags()
    settings = {
        "WORLD_SIZE": str(arguments["world_size"]),
        "torch": torch.__version__,
        "the code (a hash of paro, model and data)": code_version(),
    }
    for name, value in arguments.items():
        text = _without_paths(value) if name in paths else value_text(name, value)
        settings[option_of(name)] = text
    machine = config.sharding.machine
    digest = sha256(repr(machine).encode()).hexdigest()
    settings["the content of --paro-machine"] = "none" if machine is None else digest[:_HASH_DIGITS]
    for name, value in recorded_arguments(config).items():
        if name not in paths and value != arguments.get(name):
            settings[f"{option_of(name)} in use"] = value_text(name, value)
    return settings


def path_flags() -> set[str]:
    """Return the names of arguments whose values are paths."""
    actions = build_parser()._actions
    return {action.dest for action in actions if action.metavar in PATHS} | {"paro_machine"}


def code_version() -> str:
    """Hash the source files; unlike a commit id, the hash covers uncommitted changes."""
    digest = sha256()
    for package in (paro, model, data):
        folder = Path(package.__path__[0])
        for path in sorted((*folder.rglob("*.py"), *folder.rglob("*.toml"))):
            digest.update(path.relative_to(folder.parent).as_posix().encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:_HASH_DIGITS]


def _without_paths(value: object) -> str:
    if value is None:
        return "not given"
    words = value if isinstance(value, (list, tuple)) else [value]
    shown = ("a path" if number_in(word) is None else word for word in map(str, words))
    return " ".join(shown) or "not given"
