"""Names of the Hugging Face hub, in refusals of folders that do not exist."""

from __future__ import annotations

from pathlib import Path

import pytest

from data.hub import how_to_fetch


@pytest.mark.parametrize("name", ["meta-llama/Llama-3.2-1B", "Qwen/Qwen3-0.6B", "o_1/m.v2"])
def test_a_refusal_says_how_to_fetch_what_may_be_a_model(name: str) -> None:
    folder = name.partition("/")[2]
    assert f"'hf download {name} --local-dir {folder}'" in how_to_fetch(name)
    assert how_to_fetch(Path(name)) == how_to_fetch(name)


@pytest.mark.parametrize(
    "name",
    ["/meta-llama/Llama-3.2-1B", "a/b/c", "../runs", "~/model", "model", "owner/", "own er/model"],
)
def test_other_folders_get_no_such_advice(name: str) -> None:
    assert how_to_fetch(name) == ""


def test_a_folder_beside_others_is_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert how_to_fetch("runs/gone")
    (tmp_path / "runs").mkdir()
    assert how_to_fetch("runs/gone") == ""
