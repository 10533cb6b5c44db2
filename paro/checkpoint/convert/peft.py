"""Reads and writes peft's folders of LoRA adapters: adapter_config.json and safetensors."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from model.config import parameter_shapes
from model.hugging_face import hugging_face_name
from model.lora_config import MODULES, LoraConfig, down_name, is_adapter, targets_of
from paro.checkpoint.convert.merge import with_adapters
from paro.checkpoint.convert.safetensors_file import open_safetensors, write_safetensors
from paro.checkpoint.convert.source import Source
from paro.errors import UserError, about
from paro.untrusted.schema import read_json

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"


class _Fields(TypedDict):
    """The fields of adapter_config.json that decide what the adapters compute."""

    peft_type: str
    r: int
    lora_alpha: float
    target_modules: list[str] | str
    lora_dropout: NotRequired[float]


# Other fields, and the values with which they change nothing.
_NOTHING: dict[str, tuple[Any, ...]] = {
    "bias": (None, "none"),
    "fan_in_fan_out": (None, False),
    "layer_replication": (None,),
    "layers_to_transform": (None, []),
    "lora_bias": (None, False),
    "alora_invocation_tokens": (None,),
    "alpha_pattern": (None, {}),
    "exclude_modules": (None, []),
    "modules_to_save": (None, []),
    "rank_pattern": (None, {}),
    "target_parameters": (None, []),
    "trainable_token_indices": (None,),
    "use_dora": (None, False),
    "use_qalora": (None, False),
    "use_rslora": (None, False),
}


def open_peft(directory: Path, base: Source) -> Source:
    """The `base` with the adapters of a folder; `UserError` names the bad file or field."""
    path = directory / CONFIG
    if not path.is_file():
        raise UserError(f"{directory} holds no adapters of peft: it has no {CONFIG}")
    everything, fields = read_json(path, dict[str, Any]), read_json(path, _Fields)
    with about(f"{path}: "):
        lora = _lora_of(everything, fields)
        config = replace(base.config, lora=lora)
        shapes = {n: shape for n, shape in parameter_shapes(config).items() if is_adapter(n)}
    stored = open_safetensors(directory / WEIGHTS)
    names = {peft_name(name): name for name in shapes}
    for theirs in stored.keys() ^ names.keys():
        where = "only the file has" if theirs in stored else "the file lacks"
        raise UserError(
            f"{directory / WEIGHTS} and {CONFIG} or --base do not agree: {where} {theirs}"
        )
    for theirs, name in names.items():
        if stored[theirs].shape != shapes[name]:
            there, here = ("x".join(map(str, s)) for s in (stored[theirs].shape, shapes[name]))
            raise UserError(
                f"{directory / WEIGHTS}: {theirs} is {there}, and a model of --base needs {here}: "
                "these are adapters of another model"
            )
    return with_adapters(base, lora, {name: stored[theirs] for theirs, name in names.items()})


def write_peft(source: Source, directory: Path, advance: Callable[[int], None]) -> None:
    """Fills an empty folder, which `PeftModel.from_pretrained` opens, with a source's adapters."""
    lora = source.lora
    assert lora is not None, "no adapters"
    tensors = {peft_name(name): tensor for name, tensor in source.adapters.items()}
    write_safetensors(directory / WEIGHTS, tensors, advance)
    modules = {weight: module for module, weight in MODULES.items()}
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": [modules[weight] for weight in lora.targets],
        "bias": "none",
        "inference_mode": True,
    }
    (directory / CONFIG).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def peft_name(name: str) -> str:
    """The name of an adapter in peft's file."""
    weight = name.removesuffix("_lora_a").removesuffix("_lora_b")
    part = "lora_A" if name == down_name(weight) else "lora_B"
    return f"base_model.model.{hugging_face_name(weight).removesuffix('weight')}{part}.weight"


def _lora_of(everything: Mapping[str, Any], fields: _Fields) -> LoraConfig:
    if fields["peft_type"] != "LORA":
        raise UserError(f"peft_type is {fields['peft_type']}, and only LORA is supported")
    for name, values in _NOTHING.items():
        if everything.get(name) not in values:
            raise UserError(f"{name} {everything[name]} is not supported")
    modules = fields["target_modules"]
    text = modules if isinstance(modules, str) else ",".join(modules)
    return LoraConfig(
        rank=fields["r"],
        alpha=float(fields["lora_alpha"]),
        dropout=float(fields.get("lora_dropout", 0.0)),
        targets=targets_of(text),
    )
