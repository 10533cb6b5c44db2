"""Micro-batches on the device, and the time that training waits for them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from data.batch import Batch
from paro.distributed.timers import Timers
from paro.errors import UserError


@dataclass(slots=True)
class TimedBatches(Iterator[Batch]):
    """Micro-batches on the device, with the seconds that the training thread waited for them."""

    source: Iterator[Batch]
    device: torch.device
    timers: Timers
    seconds: float = 0.0
    kept: list[Batch] | None = None  # all that were read; None: they are not kept

    def __next__(self) -> Batch:
        begin = time.perf_counter()
        try:
            with self.timers.measure("batch-generator", level=2):
                batch = next(self.source)
        # Causes: a token id above the vocabulary in a file too large to scan, or a dead worker.
        except UserError as error:
            raise UserError(*error.args, on_this_rank=True) from error
        self.seconds += time.perf_counter() - begin
        if self.kept is not None:
            self.kept.append(batch)
        return batch.to(self.device, non_blocking=True)
