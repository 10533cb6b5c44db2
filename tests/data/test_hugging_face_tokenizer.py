"""A tokenizer.json, read or written here, gives transformers' ids; names of the hub in refusals."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers

from data.hub import how_to_fetch
from data.hugging_face_tokenizer import bytes_of_pieces, hugging_face_tokenizer
from data.tokenizer import SentencePieceTokenizer
from data.tokenizer_json import write_tokenizer_json
from tests.data.test_tokenizer import train_sentencepiece
from tests.helpers.refusals import refused
from tests.helpers.scripts import python_apart

TEXT = "def f(x):\n    return x  # naïve\n"
TEXTS = (
    *(TEXT, "", "  two  <tool></s> \n<|im_end|>", "a<s> <pad><mask>"),
    *("x" * 300, "Ein Satz <new>."),
)


def write(folder: Path, name: str, fields: Any) -> None:
    (folder / name).write_text(json.dumps(fields))


def byte_level(special: list[str]) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    return tokenizer


def modern(folder: Path) -> None:
    """As published today: all tokens in tokenizer.json, and their names next to it."""
    tokenizer = byte_level(["<s>", "</s>"])
    tokenizer.add_tokens([AddedToken("<tool>", normalized=True)])
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(pad_id=0, pad_token="<s>", length=40)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": {"content": "</s>", "__type": "AddedToken"}}
    write(folder, "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **named})


def tokens_beside(folder: Path) -> None:
    """tokenizer_config.json adds some, and names others that are not special yet."""
    tokenizer = byte_level([])
    tokenizer.add_tokens(["</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    size = tokenizer.get_vocab_size()
    more = {"lstrip": True, "rstrip": True, "normalized": False, "single_word": False}
    decoder = {
        str(size + 1): {"content": "<new>", "special": False, **more},
        str(size): {"content": "<|im_end|>", "special": True, **more},
    }
    fields = {"added_tokens_decoder": decoder, "eos_token": "<|im_end|>", "pad_token": "<pad>"}
    extra = {"additional_special_tokens": ["<tool>", "</s>"]}
    write(folder, "tokenizer_config.json", {**fields, **extra, "bos_token": "x"})


def roles_beside(folder: Path) -> None:
    """Other flags for a token of tokenizer.json, roles of the model's own, extra tokens twice."""
    tokenizer = byte_level(["<s>"])
    tokenizer.add_tokens([AddedToken("<tool>", normalized=True), AddedToken("</s>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    size = tokenizer.get_vocab_size()
    decoder = {
        str(size - 2): {"content": "<tool>", "special": True, "lstrip": True, "rstrip": True},
        str(size + 7): {"content": "<new>", "special": False, "single_word": True},
    }
    named = {"eos_token": "</s>", "image_token": "<pad>"}
    extra = {"audio": {"content": "<mask>", "lstrip": True, "__type": "AddedToken"}}
    fields = {"extra_special_tokens": extra, "additional_special_tokens": ["<|im_end|>", "<new>"]}
    write(folder, "tokenizer_config.json", {"added_tokens_decoder": decoder, **named, **fields})


def of_old(folder: Path) -> None:
    """The three files that transformers wrote before 4.34."""
    tokenizer = byte_level(["<s>"])
    tokenizer.add_tokens(["<pad>"])
    size = tokenizer.get_vocab_size()
    tokenizer.save(str(folder / "tokenizer.json"))
    write(folder, "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})
    named = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    write(folder, "special_tokens_map.json", named)
    write(folder, "added_tokens.json", {"</s>": size + 1, "<tool>": size})


def unigram(folder: Path) -> None:
    tokenizer = tokenizers.Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    names = ["<unk>", "<s>", "</s>"]
    trainer = trainers.UnigramTrainer(
        vocab_size=60, special_tokens=names, unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    fields = {"eos_token": "</s>", "unk_token": "<unk>", "split_special_tokens": True}
    write(folder, "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **fields})


def gpt2(folder: Path) -> None:
    """Only the model's own configuration names the end-of-text id."""
    tokenizer = byte_level(["<|endoftext|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    write(folder, "tokenizer_config.json", {"model_max_length": 1024})
    write(folder, "config.json", {"model_type": "gpt2", "bos_token_id": 0, "eos_token_id": 0})


FOLDERS = [modern, tokens_beside, roles_beside, of_old, unigram, gpt2]


@pytest.mark.slow("imports transformers")
@pytest.mark.parametrize("make", FOLDERS)
def test_ids_and_ends_are_transformers(make: Callable[[Path], None], tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    make(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    ours = hugging_face_tokenizer(str(tmp_path))
    assert hugging_face_tokenizer(str(tmp_path / "tokenizer.json")).vocabulary == ours.vocabulary
    for text in TEXTS:
        ids = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text) == ids, text
        assert ours.decode(ids) == theirs.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
    assert ours.encode_batch(TEXTS) == [ours.encode(text) for text in TEXTS]
    assert ours.vocabulary == theirs.get_vocab()
    assert ours.token_bytes() == bytes_of_pieces(theirs.backend_tokenizer, ours.vocab_size)
    assert (ours.eod, ours.bos) == (theirs.eos_token_id, theirs.bos_token_id)


@pytest.mark.process
def test_transformers_is_not_imported(tmp_path: Path) -> None:
    modern(tmp_path)
    program = "import sys; from data.hugging_face_tokenizer import hugging_face_tokenizer as read; "
    python_apart(f"{program}read({str(tmp_path)!r}); sys.exit('transformers' in sys.modules)")


SAYS, MAP = "tokenizer_config.json", "special_tokens_map.json"
NEW = {"content": "<new>", "lstrip": True}


def test_a_token_needs_no_type(tmp_path: Path) -> None:
    """Token objects of other programs have no `__type`; transformers refuses them."""
    gpt2(tmp_path)
    size = hugging_face_tokenizer(str(tmp_path)).vocab_size
    lists = ("additional_special_tokens", "extra_special_tokens")
    for fields in (*({name: [NEW]} for name in lists), {"pad_token": NEW}, {"eos_token": NEW}):
        for name in (SAYS, MAP):
            gpt2(tmp_path)
            write(tmp_path, name, fields)
            ours = hugging_face_tokenizer(str(tmp_path))
            assert ours.encode("  <new>") == [size]
            assert ours.vocab_size == size + 1
            assert ours.eod == (size if "eos_token" in fields else 0)
            (tmp_path / name).unlink()


EMPTY = {"model": {"type": "BPE", "vocab": {}, "merges": []}}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        *((name, "{", f"{name} is not valid JSON") for name in (SAYS, MAP, "config.json")),
        (SAYS, {"eos_token": 5}, "eos_token: 5 is of the wrong type"),
        (SAYS, {"added_tokens_decoder": {"-1": {"content": ""}}}, "-1: is no number"),
        (MAP, {"extra_special_tokens": [3]}, "[0]: 3 is of the wrong type"),
        ("added_tokens.json", {"<new>": "7"}, "<new>: '7' is of the wrong type"),
        ("tokenizer.json", EMPTY, "empty vocabulary"),
        ("config.json", [], "config.json: [] is of the wrong type"),
        ("config.json", {"eos_token_id": 10**6}, "ends documents with the id 1000000"),
        ("config.json", {"eos_token_id": [0, 5]}, "which token ends a document"),
        ("config.json", {"eos_token_id": None}, "which token ends a document"),
        ("config.json", None, "which token ends a document"),
    ],
)
def test_a_file_that_is_damaged_or_says_too_little_is_named(
    name: str, content: Any, message: str, tmp_path: Path
) -> None:
    gpt2(tmp_path)
    if content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    refused(lambda: hugging_face_tokenizer(str(tmp_path)), message, str(tmp_path))


def test_a_folder_without_a_tokenizer_json_is_for_transformers(tmp_path: Path) -> None:
    refused(lambda: hugging_face_tokenizer(str(tmp_path)), "tokenizer.json ... transformers")
    refused(lambda: hugging_face_tokenizer("an-owner/a-model"), "hf download an-owner/a-model")
    (tmp_path / "vocab.json").write_text("{}")
    os.mkfifo(tmp_path / "merges.txt")
    message = "--tokenizer-model ... merges.txt is no regular file"
    refused(lambda: hugging_face_tokenizer(str(tmp_path)), message)


LINES = ["def main() -> None:", "    print('naïve 雪 text')", "the quick  brown fox", "a b c"] * 20
LLAMA: dict[str, Any] = {  # as LLaMA-1's, LLaMA-2's and this project's were trained
    "lines": LINES,
    "vocab_size": 320,
    "hard_vocab_limit": False,
    "allow_whitespace_only_pieces": True,
    "split_digits": True,
}
CODE = ["def main() -> None:", "  def  naïve(雪):\n\t", "quick é brown 🙂 2025"]
CODE += ["a", " a", "\n", "x" * 40]


@pytest.mark.parametrize("prefix", [True, False])
def test_ids_and_texts_are_the_same(prefix: bool, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    out = tmp_path
    model = train_sentencepiece(out / "x.model", **LLAMA, add_dummy_prefix=prefix)
    assert write_tokenizer_json(model, out)
    own = SentencePieceTokenizer(str(model))
    file = hugging_face_tokenizer(str(out / "tokenizer.json"))
    theirs = AutoTokenizer.from_pretrained(out)
    assert (theirs.bos_token_id, theirs.eos_token_id) == (own.bos, own.eod) == (1, 2)
    assert (file.bos, file.eod, file.vocab_size) == (1, 2, own.vocab_size)
    for text in CODE:
        ids = own.encode(text)
        assert theirs.encode(text) == ids == file.encode(text), text
        assert theirs.decode(ids) == own.decode(ids) == file.decode(ids) == text


def test_a_model_without_bytes_keeps_its_unknown_piece(tmp_path: Path) -> None:
    model = train_sentencepiece(tmp_path / "x.model", **LLAMA | {"byte_fallback": False})
    assert write_tokenizer_json(model, tmp_path)
    ids = SentencePieceTokenizer(str(model)).encode("a 日本 b")
    assert hugging_face_tokenizer(str(tmp_path / "tokenizer.json")).encode("a 日本 b") == ids


OTHER_IDS = ({"normalization_rule_name": "nmt_nfkc"}, {"remove_extra_whitespaces": True})


@pytest.mark.parametrize("options", [*OTHER_IDS, {"model_type": "unigram", "byte_fallback": True}])
def test_what_would_have_other_ids_is_not_written(options: dict[str, Any], tmp_path: Path) -> None:
    model = train_sentencepiece(tmp_path / "x.model", **LLAMA, **options)
    assert not write_tokenizer_json(model, tmp_path)
    model.write_text("IQ== 0\nIg== 1\n")  # of another library
    assert not write_tokenizer_json(model, tmp_path)
    assert list(tmp_path.iterdir()) == [model]


def test_a_refusal_says_how_to_fetch_what_may_be_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name = "meta-llama/Llama_3.2-1B"
    assert f"'hf download {name} --local-dir Llama_3.2-1B'" in how_to_fetch(name)
    assert how_to_fetch(Path(name)) == how_to_fetch(name)
    for name in ("/o/m", "a/b/c", "../runs", "~/model", "model", "owner/", "own er/model"):
        assert how_to_fetch(name) == "", name
    (tmp_path / "runs").mkdir()
    assert how_to_fetch("runs/gone") == ""
