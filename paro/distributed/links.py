"""Links of a rank: comm streams, and counters of bytes and exposed time."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from paro.distributed.byte_counter import ByteCounter
from paro.distributed.comm_stream import (
    CommStreams,
    CudaStreams,
    InlineStreams,
    ThreadStreams,
)
from paro.distributed.exposed_time import Exposure
from paro.topology import StreamKind


@dataclass(frozen=True, slots=True)
class Links:
    """Comm streams and counters that all communication of a rank shares.

    With `stream_kind` jobs run on comm streams of this kind, whatever they send.
    """

    streams: CommStreams
    traffic: ByteCounter = field(default_factory=ByteCounter)
    exposure: Exposure = field(default_factory=Exposure)
    stream_kind: StreamKind | None = None


def make_links(device: torch.device, backend: str, *, overlap: bool = True) -> Links:
    """Return links with comm streams of their own; without `overlap` jobs run when submitted."""
    has_cuda_streams = device.type == "cuda" and backend == "nccl"
    exposure = Exposure(on_streams=has_cuda_streams)
    streams: CommStreams = InlineStreams(exposure.note)
    if overlap:
        streams = CudaStreams() if has_cuda_streams else ThreadStreams(device)
    return Links(streams, ByteCounter(), exposure)
