"""What tools share: command lines, devices, output files, meters and figures."""

from __future__ import annotations

import json
import os
import re
import time
from functools import partial
from html import unescape
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from paro.arguments.parser import build_parser
from paro.errors import UserError
from tests.helpers.house import ROOT
from tests.helpers.refusals import refused
from tools.shared.command_line import Parser, RankParser, add_trainer_flags
from tools.shared.device import device_of
from tools.shared.meters import MemoryMeter, add_up_sent, sent_bytes
from tools.shared.output import print_json, write_json, write_text
from tools.shared.picture import drawing, label_of, log_scale


def test_a_mistake_is_one_line_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    parser = Parser(prog="tool.py")
    command = parser.add_subparsers().add_parser("measure")
    command.add_argument("--rounds", type=int)
    with pytest.raises(SystemExit):
        parser.error("two\n  lines")
    assert capsys.readouterr().err == "tool.py: error: two lines\n"
    refused(lambda: parser.parse_args(["measure", "--rounds", "many"]), "argument --rounds")
    refused(lambda: parser.parse_args(["measure", "--\x1b[2J"]), "\\x1b[2J")


def test_flags_are_whole_and_a_description_keeps_its_lines(
    capsys: pytest.CaptureFixture[str],
) -> None:
    parser = Parser(prog="tool.py", description="What it does.\n\n  tool.py   --rounds 3")
    parser.add_argument("--rounds", type=int)
    assert "\n  tool.py   --rounds 3\n" in parser.format_help()
    with pytest.raises(SystemExit):
        parser.parse_args(["--round", "3"])
    assert "--round" in capsys.readouterr().err
    with pytest.raises(UserError, match="--round"):  # each rank's, of which one tells it
        RankParser().parse_args(["--round", "3"])


def test_a_path_beyond_the_systems_limits_or_none_is_refused() -> None:
    parser = Parser(prog="tool.py")
    parser.add_argument("--file", type=Path, default=Path())
    parser.add_argument("--text", metavar="PREFIX")
    parser.add_argument("--several", nargs="+", type=Path)
    parser.add_argument("--input", nargs="+", metavar="SOURCE")
    for flag in ("--file", "--text", "--several"):
        parser.parse_args([flag, f"a/{'x' * 255}"])
        for path in ("a/" * 2100, f"{'ä' * 128}/b"):
            refused(partial(parser.parse_args, [flag, path]), f"{flag}: too long")
    assert parser.parse_args(["--file", "."]).file == Path()
    for words in (["--file", ""], ["--text="], ["--several", "a", ""], ["--input", "a", ""]):
        message = f"{words[0].removesuffix('=')}: the path is empty"
        refused(partial(parser.parse_args, words), message)


def test_flags_of_the_trainer_are_as_they_are_there_but_for_own_defaults() -> None:
    parser = Parser(prog="tool.py")
    add_trainer_flags(parser, "llama_preset", seq_length=128)
    given = parser.parse_args(["--llama-preset", "LLAMA3-8b"])
    assert (given.llama_preset, given.seq_length) == ("llama3-8B", 128)
    assert "as in pretrain_llama.py; default 128" in parser.format_help()
    assert build_parser().get_default("seq_length") is None, "a copy has the default"


def test_a_device_is_there_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: torch.cuda.device_count() > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert device_of(None) == torch.device("cpu")
    refused(lambda: device_of("cuda"), "--device cuda: torch sees no CUDA device")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    refused(lambda: device_of("cuda:1"), "--device cuda:1: torch sees 1 CUDA device here")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name, device in ((None, "cuda:0"), ("cpu", "cpu"), ("cuda:1", "cuda:1")):
        assert device_of(name) == torch.device(device)
    refused(lambda: device_of("cuda:-1"), "--device cuda:-1 is unknown")
    refused(lambda: device_of("gpu"), "--device gpu is unknown: give cpu, cuda or cuda:1")


def test_json_is_whole_and_acts_upon_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    value = {"\x1b[2J\x7f\u202e": ["x" * 10**5, 1.5]}
    print_json(value)
    printed = capsys.readouterr().out
    assert printed.removesuffix("\n").isascii()
    assert printed.removesuffix("\n").isprintable()
    assert json.loads(printed) == value


