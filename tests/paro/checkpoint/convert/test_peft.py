"""Folders of peft's adapters: written, read back, merged, and refused if they do not fit."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from math import sqrt
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from paro.checkpoint.base import stored_parameters
from paro.checkpoint.convert.hugging_face import COMPANIONS
from paro.checkpoint.convert.native import open_native
from paro.checkpoint.convert.peft import WEIGHTS, peft_name
from paro.checkpoint.convert.source import ModelSource
from paro.checkpoint.convert.tensor_files import open_safetensors
from tests.helpers.refusals import refused
from tests.paro.checkpoint.convert.folders import logits_of, own_model, some_tokens
from tests.paro.training.test_base import assert_equal, started, trained
from tests.tools.conftest import convert
from tools.convert_checkpoint import main

LORA = "--lora-rank 3 --lora-alpha 6 --lora-dropout 0.1 --lora-target-modules v_proj,o_proj,up_proj"


@pytest.fixture(scope="module", name="root")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base, adapters that were trained on it, and the same as a folder of peft."""
    root = tmp_path_factory.mktemp("adapters")
    trained(f"--save {root / 'base'}")
    trained(f"{LORA} --load {root / 'base'} --save {root / 'run'} --lr 0.05")
    converted(root, "paro", "peft", "run", "peft")
    return root


@pytest.fixture
def theirs(root: Path, tmp_path: Path) -> Path:
    return shutil.copytree(root / "peft", tmp_path / "peft")


def edited(folder: Path, changes: dict[str, Any], tensors: dict[str, Tensor] | None = None) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | changes))
    if tensors is not None:
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(contiguous, folder / WEIGHTS)


def converted(root: Path, there: str, here: str, source: str, target: str, *more: str) -> Path:
    return convert(there, here, root / source, root / target, *more)


def assert_same_model(one: ModelSource, other: ModelSource) -> None:
    assert one.tensors.keys() == other.tensors.keys()
    for name, tensor in one.tensors.items():
        there = other.tensors[name].whole(torch.float32)
        torch.testing.assert_close(tensor.whole(torch.float32), there, rtol=0, atol=1e-7)


@pytest.mark.slow("imports peft")
def test_names_are_those_of_peft(root: Path) -> None:
    stored = open_safetensors(root / "peft" / "adapter_model.safetensors")
    assert len(stored) == 3 * 3 * 2
    layer = "base_model.model.model.layers.2."
    assert stored[f"{layer}mlp.up_proj.lora_A.weight"].shape == (3, 20)
    assert f"{layer}self_attn.o_proj.lora_B.weight" in stored
    fields = json.loads((root / "peft" / "adapter_config.json").read_text(encoding="utf-8"))
    assert (fields["r"], fields["lora_alpha"], fields["lora_dropout"]) == (3, 6, 0.1)
    assert fields["target_modules"] == ["v_proj", "o_proj", "up_proj"]


def test_tokenizer_and_chat_template_go_with_the_adapters(root: Path, tmp_path: Path) -> None:
    run = shutil.copytree(root / "run", tmp_path / "run")
    names = {"chat_template.jinja", "tokenizer_config.json"}
    (run / COMPANIONS).mkdir()
    for name in (*names, "config.json"):
        (run / COMPANIONS / name).write_text("{}")
    folder = converted(root, "paro", "peft", str(run), str(tmp_path / "peft"))
    assert {path.name for path in folder.iterdir()} == {*names, "adapter_config.json", WEIGHTS}


