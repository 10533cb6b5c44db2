"""Conversion: no bit lost, logits equal to transformers', folders that open unchanged."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file

import paro.checkpoint.convert.source
import paro.checkpoint.storage
from model.llama import Llama
from paro.checkpoint.convert import hugging_face
from paro.checkpoint.convert.hugging_face import open_hugging_face
from paro.checkpoint.convert.native import open_native
from paro.checkpoint.convert.source import LazyTensor, ModelSource
from paro.checkpoint.save import ChunkSavePlanner
from paro.config.run import RunConfig
from paro.errors import StorageError, describe
from paro.files.regular_file import RegularFile
from paro.report.log import Log
from paro.training.resume import load_run
from tests.helpers.refusals import output_of, refused
from tests.helpers.training import load_parameters, save_run
from tests.model.values import assert_near
from tests.paro.checkpoint.convert.folders import logits_of, random_fields, save_folder
from tests.tools import conftest
from tests.tools.conftest import LiveBytes, convert
from tools.generation.continuing import Sampling, continuations

pytestmark = pytest.mark.slow("imports transformers")


def mistake(message: str, *given: Any) -> None:
    refused(lambda: convert(*given), message)


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return found


def resumed_and_saved(folder: Path, *flags: str) -> RunConfig:
    config, training = trained(folder, *flags)
    save_run(config, training, load_run(config, training, Log(rank=0, world_size=1)))
    return config


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sharded_files_of_halves_keep_every_bit(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_folder(tmp_path / "hf", 3, dtype, max_shard_size="20KB")
    assert len(list((tmp_path / "hf").glob("model-*-of-*.safetensors"))) > 2
    monkeypatch.setattr(paro.checkpoint.convert.source, "CHUNK_BYTES", 3000)
    monkeypatch.setattr(hugging_face, "MAX_FILE_BYTES", 20_000)
    convert("hf", "paro", tmp_path / "hf", tmp_path / "paro")
    convert("paro", "hf", tmp_path / "paro", tmp_path / "back")
    kept, back = tensors_in(tmp_path / "hf"), tensors_in(tmp_path / "back")
    torch.testing.assert_close(back, kept, rtol=0.0, atol=0.0)
    files = sorted(path.name for path in (tmp_path / "back").glob("*.safetensors"))
    assert len(files) > 2
    index = json.loads((tmp_path / "back" / hugging_face.INDEX).read_text())
    assert sorted(set(index["weight_map"].values())) == files
    size = sum(tensor.nbytes for tensor in kept.values())
    assert index["metadata"]["total_size"] == size


def test_dtype_is_the_one_asked_for(tmp_path: Path) -> None:
    theirs = save_folder(tmp_path / "hf", 0).state_dict()
    convert("hf", "hf", tmp_path / "hf", tmp_path / "half", "--dtype", "bf16")
    found = tensors_in(tmp_path / "half")
    assert all(torch.equal(tensor, theirs[name].bfloat16()) for name, tensor in found.items())
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"


# With the trainer

GROUPED = (
    "--group-query-attention --num-query-groups 1 --rotary-base 50000 --norm-epsilon 1e-6 "
    "--max-position-embeddings 64"
)


def trained(folder: Path, *flags: str) -> tuple[RunConfig, Any]:
    return conftest.trained(folder, *GROUPED.split(), *flags)


def names_of(tokenizer: Path) -> tuple[str, ...]:
    return "--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", str(tokenizer)


@pytest.fixture(scope="module")
def saved(pieces: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the trainer with its own tokenizer."""
    folder = tmp_path_factory.mktemp("text")
    save_run(*trained(folder, *names_of(pieces)))
    return folder


