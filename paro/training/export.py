"""Writes the final model of a run as a Hugging Face folder, for --save-hf."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from model.hugging_face import hugging_face_name
from paro.checkpoint.agreement import CheckpointRanks, ranks_by_folder, with_one_folder
from paro.checkpoint.base import open_base
from paro.checkpoint.chunks import ChunkedState, chunked_states
from paro.checkpoint.directory import common_in
from paro.checkpoint.manifest import sync
from paro.errors import UserError, about, writing
from paro.files.atomic_file import check_absent, temporary_beside
from paro.files.object_store import path_of
from paro.report.log import Log
from paro.sharding.buffers import TORCH_TYPES
from paro.spec.states import PARAM
from paro.training.resume import Resumed, common_record
from paro.training.step import Training, TrainState, last_iteration

if TYPE_CHECKING:
    from paro.checkpoint.convert.hugging_face import HuggingFacePlan
    from paro.config.run import RunConfig


def prepare_export(
    config: RunConfig, training: Training, resumed: Resumed, state: TrainState, log: Log
) -> Callable[[], None] | None:
    """Check --save-hf before a run trains; return the function that writes the folder; collective.

    None without the flag, or if the run is complete and the folder exists. `UserError` on all ranks
    if they do not share one folder.
    """
    if config.checkpoint.save_hf is None:
        return None
    target, control = Path(config.checkpoint.save_hf), training.control
    is_complete = state.iteration >= last_iteration(config.train, config.batches, state)
    with control.raise_on_all_ranks():
        if not is_complete:
            check_absent("--save-hf", target)
        plan = plan_export(config, training, resumed, state)
    if any(control.gather(target.exists())):
        log.log0(f"--save-hf {target} exists, and is left as it is")
        return None
    folders = ranks_by_folder(target.absolute().parent, control, f"--save-hf {target}")
    if len(folders) > 1:
        raise UserError(
            f"--save-hf {target} is another folder on {len(folders)} sets of ranks: give one that "
            "all share"
        )

    def export() -> None:
        """Write the folder from the states of all ranks; collective."""
        training.model.wait_for_updated_params()
        training.optimizer.outer.wait()
        log.log0(f"writing the model to --save-hf {target}")
        ranks, states = with_one_folder(control), _held(training, resumed)
        notes = write_by_ranks(plan, states, target, ranks)
        for line in (*plan.source.notes, *notes, f"  successfully wrote the model to {target}"):
            log.log0(line)

    return export


def plan_export(
    config: RunConfig, training: Training, resumed: Resumed, state: TrainState
) -> HuggingFacePlan:
    """Plan the folder of --save-hf as a conversion of the run's last checkpoint would."""
    # Imported here, since torch.distributed.checkpoint takes half a second.
    from paro.checkpoint.convert.hugging_face import HuggingFacePlan
    from paro.checkpoint.convert.native import source_of, tensors_in
    from paro.checkpoint.convert.source import LazyTensor

    flags, flag = config.checkpoint, Path(f"--save-hf {config.checkpoint.save_hf}")
    under = open_base(resumed.base, None, f"{flag}")
    named = {} if under is None else tensors_in(under)
    for name, held in _held(training, resumed).items():
        name = name.removeprefix(f"{PARAM}.")
        named[name] = LazyTensor(shape=held.shape, dtype=held.dtype, rows=_elsewhere, name=name)
    record = {"iteration": state.iteration, **common_record(config, training, resumed, state)}
    common = common_in(json.dumps(record), f"{flag}")  # with the types that are read of a file
    root = path_of(flags.save or str(flags.save_hf))  # what is not there yet has no companions
    source, dtype = source_of(common, named, flag, root), TORCH_TYPES.get(flags.save_hf_dtype or "")
    with about(f"{flag}: "):
        return HuggingFacePlan.of(source.with_each(lambda tensor: tensor.cast(dtype)))


def write_by_ranks(
    plan: HuggingFacePlan, states: Mapping[str, ChunkedState], target: Path, ranks: CheckpointRanks
) -> list[str]:
    """Write the folder of --save-hf, which is `target`, and return lines about it; collective.

    `states` are this rank's chunks of the parameters that ranks hold. The folder is complete or
    does not exist: an error is raised on all ranks and leaves nothing behind.
    """
    # Imported here, since torch.distributed.checkpoint takes half a second.
    from paro.checkpoint.convert.tensor_files import make_files, write_parts

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


def _held(training: Training, resumed: Resumed) -> dict[str, ChunkedState]:
    """Return the parameters that a checkpoint of the run holds, with the chunks of this rank."""
    shards = training.optimizer.flat_shards(frozen=resumed.base is None)
    of_parameters = (shard for shard in shards if shard.state == PARAM)
    return chunked_states(of_parameters, writers=range(training.control.world.size))


def _elsewhere(_start: int, _stop: int) -> Tensor:
    raise AssertionError("ranks hold the chunks of this tensor")
