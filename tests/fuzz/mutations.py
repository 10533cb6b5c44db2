"""Inputs that no fixture has: tokenizers, a trace, a model of Meta; and seeded damage to them."""

from __future__ import annotations

import argparse
import io
import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import cache, partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from data.fingerprint import fingerprint_of
from data.tokenizer_config import TokenizerConfig
from paro.arguments.flag_parser import PATHS as PATH_METAVARS
from paro.checkpoint.convert.megatron import open_megatron, write_megatron
from paro.checkpoint.convert.torchtitan import write_torchtitan
from paro.checkpoint.folder_lock import LockHolder
from paro.checkpoint.manifest import MANIFEST, METADATA, read_manifest, sum_of, write_manifest
from tests.data.test_tokenizer import sentencepiece_model, write_tik
from tests.helpers.corpora import write_gpt2
from tests.paro.checkpoint.convert.folders import random_tensors
from tests.paro.checkpoint.convert.test_round_trip import CONFIG, save_meta
from tests.tools.test_draw_profile import write_trace

Mutation = Callable[[Path, Random], None]

LONG = "x" * 5000
# What a terminal may obey, what is no ASCII or no UTF-8, formulas, formats and patterns.
ODD = (
    *("\x1b[2J\x1b[31mred", "\u202egnp.exe", "ä", "\udc80", "$x", r"$\frac{$", "_x"),
    *("{x}", "%(prog)s", "*", "[", "(", "a\nb", "\uff11", "²"),
)
SYNTAX = (
    *("{", "}", '"', ",", "\0", "\x1b[31m", "- ", ": ", "&a ", "*a", "1" * 5000, "\n", "\t", "\r"),
    *("!!int ", "!x ", "? ", "<<: ", "--- ", "%", "|", "@", "\ufeff", "NaN", "Infinity", "\\ud800"),
)
YAML_VALUES = (
    *("!!int ''", "!!bool x", "!!float x", "!!null x", "!!timestamp x", "!!binary x", "! 1"),
    *("!!set {a, b}", "!!python/name:os.system", "!!omap [a: 1]", "!!str 1", "2020-13-45"),
    *("2020-01-01", "=", ".nan", "-.inf", "0x10", "010", "1_000", "1:30", "0b", "yes", "y"),
    *("~", "''", "&a 1", "*a", "[1, [2]]", "[--lr, 5]", "--lr", "{a: b}", "1" * 5000),
    *("|\n  1", r'"\0"', r'"\ud800"', r'"\e[2J"'),
)
ENCODINGS = ("utf-8-sig", "utf-16", "utf-32", "utf-7", "cp037")
DEEP = "[" * 3000 + "]" * 3000
# What a field of JSON or the value of a flag may be instead.
LEAVES: tuple[Any, ...] = (
    *(None, True, 0, -1, 1, 10**6, 10**9, 10**12, 10**30, 1e308, -1e308, 0.5),
    *(float("nan"), float("inf"), [], {}, [[[]]], {"": {}}),
    *("", " ", LONG, "../..", "a\0b", "\ud800", *ODD),
)
WORDS = (
    *("", "0", "-1", "1", "2", "3", "16", "1000000", "1000000000000", "1" + "0" * 30),
    *("1e308", "1e-308", "nan", "inf", "1.", "0x10", "1_000"),
    *("-inf", "0.5", "x", LONG, "1,2", "0:1", "--", "-", "=", "%s", "+1", "1\n", "-0", *ODD),
)


def flip_bits(path: Path, draw: Random) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(draw.choice((1, 1, 8, 64))):
        if content:
            content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def truncate(path: Path, draw: Random) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: draw.randrange(len(content) + 1)])


def empty(path: Path, draw: Random) -> None:
    path.write_bytes(b"")


def extend(path: Path, draw: Random) -> None:
    path.write_bytes(path.read_bytes() + draw.randbytes(draw.randrange(1, 4096)))


def replace_all(path: Path, draw: Random) -> None:
    path.write_bytes(draw.randbytes(draw.randrange(1, 4096)))


def overwrite_a_number(path: Path, draw: Random) -> None:
    content = bytearray(path.read_bytes())
    value = draw.choice((0, -1, 1, 2**31 - 1, -(2**31), 2**62, 2**63 - 1, -(2**63)))
    place = draw.randrange(max(1, len(content) - 7))
    content[place : place + 8] = value.to_bytes(8, "little", signed=True)
    path.write_bytes(content)


def zero_a_block(path: Path, draw: Random) -> None:
    content = bytearray(path.read_bytes())
    start = draw.randrange(len(content) + 1)
    content[start : start + 512] = bytes(len(content[start : start + 512]))
    path.write_bytes(content)


def replace_by_no_file(path: Path, draw: Random) -> None:
    """By a folder, a pipe, a link to itself or to endless zeros, or by nothing."""
    links = [partial(path.symlink_to, target) for target in (path.name, "/dev/zero")]
    make = draw.choice((path.mkdir, partial(os.mkfifo, path), *links, None))
    path.unlink()
    if make is not None:
        make()


BYTES: tuple[Mutation, ...] = (
    *(flip_bits, flip_bits, truncate, empty, extend, replace_all, overwrite_a_number),
    *(overwrite_a_number, zero_a_block, *[replace_by_no_file] * 5),
)