def test_other_figures_of_an_earlier_call_are_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "figures.json"
    for value, is_update in ((1, False), (2, False), (2, False), (3, True), (4, False)):
        write_json(path, value, is_update=is_update)
    kept = [path, *(Path(f"{path}.earlier_{number}") for number in (1, 2))]
    assert [json.loads(each.read_text()) for each in kept] == [4, 1, 3]
    assert sorted(tmp_path.iterdir()) == kept
    message = capsys.readouterr()
    assert message.out == ""  # may be read by a program
    assert [str(each) in message.err for each in kept[1:]] == [True, True]


def test_what_is_no_file_is_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, tmp_path):
        refused(lambda path=path: write_json(path, 1), f"{path} cannot be written")  # type: ignore[misc]
    assert pipe.is_fifo()


def test_a_text_with_a_name_that_is_no_utf8_is_written(tmp_path: Path) -> None:
    write_text(tmp_path / "page", f"of {os.fsdecode(bytes([0x80]))}")
    assert (tmp_path / "page").read_text(encoding="utf-8") == r"of \udc80"


def test_the_bytes_that_left_are_read_and_not_those_that_came(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counted = SimpleNamespace(bytes_sent=2500, bytes_recv=1000)
    monkeypatch.setattr("psutil.net_io_counters", lambda **_: {"lo": counted, "nic0": counted})
    assert sent_bytes(("nic0",)) == {"nic0": 2500}
    refused(lambda: sent_bytes(("nic7",)), "GLOO_SOCKET_IFNAME ... nic7, ... lo,")


def test_a_nic_that_ranks_share_counts_once() -> None:
    assert add_up_sent([("0", {"nic0": 5}), ("0", {"nic1": 7}), ("1", {"nic0": 11})]) == 23
    # They read it at slightly different times.
    assert add_up_sent([("0", {"nic0": 5}), ("0", {"nic0": 6}), ("1", {"nic0": 11})]) == 17
    assert add_up_sent([("0", {}), ("0", {})]) is None


@pytest.mark.slow("fills memory until it shows")
def test_memory_of_the_warm_up_is_seen_and_that_before_the_start_is_not() -> None:
    before = torch.ones(40_000_000)
    meter = MemoryMeter(torch.device("cpu"))
    meter.start()
    during = torch.ones(20_000_000)
    time.sleep(0.3)
    meter.end_of_warmup()
    del during
    after = torch.ones(60_000_000)
    peak = meter.peak()
    # Up to a few MB that earlier tests used may be freed during the measurement.
    assert 72_000_000 <= peak < 120_000_000
    assert before.numel() + after.numel() == 100_000_000


def texts_of(path: Path) -> list[str]:
    return [unescape(text) for text in re.findall(r"<text[^>]*>(.*?)</text>", path.read_text())]


def test_names_are_drawn_as_they_are_and_numbers_of_logarithms_plain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib import rcParams  # takes long to import, for every worker

    monkeypatch.setitem(rcParams, "svg.fonttype", "none")  # else texts are shapes of letters
    names = ["a$b$c", r"$\frac{$", r"\alpha", "5 $ and 6 $", "{x}", "%s", "_hidden"]
    names += ["x" * 2000, "<&>"]
    path = tmp_path / "names.svg"
    with drawing(path, 1, 2, size=(12, 6)) as (figure, (curves, bars)):
        for name in names:
            curves.plot([1, 2], [3, 4], label=label_of(name))
        curves.legend()
        curves.set_title(names[0])
        bars.set_yticks(range(len(names)), list(map(label_of, names)))
        figure.suptitle(names[1])
        bars.annotate(names[2], (0, 0))
    drawn = [text.strip() for text in texts_of(path)]
    for number, name in enumerate(names[:7]):
        assert drawn.count(name) == (3 if number < 3 else 2), f"{name}: {drawn}"
    assert max(map(len, drawn)) < 100
    with drawing(path, 1, 2, size=(8, 4)) as (_, (wide, narrow)):
        for panel, largest in ((wide, 1e9), (narrow, 4.0)):
            panel.plot([1.0, largest], [1.0, largest])
            log_scale(panel.xaxis, panel.yaxis)
    drawn = texts_of(path)
    assert {"1", "1e+06", "3"} <= set(drawn)
    assert not [text for text in drawn if "$" in text or "math" in text]


def test_all_axes_of_logarithms_have_plain_numbers() -> None:
    files = [path for path in (ROOT / "tools").rglob("*.py") if path.name != "picture.py"]
    axes = re.compile(r'scale\W{1,2}"log"|loglog|semilog')
    assert len(files) > 50
    assert not [path for path in files if axes.search(path.read_text())], "log_scale makes them"
