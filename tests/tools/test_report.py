"""The report of runs stands alone; curves are compared by iteration; the view of W&B has tags."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from collections.abc import Iterable
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import BROWSERS
from tests.end_to_end.test_terminal import TAGS
from tests.helpers.refusals import measured, printed, read_lines, refused, write_lines
from tests.helpers.warm_process import HANGS_AFTER
from tools import wandb_dashboard
from tools.compare_curves import main as compare
from tools.report import main
from tools.run_report.charts import CHARTS, NAMED
from tools.run_report.runs import differences, read_runs
from tools.wandb_dashboard import SECTIONS, describe, make_workspace
from tools.wandb_dashboard import main as make_view

KINDS = ("gather", "reduce", "publish")
WHOLE = '{"iteration": 1, "lm_loss": 1, "tokens_per_second": 1, "iteration_time_ms": 1}\n'


def write_run(path: Path, strategy: str, *, speed: float = 1000.0, record: bool = True) -> Path:
    """A run of 20 logged iterations as the trainer records it."""
    times = {"learning_rate": 1e-3, "iteration_time_ms": 100.0, "data_wait_ms": 1.0}
    times |= {f"exposed_{kind}_ms": ms for kind, ms in zip(KINDS, (10.0, 14.0, 1.0), strict=True)}
    sizes = {"peak_memory_bytes": 300_000_000, "model_state_bytes": 7_000_000}
    sizes |= {"intra_bytes": 2_000_000, "inter_bytes": 1_000_000}
    lines = [
        {
            "iteration": iteration,
            "lm_loss": 8.0 / iteration if iteration != 3 else None,
            "grad_norm": 1.0 + 1.0 / iteration,
            "tokens_per_second": speed if iteration > 2 else 1.0,
            **{"mfu": 0.4, "mfu_causal": 0.35, **times, **sizes},
        }
        for iteration in range(1, 21)
    ]
    write_lines(path, *lines)
    if record:
        predicted = {"model-states": 7_000_000, "slices-under-way": 2_000_000, "total": 9_000_000}
        start: dict[str, Any] = {
            "iteration": 0,
            "arguments": {"paro_strategy": strategy, "lr": 1e-3, "save": str(path), "bf16": True},
            "facts": {"world_size": 4, "predicted": predicted, "peak": {"source": "typed <in>"}},
            "environment": {"torch": "2.13.0", "device": "CPU"},
        }
        validations = [
            {"iteration": 10, "data_set": "validation", "lm_loss": 1.25, "bits_per_byte": 0.5},
            {"iteration": 20, "data_set": "validation", "lm_loss": None},
            {"iteration": 20, "data_set": "test", "lm_loss": 9.0},
        ]
        found = {"starts": [start], "validations": validations}
        Path(f"{path}.run.json").write_text(json.dumps(found))
    return path


@pytest.fixture
def two_runs(tmp_path: Path) -> list[Path]:
    fast = write_run(tmp_path / "a.jsonl", "IIG", speed=2000.0)
    return [fast, write_run(tmp_path / "b.jsonl", "GGG")]


@pytest.fixture
def without_charts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces drawing, which takes longest, for tests of the page's text."""
    monkeypatch.setattr("tools.run_report.page.charts_of", lambda _: ())


def report(files: list[Path], folder: Path, *flags: str) -> str:
    main([*map(str, files), "--output", str(folder / "report.html"), *flags])
    return (folder / "report.html").read_text()


@pytest.mark.usefixtures("without_charts")
def test_runs_are_named_by_strategy_and_compared(two_runs: list[Path], tmp_path: Path) -> None:
    page = report(two_runs, tmp_path)
    assert re.findall(r"</span>(\w+)</li>", page) == ["IIG", "GGG"]
    rows = re.findall(r"<tr><td><span.*?</tr>", page)
    cells = [re.findall(r"<td>(.*?)</td>", row)[1:] for row in rows]
    assert cells[0] == [
        *("4", "20", "0.400", "1.250 (0.500 bits/byte)", "2,000", "500"),
        *("40.00%", "35.00%", "25.00%", "7.0", "300.0"),
    ]
    assert cells[1][4] == "1,000"
    assert "<code>--paro-strategy</code></td><td><code>IIG</code></td><td><code>GGG</code>" in page
    assert "typed &lt;in&gt;" in page
    assert differences(read_runs(two_runs, ())) == {"--paro-strategy": ["IIG", "GGG"]}