def test_a_run_continues_with_adapters_of_peft(root: Path, tmp_path: Path) -> None:
    base = ("--base", str(root / "base"))
    back = converted(root, "peft", "paro", "peft", str(tmp_path / "back"), *base)
    ours, theirs = open_native(root / "run"), open_native(back)
    assert stored_parameters(back / "iter_0000000") == ours.adapters.keys()
    assert theirs.lora == ours.lora
    assert_same_model(ours, theirs)
    stable = shutil.copytree(root / "peft", tmp_path / "stable")
    edited(stable, {"use_rslora": True})  # which is written as an alpha
    lora = open_native(converted(tmp_path, "peft", "paro", "stable", "alpha", *base)).lora
    assert lora.scaling == pytest.approx(STABLE)
    assert (lora.rank, lora.targets) == (3, ("wv", "wo", "w_up"))
    _, training, resumed = started(f"{LORA} --load {back} --save {tmp_path / 'next'}")
    assert resumed.base is not None
    wanted = started(f"{LORA} --load {root / 'run'} --finetune")[1]
    assert_equal(training, wanted)


def test_what_is_not_finite_is_refused_by_name(root: Path, theirs: Path, tmp_path: Path) -> None:
    stored = load_file(theirs / WEIGHTS)
    name = [*stored][-1]
    stored[name][0, 0] = float("inf")
    edited(theirs, {}, stored)
    base = ("--base", str(root / "base"))
    for target, *more in (("paro",), ("peft",), ("paro", "--merge"), ("hf", "--merge")):
        out = tmp_path / "out"
        refused(lambda: convert("peft", target, theirs, out, *base, *more), f"{theirs} ... {name}")  # noqa: B023
        assert not out.exists()


@pytest.mark.slow("trains, converts and loads")
@pytest.mark.parametrize("target", ["hf", "megatron"])
def test_both_ways_merge_into_the_same_model(root: Path, tmp_path: Path, target: str) -> None:
    wanted = open_native(root / "run")
    more = ["--make-vocab-size-divisible-by", "1", "--merge"]
    converted(root, "paro", target, "run", str(tmp_path / "one"), *more)
    base = converted(root, "paro", "hf", "base", str(tmp_path / "hf"))
    more += ["--base", str(base if target == "hf" else root / "base")]
    converted(root, "peft", target, "peft", str(tmp_path / "two"), *more)
    models = []
    for name in ("one", "two"):
        converted(tmp_path, target, "hf", name, f"{name} again")
        converted(tmp_path, "hf", "paro", f"{name} again", f"{name} native")
        models.append(open_native(tmp_path / f"{name} native"))
    for model in models:
        assert model.lora is None
        assert_same_model(model, wanted)
    tokens_BS = some_tokens(wanted.config.vocab_size, length=12)
    plain = logits_of(own_model(open_native(root / "base")), tokens_BS)
    assert (logits_of(own_model(wanted), tokens_BS) - plain).abs().max() > 1e-3


def named_base(folder: Path) -> str | None:
    fields = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    name: str | None = fields["base_model_name_or_path"]
    return name


