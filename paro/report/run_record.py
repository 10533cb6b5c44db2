"""FILE.run.json next to a metrics file: arguments, environment and evaluations of the run."""

# {"starts": [{"iteration", "time", "arguments", "facts", "environment", "measured"}, ...],
#  "validations": [{"iteration", "data_set", "lm_loss", "bits_per_byte"}, ...]}
# A resumed run adds its start, and removes evaluations of iterations that it will run again.

from __future__ import annotations

import json
import math
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict, cast

from data.atomic_file import replacing
from paro.errors import UserError
from paro.untrusted.schema import Count, Figure, Positive, read_json

if TYPE_CHECKING:  # importing these loads torch, which readers of the file do not need
    import torch

    from paro.report.record import RunFacts, Validation


class _Peak(TypedDict):
    source: str


class Facts(TypedDict):
    """Fields of a run's `RunFacts` that reports read."""

    world_size: NotRequired[Positive]
    peak: NotRequired[_Peak]
    predicted: NotRequired[dict[str, Figure]]


class _Start(TypedDict):
    iteration: Count
    time: NotRequired[str]
    arguments: NotRequired[dict[str, Any]]
    facts: NotRequired[Facts]
    environment: NotRequired[dict[str, str]]
    measured: NotRequired[dict[str, Any]]  # measured step; facts["planned"] has the predicted step


class _Validation(TypedDict):
    iteration: Count
    data_set: str
    lm_loss: Figure | None
    bits_per_byte: NotRequired[Figure | None]


class Record(TypedDict):
    """The top-level fields of a run record file."""

    starts: NotRequired[list[_Start]]
    validations: NotRequired[list[_Validation]]


def read_record(path: Path) -> Record:
    """Read a run's record; empty if there is no file."""
    if not path.exists():
        return {}
    try:
        record: Record = read_json(path, Record)
    except UserError as error:
        raise UserError(f"{error}; remove it to go on without what it says") from error
    return record


class RunRecord:
    """The run record that the first rank writes; every change rewrites the whole file."""

    def __init__(self, path: Path, *, start_iteration: int) -> None:
        self._path = path
        known = read_record(path) if start_iteration > 0 else Record()
        self._starts = [s for s in known.get("starts", []) if s["iteration"] < start_iteration]
        self._validations = [
            v for v in known.get("validations", []) if v["iteration"] <= start_iteration
        ]
        self._start_iteration = start_iteration

    def start(self, arguments: Mapping[str, object], facts: RunFacts, device: torch.device) -> None:
        """Add this start of the run."""
        self._starts.append(
            {
                "iteration": self._start_iteration,
                "time": datetime.now().astimezone().isoformat(timespec="seconds"),
                "arguments": dict(arguments),
                "facts": cast("Facts", asdict(facts)),
                "environment": environment(device),
            }
        )
        self._write()

    def measured(self, seconds: Mapping[str, float], peak_bytes: int) -> None:
        """Add peak memory and measured seconds, with the keys of `facts.planned`, to this start."""
        self._starts[-1]["measured"] = {"seconds": dict(seconds), "peak_bytes": peak_bytes}
        self._write()

    def validation(self, validation: Validation) -> None:
        """Add an evaluation."""
        self._validations.append(
            {
                "iteration": validation.iteration,
                "data_set": validation.name,
                "lm_loss": _finite(validation.lm_loss),
                "bits_per_byte": _finite(validation.bits_per_byte),
            }
        )
        self._write()

    def _write(self) -> None:
        record = {"starts": self._starts, "validations": self._validations}
        with replacing(self._path) as temporary:
            temporary.write_text(json.dumps(record, indent=1, default=str) + "\n", encoding="utf-8")


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def environment(device: torch.device) -> dict[str, str]:
    """Collect versions, hardware and settings that a run's measurements depend on besides flags."""
    import torch

    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "cores": str(os.cpu_count()),
        "threads of a rank": str(torch.get_num_threads()),
    }
    if device.type == "cuda":
        found["device"] = torch.cuda.get_device_name(device)
        found["CUDA"] = str(torch.version.cuda)
    else:
        found["device"] = f"CPU, {_cpu_name()}"
    return found


def _cpu_name() -> str:
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"