def test_what_was_trained_here_opens_in_transformers(saved: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = convert("paro", "hf", saved, tmp_path / "hf")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    assert (model.config.vocab_size, len(tokenizer)) == (300, 300), "padding was exported"
    assert model.config.max_position_embeddings == 64
    assert (model.config.bos_token_id, model.config.eos_token_id) == (1, 2)
    prompt = "  def naïve(雪):\n\t"
    ids = tokenizer.encode(prompt)
    assert tokenizer.decode(ids) == prompt
    own = Llama(open_native(saved).config)
    parameters = load_parameters(saved)
    for name in ("embedding.weight", "head.weight"):
        parameters[name] = parameters[name][:300]
    own.load_state_dict(parameters)
    tokens = torch.tensor([ids])
    out = model.generate(tokens, max_new_tokens=12, min_new_tokens=12, do_sample=False)
    sampling = Sampling(temperature=0.0, seed=1)
    ours = [token for (token,) in islice(continuations(own, [ids], sampling, num_ids=300), 12)]
    assert 2 not in ours, "the text ends early: choose another prompt"
    assert out[0, len(ids) :].tolist() == ours
    assert_near(logits_of(own, tokens), logits_of(model, tokens))


def test_training_begins_with_a_converted_model(saved: Path, pieces: Path, tmp_path: Path) -> None:
    convert("paro", "hf", saved, tmp_path / "hf")
    convert("hf", "paro", tmp_path / "hf", tmp_path / "again")
    flags = (*names_of(pieces), "--load", str(tmp_path / "again"), "--seed", "99")
    config, training = trained(tmp_path / "new", *flags)
    message: list[str] = []
    assert load_run(config, training, Log(rank=0, world_size=1, write=message.append)).state is None
    assert any("is a converted model" in line for line in message)
    save_run(config, training)
    before, after = load_parameters(saved), load_parameters(tmp_path / "new")
    for name, tensor in before.items():
        rows = 300 if name in ("embedding.weight", "head.weight") else tensor.shape[0]
        assert torch.equal(after[name][:rows], tensor[:rows]), name


def test_what_a_configuration_says_is_still_said_after_training(tmp_path: Path) -> None:
    save_folder(tmp_path / "hf", 0)
    path = tmp_path / "hf" / "config.json"
    fields = json.loads(path.read_text())
    ids = {"bos_token_id": 3, "eos_token_id": [5, 7], "pad_token_id": 9}
    del fields["rope_parameters"]
    stretched = {"rope_theta": 5e4, "rope_scaling": {"type": "linear", "factor": 4.0}}
    path.write_text(json.dumps({**fields, **ids, **stretched}))
    convert("hf", "paro", tmp_path / "hf", tmp_path / "0")
    for load, save, more in (("0", "1", ()), ("1", "2", ("--lora-rank", "2"))):
        flags = ("--load", str(tmp_path / load), "--use-checkpoint-args", *more)
        resumed_and_saved(tmp_path / save, *flags)
    out = convert("paro", "hf", tmp_path / "2", tmp_path / "out", "--merge")
    written = json.loads((out / "config.json").read_text())
    assert {name: written[name] for name in ids} == ids
    assert open_hugging_face(out).config == open_hugging_face(tmp_path / "hf").config
    assert written["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}


# Messages


def test_a_dry_run_says_what_a_folder_lacks_and_writes_nothing(tmp_path: Path) -> None:
    save_folder(tmp_path / "hf", 0)
    (tmp_path / "hf" / "generation_config.json").unlink()
    words = ("hf", "paro", tmp_path / "hf", tmp_path / "paro", "--dry-run")
    out = output_of(lambda: convert(*words))
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
    assert f"{random_fields(0)['num_hidden_layers']} layers" in out
    assert "would write" in out
    assert out.count("has no tokenizer: prompts are token ids\n") == 1
    assert out.count("has no generation_config.json: none is written\n") == 1


def test_mistakes_are_named_and_leave_nothing(tmp_path: Path) -> None:
    folder, out = tmp_path / "hf", tmp_path / "out"
    save_folder(folder, 3, max_shard_size="20KB")
    mistake(f"--input {out} is no folder", "hf", "paro", out, out)
    mistake("hf download an-owner/a-model", "hf", "paro", Path("an-owner/a-model"), out)
    mistake(f"--output {folder} exists", "hf", "paro", folder, folder)
    mistake("has no config.json", "hf", "paro", tmp_path, out)
    mistake("holds no checkpoint", "paro", "hf", folder, out)
    config = folder / "config.json"
    text = config.read_text()
    for wrong in ({"model_type": "mixtral"}, {"mlp_bias": True}, {"num_hidden_layers": "x"}):
        config.write_text(json.dumps({**json.loads(text), **wrong}))
        (name,) = wrong
        mistake(f"{config} ... {name}", "hf", "paro", folder, out)
    config.write_text(json.dumps({**json.loads(text), "intermediate_size": 7}))
    mistake("mlp.gate_proj.weight is", "hf", "paro", folder, out)
    config.write_text(text[:40])
    mistake(f"{config} is not valid JSON", "hf", "paro", folder, out)
    config.write_text(text)
    shard = sorted(folder.glob("*.safetensors"))[1]
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1])
    mistake(f"{shard} is missing, truncated or damaged", "hf", "paro", folder, out)
    shard.unlink()
    mistake(f"{shard} cannot be read: No such file", "hf", "paro", folder, out)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_a_truncated_checkpoint_is_named(tmp_path: Path) -> None:
    save_folder(tmp_path / "hf", 0)
    convert("hf", "paro", tmp_path / "hf", tmp_path / "paro")
    (file,) = (tmp_path / "paro" / "iter_0000000").glob("*.distcp")
    shutil.copytree(file.parent, tmp_path / "paro" / "iter_0000005")
    file.write_bytes(file.read_bytes()[:-100])
    mistake(f"{file} is truncated", "paro", "hf", tmp_path / "paro", tmp_path / "out")
    convert("paro", "hf", tmp_path / "paro", tmp_path / "out", "--ckpt-step", 5)
    weights = [tmp_path / name / "model.safetensors" for name in ("hf", "out")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    other = ("hf", "paro", tmp_path / "hf", tmp_path / "o")
    mistake("--ckpt-step ... --from paro", *other, "--ckpt-step", 5)


def test_a_failing_disk_is_one_line_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_folder(tmp_path / "hf", 0)
    out, full = tmp_path / "out", OSError(28, "No space left on device")
    for target, owner, name, message in (
        ("hf", ModelSource, "copy_companions", f"{out} cannot be written: {full.strerror}"),
        ("paro", ChunkSavePlanner, "resolve_data", f"--output {out}: {full.strerror}"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, Mock(side_effect=full))
            with pytest.raises((OSError, StorageError)) as failed:
                convert("hf", target, tmp_path / "hf", out)
        assert message in describe(failed.value)
    # One that is too small is told before anything is written.
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(9, 8, 1))
    mistake("1 bytes are free there", "hf", "megatron", tmp_path / "hf", out)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize(
    ("source", "target"),
    [
        *(("hf", target) for target in ("paro", "megatron", "torch_dist")),
        *((source, "hf") for source in ("paro", "torch_dist", "torchtitan")),
    ],
)
def test_little_is_in_memory_at_a_time(
    source: str, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One piece and, for a checkpoint, the part of the file that DCP keeps while writing."""
    save_folder(tmp_path / "hf", 3)
    if source != "hf":
        convert("hf", source, tmp_path / "hf", tmp_path / source)
    piece, file = 600, 4000
    monkeypatch.setattr(paro.checkpoint.convert.source, "CHUNK_BYTES", piece)
    monkeypatch.setattr(paro.checkpoint.storage, "MAX_FILE_BYTES", file)
    cast, read, live, lengths = LazyTensor.cast, RegularFile.read, LiveBytes(), []

    def watched(self: LazyTensor, dtype: torch.dtype | None) -> LazyTensor:
        def rows(start: int, stop: int) -> torch.Tensor:
            return live.watched(self.rows(start, stop))

        return replace(cast(self, dtype), rows=rows)

    def measured(self: RegularFile, begin: int, length: int) -> bytes:
        lengths.append(length)
        return read(self, begin, length)

    monkeypatch.setattr(LazyTensor, "cast", watched)
    monkeypatch.setattr(RegularFile, "read", measured)
    convert(source, target, tmp_path / source, tmp_path / "out")
    size = sum(path.stat().st_size for path in (tmp_path / "hf").glob("*.safetensors"))
    assert size > 4 * file
    assert 0 < live.most <= (file if target in ("paro", "torch_dist") else 0) + 2 * piece
    fields = random_fields(3)  # rows are permuted by head
    head = 4 * fields["head_dim"] * fields["hidden_size"] if source == "torchtitan" else 0
    assert max(lengths, default=0) <= max(piece, 4096, head), "a chunk was read whole"
