"""How many samples and micro-batches each iteration takes, ramp-up of the batch size included."""

# Megatron's rule: with --rampup-batch-size START INCREMENT SAMPLES the batch grows from START to
# --global-batch-size in equal steps of INCREMENT, and each size lasts for SAMPLES / (number of
# steps) samples. Everything here is a function of the samples consumed so far, so that a run which
# resumes needs no state for it.

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSchedule:
    """The batch sizes of a run; `rampup_batch_size` is (start, increment, samples) or None."""

    micro_batch_size: int
    global_batch_size: int
    data_parallel_size: int
    rampup_batch_size: tuple[int, int, int] | None = None

    def __post_init__(self) -> None:
        for flag, size in (
            ("--micro-batch-size", self.micro_batch_size),
            ("--global-batch-size", self.global_batch_size),
        ):
            if size < 1:
                raise ValueError(f"{flag} {size} must be at least 1")
        self._check_divides("--global-batch-size", self.global_batch_size)
        if self.rampup_batch_size is not None:
            self._check_rampup(*self.rampup_batch_size)

    @property
    def samples_per_micro_batch(self) -> int:
        """Samples that all ranks together take in one micro-batch."""
        return self.micro_batch_size * self.data_parallel_size

    def batch_size_at(self, consumed_samples: int) -> int:
        """The global batch size of the iteration that starts after `consumed_samples`."""
        if self.rampup_batch_size is None:
            return self.global_batch_size
        start, increment, rampup_samples = self.rampup_batch_size
        if start == self.global_batch_size or consumed_samples >= rampup_samples:
            return self.global_batch_size
        num_increments = (self.global_batch_size - start) // increment
        return start + int(consumed_samples / (rampup_samples / num_increments)) * increment

    def num_micro_batches_at(self, consumed_samples: int) -> int:
        """How many micro-batches each rank takes in that iteration."""
        return self.batch_size_at(consumed_samples) // self.samples_per_micro_batch

    def samples_after(self, iterations: int, consumed: int = 0) -> int:
        """Samples consumed after `iterations` more iterations, by default the first."""
        while iterations > 0 and self._in_rampup(consumed):
            consumed += self.batch_size_at(consumed)
            iterations -= 1
        return consumed + iterations * self.global_batch_size

    def iterations_within(self, samples: int, consumed: int = 0) -> int:
        """Iterations that still fit into `samples`, of which some may be consumed already.

        A last partial batch is left out.
        """
        iterations = 0
        while self._in_rampup(consumed):
            consumed += self.batch_size_at(consumed)
            if consumed > samples:
                return iterations
            iterations += 1
        return iterations + max(0, samples - consumed) // self.global_batch_size

    def _in_rampup(self, consumed_samples: int) -> bool:
        return self.rampup_batch_size is not None and consumed_samples < self.rampup_batch_size[2]

    def _check_rampup(self, start: int, increment: int, samples: int) -> None:
        flag = f"--rampup-batch-size {start} {increment} {samples}"
        if start < 1 or increment < 1 or samples < 0:
            raise ValueError(f"{flag}: START and INCREMENT must be at least 1, SAMPLES at least 0")
        if start > self.global_batch_size:
            raise ValueError(
                f"{flag} starts above --global-batch-size {self.global_batch_size}: lower START"
            )
        if (self.global_batch_size - start) % increment != 0:
            raise ValueError(
                f"{flag} cannot reach --global-batch-size {self.global_batch_size} from {start} "
                f"in steps of {increment}"
            )
        self._check_divides(f"{flag}: START", start)
        if start != self.global_batch_size:
            self._check_divides(f"{flag}: INCREMENT", increment)

    def _check_divides(self, what: str, size: int) -> None:
        if size % self.samples_per_micro_batch != 0:
            raise ValueError(
                f"{what} {size} is not divisible by --micro-batch-size {self.micro_batch_size} "
                f"times {self.data_parallel_size} ranks (= {self.samples_per_micro_batch})"
            )
