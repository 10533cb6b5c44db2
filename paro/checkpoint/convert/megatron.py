"""Megatron-LM's checkpoints: reads its formats in any layout of ranks, writes `torch` for one."""

from __future__ import annotations

import mmap
from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.serialization import safe_globals, set_default_mmap_options, skip_data

from paro.checkpoint.convert.hugging_face import (
    COMPANIONS,
    begins_with_bos,
    companions_in,
    tokenizer_of,
)
from paro.checkpoint.convert.megatron_dist import is_dist, open_dist, write_dist
from paro.checkpoint.convert.megatron_names import (
    NUMBERED,
    MegatronModel,
    args_in,
    config_of,
    fused,
    unfused,
    written_args,
)
from paro.checkpoint.convert.megatron_optim import PREFIX, written_optimizer
from paro.checkpoint.convert.source import (
    LazyTensor,
    ModelSource,
    joined,
    lazy,
    picked,
    with_vocabulary,
)
from paro.checkpoint.convert.tensor_files import is_weight, load_torch_file
from paro.checkpoint.directory import MAX_TRACKER_BYTES, TRACKER, iteration_directory
from paro.checkpoint.manifest import METADATA
from paro.errors import UserError
from paro.files.regular_file import paths_in, read_bytes
from paro.layout import shape_text

FILE = "model_optim_rng.pt"


def open_megatron(root: Path, *, optimizer: bool = False) -> ModelSource:
    """Open a checkpoint of Megatron-LM, in its formats torch or torch_dist.

    With `optimizer` it has the optimizer's states, too. `UserError` if it cannot be read.
    """
    directory = _iteration(root)
    if is_dist(directory):
        model = open_dist(directory, optimizer=optimizer)
    elif optimizer:
        raise UserError(
            f"--with-optimizer: {directory} is not in torch_dist, whose optimizer alone can be read"
        )
    else:
        model = _open_torch(directory)
    config, vocab_size = config_of(model)
    rows = config.vocab_size if optimizer else vocab_size  # rows of padding have trained
    tensors = unfused(config, model.tensors, model.path)
    for name, tensor in tensors.items() if optimizer else ():
        if tensor.dtype is not torch.float32:
            raise UserError(f"--with-optimizer: {model.path} has no fp32 master of {name}")
    companions = companions_in(root / COMPANIONS)
    # A tokenizer.model alone is from a folder of Meta's, whose texts begin with BOS.
    begins = {*companions} == {"tokenizer.model"} or begins_with_bos(companions)
    return ModelSource(
        config=replace(config, vocab_size=rows),
        tensors=with_vocabulary(tensors, rows),
        companions=companions,
        tokenizer=tokenizer_of(companions, begins=begins),
        begins_with_bos=begins,
        notes=() if companions else (f"{root} has no tokenizer: prompts are token ids",),
        moments={
            kind: unfused(config, moments, model.path, f"{PREFIX}{kind}.")
            for kind, moments in model.moments.items()
        },
        progress=model.progress,
    )


def write_megatron(
    source: ModelSource, root: Path, *, rows: int, divisible_by: int, dist: bool = False
) -> None:
    """Fill an empty folder with a `release` checkpoint; embedding and head have `rows` rows.

    Its format is torch_dist with `dist`, else torch. With moments it is an iteration, from which
    Megatron-LM continues.
    """
    config = replace(source.config, vocab_size=rows)
    whole = fused(config, with_vocabulary(source.tensors, rows))
    dtype = next(iter(whole.values())).dtype
    args = written_args(config, source.config.vocab_size, dtype, divisible_by)
    common = {"args": args, "checkpoint_version": 3.0, "iteration": 0}
    name = tracked = "release"
    if source.moments:
        more, states = written_optimizer(source, config)
        common, whole = common | more, whole | states
        for count in ("iteration", "consumed_train_samples", "consumed_valid_samples"):
            setattr(args, count, source.progress["state"][count])
        args.global_batch_size = source.progress.get("global_batch_size")
        args.no_save_rng = True  # it holds no state of random numbers
        tracked = str(more["iteration"])
        name = iteration_directory(root, more["iteration"]).name
    (root / name).mkdir()
    if dist:
        args.ckpt_format = "torch_dist"
        write_dist(root / name, common, whole)
    else:
        args.ckpt_format = "torch"
        _write_torch(root / name / "mp_rank_00" / FILE, common, whole)
    source.copy_companions(root / COMPANIONS)
    (root / TRACKER).write_text(tracked, encoding="utf-8")


def _write_torch(path: Path, common: Mapping[str, Any], whole: Mapping[str, LazyTensor]) -> None:
    # Never written, so they take no memory; `skip_data` reserves their space in the file.
    room = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in whole.items()}
    path.parent.mkdir()
    with skip_data():
        torch.save({**common, "model": room}, path)
    del room
    with safe_globals([Namespace]), set_default_mmap_options(mmap.MAP_SHARED):
        mapped = torch.load(path, map_location="cpu", mmap=True, weights_only=True)["model"]
    for name, tensor in whole.items():
        for start, stop in tensor.row_ranges():
            mapped[name][start:stop] = tensor.rows(start, stop)


