"""Whose mistake: a user's file is one line and status 2, a bug keeps its traceback and status 1."""

from __future__ import annotations

from pathlib import Path

import pytest

from paro.errors import UserError
from tests.end_to_end.test_training import launch
from tests.helpers.refusals import refused

BINARY = b"\xff\xfe\x00"
GPT2 = "--tokenizer-type GPT2BPETokenizer --merge-file {file} --vocab-file {file}"


def bug(*_: object, **__: object) -> None:
    """What a bug of ours may look like: a `ValueError`, as a mistake of a user is one."""
    list(zip([1], [], strict=True))


@pytest.mark.parametrize(
    ("flags", "content", "told"),
    [
        ("--yaml-cfg {file}", BINARY, "--yaml-cfg {file} is not UTF-8 text"),
        ("--yaml-cfg {file}", b"a: 2026-13-01", "--yaml-cfg {file} is no YAML: month must"),
        ("--mock-data --paro-machine {file}", b"{", "machine file {file} is not valid JSON"),
        ("--data-args-path {file}", BINARY, "--data-args-path {file} is not UTF-8 text"),
        ("--per-split-data-args-path {file}", b"[", "{file} is not valid JSON"),
        (f"{GPT2} --data-path x", BINARY, "--vocab-file {file} is not UTF-8 text"),
    ],
)
def test_a_bad_file_is_named_in_one_line(
    flags: str, content: bytes, told: str, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.write_bytes(content)
    words = flags.format(file=file)
    refused(lambda: launch("--train-iters 4", words), told.format(file=file))


def test_a_bug_is_no_mistake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = f"--mock-data --save {tmp_path} --load {tmp_path} --train-iters"
    launch(words, 2)
    for place in (
        "config.run.take_precision",
        "checkpoint.load._check_model",
        "checkpoint.storage.CheckedReader._read_rectangle",
        "checkpoint.load.common_of",
    ):
        with monkeypatch.context() as patch:
            patch.setattr(f"paro.{place}", bug)
            with pytest.raises(ValueError, match=r"zip\(\) argument 2 is shorter") as caught:
                launch(words, 3)
        assert not isinstance(caught.value, UserError), place
