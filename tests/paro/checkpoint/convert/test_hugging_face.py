"""Hugging Face folders: which tensor is a parameter, and folders of runs without a tokenizer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from model.hugging_face import hugging_face_config, hugging_face_name
from paro.checkpoint.convert.hugging_face import (
    INDEX,
    WEIGHTS,
    companions_in,
    open_hugging_face,
    tokenizer_of,
)
from tests.data.test_tokenizer import train_sentencepiece, write_tik
from tests.helpers.refusals import refused
from tests.helpers.training import llama
from tests.paro.checkpoint.convert.folders import random_tensors
from tests.tools.conftest import SIZES, convert, save_untrained

CONFIG = llama(2, 16, 24, heads=(2, 1, 6), length=32, vocab=21)
TENSORS = {hugging_face_name(name): t for name, t in random_tensors(CONFIG).items()}
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
DOWN = "model.layers.0.mlp.down_proj.weight"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def written(folder: Path, tensors: dict[str, Tensor], **fields: object) -> Path:
    folder.mkdir()
    config = hugging_face_config(CONFIG) | fields
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / WEIGHTS)
    return folder


def sharded(folder: Path, tensors: dict[str, Tensor]) -> dict[str, str]:
    """Two files instead of one; the places to write into an index."""
    written(folder, tensors)
    (folder / WEIGHTS).unlink()
    places = {name: (FIRST, SECOND)[number % 2] for number, name in enumerate(tensors)}
    for file in (FIRST, SECOND):
        save_file({n: t for n, t in tensors.items() if places[n] == file}, folder / file)
    index(folder, places)
    return places


def index(folder: Path, places: dict[str, str]) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))


def read(folder: Path) -> dict[str, Tensor]:
    tensors = open_hugging_face(folder).tensors
    return {hugging_face_name(name): t.whole(t.dtype) for name, t in tensors.items()}


def assert_read(folder: Path, expected: dict[str, Tensor]) -> None:
    found = read(folder)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def refuses(folder: Path, message: str) -> None:
    refused(lambda: open_hugging_face(folder), message)


@pytest.mark.parametrize(
    "renamed",
    [
        lambda name: name.removeprefix("model."),
        lambda name: f"module._orig_mod.{name}",
        lambda name: name.replace("layers.1.", "layers.1._orig_mod."),
        lambda name: name.replace("self_attn.", "_checkpoint_wrapped_module.self_attn."),
        lambda name: "_fsdp_wrapped_module." + name.replace("mlp.", "mlp._fsdp_wrapped_module."),
    ],
)
def test_names_of_wrappers_and_frequencies_are_left_out(
    renamed: Callable[[str], str], tmp_path: Path
) -> None:
    names = ("model.rotary_emb.inv_freq", "model.layers.1.self_attn.rotary_emb.inv_freq")
    stored = {**TENSORS, **{name: torch.ones(3) for name in names}}
    assert_read(written(tmp_path / "hf", {renamed(n): t for n, t in stored.items()}), TENSORS)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model.layers.2.mlp.up_proj.weight", "which this model has not"),
        ("lm_head.bias", "which this model has not"),
        (f"module.{DOWN}", f"both are {DOWN}"),
    ],
)
def test_a_tensor_that_this_model_has_not_is_named(name: str, message: str, tmp_path: Path) -> None:
    more = {**TENSORS, name: torch.ones(3)}
    refuses(written(tmp_path / "hf", more), f"{name} ... {message}")


def test_the_index_decides_which_of_two_files_is_read(tmp_path: Path) -> None:
    """And what it leaves out is found."""
    folder = tmp_path / "hf"
    places = sharded(folder, TENSORS)
    new = torch.full_like(TENSORS[DOWN], 0.5)
    for file in ("a-first.safetensors", "z-last.safetensors"):
        save_file({DOWN: new}, folder / file)
        index(folder, {**places, DOWN: file})
        assert_read(folder, {**TENSORS, DOWN: new})
        (folder / file).unlink()
    for left_out in ("", DOWN):
        index(folder, {name: file for name, file in places.items() if name != left_out})
        assert_read(folder, TENSORS)


def test_an_index_that_does_not_fit_its_files_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    places = sharded(folder, TENSORS)
    other = SECOND if places[DOWN] == FIRST else FIRST
    index(folder, {**places, DOWN: other})
    refuses(folder, f"{folder / other} has no {DOWN} ... {INDEX}")
    index(folder, {**places, DOWN: "third.safetensors"})
    refuses(folder, f"{folder / 'third.safetensors'} cannot be read: No such file")
    index(folder, {**places, DOWN: "../hf/" + places[DOWN]})
    refuses(folder, f"{folder / INDEX} is damaged (it names files elsewhere)")
    index(folder, {})
    refuses(folder, f"has no {EMBEDDING}: a file is missing")


def test_one_whole_file_is_read_rather_than_shards_as_transformers_does(tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    sharded(folder, TENSORS)
    new = {name: tensor + 1.0 for name, tensor in TENSORS.items()}
    save_file(new, folder / WEIGHTS, {"format": "pt"})
    assert_read(folder, new)
    assert any(f"{INDEX} is not read" in note for note in open_hugging_face(folder).notes)


def test_a_tied_output_layer_is_what_is_stored(tmp_path: Path) -> None:
    def stored(name: str, tensors: dict[str, Tensor]) -> Path:
        return written(tmp_path / name, tensors, tie_word_embeddings=True)

    tied = {name: tensor for name, tensor in TENSORS.items() if name != HEAD}
    assert_read(stored("the same in fp64", {**tied, HEAD: tied[EMBEDDING].double()}), tied)
    by_head = {name: tensor * torch.nan for name, tensor in TENSORS.items() if name != EMBEDDING}
    assert read(stored("only the output layer, of a diverged run", by_head)).keys() == tied.keys()
    other = {**tied, HEAD: tied[EMBEDDING].clone()}
    other[HEAD][-1, -1] += 0.5
    folder = stored("another", other)
    assert_read(folder, other)
    (note,) = (note for note in open_hugging_face(folder).notes if "tie_word" in note)
    assert note.endswith(f"stores another {HEAD}: the output layer is not tied")
    longer = {**tied, HEAD: torch.cat((tied[EMBEDDING], tied[EMBEDDING]))}
    refuses(stored("longer", longer), f"{HEAD} is 42x16")


BIASED = {
    **TENSORS,
    **{
        f"model.layers.{layer}.self_attn.{part}_proj.bias": torch.full((size,), 0.1 + layer)
        for layer in range(2)
        for part, size in (("q", 12), ("k", 6), ("v", 6))
    },
}
OUTPUT = "model.layers.1.self_attn.o_proj.bias"
ZEROS = {OUTPUT.replace("1", str(layer)): torch.zeros(16) for layer in range(2)}


def test_a_bias_of_the_output_projection_has_to_be_zero(tmp_path: Path) -> None:
    for name, there in (("zero", ZEROS), ("left out", {})):
        folder = written(tmp_path / name, {**BIASED, **there}, attention_bias=True)
        assert open_hugging_face(folder).config.add_qkv_bias
        assert_read(folder, BIASED)
    for value in (torch.eye(16)[5], torch.zeros(3), torch.tensor(0.0)):
        folder = written(tmp_path / "no", {**BIASED, **ZEROS, OUTPUT: value}, attention_bias=True)
        refuses(folder, f"{folder}: {OUTPUT} is not zero, and this model has no bias")
        shutil.rmtree(folder)
    folder = written(tmp_path / "unsaid", {**BIASED, **ZEROS})
    refuses(folder, "self_attn.k_proj.bias, which this model has not")


def test_a_lost_tokenizer_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = train_sentencepiece(tmp_path / "pieces.model")
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


def test_a_tokenizer_that_is_copied_keeps_its_type(tmp_path: Path) -> None:
    model = write_tik(tmp_path / "own.model")
    flags = f"{SIZES} --tokenizer-type TikTokenizer --tokenizer-model {model}"
    save_untrained(tmp_path / "saved", flags)
    out = convert("paro", "paro", tmp_path / "saved", tmp_path / "out")
    common = json.loads((out / "iter_0000000" / "common.json").read_text(encoding="utf-8"))
    copy = str(out / "hugging_face" / "tokenizer.model")
    assert common["tokenizer"]["tokenizer_type"] == "TikTokenizer"
    assert common["tokenizer"]["tokenizer_model"] == copy


def test_the_tokenizer_of_a_folder_of_pieces_is_found_without_transformers(tmp_path: Path) -> None:
    model = train_sentencepiece(tmp_path / "tokenizer.model")
    own = {"auto_map": {"AutoTokenizer": ["own.OwnTokenizer", None]}}
    for fields in (own, {"tokenizer_class": "T5Tokenizer"}, {"eos_token": {"content": "</s>"}}):
        said = json.dumps({"eos_token": "</s>", **fields})
        (tmp_path / "tokenizer_config.json").write_text(said)
        assert tokenizer_of(companions_in(tmp_path), begins=False) == {
            "tokenizer_type": "SentencePieceTokenizer",
            "tokenizer_model": str(model),
        }


def test_a_model_that_transformers_has_not_is_one_line(tmp_path: Path) -> None:
    flags = "--use-rope-scaling --rotary-seq-len-interpolation-factor 2"
    null = "--tokenizer-type NullTokenizer --vocab-size 64"
    save_untrained(tmp_path / "saved", f"{SIZES} {flags} {null}")
    message = "no model with both rope_type llama3 and --rotary-seq-len-interpolation-factor"
    refused(lambda: convert("paro", "hf", tmp_path / "saved", tmp_path / "hf"), message)
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
