"""Conversion of vocabulary rows, of weights that are not finite; inspection of every format."""

from __future__ import annotations

import json
import math
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from data.loader import Datasets
from model.units import num_parameters
from paro.checkpoint.convert.conversion import OPENERS, format_of
from paro.checkpoint.convert.hugging_face import write_hugging_face
from paro.checkpoint.convert.megatron import write_megatron
from paro.checkpoint.convert.native import open_native, write_native
from paro.checkpoint.convert.source import ModelSource, lazy
from paro.checkpoint.convert.torchtitan import write_torchtitan
from paro.checkpoint.metadata import read_metadata
from paro.launch.setup import open_data
from paro.report.log import Log
from paro.training.resume import load_run
from paro.training.step import TrainState
from tests.data.test_hugging_face_tokenizer import byte_level
from tests.fixtures.write import FIXTURES
from tests.helpers.corpora import write_corpus
from tests.helpers.refusals import output_of, printed, refused
from tests.helpers.training import save_run
from tests.model.values import SMALL
from tests.paro.checkpoint.convert.folders import random_tensors, save_folder
from tests.paro.checkpoint.convert.test_round_trip import CONFIG, save_meta
from tests.tools.conftest import convert, save_untrained
from tests.tools.test_convert_checkpoint import resumed_and_saved, tensors_in, trained
from tools.generate import load_model, open_model
from tools.generate import main as generate
from tools.inspect_checkpoint import main

pytestmark = pytest.mark.slow("imports transformers")


def rows_in(folder: Path) -> int:
    rows: int = json.loads((folder / "config.json").read_text())["vocab_size"]
    assert tensors_in(folder)["model.embed_tokens.weight"].shape[0] == rows
    return rows


ENDS = {"eos_token": "<|im_end|>", "pad_token": "<pad>"}  # ids 278 and 279


def model_and_tokenizer(folder: Path, rows: int, fields: dict[str, Any]) -> None:
    """A model, its tokenizer.json of 278 ids, and a file that adds tokens."""
    save_folder(folder, 0, vocab_size=rows)
    byte_level(["<s>"]).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))


def test_rows_that_no_token_has_stay(tmp_path: Path) -> None:
    """A model has 320 rows, its tokenizer.json 278 ids, and the file next to it two more."""
    fields = {"eos_token": "<|im_end|>", "additional_special_tokens": ["<tool>"]}
    model_and_tokenizer(tmp_path / "hf", 320, fields)
    there = convert("hf", "paro", tmp_path / "hf", tmp_path / "paro")
    for name in ("new", "newer"):  # the second one continues the first
        flags = ("--use-checkpoint-args", "--load", str(there))
        config = resumed_and_saved(tmp_path / name, *flags)
        assert (config.vocab_size, config.model.vocab_size) == (280, 384)
        there = tmp_path / name
        assert rows_in(convert("paro", "hf", there, tmp_path / f"{name}-hf")) == 320
    back = (tmp_path / "newer-hf" / "tokenizer_config.json").read_text()
    assert json.loads(back) == fields


def test_a_tokenizer_may_have_more_ids_than_its_model_has_rows(tmp_path: Path) -> None:
    model_and_tokenizer(tmp_path / "hf", 279, ENDS)
    flags = ("--make-vocab-size-divisible-by", "1")
    there = convert("hf", "paro", tmp_path / "hf", tmp_path / "paro", *flags)
    assert rows_in(convert("paro", "hf", there, tmp_path / "back")) == 279
    config = resumed_and_saved(tmp_path / "run", "--use-checkpoint-args", "--load", str(there))
    assert (config.vocab_size, config.model.vocab_size) == (280, 280)
    assert rows_in(convert("paro", "hf", tmp_path / "run", tmp_path / "trained")) == 280
    words = ["--load", str(tmp_path / "hf"), "--max-new-tokens", "2", "--prompt"]
    generate([*words, "def"])
    refused(lambda: generate([*words, "a<pad>"]), "'<pad>' ... 279, ... 279")


def test_ids_that_can_never_be_learnt_are_refused_in_training_and_export(tmp_path: Path) -> None:
    """A base has 279 rows, its tokenizer 280 ids; vocabulary rows are frozen, or they train."""
    model_and_tokenizer(tmp_path / "hf", 279, ENDS)
    save_folder(tmp_path / "small", 0, vocab_size=278)
    message = output_of(lambda: convert("hf", "paro", tmp_path / "hf", tmp_path / "paro"))
    assert "280 ids and the model 279 rows" in message
    right = write_corpus(tmp_path / "right", [[[278] * 99]])
    wrong = write_corpus(tmp_path / "wrong", [[[*[1] * 98, 279]]])
    flags = ("--use-checkpoint-args", "--load", str(tmp_path / "paro"))
    freezing = ("--trainable last-blocks:0.5", "--trainable names:head.weight", "--lora-rank 2")
    for number, more in enumerate(("", *freezing)):
        lines: list[str] = []
        log = Log(rank=0, world_size=1, write=lines.append)
        config, training = trained(tmp_path / f"run{number}", *flags, *more.split())
        resumed = load_run(config, training, log)

        def opened(prefix: Path) -> Datasets:
            data = replace(config.data, mock_data=False, data_path=(str(prefix),), split="1,0,0")  # noqa: B023
            start = TrainState.at_start(config.loss_scale)  # noqa: B023
            return open_data(replace(config, data=data), start, resumed, log)[0]  # noqa: B023

        opened(right)
        assert sum("279 vocabulary rows" in line for line in lines) == bool(more)
        if not more:
            opened(wrong)
            continue
        refused(partial(opened, wrong), f"{wrong}.bin holds token id 279 ... 279 vocabulary rows")
    save_run(config, training, resumed)
    merged = convert("paro", "hf", tmp_path / "run3", tmp_path / "merged", "--merge")
    assert rows_in(merged) == 279
    export = partial(convert, "paro", "peft", tmp_path / "run3", tmp_path / "peft")
    base = ("--base-model-name-or-path", str(tmp_path / "small"))
    refused(lambda: export(*base), f"{tmp_path / 'small'} has 278 ... 279")
    assert not (tmp_path / "peft").exists()
    assert "280 ids and the model 279 rows" in output_of(export)


