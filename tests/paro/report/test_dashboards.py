"""TensorBoard and W&B: independent of each other, and their failures never stop training."""

import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from paro.report.config import ReportConfig
from paro.report.dashboards import RUN_ID_FILE, Dashboards, check_login, open_dashboards
from paro.report.log import Log
from tests.helpers.object_server import wandb_server
from tests.helpers.refusals import output_of, refused


class Faulty:
    """A dashboard whose writes wait until it is released, and fail then: a full disk."""

    name = "Faulty"
    place = "nowhere"

    def __init__(self) -> None:
        self.calls = 0
        self.released = threading.Event()
        self.failed = threading.Event()

    def write(self, scalars: object, iteration: int, samples: int) -> None:
        self.calls += 1
        self.released.wait()
        self.failed.set()
        raise OSError("no space\nleft")

    def close(self) -> None:
        raise AssertionError("it was left out before")


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    """What runs of a test import as wandb, and the run that it starts."""
    fake = MagicMock(id="abc123", starting_step=0, url="https://wandb.ai/e/p/runs/abc123")
    fake.settings = SimpleNamespace(mode="online", sync_dir="wandb/offline-run-1")
    fake.init.return_value, fake.Settings = fake, dict
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def test_wandb_needs_no_tensorboard(wandb: MagicMock) -> None:
    config = ReportConfig(wandb_project="p", wandb_entity="e", wandb_exp_name="n")
    boards = open_dashboards(config, Log(), {"lr": 0.1})
    boards.write({"lm loss": 2.0}, iteration=3, samples=24)
    boards.close()
    assert wandb.init.call_args.kwargs == {
        "project": "p", "entity": "e", "name": "n", "dir": None, "config": {"lr": 0.1},
        "settings": {"console": "off", "silent": True},
    }  # fmt: skip
    wandb.log.assert_called_once_with({"lm loss": 2.0, "samples vs steps": 24}, step=3)
    assert wandb.finish.called
    open_dashboards(config, Log(rank=0, world_size=2), {}).write({"lm loss": 2.0}, 4, samples=32)
    assert wandb.log.call_count == 1, "only the last rank opens any"
    wandb.settings.mode = "offline"
    message = output_of(lambda: open_dashboards(ReportConfig(wandb_project="p"), Log(), {}).close())
    assert message == "> Weights & Biases: offline, until you run wandb sync wandb/offline-run-1\n"


def test_tensorboard_has_each_tag_over_iterations_and_over_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    from torch.utils.tensorboard import SummaryWriter

    close, closed = SummaryWriter.close, Counter[str]()

    def counted(writer: SummaryWriter) -> None:
        closed[Path(writer.log_dir).name] += 1
        close(writer)

    monkeypatch.setattr(SummaryWriter, "close", counted)
    config = ReportConfig(tensorboard_dir=str(tmp_path))

    def start(iteration: int, *steps: int, loss: float) -> None:
        boards = open_dashboards(config, Log(), {}, start_iteration=iteration)
        boards.write({"recovery/seconds": 1.0}, iteration=iteration, samples=8 * iteration)
        for step in steps:
            boards.write({"lm loss": loss}, iteration=step, samples=8 * step)
        boards.close()

    def shown(folder: Path, tag: str) -> list[tuple[int, float]]:
        events = accumulator.EventAccumulator(str(folder))
        events.Reload()
        return [(event.step, event.value) for event in events.Scalars(tag)]

    start(0, 1, 2, 3, 4, loss=2.5)
    # Resumed from an earlier iteration than the last: one value a step, of the later start.
    start(2, 3, loss=1.5)
    wanted = [(1, 2.5), (2, 2.5), (3, 1.5)]
    assert shown(tmp_path, "lm loss") == wanted
    over_samples = shown(tmp_path / "samples", "lm loss vs samples")
    assert over_samples == [(8 * step, loss) for step, loss in wanted]
    assert [step for step, _ in shown(tmp_path, "recovery/seconds")] == [0, 2]

    start(0, 1, loss=0.5)  # from the beginning: what was there is a run of its own
    earlier = tmp_path / "earlier_1"
    assert shown(earlier, "lm loss") == wanted
    assert shown(earlier / "samples", "lm loss vs samples") == over_samples
    assert shown(tmp_path, "lm loss") == [(1, 0.5)]
    assert shown(tmp_path / "samples", "lm loss vs samples") == [(8, 0.5)]
    assert closed == {tmp_path.name: 3, "samples": 3}


def test_a_failing_one_is_left_out(wandb: MagicMock, capsys: pytest.CaptureFixture[str]) -> None:
    faulty = Faulty()
    faulty.released.set()
    boards = open_dashboards(ReportConfig(wandb_project="p"), Log(), {})
    boards.open("--faulty", lambda: faulty)
    boards.write({"lm loss": 2.0}, iteration=1, samples=8)
    assert faulty.failed.wait(10.0)
    time.sleep(0.05)
    boards.write({"lm loss": 2.0}, iteration=2, samples=8)
    boards.close()
    assert (faulty.calls, wandb.log.call_count) == (1, 2)
    message = capsys.readouterr().out
    assert message.startswith(
        "> Weights & Biases: https://wandb.ai/e/p/runs/abc123\n> Faulty: nowhere"
    )
    assert message.endswith("\nFaulty is left out from here on: OSError: no space left\n")


