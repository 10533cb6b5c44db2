"""The saved view shows tags that runs have; without an account nothing is sent."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.test_trackers import MEGATRON, OURS
from tests.helpers.commands import printed
from tests.helpers.refusals import refused
from tools import wandb_dashboard
from tools.wandb_dashboard import SECTIONS, describe, main, make_workspace

WORDS = ["--wandb-project", "llama", "--wandb-entity", "team"]


@pytest.fixture(autouse=True)
def nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


def test_every_panel_shows_tags_that_runs_write() -> None:
    shown = {tag for panels in SECTIONS.values() for panel in panels for tag in panel.tags}
    # Of a corpus, of averaged weights, and of outer steps.
    of_some_runs = {"bits per byte validation", "lm loss validation ema", "outer/grad-cosine"}
    assert shown <= MEGATRON | OURS | of_some_runs
    assert {tag for tag in OURS if tag.startswith("throughput/")} <= shown
    assert next(iter(SECTIONS)) == "throughput and MFU"


def test_the_library_takes_the_view_and_without_an_account_nothing_is_saved() -> None:
    pytest.importorskip("wandb_workspaces")
    workspace = make_workspace("team", "llama", "view")
    assert [section.name for section in workspace.sections] == list(SECTIONS)
    titles = [panel.title for panel in workspace.sections[0].panels]
    assert titles == [panel.title for panel in SECTIONS["throughput and MFU"]]
    refused(lambda: main([*WORDS, "--name", "+1"]), "--name +1")
    told = printed(main, *WORDS)
    assert told.startswith(describe("team", "llama", "throughput and MFU"))
    assert told.endswith("nothing was saved (no account: run `wandb login`)\n")


def test_with_an_account_it_saves_and_a_refusal_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("wandb_workspaces")
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)

    class Saved:
        url = "https://wandb.ai/team/llama?nw=abc"
        error: Exception | None = None

        def save(self) -> None:
            if self.error is not None:
                raise self.error

    monkeypatch.setattr(wandb_dashboard, "make_workspace", lambda *_: Saved())
    assert printed(main, *WORDS).endswith("saved: https://wandb.ai/team/llama?nw=abc\n")
    assert "nothing was saved (--dry-run)" in printed(main, *WORDS, "--dry-run")
    Saved.error = RuntimeError("project not\nfound")
    refused(lambda: main(WORDS), "project not found")
    refused(lambda: main(WORDS[:2]), "--wandb-entity is missing")
