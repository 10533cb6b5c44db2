"""Megatron-core's distributed checkpoints (`torch_dist`): DCP's files, common.pt, metadata.json."""

from __future__ import annotations

import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from paro.checkpoint.convert.dcp_files import DcpFolder, write_dcp
from paro.checkpoint.convert.megatron_names import NUMBERED, MegatronModel, args_in
from paro.checkpoint.convert.megatron_optim import MASTERS, PREFIX, progress_of
from paro.checkpoint.convert.source import LazyTensor, joined, write_json
from paro.checkpoint.convert.tensor_files import WEIGHT_TYPES, load_torch_file
from paro.checkpoint.manifest import FOREIGN as BACKENDS
from paro.checkpoint.manifest import METADATA
from paro.checkpoint.metadata import read_metadata
from paro.errors import UserError
from paro.files.object_cache import MAX_BYTES
from paro.files.regular_file import RegularFile
from paro.files.schema import conform, read_json
from paro.layout import Shape
from paro.spec.states import MOMENTS

COMMON = "common.pt"
_COMMON_STATE = "common_state/shard_0_1"
_WRITTEN = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
# Layers are stored as one tensor with a dimension of layers in front, unless they are numbered.
_STACKED = re.compile(r"(decoder\.layers\.)(?!\d)")
# Modules for which Megatron-core asks for an object in addition to the weights; here it is empty.
_WITH_EXTRA_STATE = (
    *("linear_qkv", "linear_proj", "core_attention", "q_layernorm", "k_layernorm"),
    *("linear_fc1", "linear_fc2"),
)


def is_dist(directory: Path) -> bool:
    """Return whether an iteration's folder holds a distributed checkpoint of Megatron's."""
    return (directory / BACKENDS).is_file()


def open_dist(directory: Path, *, optimizer: bool = False) -> MegatronModel:
    """Open an iteration's folder, with the optimizer's states if asked; `UserError` if it fails."""
    backends = read_json(directory / BACKENDS, dict[str, Any])
    kind = conform(backends.get("sharded_backend"), str, f"{directory / BACKENDS}: sharded_backend")
    if kind != "torch_dist":
        raise UserError(
            f"{directory} is in the format {kind:.40}: of distributed checkpoints only torch_dist "
            "can be read"
        )
    folder = DcpFolder(directory)
    path, common = _common_of(directory, folder)
    args, tensors = args_in(common, path), _tensors_in(folder)
    if not optimizer:
        return MegatronModel(path=path, args=args, tensors=tensors)
    progress = progress_of(common, args, path)
    for kind in MASTERS:
        tensors |= _tensors_in(folder, f"{PREFIX}{kind}.")
    moments = {kind: _tensors_in(folder, f"{PREFIX}{kind}.") for kind in MOMENTS}
    return MegatronModel(path=path, args=args, tensors=tensors, moments=moments, progress=progress)


def _common_of(directory: Path, folder: DcpFolder) -> tuple[Path, Any]:
    """Return the state common to all ranks, and its file: common.pt, or in newer folders DCP's."""
    path = directory / COMMON
    info = folder.metadata.storage_data.get(MetadataIndex(_COMMON_STATE))
    if path.exists() or info is None:
        return path, load_torch_file(path)
    path = directory / info.relative_path
    if info.length > MAX_BYTES:
        raise UserError(f"{path}: {_COMMON_STATE} has {info.length:,} bytes")
    content = RegularFile(path).read(info.offset, info.length)
    states = load_torch_file(path, content)
    return path, states[0] if isinstance(states, list) and states else None


def _tensors_in(folder: DcpFolder, prefix: str = "") -> dict[str, LazyTensor]:
    """Return the tensors whose names begin so and that can be weights, with all layers numbered.

    The prefix is left out of their names; without a prefix the optimizer's are left out.
    """
    tensors = {}
    for stored, state in folder.states.items():
        is_wanted = stored.startswith(prefix or ("embedding.", "decoder.", "output_layer."))
        if not is_wanted or state.properties.dtype not in WEIGHT_TYPES or 0 in state.size:
            continue
        name = stored.removeprefix(prefix)
        if _STACKED.search(name) and len(state.size) in (2, 3):
            for layer in range(state.size[0]):
                tensors[_STACKED.sub(rf"\g<1>{layer}.", name)] = folder.tensor(stored, layer)
        elif len(state.size) in (1, 2):
            tensors[name] = folder.tensor(stored)
    for gate in [name for name in tensors if name.endswith("linear_fc1.weight_w")]:
        whole, up = gate.removesuffix("_w"), f"{gate.removesuffix('_w')}_v"
        if up in tensors:  # stored apart, as with `singleton_local_shards`
            tensors[whole] = joined([tensors.pop(gate), tensors.pop(up)], 0)
    return tensors


def write_dist(directory: Path, common: Mapping[str, Any], whole: Mapping[str, LazyTensor]) -> None:
    """Fill an empty folder with a checkpoint of the whole model, whose layers are stacked."""
    torch.save(dict(common), directory / COMMON)
    tensors: dict[str, dict[Shape, LazyTensor]] = {}
    for name, tensor in whole.items():
        layer = NUMBERED.search(name)
        index = () if layer is None else (int(layer[2]),)
        tensors.setdefault(NUMBERED.sub(r"\1", name), {})[index] = tensor
    write_dcp(directory, tensors, f"--output {directory}")
    _add_extra_states(directory, common["args"].num_layers)
    write_json(directory / BACKENDS, _WRITTEN)


def _add_extra_states(directory: Path, num_layers: int) -> None:
    """Add the objects that Megatron-core's modules ask for, all of which are one `None`."""
    metadata = read_metadata(directory)
    path = directory / "__1_0.distcp"
    with path.open("wb") as file:
        torch.save([None], file)
    info = _StorageInfo(path.name, 0, path.stat().st_size)
    parts = [(f"mlp.{m}" if "fc" in m else f"self_attention.{m}") for m in _WITH_EXTRA_STATE]
    names = [
        f"decoder.layers.{part}._extra_state/shard_{layer}_{num_layers}"
        for part in parts
        for layer in range(num_layers)
    ]
    for name in (*names, "decoder.final_layernorm._extra_state/shard_0_1"):
        metadata.state_dict_metadata[name] = BytesStorageMetadata()
        metadata.storage_data[MetadataIndex(name)] = info
    (directory / METADATA).write_bytes(pickle.dumps(metadata))
