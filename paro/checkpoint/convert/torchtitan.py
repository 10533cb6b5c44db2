"""torchtitan's checkpoints of its llama3: DCP's files, described by a Hugging Face folder."""

# A step's folder has no configuration. Parameters are named as in Meta's files, and queries and
# keys rotate as there, in pairs of channels; from version 0.3 on some are named otherwise. Up to
# version 0.1 all names but those of an export of the model alone begin with `model.`.

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from model.config import LlamaConfig
from model.units import name_in
from paro.checkpoint.convert.dcp_files import DcpFolder, write_dcp
from paro.checkpoint.convert.hugging_face import (
    COMPANIONS,
    CONFIG,
    config_fields,
    core_name,
    is_hugging_face,
    open_described,
    write_description,
)
from paro.checkpoint.convert.meta import NAMES as OLDER_NAMES
from paro.checkpoint.convert.meta import turned
from paro.checkpoint.convert.source import LazyTensor, ModelSource
from paro.checkpoint.convert.tensor_files import WEIGHT_TYPES
from paro.checkpoint.manifest import METADATA
from paro.errors import UserError, flag_of
from paro.layout import Shape

_FUSABLE = "attention.qkv_linear."  # module of version 0.3 that has the projections of attention
_NAMES = OLDER_NAMES | {
    "head.weight": "lm_head.weight",
    **{f"blocks.*.{part}": f"layers.*.{_FUSABLE}{part}.weight" for part in ("wq", "wk", "wv")},
}
# Beginnings of names of other states than the model's in the checkpoint of a training.
_TRAINING = ("optimizer.", "lr_scheduler.", "dataloader.", "train_state.")
_BUFFER = "freqs_cis"  # stored until August 2025; it follows from RoPE fields
# Fields of models that torchtitan's llama3 cannot be, and the only value that it has.
_FIXED = {
    "add_qkv_bias": False,
    "qk_layernorm": False,
    "use_mup": False,
    "position_embedding_type": "rope",
    "rotary_seq_len_interpolation_factor": 1.0,
}


def open_torchtitan(directory: Path, assets: Path | None = None) -> ModelSource:
    """Open the folder of a step, of any version; `UserError` names the bad file or tensor.

    `assets` is the folder of the model's config.json and tokenizer; None: a folder in `directory`.
    """
    if not (directory / METADATA).is_file():
        raise UserError(f"{directory} has no {METADATA}: give the folder of a step, as step-1000")
    assets = assets or directory / COMPANIONS
    if not is_hugging_face(assets):
        raise UserError(
            f"{assets / CONFIG} is missing, and DCP's files hold no configuration: put the model's "
            "there, with its tokenizer, or give convert_checkpoint.py --hf-assets-path, their "
            "folder"
        )
    folder = DcpFolder(directory)
    newer = any(_FUSABLE in name for name in folder.states)

    def stored(config: LlamaConfig) -> dict[str, LazyTensor]:
        _check_architecture(config, f"{assets / CONFIG}")
        return _tensors_in(folder)

    called = partial(name_in, _NAMES if newer else OLDER_NAMES)
    source = open_described(assets, directory, stored, called)
    return replace(source, tensors=turned(source.tensors, source.config.kv_channels))


def _tensors_in(folder: DcpFolder) -> dict[str, LazyTensor]:
    """Return the model's tensors by their names in the files."""
    tensors = {}
    for name, state in folder.states.items():
        if name.startswith(_TRAINING) or core_name(name) == _BUFFER:
            continue
        if state.properties.dtype not in WEIGHT_TYPES:
            kind = str(state.properties.dtype).removeprefix("torch.")
            raise UserError(f"{folder.directory}: {name:.99} is {kind}, which is no weight's type")
        tensors[name] = folder.tensor(name)
    return tensors


def write_torchtitan(source: ModelSource, directory: Path, *, older: bool) -> list[str]:
    """Fill an empty folder with a model-only checkpoint; return lines to print about the result.

    Names are those of version 0.3, with `older` of 0.2. config.json and the tokenizer are written
    into a folder there.
    """
    config = source.config
    tensors = turned(source.tensors, config.kv_channels, to_pairs=True)
    _check_architecture(config, "--to torchtitan")
    notes = write_description(source, config_fields(source), directory / COMPANIONS)
    if config.tie_embeddings_and_output_weights:
        tensors["head.weight"] = tensors["embedding.weight"]
        how = "trains it apart" if older else "ties it if its flavor has enable_weight_tying"
        notes.append(f"the output layer is tied, and stored too: torchtitan {how}")
    names = OLDER_NAMES if older else _NAMES
    named: dict[str, dict[Shape, LazyTensor]] = {
        name_in(names, name): {(): tensor} for name, tensor in tensors.items()
    }
    write_dcp(directory, named, f"--output {directory}")
    return notes


def _check_architecture(config: LlamaConfig, blame: str) -> None:
    """Raise a `UserError`, which begins with `blame`, for a model that llama3 cannot be."""
    for name, ours in _FIXED.items():
        if (value := getattr(config, name)) != ours:
            flag = flag_of(name)
            raise UserError(
                f"{blame}: torchtitan's llama3 has no {flag} {value}, as this model has"
            )
