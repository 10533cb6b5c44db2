"""Writes the Hugging Face folder of a run in parallel, by ranks that each hold a part of it."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from model.hugging_face import hugging_face_name
from paro.checkpoint.agreement import CheckpointRanks
from paro.checkpoint.chunks import ChunkedState
from paro.checkpoint.convert.hugging_face import HuggingFacePlan
from paro.checkpoint.convert.tensor_files import make_files, write_parts
from paro.checkpoint.manifest import sync
from paro.errors import writing
from paro.files.atomic_file import check_absent, temporary_beside
from paro.spec.states import PARAM


def write_by_ranks(
    plan: HuggingFacePlan, states: Mapping[str, ChunkedState], target: Path, ranks: CheckpointRanks
) -> list[str]:
    """Write the folder of --save-hf, which is `target`, and return lines about it; collective.

    `states` are this rank's chunks of the parameters that ranks hold. The folder is complete or
    does not exist: an error is raised on all ranks and leaves nothing behind.
    """
    blame = f"--save-hf {target}"
    held = {hugging_face_name(name.removeprefix(f"{PARAM}.")): states[name] for name in states}
    temporary: Path = ranks.everyone.gather(temporary_beside(target))[0]

    def begin() -> None:
        with writing(blame):
            temporary.mkdir(parents=True)
            make_files(plan.files, temporary)

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
            written = write_parts(plan.files, temporary, held, ranks.everyone.world)
        total = sum(ranks.everyone.gather(written))
        assert total == plan.num_bytes, f"{total} of {plan.num_bytes} bytes are written"
        return ranks.first_decides(finish, "")
    finally:
        if ranks.is_first_of_folder:
            shutil.rmtree(temporary, ignore_errors=True)
