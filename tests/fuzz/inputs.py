"""Inputs of the fuzzer that no fixture has: tokenizers, a trace, and a model in Meta's form."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from data.fingerprint import fingerprint_of
from data.tokenizer_config import TokenizerConfig
from paro.checkpoint.folder_lock import LockHolder
from tests.data.test_tokenizer import sentencepiece_model, write_tik
from tests.helpers.gpt2 import write_gpt2
from tests.paro.checkpoint.convert.folders import random_tensors
from tests.paro.checkpoint.convert.test_round_trip import CONFIG, save_meta
from tests.tools.test_draw_profile import write_trace

# Of a run on another host, which was killed.
OWNER = asdict(replace(LockHolder.this_process(), host="node7", boot_id="another boot")) | {
    **{"heartbeat": 5, "released": False}
}


def add_inputs(place: Path) -> None:
    """Adds the files to a folder that holds a copy of the fixtures."""
    for name, content in _made().items():
        path = place / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    write_trace(place / "trace.json")
    write_tik(place / "ranks.tiktoken")
    save_meta(place / "meta", random_tensors(CONFIG), 1, by_vocab=False)
    for suffix in ("idx", "bin"):
        shutil.copy(place / f"corpus_text_document.{suffix}", place / f"words.{suffix}")
    words = TokenizerConfig(
        tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(place / "tokenizer.json")
    )
    fingerprint = fingerprint_of(words)
    assert fingerprint is not None
    (place / "words.tokenizer").write_text(json.dumps(asdict(fingerprint)))
    shutil.copy(place / "tokenizer_config.json", place / "hf/tokenizer_config.json")
    tokenizer = json.loads((place / "tokenizer.json").read_text(encoding="utf-8"))
    tokenizer["model"]["unk_token"] = "0"
    del tokenizer["model"]["vocab"]["?"]  # the model has no row for it
    (place / "hf/tokenizer.json").write_text(json.dumps(tokenizer))
    (place / "hf/generation_config.json").write_text('{"eos_token_id": [31]}')
    (place / "owned").mkdir()
    (place / "owned/lease_1.json").write_text(json.dumps(OWNER))
    _move_partitions(place)


def _move_partitions(place: Path) -> None:
    """Writes the places and times of the copied inputs into the record of unfinished partitions."""
    path = place / "halfway_partitions/run.json"
    record = json.loads(path.read_text(encoding="utf-8"))
    text, tokenizer = place / "text.jsonl", place / "tokenizer.json"
    for piece in (piece for pieces in record["partitions"] for piece in pieces):
        piece |= {"path": str(text), "stamp": text.stat().st_mtime_ns}
    status = tokenizer.stat()
    record["tokenizer_files"] = {str(tokenizer): [status.st_size, status.st_mtime_ns]}
    record["plan"]["tokenizer"]["tokenizer_model"] = str(tokenizer)
    path.write_text(json.dumps(record))


@cache
def _made() -> dict[str, bytes]:
    """Contents by name, made once per process."""
    with TemporaryDirectory() as folder:
        gpt2 = {f"gpt2/{path.name}": path.read_bytes() for path in write_gpt2(Path(folder))}
    return {"spm.model": sentencepiece_model(), **gpt2, "prompts.txt": b"1 2 3\n4 5\n"}
