"""Writes the Hugging Face folder of a run in parallel, by ranks that each hold a part of it."""

# Each rank writes its chunks at their places in files that the first rank has made at full length.
# Not through a mapping: nodes would write back each other's parts of a page.

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from itertools import cycle
from pathlib import Path

from torch import Tensor

from model.hugging_face import hugging_face_name
from paro.checkpoint.agreement import CheckpointRanks
from paro.checkpoint.chunks import ChunkedState
from paro.checkpoint.convert.hugging_face import HuggingFacePlan
from paro.checkpoint.convert.source import LazyTensor, finite_cast
from paro.checkpoint.convert.tensor_files import bytes_of, safetensors_plan
from paro.checkpoint.manifest import sync
from paro.distributed.world import World
from paro.errors import writing
from paro.files.atomic_file import check_absent, temporary_beside
from paro.layout import Shape
from paro.spec.states import PARAM


def write_by_ranks(
    plan: HuggingFacePlan, states: Mapping[str, ChunkedState], target: Path, ranks: CheckpointRanks
) -> list[str]:
    """Write the folder of --save-hf, which is `target`, and return lines about it; collective.

    `states` are this rank's chunks of the parameters that ranks hold. The folder is complete or
    does not exist: an error is raised on all ranks and leaves nothing behind.
    """
    blame = f"--save-hf {target}"
    temporary: Path = ranks.everyone.gather(temporary_beside(target))[0]

    def begin() -> None:
        with writing(blame):
            temporary.mkdir(parents=True)
            make_files(plan, temporary)

    def finish() -> list[str]:
        with writing(blame):
            notes = plan.write_rest(temporary)
            for path in (*temporary.iterdir(), temporary):  # all is durable before its name is
                sync(path)
            check_absent("--save-hf", target)
            temporary.rename(target)
            sync(target.absolute().parent)
        return notes

    try:
        ranks.first_decides(begin, "")
        with ranks.raise_on_all_ranks(blame):
            written = write_parts(plan, states, temporary, ranks.everyone.world)
        total = sum(ranks.everyone.gather(written))
        assert total == plan.num_bytes, f"{total} of {plan.num_bytes} bytes are written"
        return ranks.first_decides(finish, "")
    finally:
        if ranks.is_first_of_folder:
            shutil.rmtree(temporary, ignore_errors=True)


def make_files(plan: HuggingFacePlan, directory: Path) -> None:
    """Make the files of tensors, with their headers and at full length."""
    for name, tensors in plan.files.items():
        header, _ = safetensors_plan(tensors)
        with (directory / name).open("xb") as file:
            file.write(header)
            file.truncate(len(header) + sum(tensor.num_bytes for tensor in tensors.values()))


def write_parts(
    plan: HuggingFacePlan, states: Mapping[str, ChunkedState], directory: Path, world: World
) -> int:
    """Write a rank's part of all tensors into files that exist; return the number of bytes.

    Ranks take turns to write the chunks of tensors that no rank holds.
    """
    held = {hugging_face_name(name.removeprefix(f"{PARAM}.")): states[name] for name in states}
    turns, written = cycle(range(world.size)), 0
    for file, tensors in plan.files.items():
        _, places = safetensors_plan(tensors)
        with (directory / file).open("r+b") as out:
            for name, tensor in tensors.items():
                if name in held:
                    chunks = iter(held[name].chunks.items())
                else:
                    mine = (r for r in tensor.row_ranges() if next(turns) == world.rank)
                    chunks = (((rows[0],), tensor.rows(*rows)) for rows in mine)
                for offsets, values in chunks:
                    for at, content in _runs(tensor, offsets, values):
                        out.seek(places[name] + at)
                        written += out.write(content)
            out.flush()
            os.fsync(out.fileno())  # a server's full disk is reported here
    return written


def _runs(tensor: LazyTensor, offsets: Shape, values: Tensor) -> Iterator[tuple[int, memoryview]]:
    """Yield each contiguous run of a chunk in an unpadded tensor: offset in bytes, and content.

    The chunk begins at `offsets` in the tensor; of whole rows only the first offset is needed.
    """
    values = values.detach()[: max(0, tensor.shape[0] - offsets[0])].cpu()
    values = finite_cast(values, tensor.dtype, tensor.name)
    row, size = tensor.num_bytes // tensor.shape[0], tensor.dtype.itemsize
    if values.shape[1:] == tensor.shape[1:]:
        yield offsets[0] * row, bytes_of(values)
    else:
        for index, part in enumerate(values, offsets[0]):
            yield index * row + offsets[1] * size, bytes_of(part)
