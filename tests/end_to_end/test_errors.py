"""Whose mistake: a user's file is one line and status 2, a bug keeps its traceback and status 1."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from paro.errors import UserError
from tests.end_to_end.test_training import MODEL, SCRIPT, mistake, run_main
from tests.helpers.ranks import ROOT
from tools import convert_checkpoint, plan

BINARY = b"\xff\xfe\x00"
GPT2 = ["--tokenizer-type", "GPT2BPETokenizer", "--merge-file", "{file}", "--vocab-file", "{file}"]
PLAN = ["--llama-preset", "7B", "--global-batch-size", "64", "--micro-batch-size", "1"]


def bug(*_: object, **__: object) -> None:
    """What a bug of ours may look like: a `ValueError`, as a mistake of a user is one."""
    list(zip([1], [], strict=True))


@pytest.mark.parametrize(
    ("flags", "content", "told"),
    [
        (["--yaml-cfg", "{file}"], BINARY, "--yaml-cfg {file} is not UTF-8 text"),
        (["--yaml-cfg", "{file}"], b"a: 2026-13-01", "--yaml-cfg {file} is no YAML: month must"),
        (
            ["--mock-data", "--paro-machine", "{file}"],
            BINARY,
            "machine file {file} is not UTF-8 text",
        ),
        (
            ["--mock-data", "--paro-machine", "{file}"],
            b"{",
            "machine file {file} is not valid JSON: ",
        ),
        (["--data-args-path", "{file}"], BINARY, "--data-args-path {file} is not UTF-8 text"),
        (["--per-split-data-args-path", "{file}"], b"[", "{file} is not valid JSON: "),
        ([*GPT2, "--data-path", "x"], BINARY, "--vocab-file {file} is not UTF-8 text"),
        (["--mock-data", "--metrics-file", "{file}"], BINARY, "--metrics-file {file} exists and"),
        (["--mock-data", "--load", "{file}"], b"", "{file} is a file: give a folder"),
    ],
)
def test_a_bad_file_is_named_in_one_line(
    flags: Sequence[str], content: bytes, told: str, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.write_bytes(content)
    words = ["--train-iters", "4", *(word.format(file=file) for word in flags)]
    assert told.format(file=file) in mistake(words)


@pytest.mark.parametrize(
    "flag",
    [
        "--yaml-cfg",
        "--mock-data --paro-machine",
        "--data-args-path",
        "--per-split-data-args-path",
    ],
)
def test_a_file_without_permission_is_named_in_one_line(
    flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may read everything, so the system's answer is planted."""
    file = tmp_path / "file"
    file.touch()
    opened = os.open

    def refuse(path: str | Path, *others: Any, **named: Any) -> int:
        if Path(path) == file:
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *others, **named)

    monkeypatch.setattr(os, "open", refuse)
    told = mistake(["--train-iters", "4", *flag.split(), str(file)])
    assert f"{file} cannot be read: Permission denied" in told


@pytest.mark.process
def test_a_bug_in_the_configuration_keeps_its_traceback() -> None:
    program = (
        "import pretrain_llama, tests.end_to_end.test_errors as own, paro.config.run as run\n"
        "run.take_precision = own.bug\npretrain_llama.command()"
    )
    flags = [*MODEL, "--mock-data", "--train-iters", "4"]
    command = [sys.executable, "-c", program, *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "in bug" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("ValueError: zip() argument 2 is shorter")


def test_a_bug_while_loading_is_no_mistake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [SCRIPT, *MODEL, "--mock-data", "--save", str(tmp_path), "--load", str(tmp_path)]
    assert run_main([*words, "--train-iters", "2"]).mistake is None
    for place in ("load._check_model", "storage.CheckedReader._read_rectangle", "load.common_of"):
        with monkeypatch.context() as patch:
            patch.setattr(f"paro.checkpoint.{place}", bug)
            with pytest.raises(ValueError, match=r"zip\(\) argument 2 is shorter") as caught:
                run_main([*words, "--train-iters", "3"])
        assert not isinstance(caught.value, UserError), place


def test_a_bug_in_a_tool_keeps_its_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "case_of", bug)
    with pytest.raises(ValueError, match="argument 2") as in_plan:
        plan.main(["--paro-machine", "dgx-h100", *PLAN])
    monkeypatch.setattr("tools.convert_checkpoint.Conversion.open", bug)
    paths = ["--input", str(tmp_path), "--output", str(tmp_path / "out")]
    with pytest.raises(ValueError, match="argument 2") as in_conversion:
        convert_checkpoint.main(["--from", "hf", "--to", "paro", *paths])
    assert not isinstance(in_plan.value, UserError)
    assert not isinstance(in_conversion.value, UserError)
