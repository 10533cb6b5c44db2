"""TrainConfig: the configuration of the training loop."""

from __future__ import annotations

from dataclasses import dataclass

from paro.errors import UserError, check_between, check_least, check_positive

MOST_ITERATIONS = 10**9  # above 30 years of steps that take a second


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """The length of a training, the times of evaluations, and the reasons to exit."""

    train_iters: int  # iterations of the run, or those that --train-samples allows from the start
    train_samples: int | None = None
    eval_iters: int = 100
    eval_interval: int | None = 1000
    skip_train: bool = False  # True: only evaluate the loaded model
    calculate_per_token_loss: bool = False
    exit_interval: int | None = None
    exit_duration_in_mins: float | None = None
    exit_signal_handler: bool = False
    exit_signal: str = "SIGTERM"
    check_weight_hash_across_dp_replicas_interval: int | None = None
    manual_gc: bool = False
    manual_gc_interval: int = 0
    empty_unused_memory_level: int = 0
    log_num_zeros_in_grad: bool = False
    log_params_norm: bool = False
    trace_nan: bool = False  # True: name the first operation of a step that is not finite
    seed: int = 1234
    # Samples at the start with unquantized messages; None: until the learning rate has warmed up.
    inter_bits_warmup_samples: int | None = None

    def __post_init__(self) -> None:
        check_between(1, MOST_ITERATIONS, train_iters=self.train_iters)
        check_between(0, MOST_ITERATIONS, eval_iters=self.eval_iters)
        check_least(0, eval_interval=self.eval_interval, manual_gc_interval=self.manual_gc_interval)
        hashes = self.check_weight_hash_across_dp_replicas_interval
        check_least(1, check_weight_hash_across_dp_replicas_interval=hashes)
        check_least(1, exit_interval=self.exit_interval)
        check_positive(exit_duration_in_mins=self.exit_duration_in_mins)
        if self.skip_train and self.eval_iters == 0:
            raise UserError(
                "--skip-train and --eval-iters 0 leave nothing to do: give 1 or more iterations to "
                "evaluate"
            )
