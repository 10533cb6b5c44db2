"""Links: what a rank's communication runs on, from comm streams to the settings of groups."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from paro.distributed.byte_counter import ByteCounter
from paro.distributed.comm_stream import CommStreams, make_comm_streams
from paro.distributed.exposed_time import Exposure
from paro.distributed.groups import GroupConfig


@dataclass(frozen=True, slots=True)
class Links:
    """Shared by everything that a rank sends and waits for.

    `group_config` is None for a rank that is planned and never runs: it has no process groups.
    """

    streams: CommStreams
    traffic: ByteCounter = field(default_factory=ByteCounter)
    exposure: Exposure = field(default_factory=Exposure)
    group_config: GroupConfig | None = None


def make_links(device: torch.device, config: GroupConfig, *, overlap: bool = True) -> Links:
    """Links with comm streams of their own, on the meta device for a rank that never runs."""
    exposure = Exposure(on_streams=device.type == "cuda" and config.backend == "nccl")
    streams = make_comm_streams(device, overlap=overlap, backend=config.backend, note=exposure.note)
    made_for = None if device.type == "meta" else config
    return Links(streams, ByteCounter(), exposure, made_for)
