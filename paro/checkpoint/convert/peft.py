"""Reads and writes peft's folders of LoRA adapters: adapter_config.json and safetensors."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import nextafter, sqrt
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict

from model.config import ALL_LINEAR, MODULES, LoraConfig, adapted_weight, down_name, up_name
from model.hugging_face import hugging_face_name, llama_config
from paro.checkpoint.convert.hugging_face import CONFIG as BASE_CONFIG
from paro.checkpoint.convert.hugging_face import (
    TOKENIZER_FILES,
    is_hugging_face,
    open_hugging_face,
)
from paro.checkpoint.convert.native import open_native
from paro.checkpoint.convert.source import LazyTensor, ModelSource, checked_tensors, write_json
from paro.checkpoint.convert.tensor_files import open_safetensors, write_safetensors
from paro.errors import UserError, about
from paro.files.schema import Positive, conform, read_json
from paro.layout import Shape

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_OLD_WEIGHTS = "adapter_model.bin"
_Alpha = Annotated[float, (1e-30, 1e30)]


class _Fields(TypedDict):
    """The fields of adapter_config.json on which the output of the adapters depends."""

    peft_type: str
    r: Positive
    lora_alpha: _Alpha
    target_modules: NotRequired[list[str] | str | None]
    lora_dropout: NotRequired[Annotated[float, (0.0, nextafter(1.0, 0.0))]]
    init_lora_weights: NotRequired[bool | str | None]
    use_rslora: NotRequired[bool | None]
    exclude_modules: NotRequired[list[str] | str | None]
    layers_to_transform: NotRequired[list[int] | int | None]
    rank_pattern: NotRequired[dict[str, Positive] | None]
    alpha_pattern: NotRequired[dict[str, _Alpha] | None]


# Other fields that change nothing in what trained adapters compute: where they come from, and how
# they began. The rest must be empty, also the fields of a newer peft.
_HARMLESS = {
    *("auto_mapping", "base_model_name_or_path", "peft_version", "revision", "task_type"),
    *("corda_config", "eva_config", "loftq_config", "lora_ga_config", "runtime_config"),
    *("ensure_weight_tying", "inference_mode"),
    *("layers_pattern", "megatron_core", "qalora_group_size"),
}
# The beginnings of adapters that leave their base weights as they are. PiSSA, OLoRA, CorDA and
# LoRA-GA subtract from these weights what the adapters begin with, and LoftQ quantizes them.
_BEGINNINGS = (None, True, False, "gaussian", "eva", "orthogonal", "mica")
_MERGED = "let peft merge these adapters, if it can (merge_and_unload), and convert its model"


def open_peft(directory: Path, base: str) -> ModelSource:
    """Return the model in the folder `base` with adapters; `UserError` names a bad file or field.

    Which modules have adapters is decided by the tensors in the folder.
    """
    with about("--base "):
        opener = open_hugging_face if is_hugging_face(Path(base)) else open_native
        model = opener(Path(base))
    path = directory / CONFIG
    if not path.is_file():
        raise UserError(f"{directory} holds no adapters of peft: it has no {CONFIG}")
    everything = read_json(path, dict[str, Any])
    fields: _Fields = conform(everything, _Fields, str(path))
    with about(f"{path}: "):
        _check_supported(everything, fields)
    if (directory / _OLD_WEIGHTS).exists() and not (directory / WEIGHTS).exists():
        raise UserError(
            f"{directory} has {_OLD_WEIGHTS}, which may hold programs, in place of {WEIGHTS}: open "
            "it with peft and save it again"
        )
    layers = range(model.config.num_layers)
    weights = [f"blocks.{layer}.{kind}" for layer in layers for kind in MODULES.values()]
    adapters = _adapters_in(directory / WEIGHTS, weights, fields)
    scales: dict[str, tuple[int, float]] = {}  # {weight: (rank, alpha)}
    shapes: dict[str, Shape] = {}
    for weight in weights:
        if (down := adapters.get(down_name(weight))) is not None:
            stored = next(iter(down.shape), 0) if fields.get("rank_pattern") else 0
            rank = stored or fields["r"]
            scales[weight] = (rank, _alpha_of(weight, rank, fields))
            rows, columns = model.tensors[weight].shape
            shapes |= {down_name(weight): (rank, columns), up_name(weight): (rows, rank)}
    with about(suffix=": these are adapters of another model than --base"):
        adapters = checked_tensors(shapes, adapters, directory / WEIGHTS, peft_name)
    scalings = {weight: alpha / rank for weight, (rank, alpha) in scales.items()}
    return model.with_adapters(_alike(model, scales, fields), adapters, scalings)


def check_base(source: ModelSource, base_model: str | None) -> None:
    """Raise `UserError` if adapters would name a folder as their base whose model lacks rows."""
    base = base_model or source.origin
    if base is None or not is_hugging_face(Path(base)):
        return  # a name of the hub, or a folder of another machine
    path, rows = Path(base) / BASE_CONFIG, source.config.vocab_size
    with about(f"{path}: "):
        there = llama_config(read_json(path, dict[str, Any])).vocab_size
    if there < rows:
        raise UserError(
            f"the base {base} has {there} vocabulary rows, and the model of these adapters {rows}: "
            "name another with --base-model-name-or-path, or write the whole model with --merge"
        )


def write_peft(source: ModelSource, directory: Path, base_model: str | None) -> str:
    """Fill an empty folder, which peft opens, with a source's adapters and the files of its
    tokenizer, chat template included; a line to print about it.

    `base_model` names the base for peft's AutoPeftModel; None: the folder that the source is from.
    """
    base_model = base_model or source.origin
    lora = source.lora
    assert lora is not None, "no adapters"
    tensors = {peft_name(name): tensor for name, tensor in source.adapters.items()}
    write_safetensors({WEIGHTS: tensors}, directory)
    files = {n: path for n, path in source.companions.items() if n in TOKENIZER_FILES}
    replace(source, companions=files).copy_companions(directory)
    modules = {weight: module for module, weight in MODULES.items()}
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": [modules[weight] for weight in lora.targets],
        "bias": "none",
        "inference_mode": True,
    }
    write_json(directory / CONFIG, fields)
    if base_model is None:
        return f"{CONFIG} names no base, as it is not known: give --base-model-name-or-path"
    return f"{CONFIG} names the base {base_model}"


def peft_name(name: str) -> str:
    """Return the name of an adapter in peft's file."""
    weight = adapted_weight(name)
    part = "lora_A" if name == down_name(weight) else "lora_B"
    return f"base_model.model.{_module_name(weight)}.{part}.weight"


