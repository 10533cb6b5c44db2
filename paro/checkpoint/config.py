"""CheckpointConfig: where a run is saved; SavedRun: the checkpoint that it is loaded from."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from model.config import LlamaConfig
from paro.checkpoint.directory import candidates, common_of, find_checkpoint
from paro.checkpoint.manifest import DamagedError, Manifest, read_manifest
from paro.errors import UserError, check_least, contradiction
from paro.files.object_store import is_url, path_of

# Fields of the model that a run may change when it continues; so are those of fused kernels.
_FREE_FIELDS = {
    "recompute",
    "max_position_embeddings",
    "init_method_std",
    "lora",
    "attention_backend",
    "fp8_format",
    "z_loss_weight",
    "torch_compile",
}


def saved_fields(model: LlamaConfig) -> dict[str, Any]:
    """Return the fields of the model that checkpoints hold."""
    values = asdict(model)
    free = _FREE_FIELDS.union(name for name in values if name.startswith("fuses_"))
    return {name: value for name, value in values.items() if name not in free}


def as_read(record: Mapping[str, Any], kind: Any = None) -> dict[str, Any]:
    """Return a record as JSON has it (tuples become lists), with the defaults of a dataclass.

    A field that was added after a checkpoint had been written has its default there.
    """
    added = () if kind is None else (each for each in fields(kind) if each.default is not MISSING)
    values = {**{field.name: field.default for field in added}, **record}
    read: dict[str, Any] = json.loads(json.dumps(values))
    return read


def is_of_positions(name: str) -> bool:
    """Return whether a field of the model says how positions rotate, which no weight depends on."""
    return name.startswith(("rotary_", "rope_", "use_rope_", "position_", "yarn_"))


@dataclass(frozen=True, kw_only=True)
class SavedRun:
    """The manifest and the common.json of a checkpoint, without its tensors."""

    manifest: Manifest
    common: Mapping[str, Any]
    passed_over: tuple[str, ...] = ()  # log lines: why no better iteration was taken


def read_saved(root: Path, iteration: int, *, sizes: bool = True) -> SavedRun:
    """Read an iteration; `DamagedError` if it is damaged, with `sizes` also by files' sizes."""
    manifest = read_manifest(find_checkpoint(root, iteration))
    saved = SavedRun(manifest=manifest, common=common_of(manifest))
    manifest.check_sizes(manifest.files if sizes else ())
    return saved


