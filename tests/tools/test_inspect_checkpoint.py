"""Inspection: every format is recognised, every tensor counted, damage named."""

import json
import pickle
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from model.units import num_parameters
from paro.checkpoint.convert.conversion import OPENERS
from paro.checkpoint.metadata import read_metadata
from tests.fixtures.write import FIXTURES
from tests.helpers.commands import printed
from tests.helpers.refusals import refused
from tests.paro.checkpoint.convert.folders import random_tensors, save_folder
from tests.paro.checkpoint.convert.test_round_trip import CONFIG, save_meta
from tests.tools.untrained import convert, save_untrained
from tools.inspect_checkpoint import format_of, main


def inspected(folder: Path, *words: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(printed(main, "--load", folder, "--json", *words))
    return found


def test_every_format_is_recognised_and_counted_and_a_truncated_file_named(tmp_path: Path) -> None:
    save_folder(tmp_path / "hf", 2, torch.bfloat16)
    save_meta(tmp_path / "meta", random_tensors(CONFIG), 2, by_vocab=False)
    for name in ("paro", "megatron"):
        convert("hf", name, tmp_path / "hf", tmp_path / name)
    patterns = {"hf": "*.safetensors", "paro": "*/*.distcp", "meta": "*.00.pth"}
    for name, opener in OPENERS.items():
        folder = tmp_path / name
        assert format_of(folder) == name
        found, source = inspected(folder, "--verify"), opener(folder)
        assert found["format"] == name
        assert found["model"]["num_layers"] == source.config.num_layers
        assert len(found["tensors"]) == len(source.tensors)
        if name != "paro":  # it contains padding
            assert sum(t["bytes"] for t in found["tensors"]) == source.num_bytes
        assert found["verified"]
        out = printed(main, "--load", folder)
        assert out.startswith(f"format {name}\n")
        if name == "hf":
            total = num_parameters(source.config)
            assert f"param: {total:,} elements, {2 * total:,} bytes" in out
        (file,) = folder.glob(patterns.get(name, "*/*/*.pt"))
        file.write_bytes(file.read_bytes()[:-2000])
        refused(partial(main, ["--load", str(folder), "--verify"]), str(file), "truncated")


def test_of_a_training_moments_and_versions_are_told(tmp_path: Path) -> None:
    save_untrained(tmp_path, "--tokenizer-type NullTokenizer --vocab-size 60")
    found = inspected(tmp_path)
    states = {tensor["name"].partition(".")[0] for tensor in found["tensors"]}
    assert states == {"param", "exp_avg", "exp_avg_sq"}
    assert found["iteration"] == 0
    # A wheel's metadata may lack the build suffix that torch itself reports: 2.11.0+cu130.
    assert found["versions"]["torch"] in (torch.__version__, torch.__version__.partition("+")[0])
    lines = printed(main, "--load", tmp_path).splitlines()
    assert sum(line.startswith("  exp_avg_sq: ") for line in lines) == 1
    assert any(line.startswith("  torch ") for line in lines)


def test_names_in_a_file_cannot_act_upon_the_terminal(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "2026-11-21/iig/saved", tmp_path / "saved")
    folder = tmp_path / "saved/iter_0000004"
    metadata = read_metadata(folder)
    name = f"exp_avg.\x1b[2J\u202e{'x' * 900}"
    whole = metadata.state_dict_metadata["exp_avg.blocks.0.wo"]
    metadata.state_dict_metadata[name] = replace(whole, chunks=[])
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    out = printed(main, "--load", tmp_path / "saved")
    assert "  exp_avg.\\x1b[2J\\u202exxx" in out
    assert all(line.isprintable() for line in out.splitlines())
    assert sorted(map(len, out.splitlines()))[-2] < 300  # other lines are no wider for it


def test_a_folder_without_a_checkpoint_is_named(tmp_path: Path) -> None:
    refused(lambda: main(["--load", str(tmp_path)]), f"{tmp_path} holds no checkpoint")