def test_a_dashboard_that_hangs_holds_nobody(capsys: pytest.CaptureFixture[str]) -> None:
    stuck, boards = Faulty(), Dashboards(Log())
    boards.open("--stuck", lambda: stuck)
    for iteration in range(2000):
        boards.write({"lm loss": 2.0}, iteration=iteration, samples=8)
    assert capsys.readouterr().out.count("left out from here on: it is 1000 writes late\n") == 1
    boards.open("--stuck", lambda: stuck)
    boards.write({"lm loss": 2.0}, iteration=1, samples=8)
    boards.close(seconds=0.1)
    assert "it did not end within 0 seconds" in capsys.readouterr().out
    stuck.released.set()


KEY = 40 * "0"


@pytest.fixture
def wandb_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """wandb as on a machine without a login."""
    wandb = pytest.importorskip("wandb")
    for name in [name for name in os.environ if name.startswith("WANDB_") or name == "NETRC"]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "wandb"))
    monkeypatch.chdir(tmp_path)
    wandb.teardown()  # it reads the environment only once
    yield wandb
    wandb.teardown()


@pytest.mark.process
@pytest.mark.parametrize(
    ("mode", "rewinds"),
    [
        ("online", True),
        pytest.param("online", False, marks=pytest.mark.verify),
        pytest.param("offline", True, marks=pytest.mark.verify),
    ],
)
@pytest.mark.usefixtures("wandb_alone")
def test_wandb_has_one_value_a_step_after_a_resume_from_an_earlier_iteration(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    mode: str,
    rewinds: bool,
) -> None:
    """The third start is where the second ended; the run is the same until a fresh start."""
    place, ids = tmp_path / "ckpt" / RUN_ID_FILE, []
    with wandb_server(rewinds=rewinds) as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        monkeypatch.setenv("WANDB_API_KEY", KEY)
        monkeypatch.setenv("WANDB_MODE", mode)
        config = ReportConfig(wandb_project="p", wandb_entity="e", wandb_save_dir=str(tmp_path))
        arguments = {"save": str(place.parent)}
        for begin, value in ((0, 1.0), (3, 2.0), (8, 3.0)):
            boards = open_dashboards(config, Log(), arguments, start_iteration=begin)
            for step in range(begin + 1, begin + 6):
                boards.write({"lm loss": value}, iteration=step, samples=step)
            boards.close()
            ids.append(place.read_text())
        for folder in sorted(tmp_path.glob("wandb/offline-run-*")):
            command = [sys.executable, "-m", "wandb", "sync", folder]
            subprocess.run(command, env=os.environ | {"WANDB_MODE": "online"}, check=True)
        kept = 3 if rewinds else 5
        assert server.values("lm loss") == {
            step: 1.0 if step <= kept else 2.0 if step <= 8 else 3.0 for step in range(1, 14)
        }
        open_dashboards(config, Log(), arguments).close()
    assert len({*ids}) == 1
    assert place.read_text() not in ids
    message = "keeps its values up to iteration 5: it cannot rewind"
    assert capsys.readouterr().out.count(message) == (not rewinds)


@pytest.mark.process
@pytest.mark.parametrize(
    ("name", "value", "works"),
    [
        ("WANDB_API_KEY", KEY, True),
        ("WANDB_MODE", "offline", True),
        ("netrc", f"machine api.wandb.ai login user password {KEY}", True),
        ("WANDB_API_KEY", "abc", False),
    ],
)
@pytest.mark.usefixtures("wandb_alone")
def test_a_key_or_no_need_of_one_is_found_and_another_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, value: str, works: bool
) -> None:
    if name == "netrc":
        (tmp_path / ".netrc").write_text(value)
    else:
        monkeypatch.setenv(name, value)
    if works:
        check_login(ReportConfig(wandb_project="p"), Log())
    else:
        refused(lambda: check_login(ReportConfig(wandb_project="p"), Log()), "--wandb-project p:")


def test_names_are_cleaned_before_they_are_sent(wandb: MagicMock) -> None:
    config = ReportConfig(wandb_project="p\x1b", wandb_exp_name=f"n\u202e{'x' * 5000}")
    boards = open_dashboards(config, Log(), {"load": "\x1b[2J", "lr": 0.5})
    boards.write({f"validation-\x1b{'x' * 5000}": 2.0}, iteration=1, samples=8)
    boards.close()
    given = wandb.init.call_args.kwargs
    assert (given["project"], given["config"]) == ("p\\x1b", {"load": "\\x1b[2J", "lr": 0.5})
    (tag,) = (name for name in wandb.log.call_args.args[0] if name.startswith("validation-"))
    for name, cleaned in ((given["name"], "n\\u202exx"), (tag, "validation-\\x1bxx")):
        assert name.startswith(cleaned)
        assert len(name) <= 128


@pytest.mark.usefixtures("wandb")
def test_a_damaged_id_of_a_run_is_named(tmp_path: Path) -> None:
    path, config = tmp_path / RUN_ID_FILE, ReportConfig(wandb_project="p")
    for content in (b"", b"a/b", b"x" * 1000, b"\xff\xfe"):
        path.write_bytes(content)
        begin = partial(open_dashboards, config, Log(), {"save": str(tmp_path)}, start_iteration=5)
        assert output_of(begin).startswith(f"--wandb-project has no effect: UserError: {path}")
