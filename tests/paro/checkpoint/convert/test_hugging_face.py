"""Folders for transformers, written from runs whose tokenizer is present or missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.refusals import refused
from tests.tools.conftest import TEXT
from tests.tools.untrained import SIZES, convert, save_untrained
from tools.train_tokenizer import main as train_tokenizer


def test_a_run_whose_tokenizer_is_gone_is_converted_without_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    model = tmp_path / "pieces.model"
    given = ["--input", str(tmp_path / "text.txt"), "--output-prefix", str(tmp_path / "pieces")]
    train_tokenizer([*given, "--vocab-size", "300"])
    flags = f"{SIZES} --tokenizer-type SentencePieceTokenizer --tokenizer-model {model}"
    save_untrained(tmp_path / "saved", flags)
    model.unlink()
    capsys.readouterr()
    convert("paro", "hf", tmp_path / "saved", tmp_path / "hf")
    said = f"the tokenizer is no longer at {model}: converted without it\n"
    assert capsys.readouterr().out.count(said) == 1
    written = sorted(path.name for path in (tmp_path / "hf").iterdir())
    assert written == ["config.json", "model.safetensors"]
    fields = json.loads((tmp_path / "hf" / "config.json").read_text(encoding="utf-8"))
    assert (fields["bos_token_id"], fields["eos_token_id"]) == (None, None)


def test_a_model_that_transformers_has_not_is_one_line(tmp_path: Path) -> None:
    flags = "--use-rope-scaling --rotary-seq-len-interpolation-factor 2"
    null = "--tokenizer-type NullTokenizer --vocab-size 64"
    save_untrained(tmp_path / "saved", f"{SIZES} {flags} {null}")
    told = "no model with both --use-rope-scaling and --rotary-seq-len-interpolation-factor"
    refused(lambda: convert("paro", "hf", tmp_path / "saved", tmp_path / "hf"), told)
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