def find_saved(
    root: Path,
    iteration: int | None = None,
    *,
    order: Callable[[Path], tuple[list[int], str | None]] = candidates,
    read: Callable[[Path, int], SavedRun] = read_saved,
    log: Callable[[str], None] = lambda _line: None,
) -> SavedRun | None:
    """Read `iteration`, or the first in `order` that is not damaged; None if nothing was saved.

    `log` gets the tracker's fault, and a line for each iteration that `read` finds damaged.
    `DamagedError` if the given iteration is damaged, or all are.
    """
    numbers, fault = order(root) if iteration is None else ([iteration], None)
    if numbers and fault is not None:
        log(f"  {fault}")
    for number in numbers:
        try:
            return read(root, number)
        except DamagedError as error:
            if iteration is not None:
                raise DamagedError(f"{error}; another --ckpt-step may be whole") from error
            log(f"  passing over iteration {number}: {error}")
            fault = fault or str(error)
    if fault is not None:
        raise DamagedError(f"{fault}; no checkpoint there is whole")
    return None


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Megatron's checkpoint flags."""

    save: str | None = None
    save_interval: int | None = None
    save_retain_interval: int | None = None
    async_save: bool = False
    on_save_failure: str = "stop"  # "stop" or "continue": what a run does after a failed save
    no_save_optim: bool = False
    start_over: bool = False  # whether to move the checkpoints in --save aside
    save_hf: str | None = None  # Hugging Face folder that a complete run writes
    save_hf_dtype: str | None = None  # type of its tensors; None: as checkpoints hold them
    load: str | None = None
    base: str | None = None  # folder of the base of --load, if the base has moved
    save_frozen: bool = False  # whether to save frozen parameters even if --load holds them
    ckpt_step: int | None = None  # iteration to load; None: the latest complete checkpoint
    exit_on_missing_checkpoint: bool = False
    finetune: bool = False
    no_load_optim: bool = False
    use_checkpoint_args: bool = False
    override_opt_param_scheduler: bool = False
    use_checkpoint_opt_param_scheduler: bool = False
    non_persistent_ckpt_type: str | None = None  # "local": in-memory checkpoints; None: none
    non_persistent_local_ckpt_dir: str | None = None  # folder of these; None: /dev/shm
    non_persistent_save_interval: int | None = None  # iterations between these; None: 1

    def __post_init__(self) -> None:
        for flag, is_given in (
            ("--ckpt-step", self.ckpt_step is not None),
            ("--base", self.base is not None),
            ("--use-checkpoint-args", self.use_checkpoint_args),
            ("--use-checkpoint-opt_param-scheduler", self.use_checkpoint_opt_param_scheduler),
        ):
            if is_given and self.load is None:
                raise UserError(f"{flag} needs --load")
        if self.save_hf_dtype is not None and self.save_hf is None:
            raise UserError(f"--save-hf-dtype {self.save_hf_dtype} needs --save-hf")
        check_least(0, ckpt_step=self.ckpt_step)
        check_least(
            1,
            save_interval=self.save_interval,
            save_retain_interval=self.save_retain_interval,
            non_persistent_save_interval=self.non_persistent_save_interval,
        )
        if self.override_opt_param_scheduler and self.use_checkpoint_opt_param_scheduler:
            flag = "--override-opt_param-scheduler"
            raise contradiction(flag, "--use-checkpoint-opt_param-scheduler")
        if self.start_over and self.save is None:
            raise UserError("--start-over needs --save")
        if self.start_over and is_url(str(self.save)):
            raise UserError(
                f"--start-over renames, which a store cannot: give another --save than {self.save}"
            )
        if self.start_over and self.saves_where_it_loads:
            raise UserError(
                f"--start-over moves the checkpoints of --save {self.save} aside and --load names "
                "the same folder: leave --start-over out to continue, or --load to begin again"
            )
        if self.save_retain_interval is None:
            return
        flag = f"--save-retain-interval {self.save_retain_interval}"
        if self.save_interval is None:
            raise UserError(f"{flag} needs --save-interval, of which it is a multiple")
        if self.save_retain_interval % self.save_interval != 0:
            raise UserError(f"{flag} must be a multiple of --save-interval {self.save_interval}")

    @property
    def saves_where_it_loads(self) -> bool:
        """True if --save and --load are one folder, which may not exist yet."""
        if self.save is None or self.load is None:
            return False
        return path_of(self.save).resolve() == path_of(self.load).resolve()

    @property
    def continues(self) -> bool:
        """True if the run continues from the checkpoints in --save."""
        return self.saves_where_it_loads and not self.finetune

    @cached_property
    def saved(self) -> SavedRun | None:
        """The checkpoint that --load would load, found and read once; None if there is none.

        It is for the configuration, made before this run holds the folder; loading looks again.
        """
        lines: list[str] = []
        saved = None
        if self.load is not None:
            saved = find_saved(path_of(self.load), self.ckpt_step, log=lines.append)
        return saved and replace(saved, passed_over=tuple(lines))

    @property
    def resumed_arguments(self) -> Mapping[str, Any]:
        """The arguments saved by the run that is resumed; empty for a new run."""
        return {} if self.finetune or self.saved is None else self.saved.manifest.arguments

    @property
    def resumed_samples(self) -> int:
        """The training samples that the resumed run has consumed; 0 for a new run."""
        state = {} if self.finetune or self.saved is None else self.saved.common.get("state", {})
        return int(state.get("consumed_train_samples", 0))