@pytest.mark.slow("imports matplotlib")
def test_the_page_stands_alone_and_follows_light_and_dark_and_pictures_have_its_charts(
    two_runs: list[Path], tmp_path: Path
) -> None:
    page = report(two_runs, tmp_path, "--png-dir", str(tmp_path / "png"))
    pictures = {path.stem: path.read_bytes() for path in (tmp_path / "png").iterdir()}
    assert pictures.keys() == {chart.name for chart in CHARTS}
    assert all(content.startswith(b"\x89PNG") for content in pictures.values())
    assert not re.findall(r'(?:src|href)="(?!#)', page.replace("http://www.w3.org", "#"))
    assert "<script" not in page
    assert page.count("<svg") == len(CHARTS)
    assert "slices under way" in page  # every kind of memory that a run predicts
    drawn = page.partition("<svg")[2]
    assert not [light for light, _ in NAMED.values() if light in drawn]
    used = set(re.findall(r"var\((--\w+)\)", page))
    dark = page[page.index("prefers-color-scheme: dark") :].partition("}")[0]
    assert used <= set(re.findall(r"(--\w+):", dark))
    names = re.findall(r'\bid="([^"]+)"', page)
    repeated = {name for name in names if names.count(name) > 1}
    assert not {name for name in repeated if f"#{name}" in page}
    HTMLParser().feed(page)


@pytest.mark.usefixtures("without_charts")
def test_a_run_that_went_wrong_says_so_and_metrics_alone_are_enough(tmp_path: Path) -> None:
    page = report([write_run(tmp_path / "alone.jsonl", "IIG", record=False)], tmp_path)
    assert "There is no record in the folder of the metrics files." in page
    assert ">alone</li>" in page
    path = write_run(tmp_path / "m.jsonl", "IIG")
    lines = read_lines(path)
    for line in lines[10:]:
        line |= {"lm_loss": None, "grad_norm": None, "skipped_iterations": 5, "nan_iterations": 4}
        line["group_lm_losses"] = [2.5, None]
    write_lines(path, *lines)
    page = report([path], tmp_path)
    assert "<td>0.800<br>at 10</td>" in page
    assert "IIG left out 50 steps, 40 with a loss not finite." in page


@pytest.mark.usefixtures("without_charts")
def test_sets_of_held_out_data_are_told_apart(tmp_path: Path) -> None:
    path = write_run(tmp_path / "m.jsonl", "IIG")
    record = json.loads(Path(f"{path}.run.json").read_text())
    wanted = {"validation-a": ([10, 20], [3.0, 2.0]), "validation-b": ([10, 20], [5.0, 4.0])}
    record["validations"] = [
        {"iteration": iteration, "data_set": name, "lm_loss": loss}
        for name, of_set in wanted.items()
        for iteration, loss in zip(*of_set, strict=True)
    ]
    Path(f"{path}.run.json").write_text(json.dumps(record))
    (run,) = read_runs([path], ())
    assert run.validations() == wanted
    assert "<td>a 2.000<br>b 4.000</td>" in report([path], tmp_path)


