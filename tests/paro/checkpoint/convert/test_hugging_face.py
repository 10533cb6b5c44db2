"""Folders for transformers, written from runs whose tokenizer is present or missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from paro.checkpoint.convert.native import open_native
from paro.errors import UserError
from tests.paro.checkpoint.convert.folders import logits_of, own_model, some_tokens
from tests.tools.test_generate import SIZES, TEXT, save_untrained
from tools.convert_checkpoint import main as convert
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
    words = ["--from", "paro", "--to", "hf", "--input", str(tmp_path / "saved")]
    convert([*words, "--output", str(tmp_path / "hf")])
    said = f"the tokenizer is no longer at {model}: converted without it\n"
    assert capsys.readouterr().out.count(said) == 1
    written = sorted(path.name for path in (tmp_path / "hf").iterdir())
    assert written == ["config.json", "model.safetensors"]
    fields = json.loads((tmp_path / "hf" / "config.json").read_text(encoding="utf-8"))
    assert (fields["bos_token_id"], fields["eos_token_id"]) == (None, None)


@pytest.mark.parametrize(
    ("flags", "architecture"),
    [
        ("--qk-layernorm --kv-channels 24", "Qwen3ForCausalLM"),
        ("--add-qkv-bias", "Qwen2ForCausalLM"),
        ("--add-qkv-bias --qk-layernorm", "Qwen3ForCausalLM"),
        ("--rotary-seq-len-interpolation-factor 2.5", "LlamaForCausalLM"),
        (
            "--use-rope-scaling --rope-scaling-original-max-position-embeddings 8 "
            "--rope-scaling-low-freq-factor 0.5 --rope-scaling-high-freq-factor 2",
            "LlamaForCausalLM",
        ),
    ],
)
def test_a_run_opens_in_transformers_as_its_own_architecture(
    flags: str, architecture: str, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    save_untrained(
        tmp_path / "saved", f"{SIZES} {flags} --tokenizer-type NullTokenizer --vocab-size 64"
    )
    words = ["--from", "paro", "--to", "hf", "--input", str(tmp_path / "saved")]
    convert([*words, "--output", str(tmp_path / "hf")])
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    assert type(theirs).__name__ == architecture
    tokens = some_tokens(64, length=16)
    ours = logits_of(own_model(open_native(tmp_path / "saved")), tokens)
    expected = logits_of(theirs, tokens)
    torch.testing.assert_close(ours, expected, rtol=0.0, atol=1e-5 * float(expected.abs().max()))


def test_a_model_that_transformers_has_not_is_one_line(tmp_path: Path) -> None:
    flags = "--use-rope-scaling --rotary-seq-len-interpolation-factor 2"
    null = "--tokenizer-type NullTokenizer --vocab-size 64"
    save_untrained(tmp_path / "saved", f"{SIZES} {flags} {null}")
    words = ["--to", "hf", "--input", str(tmp_path / "saved"), "--output", str(tmp_path / "hf")]
    with pytest.raises(UserError, match="no model with both --use-rope-scaling and --rot"):
        convert(["--from", "paro", *words])
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