@pytest.mark.slow("trains, converts and loads")
def test_adapters_name_the_folder_that_their_base_was_converted_from(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hf = str(converted(root, "paro", "hf", "base", str(tmp_path / "hf")))
    one_row = ("--make-vocab-size-divisible-by", "1")
    base = converted(tmp_path, "hf", "paro", "hf", "base", *one_row)
    trained(f"{LORA} --load {base} --save {tmp_path / 'run'}")
    assert named_base(converted(tmp_path, "paro", "peft", "run", "peft")) == hf
    assert f"adapter_config.json names the base {hf}" in capsys.readouterr().out
    converted(tmp_path, "peft", "paro", "peft", "back", "--base", str(base))
    assert named_base(converted(tmp_path, "paro", "peft", "back", "peft again")) == hf
    name = ("--base-model-name-or-path", "some/model")
    assert named_base(converted(tmp_path, "paro", "peft", "run", "hub", *name)) == "some/model"
    words = ["--from", "paro", "--to", "hf", "--input", str(base), *name]
    refuses(tmp_path, words, "needs --to peft")
    # Adapters on other weights do not name that folder.
    assert named_base(root / "peft") is None
    trained(f"--trainable names:*.wq --load {base} --save {tmp_path / 'tuned'}")
    merge = ("--merge", "--base", hf, *one_row)
    converted(root, "peft", "paro", "peft", str(tmp_path / "merged"), *merge)
    for folder in ("tuned", "merged"):
        run = tmp_path / f"on_{folder}"
        trained(f"{LORA} --load {tmp_path / folder} --save {run}")
        assert named_base(converted(tmp_path, "paro", "peft", run.name, f"peft {folder}")) is None
        assert "give --base-model-name-or-path" in capsys.readouterr().out


def refuses(root: Path, words: Sequence[str], *message: str) -> None:
    out = root / "refused"
    refused(lambda: main([*words, "--output", str(out)]), *message)
    assert not out.exists()


def refuses_theirs(root: Path, theirs: Path, *message: str, to: Sequence[str] = ("paro",)) -> None:
    words = ["--from", "peft", "--input", str(theirs), "--base", str(root / "base")]
    refuses(theirs.parent, [*words, "--to", *to], *message)


def test_flags_that_do_not_agree(root: Path) -> None:
    peft = ("--from", "peft", "--input", str(root / "peft"))
    run = ("--from", "paro", "--input", str(root / "run"))
    base = ("--base", str(root / "base"))
    plain = ("--from", "paro", "--input", str(root / "base"))
    for words, message in (
        ((*peft, "--to", "paro"), "--from peft needs --base"),
        ((*peft, "--to", "hf", *base), "give --merge to write the model"),
        ((*run, "--to", "hf"), "give --merge to write the model"),
        ((*run, "--to", "peft", "--merge"), "--merge and --to peft contradict each other"),
        ((*plain, "--to", "peft"), "--to peft:"),
        ((*plain, "--to", "hf", "--merge"), "has no adapters: leave it out"),
        ((*peft, "--to", "paro", "--base", str(root / "run")), "without adapters"),
        ((*peft, "--to", "paro", "--base", str(root / "gone")), f"--base {root / 'gone'}"),
        (("--from", "hf", "--to", "paro", "--input", str(root), *base), "needs --from paro or"),
        (("--from", "peft", "--to", "paro", "--input", str(root), *base), "has no adapter_config"),
    ):
        refuses(root, words, message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"r": 4}, "lora_A.weight is 3x20, and 4x20 by its configuration"),
        ({"peft_type": "IA3"}, "peft_type is IA3, and only LORA is supported"),
        ({"of_a_newer_peft": {"a": 1}}, "of_a_newer_peft {'a': 1} is not supported"),
        ({"alpha_pattern": {"(v|o)_proj": 2}}, "alpha_pattern ... expression (v|o)_proj"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights pissa changes the base"),
        ({"init_lora_weights": "pissa_niter_4"}, "path_initial_model_for_weight_conversion"),
        ({"init_lora_weights": "of a newer peft"}, "or is unknown"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save ['lm_head'] is not supported"),
        ({"target_modules": ["lm_head"]}, "only the file has"),
        ({"target_modules": "all-linear"}, "the file lacks"),
        ({"lora_alpha": None}, "lora_alpha"),
    ],
)
def test_adapters_that_do_not_fit_are_refused(
    root: Path, theirs: Path, changes: dict[str, Any], message: str
) -> None:
    edited(theirs, changes)
    refuses_theirs(root, theirs, message, str(theirs))


V_PROJ, O_PROJ, UP_PROJ = "self_attn.v_proj", "self_attn.o_proj", "mlp.up_proj"
FIRST = f"model.layers.0.{V_PROJ}"
STABLE = 6 / sqrt(3)  # the scaling with use_rslora