def test_rows_by_a_flag_are_named_and_stay(tmp_path: Path) -> None:
    flags = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "99"]
    save_run(*trained(tmp_path / "run", *flags, "--padded-vocab-size", "200"))
    assert rows_in(convert("paro", "hf", tmp_path / "run", tmp_path / "hf")) == 200
    source = open_native(convert("paro", "paro", tmp_path / "run", tmp_path / "paro"))
    assert (source.config.vocab_size, source.tokenizer["vocab_size"]) == (200, 99)
    flags += ["--load", str(tmp_path / "paro")]
    other = trained(tmp_path / "new", *flags)
    message = "256 ... 128 ... give --padded-vocab-size 256"
    refused(lambda: load_run(*other, Log(rank=0, world_size=1)), message)
    resumed_and_saved(tmp_path / "new", *flags, "--padded-vocab-size", "256")
    assert rows_in(convert("paro", "hf", tmp_path / "new", tmp_path / "new-hf")) == 200


ROWS = SMALL.vocab_size


# Of each format: what the weight is called, and what writes it without a check.
FORMATS: dict[str, tuple[str, Callable[[ModelSource, Path], object]]] = {
    "hf": ("model.layers.0.mlp.down_proj.weight", write_hugging_face),
    "paro": ("blocks.0.w_down", lambda source, at: write_native(source, at, at, rows=ROWS)),
    "megatron": (
        "decoder.layers.0.mlp.linear_fc2.weight",
        partial(write_megatron, rows=ROWS, divisible_by=1),
    ),
    "torch_dist": (
        "decoder.layers.mlp.linear_fc2.weight[0]",
        partial(write_megatron, rows=ROWS, divisible_by=1, dist=True),
    ),
    "torchtitan": ("layers.0.feed_forward.w2.weight", partial(write_torchtitan, older=False)),
}


@pytest.mark.parametrize(
    ("source", "value", "flags", "message"),
    [
        ("paro", math.nan, "", "infinity or NaN"),
        ("megatron", -math.inf, "--dtype bf16", "infinity or NaN"),
        ("hf", 1e5, "--dtype fp16", "100000 ... float16 ... 65504"),
        ("paro", -3.4e38, "--dtype bf16", "3.4e+38 ... bfloat16"),
    ],
)
def test_no_format_is_written_with_such_a_weight(
    source: str, value: float, flags: str, message: str, tmp_path: Path
) -> None:
    name, write = FORMATS[source]
    tensors = random_tensors(SMALL)
    tensors["blocks.0.w_down"][-1, -1] = value
    folder = tmp_path / "wrong"
    folder.mkdir()
    write(
        ModelSource(config=SMALL, tensors={key: lazy(each) for key, each in tensors.items()}),
        folder,
    )
    for target in FORMATS:
        words = (source, target, folder, tmp_path / "out", *flags.split())
        refused(partial(convert, *words), f"{folder} ... {name} ... {message}")
        assert [path.name for path in tmp_path.iterdir()] == ["wrong"]
    if source == "paro":
        dtype = {"": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[flags[-4:]]
        load = partial(load_model, open_native(folder), torch.device("cpu"), dtype)
        refused(load, f"{folder} ... {name} ... {message}")


def inspected(folder: Path, *words: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(printed(main, "--load", folder, "--json", *words))
    return found


def test_every_format_is_recognised_and_counted_and_a_truncated_file_named(tmp_path: Path) -> None:
    save_folder(tmp_path / "hf", 2, torch.bfloat16)
    save_meta(tmp_path / "meta", random_tensors(CONFIG), 2, by_vocab=False)
    for name in ("paro", "megatron", "torch_dist", "torchtitan"):
        convert("hf", name, tmp_path / "hf", tmp_path / name)
    patterns = {
        "hf": "*.safetensors",
        "paro": "*/*.distcp",
        "torch_dist": "*/__0*",
        "torchtitan": "__0*",
        "meta": "*.00.pth",
    }
    for name, opener in OPENERS.items():
        folder = tmp_path / name
        assert format_of(folder) == name
        found, source = inspected(folder, "--verify"), opener(folder)
        assert found["format"] == name
        assert open_model(folder).tensors.keys() == source.tensors.keys()
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