def _module_name(weight: str) -> str:
    """Return peft's name of the module of a weight."""
    return hugging_face_name(weight).removesuffix(".weight")


def _check_supported(everything: Mapping[str, Any], fields: _Fields) -> None:
    if fields["peft_type"] != "LORA":
        raise UserError(f"peft_type is {fields['peft_type']}, and only LORA is supported")
    beginning = fields.get("init_lora_weights")
    if beginning not in _BEGINNINGS:
        raise UserError(
            f"init_lora_weights {beginning} changes the base, or is unknown: let peft convert them "
            "(save_pretrained with path_initial_model_for_weight_conversion) or merge "
            "them (merge_and_unload), or give --base the changed base and set the field to true"
        )
    for name in sorted(everything.keys() - _Fields.__annotations__.keys() - _HARMLESS):
        if everything[name] and everything[name] != "none":
            raise UserError(f"{name} {everything[name]} is not supported: {_MERGED}")
    for key in fields.get("alpha_pattern") or {}:
        if not re.fullmatch(r"\^?[\w.]+", key):
            raise UserError(f"alpha_pattern has the regular expression {key}: {_MERGED}")


def _adapters_in(path: Path, weights: Sequence[str], fields: _Fields) -> dict[str, LazyTensor]:
    """Return a file's tensors by this project's names; `UserError` if any is missing or strange."""
    stored = open_safetensors(path)
    names = {part(weight): weight for part in (down_name, up_name) for weight in weights}
    tensors = {name: stored[peft_name(name)] for name in names if peft_name(name) in stored}
    if strange := sorted(stored.keys() - map(peft_name, names)):
        raise UserError(
            f"{path} has {strange[0]}, and only {', '.join(MODULES)} of the "
            f"{len(weights) // len(MODULES)} layers of --base have adapters here: {_MERGED}"
        )
    targets = {name for name, weight in names.items() if _is_target(weight, fields, tensors)}
    for name in sorted(targets ^ tensors.keys()):
        where = "only the file has" if name in tensors else "the file lacks"
        raise UserError(f"{path} and target_modules of {CONFIG} differ: {where} {peft_name(name)}")
    if not tensors:
        raise UserError(f"{path} holds no adapters")
    return tensors


def _is_target(weight: str, fields: _Fields, tensors: Mapping[str, LazyTensor]) -> bool:
    """Return whether a weight has adapters, by the names of targets; by the file for a regex."""
    targets, excluded = fields.get("target_modules"), fields.get("exclude_modules") or []
    if targets == ALL_LINEAR:
        targets = list(MODULES)
    if targets is None or isinstance(targets, str) or isinstance(excluded, str):
        return down_name(weight) in tensors or up_name(weight) in tensors
    name, layer = _module_name(weight), int(weight.split(".")[1])
    if _is_among(excluded, name):
        return False
    layers = fields.get("layers_to_transform")
    layers = [layers] if isinstance(layers, int) else layers or [layer]
    return name in targets or (_is_among(targets, name) and layer in layers)


def _alpha_of(weight: str, rank: int, fields: _Fields) -> float:
    """Return the alpha with which the scaling of a weight's adapters is alpha / rank."""
    name, alpha = _module_name(weight), fields["lora_alpha"]
    for key, value in (fields.get("alpha_pattern") or {}).items():
        if name == key[1:] if key.startswith("^") else _is_among([key], name):
            alpha = value
            break
    return alpha * sqrt(rank) if fields.get("use_rslora") else float(alpha)


def _is_among(names: Sequence[str], module: str) -> bool:
    """Return whether a module's name is one of the names or ends, after a dot, with one."""
    return any(f".{module}".endswith(f".{name}") for name in names)


def _alike(
    base: ModelSource, scales: Mapping[str, tuple[int, float]], fields: _Fields
) -> LoraConfig | None:
    """Return the configuration of a run with these adapters; None if no run has such adapters."""
    kinds = {weight.rpartition(".")[2] for weight in scales}
    rank, alpha = next(iter(scales.values()))
    if (
        len(scales) < len(kinds) * base.config.num_layers
        or {*scales.values()} != {(rank, alpha)}
        or rank > min(min(base.tensors[weight].shape) for weight in scales)
    ):
        return None
    return LoraConfig(
        rank=rank,
        alpha=alpha,
        dropout=fields.get("lora_dropout", 0.0),
        targets=tuple(kind for kind in MODULES.values() if kind in kinds),
    )
