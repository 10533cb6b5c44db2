"""How many samples and micro-batches each iteration takes, ramp-up of the batch size included."""

# Megatron's rule: with --rampup-batch-size START INCREMENT SAMPLES the batch grows from START to
# --global-batch-size in equal steps of INCREMENT, and each size lasts for SAMPLES / (number of
# steps) samples. Everything here is a function of the samples consumed so far, so that a run which
# resumes needs no state for it.

from __future__ import annotations

from dataclasses import dataclass

from paro.quantities import count_text


def check_multiple(what: str, size: int, micro_batch_size: int, *, num_ranks: int) -> None:
    """`ValueError` with the nearest sizes unless all ranks take the same whole micro-batches."""
    at_once = micro_batch_size * num_ranks
    if size > 0 and size % at_once == 0:
        return
    below = size // at_once * at_once
    raise ValueError(
        f"{what} {size} is no multiple of --micro-batch-size {micro_batch_size} times "
        f"{count_text(num_ranks, 'rank')} (= {at_once}): choose "
        + (f"{below} or {below + at_once}" if below > 0 else f"{at_once}")
    )


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
        self._check_multiple("--global-batch-size", self.global_batch_size)
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
        self._check_multiple(f"{flag}: START", start)
        if start != self.global_batch_size:
            self._check_multiple(f"{flag}: INCREMENT", increment)

    def _check_multiple(self, what: str, size: int) -> None:
        check_multiple(what, size, self.micro_batch_size, num_ranks=self.data_parallel_size)
