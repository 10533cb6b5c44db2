"""Launchers that start nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.launch_scripts import RECORDER


@pytest.fixture(scope="session")
def recorders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of launchers that start nothing."""
    folder = tmp_path_factory.mktemp("bin")
    for name in ("python", "torchrun", "srun"):
        (folder / name).write_text(RECORDER)
        (folder / name).chmod(0o755)
    (folder / "scontrol").write_text('#!/bin/sh\nprintf "first\\nsecond\\n"\n')
    (folder / "scontrol").chmod(0o755)
    return folder
