"""Where a run is saved and what it starts from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """Megatron's checkpoint flags."""

    save: str | None = None
    save_interval: int | None = None
    save_retain_interval: int | None = None
    async_save: bool = False
    on_save_failure: str = "stop"  # or "continue"
    no_save_optim: bool = False
    load: str | None = None
    ckpt_step: int | None = None  # None: the newest that is whole
    exit_on_missing_checkpoint: bool = False
    finetune: bool = False
    no_load_optim: bool = False
    use_checkpoint_args: bool = False
    override_opt_param_scheduler: bool = False
    use_checkpoint_opt_param_scheduler: bool = False

    def __post_init__(self) -> None:
        for flag, value in (
            ("--ckpt-step", self.ckpt_step),
            ("--use-checkpoint-args", self.use_checkpoint_args or None),
            (
                "--use-checkpoint-opt_param-scheduler",
                self.use_checkpoint_opt_param_scheduler or None,
            ),
        ):
            if value is not None and self.load is None:
                raise ValueError(f"{flag} needs --load")
        if self.override_opt_param_scheduler and self.use_checkpoint_opt_param_scheduler:
            raise ValueError(
                "--override-opt_param-scheduler and --use-checkpoint-opt_param-scheduler "
                "contradict each other: give one"
            )
        if self.save_retain_interval is None:
            return
        if not self.save_interval or self.save_retain_interval % self.save_interval != 0:
            raise ValueError(
                f"--save-retain-interval {self.save_retain_interval} must be a multiple of "
                f"--save-interval {self.save_interval}"
            )