def change_a_field(path: Path, draw: Random) -> None:
    """One value of a JSON file, or of a line of it, becomes another."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines() if path.suffix == ".jsonl" else [text]
    chosen = draw.randrange(len(lines))
    document = [json.loads(lines[chosen])]
    holder, key = draw.choice(list(_fields(document)))
    if holder is not document and draw.random() < 0.2:
        del holder[key]
    else:
        holder[key] = draw.choice(LEAVES)
    lines[chosen] = json.dumps(document[0], ensure_ascii=draw.random() < 0.5)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8", errors="surrogatepass")


def nest_deeply(path: Path, draw: Random) -> None:
    path.write_text(draw.choice((DEEP, '{"a":' * 3000 + "1" + "}" * 3000)), encoding="utf-8")


def break_the_syntax(path: Path, draw: Random) -> None:
    text = path.read_text(encoding="utf-8")
    at = draw.randrange(len(text) + 1)
    path.write_text(text[:at] + draw.choice(SYNTAX) + text[at:], encoding="utf-8")


def retype_a_value(path: Path, draw: Random) -> None:
    """A value of a YAML file becomes one that YAML makes something else of than a text."""
    lines = path.read_text(encoding="utf-8").splitlines()
    chosen = draw.randrange(len(lines))
    lines[chosen] = f"{lines[chosen].split(':')[0]}: {draw.choice(YAML_VALUES)}"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def encode_otherwise(path: Path, draw: Random) -> None:
    text = path.read_text(encoding="utf-8")
    path.write_bytes(text.encode(draw.choice(ENCODINGS), errors="replace"))


TEXT: tuple[Mutation, ...] = (*BYTES, *[break_the_syntax] * 6, encode_otherwise)
YAML: tuple[Mutation, ...] = (*TEXT, *[retype_a_value] * 16)
JSON: tuple[Mutation, ...] = (*TEXT, nest_deeply, *[change_a_field] * 16)


PICKLED: tuple[Any, ...] = (
    *(2**62, torch.Size([]), torch.Size([10**9, 8]), torch.Size([2**40] * 3)),
    *(torch.ones(()), torch.ones(3), torch.ones(2, 2).to_sparse(), torch.float32),
)


def change_a_record(path: Path, draw: Random) -> None:
    """One field of a pickled file becomes another; a checkpoint's manifest is made to agree."""
    is_plain = path.name == METADATA
    content = path.read_bytes()
    value = pickle.loads(content) if is_plain else torch.load(path, weights_only=False)
    holder, key = draw.choice(list(_fields(value)))
    holder[key] = draw.choice((*LEAVES, *PICKLED))
    changed = io.BytesIO()
    try:
        pickle.dump(value, changed) if is_plain else torch.save(value, changed)
    except (RuntimeError, TypeError, AttributeError):  # of classes that check as they are pickled
        return
    path.write_bytes(changed.getvalue())
    if (path.parent / MANIFEST).exists():
        manifest = read_manifest(path.parent)
        sums = {**manifest.files, METADATA: sum_of(changed.getvalue())}
        write_manifest(path.parent, manifest.iteration, sums, manifest.arguments)


def _fields(value: Any) -> Iterator[tuple[Any, Any]]:
    """The holder and the key of every field below a value."""
    holder = value if isinstance(value, dict | list) else getattr(value, "__dict__", None)
    if not isinstance(holder, dict | list) or isinstance(value, Tensor):
        return
    for key in list(holder) if isinstance(holder, dict) else range(len(holder)):
        yield holder, key
        yield from _fields(holder[key])


RECORD: tuple[Mutation, ...] = (*BYTES, *[change_a_record] * 16)


def mutations_of(path: Path) -> tuple[Mutation, ...]:
    """The ways to damage a file, the likelier ones several times."""
    if path.suffix in (".json", ".jsonl"):
        return JSON
    if path.name == METADATA or path.suffix in (".pt", ".pth"):
        return RECORD
    if path.suffix == ".yaml":
        return YAML
    return TEXT if path.suffix in (".txt", ".tiktoken", ".tokenizer") else BYTES


# In an empty folder that a program may write to, as `make_inputs` fills it, or in the inputs'.
PATHS = (
    *("", "{out}", "{set}", "{out}/absent", "{out}/a/b/c", "{out}/pipe", "{out}/zeros"),
    *("{out}/loop", "{out}/empty", f"{{out}}/{'x' * 300}", f"{{out}}/{LONG}"),
    *("{out}/\x1b[2J\x1b[31mred", "{out}/\u202egnp.exe", "{out}/ä.png", "{out}/x.json"),
)


def odd_flags(actions: Sequence[argparse.Action], draw: Random) -> list[str]:
    """One to three flags, each with a value that is rarely right, some of them twice."""
    words: list[str] = []
    for action in draw.sample(actions, min(len(actions), draw.choice((1, 1, 2, 3)))):
        flag = draw.choice(action.option_strings)
        count = 0 if action.nargs == 0 else 1 if action.nargs is None else draw.randrange(4)
        is_path = action.metavar in PATH_METAVARS or action.type is Path
        values = PATHS if is_path else (*WORDS, *map(str, action.choices or ()))
        given = [draw.choice(values) for _ in range(count)]
        joined = (
            [f"{flag}={given[0]}", *given[1:]] if given and draw.random() < 0.2 else [flag, *given]
        )
        words += joined * draw.choice((1, 1, 1, 2))
    return words


def add_inputs(place: Path) -> None:
    """Adds the files to a folder that holds a copy of the fixtures."""
    for name, content in _made().items():
        path = place / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    write_trace(place / "trace.json")
    write_tik(place / "ranks.tiktoken")
    save_meta(place / "meta", random_tensors(CONFIG), 1, by_vocab=False)
    (place / "dist").mkdir()
    source = open_megatron(place / "megatron")
    write_megatron(source, place / "dist", rows=32, divisible_by=1, dist=True)
    (place / "titan").mkdir()
    write_torchtitan(source, place / "titan", older=False)
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
    killed = asdict(replace(LockHolder.this_process(), host="node7", boot_id="another boot"))
    lease = json.dumps(killed | {"heartbeat": 5, "released": False})
    (place / "owned/lease_1.json").write_text(lease)
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