def test_files_that_are_no_metrics(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    refused(lambda: report([path], tmp_path), "cannot be read: No such file")
    for content, message in (
        ("", "is empty"),
        ('{"iteration": 1}\n', "line 1: lm_loss: is missing"),
        (f'{WHOLE}{{"iteration": 2, \n{WHOLE}', "line 2 is not valid JSON"),
    ):
        path.write_text(content)
        refused(lambda: report([path], tmp_path), message)
        assert not (tmp_path / "report.html").exists()


@pytest.mark.usefixtures("without_charts")
def test_names_must_fit(two_runs: list[Path], tmp_path: Path) -> None:
    assert ">one</li>" in report(two_runs, tmp_path, "--names", "one", "two")
    assert r">\x1b[2J</li>" in report(two_runs, tmp_path, "--names", "\x1b[2J", "two")
    for names, message in ((["one"], "1 names for 2 metrics files"), (["one"] * 2, "must differ")):
        refused(partial(report, two_runs, tmp_path, "--names", *names), message)


@pytest.mark.verify
@pytest.mark.browser
def test_a_browser_shows_it_in_light_and_in_the_dark(two_runs: list[Path], tmp_path: Path) -> None:
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    assert browser is not None, f"the mark needs one of {', '.join(BROWSERS)}"
    image = pytest.importorskip("matplotlib.image")
    report(two_runs, tmp_path)
    brightness = []
    for scheme in (0, 1):  # dark, light
        picture = tmp_path / f"{scheme}.png"
        command = [browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        command += ["--enable-logging=stderr", "--window-size=1200,2400"]
        command += [f"--blink-settings=preferredColorScheme={scheme}", f"--screenshot={picture}"]
        command += [f"--user-data-dir={tmp_path / 'profile'}", f"file://{tmp_path}/report.html"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=HANGS_AFTER)
        assert picture.exists(), done.stderr
        assert "CONSOLE" not in done.stderr, done.stderr
        pixels = image.imread(picture)[..., :3]
        brightness.append(float(pixels.mean()))
        assert pixels.std() > 0.02  # not blank
    assert brightness[0] < 0.3 < 0.7 < brightness[1]
    assert all(math.isfinite(value) for value in brightness)


def write_curve(path: Path, losses: Iterable[tuple[int, float]]) -> str:
    more = {"tokens_per_second": 1.0, "iteration_time_ms": 1.0}
    return str(write_lines(path, *({"iteration": at, "lm_loss": x, **more} for at, x in losses)))


def test_differences_are_relative_to_the_first_run(tmp_path: Path) -> None:
    first = write_curve(tmp_path / "a.jsonl", ((at, 4.0) for at in range(1, 21)))
    # One extra iteration, and one repeated after a restart: its last value counts.
    other = dict.fromkeys(range(1, 22), 4.0) | {2: 4.04, 20: 3.0}
    second = write_curve(tmp_path / "b.jsonl", [*other.items(), (20, 3.9)])
    picture = tmp_path / "curves.png"
    message, figures = measured(compare, first, second, "--plot", picture, "--names", "one", "two")
    (distance,) = figures["distances"]
    assert figures["reference"] == "one"
    assert figures["losses"]["two"]["20"] == 3.9
    wanted = {"first": 0.0, "early": 0.01, "largest": 0.025}
    wanted |= {"mean": (0.01 + 0.025) / 20, "mean_signed": (0.01 - 0.025) / 20}
    assert {name: distance[name] for name in wanted} == pytest.approx(wanted)
    assert "2.5e-02" in message
    assert picture.stat().st_size > 10_000


def test_what_cannot_be_compared_or_written_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    curve = write_curve(tmp_path / "a.jsonl", [(1, 2.0), (2, 1.0)])
    late = write_curve(tmp_path / "late.jsonl", [(7, 2.0)])
    refused(lambda: compare([curve]), "nothing to compare")
    refused(lambda: compare([curve, late]), "no iteration in common")
    for flag, name in (("--json", ""), ("--plot", ""), ("--plot", "a.jsonl/x.png")):
        words = [curve, curve, "--names", "one", "two", flag, str(tmp_path / name)]
        refused(partial(compare, words), str(tmp_path / name))
    assert capsys.readouterr().out == ""


WORDS = ["--wandb-project", "llama", "--wandb-entity", "team"]


def test_every_panel_shows_tags_that_runs_write() -> None:
    shown = {tag for panels in SECTIONS.values() for panel in panels for tag in panel.tags}
    # Of a corpus, of averaged weights, and of outer steps.
    of_some_runs = {"bits per byte validation", "lm loss validation ema", "outer/grad-cosine"}
    of_some_runs.add("decoupled-learning-rate")
    assert shown <= TAGS | of_some_runs
    assert {tag for tag in TAGS if tag.startswith("throughput/")} <= shown
    assert next(iter(SECTIONS)) == "throughput and MFU"


@pytest.mark.slow("imports wandb_workspaces")
def test_the_library_takes_the_view_and_an_account_saves_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("wandb_workspaces")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    workspace = make_workspace("team", "llama", "view")
    assert [section.name for section in workspace.sections] == list(SECTIONS)
    refused(lambda: make_view([*WORDS, "--name", "+1"]), "--name +1")
    message = printed(make_view, *WORDS)
    assert message.startswith(describe("team", "llama", "throughput and MFU"))
    assert message.endswith("nothing was saved (no account: run `wandb login`)\n")
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)

    class Saved:
        url = "https://wandb.ai/team/llama?nw=abc"
        error: Exception | None = None

        def save(self) -> None:
            if self.error is not None:
                raise self.error

    monkeypatch.setattr(wandb_dashboard, "make_workspace", lambda *_: Saved())
    assert printed(make_view, *WORDS).endswith("saved: https://wandb.ai/team/llama?nw=abc\n")
    assert "nothing was saved (--dry-run)" in printed(make_view, *WORDS, "--dry-run")
    Saved.error = RuntimeError("project not\nfound")
    refused(lambda: make_view(WORDS), "project not found")
    refused(lambda: make_view(WORDS[:2]), "--wandb-entity is missing")
