"""Links: what a rank's communication runs on, from comm streams to the settings of groups."""

from __future__ import annotations

from dataclasses import dataclass, field

from paro.distributed.byte_counter import ByteCounter
from paro.distributed.comm_stream import CommStreams
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