@pytest.mark.slow("saves and loads")
@pytest.mark.parametrize(
    ("changes", "kept", "scalings"),
    [
        ({"target_modules": r".*(self_attn\.[vo]|up)_proj"}, "", {}),
        ({"target_modules": r"model\.layers\.[02]\..*"}, r"layers\.[02]\.", {}),
        ({"target_modules": [FIRST, f"1.{O_PROJ}"]}, f"0.{V_PROJ}|1.{O_PROJ}", {}),
        ({"layers_to_transform": [0, 2], "layers_pattern": "layers"}, r"layers\.[02]\.", {}),
        ({"exclude_modules": [f"1.{V_PROJ}", UP_PROJ]}, f"[02].{V_PROJ}|{O_PROJ}", {}),
        ({"target_modules": "all-linear", "exclude_modules": r".*layers\.0.*"}, r"s\.[12]\.", {}),
        ({"rank_pattern": {"v_proj": 2}}, "", {V_PROJ: 6 / 2}),
        ({"alpha_pattern": {"self_attn.v_proj": 12, "^v_proj": 7}}, "", {V_PROJ: 12 / 3}),
        ({"alpha_pattern": {f"^{FIRST}": 3, V_PROJ: 12}}, "", {FIRST: 3 / 3, V_PROJ: 12 / 3}),
        ({"use_rslora": True}, "", {"": STABLE}),
        ({"use_rslora": True, "rank_pattern": {V_PROJ: 2}}, "", {V_PROJ: 6 / sqrt(2), "": STABLE}),
    ],
)
def test_the_adapters_of_a_file_merge_where_and_as_they_are(
    root: Path, theirs: Path, changes: dict[str, Any], kept: str, scalings: dict[str, float]
) -> None:
    base = open_native(root / "base")
    ranks = changes.get("rank_pattern", {})
    tensors = {}
    for name, tensor in load_file(theirs / WEIGHTS).items():
        rank = next((rank for part, rank in ranks.items() if part in name), 3)
        if re.search(kept, name):
            tensors[name] = tensor[:rank] if "lora_A" in name else tensor[:, :rank]
    edited(theirs, changes, tensors)
    wanted = {name: tensor.whole(torch.float32) for name, tensor in base.tensors.items()}
    names = {
        peft_name(f"{name}_lora_a"): name for name in base.tensors if name.startswith("blocks")
    }
    for down in filter(names.get, tensors):
        scaling = next((value for part, value in scalings.items() if part in down), 6 / 3)
        up = tensors[down.replace("lora_A", "lora_B")]
        wanted[names[down]] += scaling * up @ tensors[down]
    merge = ("--merge", "--base", str(root / "base"))
    whole = converted(theirs.parent, "peft", "paro", "peft", "whole", *merge)
    for name, tensor in open_native(whole).tensors.items():
        torch.testing.assert_close(tensor.whole(torch.float32), wanted[name], rtol=0, atol=1e-6)


def test_adapters_that_no_run_has_are_only_merged(root: Path, theirs: Path) -> None:
    tensors = load_file(theirs / WEIGHTS)
    some = {name: t for name, t in tensors.items() if "layers.2" not in name}
    for changes, kept in (
        ({"layers_to_transform": [0, 1]}, some),
        ({"layers_to_transform": None, "alpha_pattern": {"v_proj": 2}}, tensors),
    ):
        edited(theirs, changes, kept)
        for target in ("paro", "peft"):
            refuses_theirs(root, theirs, "the same modules in all layers", to=(target,))
    for cut in (lambda tensor: tensor.new_zeros(()), lambda tensor: tensor[:0]):
        emptied = {name: cut(tensor) for name, tensor in tensors.items()}
        edited(theirs, {"alpha_pattern": {}, "rank_pattern": {"v_proj": 2}}, emptied)
        refuses_theirs(root, theirs, "adapters of another model", to=("hf", "--merge"))


def test_old_and_damaged_files_are_refused(root: Path, theirs: Path) -> None:
    for name in ("adapter_config.json", WEIGHTS):
        path = theirs / name
        content = path.read_bytes()
        for damaged in (content[: len(content) // 2], b"", b"[" * 100_000):
            path.write_bytes(damaged)
            refuses_theirs(root, theirs, str(path))
        path.unlink()
        refuses_theirs(root, theirs, name)
        path.write_bytes(content)
    path.rename(theirs / "adapter_model.bin")
    refuses_theirs(root, theirs, "has adapter_model.bin, which may hold programs")
