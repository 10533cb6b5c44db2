"""Vocabulary rows through conversion and training: padding goes, the model's own rows stay."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

from data.loader import Datasets
from paro.checkpoint.convert.native import open_native
from paro.launch.setup import open_data
from paro.report.log import Log
from paro.training.resume import load_run
from paro.training.step import TrainState
from tests.data.test_hugging_face_tokenizer import byte_level
from tests.helpers.commands import output_of
from tests.helpers.corpora import write_corpus
from tests.helpers.refusals import refused
from tests.helpers.training import save_run
from tests.paro.checkpoint.convert.folders import save_folder
from tests.tools.test_convert_checkpoint import resumed_and_saved, tensors_in, trained
from tests.tools.untrained import convert
from tools.generate import main as generate


def rows_in(folder: Path) -> int:
    rows: int = json.loads((folder / "config.json").read_text())["vocab_size"]
    assert tensors_in(folder)["model.embed_tokens.weight"].shape[0] == rows
    return rows


def test_rows_that_no_token_has_stay(tmp_path: Path) -> None:
    """A model has 320 rows, its tokenizer.json 278 ids, and the file next to it two more."""
    save_folder(tmp_path / "hf", 0, vocab_size=320)
    byte_level(["<s>"]).save(str(tmp_path / "hf" / "tokenizer.json"))
    fields = {"eos_token": "<|im_end|>", "additional_special_tokens": ["<tool>"]}
    (tmp_path / "hf" / "tokenizer_config.json").write_text(json.dumps(fields))
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
    save_folder(tmp_path / "hf", 0, vocab_size=279)
    byte_level(["<s>"]).save(str(tmp_path / "hf" / "tokenizer.json"))
    fields = {"eos_token": "<|im_end|>", "pad_token": "<pad>"}  # 278 and 279
    (tmp_path / "hf" / "tokenizer_config.json").write_text(json.dumps(fields))
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
    save_folder(tmp_path / "hf", 0, vocab_size=279)
    save_folder(tmp_path / "small", 0, vocab_size=278)
    byte_level(["<s>"]).save(str(tmp_path / "hf" / "tokenizer.json"))
    fields = {"eos_token": "<|im_end|>", "pad_token": "<pad>"}  # 278 and 279
    (tmp_path / "hf" / "tokenizer_config.json").write_text(json.dumps(fields))
    told = output_of(lambda: convert("hf", "paro", tmp_path / "hf", tmp_path / "paro"))
    assert "280 ids and the model 279 rows" in told
    right = write_corpus(tmp_path / "right", [[[278] * 99]])
    wrong = write_corpus(tmp_path / "wrong", [[[*[1] * 98, 279]]])
    flags = ("--use-checkpoint-args", "--load", str(tmp_path / "paro"))
    freezing = ("--trainable last-blocks:0.5", "--trainable names:head.weight", "--lora-rank 2")
    for number, more in enumerate(("", *freezing)):
        lines: list[str] = []
        log = Log(rank=0, world_size=1, write=lines.append)
        config, training = trained(tmp_path / f"run{number}", *flags, *more.split())
        resumed = load_run(config, training, log)

        start = TrainState.at_start(config.loss_scale)

        def opened(prefix: Path) -> Datasets:
            data = replace(config.data, mock_data=False, data_path=(str(prefix),), split="1,0,0")  # noqa: B023
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
    told = "256 ... 128 ... give --padded-vocab-size 256"
    refused(lambda: load_run(*other, Log(rank=0, world_size=1)), told)
    resumed_and_saved(tmp_path / "new", *flags, "--padded-vocab-size", "256")
    assert rows_in(convert("paro", "hf", tmp_path / "new", tmp_path / "new-hf")) == 200