def _iteration(root: Path) -> Path:
    tracker = root / TRACKER
    if not tracker.is_file():
        raise UserError(f"{root} holds no checkpoint of Megatron's: it has no {TRACKER}")
    text = read_bytes(tracker, max_bytes=MAX_TRACKER_BYTES).decode(errors="replace").strip()
    if text == "release":
        return root / text
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise UserError(f"{tracker} says {text[:40]!r} and names no iteration")
    return iteration_directory(root, int(text))


def _open_torch(directory: Path) -> MegatronModel:
    """Open the files of all ranks: mp_rank_TT or, with pipeline parallelism, mp_rank_TT_PPP."""
    folders = paths_in(directory, "mp_rank_00", "mp_rank_00_000")
    path = (folders[0] if folders else directory / "mp_rank_00") / FILE
    if not path.is_file() and (directory / METADATA).is_file():
        raise UserError(
            f"{directory} is of --ckpt-format fsdp_dtensor or torch_dcp, as DCP's files without "
            "metadata.json are: only torch and torch_dist can be read"
        )
    if not path.is_file():
        raise UserError(
            f"{path} is missing: only --ckpt-format torch and torch_dist can be read, without "
            "expert parallelism"
        )
    args = args_in(load_torch_file(path), path)
    stages = args.get("pipeline_model_parallel_size", 1)
    ends = [f"_{stage:03d}" for stage in range(stages)] if stages > 1 else [""]
    by_rank = [
        _of_stages([directory / f"mp_rank_{rank:02d}{end}" / FILE for end in ends])
        for rank in range(args.get("tensor_model_parallel_size", 1))
    ]
    names = dict.fromkeys(name for rank in by_rank for name in rank)
    whole = {name: _of_ranks(name, by_rank, directory) for name in names}
    return MegatronModel(path=path, args=args, tensors=whole)


def _of_stages(paths: list[Path]) -> dict[str, LazyTensor]:
    """Return a tensor-parallel rank's tensors of all pipeline stages, with all layers numbered.

    With virtual pipeline parallelism a stage has several chunks of layers, and the second chunk of
    the first stage follows the first chunk of the last.
    """
    stages = [[*_chunks_in(path)] for path in paths]
    if len({*map(len, stages)}) > 1:
        raise UserError(f"{paths[0]} has {len(stages[0])} chunks of layers, and others have not")
    tensors: dict[str, LazyTensor] = {}
    first_layer = 0
    for chunk in (chunk for same in zip(*stages, strict=True) for chunk in same):
        layers = {0}
        for name, tensor in chunk.items():
            if (layer := NUMBERED.search(name)) is not None:
                layers.add(int(layer[2]) + 1)
                name = NUMBERED.sub(rf"\g<1>{first_layer + int(layer[2])}.", name, count=1)
            tensors.setdefault(name, tensor)
        first_layer += max(layers)
    return tensors


def _chunks_in(path: Path) -> Iterator[dict[str, LazyTensor]]:
    """Yield the tensors of each chunk of layers in a rank's file; `UserError` if it has none."""
    saved = load_torch_file(path)
    args_in(saved, path)
    chunks = [saved["model"]] if "model" in saved else []
    while f"model{len(chunks)}" in saved:
        chunks.append(saved[f"model{len(chunks)}"])
    if not chunks or not all(isinstance(chunk, dict) for chunk in chunks):
        raise UserError(f"{path} is no checkpoint of Megatron's: it has no model")
    for chunk in chunks:
        yield {str(name): lazy(value) for name, value in chunk.items() if is_weight(value)}


def _of_ranks(name: str, ranks: list[dict[str, LazyTensor]], directory: Path) -> LazyTensor:
    """Join a tensor of all tensor-parallel ranks."""
    parts = [rank[name] for rank in ranks if name in rank]
    for part in parts:
        if part.shape != parts[0].shape:
            raise UserError(
                f"{directory}: {name} is {shape_text(part.shape)} on one tensor-parallel rank and "
                f"{shape_text(parts[0].shape)} on another"
            )
    if len(parts) < len(ranks):
        raise UserError(f"{directory}: not every tensor-parallel rank has {name}")
    # Tensor parallelism cuts all tensors but norms.
    is_by_columns = name.endswith(("linear_proj.weight", "linear_fc2.weight"))
    dim = None if "norm" in name else int(is_by_columns)
    if dim == 1 and len(parts[0].shape) < 2:
        raise UserError(f"{directory}: {name} is no matrix")
    whole = joined(parts, dim)
    if ".linear_fc1.weight" not in name or whole.shape[0] % (2 * len(parts)):
        return whole
    of_ranks = torch.arange(whole.shape[0]).view(len(parts), 2, -1)
    return picked(whole, of_ranks.transpose(0, 1).flatten())
