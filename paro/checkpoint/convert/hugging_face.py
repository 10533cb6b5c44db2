"""Reads and writes Hugging Face folders: config, safetensors, tokenizer and generation config."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict

from data.gpt2_tokenizer import MERGE_FILE, VOCAB_FILE, write_gpt2_tokenizer_json
from data.tokenizer import build_tokenizer
from data.tokenizer_config import GPT2_TYPE, TokenizerConfig
from data.tokenizer_json import write_tokenizer_json
from model.config import LlamaConfig, parameter_shapes
from model.hugging_face import hugging_face_config, hugging_face_name, llama_config
from paro.checkpoint.convert.safetensors_file import open_safetensors, write_safetensors
from paro.checkpoint.convert.source import LazyTensor, Source, checked_tensors
from paro.errors import UserError, about
from paro.untrusted.schema import read_json

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    VOCAB_FILE,
    MERGE_FILE,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
MAX_FILE_BYTES = 5 * 10**9  # the limit of transformers


class _Begins(TypedDict, total=False):
    add_bos_token: bool | None


class _Step(TypedDict, total=False):
    """A step of a tokenizer.json's post_processor: what it puts around a text."""

    single: list[dict[str, Any]]
    processors: list[_Step]


class _Steps(TypedDict, total=False):
    post_processor: _Step | None


class _Index(TypedDict):
    weight_map: dict[str, str]


def is_hugging_face(directory: Path) -> bool:
    return (directory / CONFIG).is_file()


def open_hugging_face(directory: Path) -> Source:
    """Opens a folder that transformers can load; `UserError` names the bad file or field."""
    if not is_hugging_face(directory):
        raise UserError(f"{directory} holds no Hugging Face model: it has no {CONFIG}")
    fields = read_json(directory / CONFIG, dict[str, Any])
    with about(f"{directory / CONFIG} is not of this architecture: "):
        config = llama_config(fields)
    names = {name: hugging_face_name(name) for name in parameter_shapes(config)}
    stored = _stored_tensors(directory)
    found = {name: stored[theirs] for name, theirs in names.items() if theirs in stored}
    tensors = checked_tensors(config, found, directory, names)
    unknown = sorted(set(stored) - set(names.values()) - _superfluous(config))
    if unknown:
        raise UserError(f"{directory} has {unknown[0]}, which this model has not")
    companions = companions_in(directory)
    return Source(
        config=config,
        tensors=tensors,
        companions=companions,
        tokenizer=tokenizer_of(companions),
        origin=str(directory.resolve()),
        begins_with_bos=begins_with_bos(companions),
        notes=tuple(_missing_companions(directory, companions)),
    )


def companions_in(directory: Path) -> dict[str, Path]:
    """The config and tokenizer files of a folder, by name."""
    names = (CONFIG, GENERATION_CONFIG, *TOKENIZER_FILES)
    return {name: directory / name for name in names if (directory / name).is_file()}


def tokenizer_of(companions: Mapping[str, Path]) -> dict[str, Any] | None:
    """The TokenizerConfig fields for these files; None if they have no tokenizer."""
    for name, kind in (
        ("tokenizer.json", "HuggingFaceTokenizer"),
        ("tokenizer.model", "Llama2Tokenizer"),
    ):
        if name in companions:
            return {"tokenizer_type": kind, "tokenizer_model": str(companions[name])}
    if VOCAB_FILE in companions and MERGE_FILE in companions:
        files = {"vocab_file": companions[VOCAB_FILE], "merge_file": companions[MERGE_FILE]}
        return {"tokenizer_type": GPT2_TYPE} | {name: str(path) for name, path in files.items()}
    return None


def begins_with_bos(companions: Mapping[str, Path]) -> bool:
    """Whether the tokenizer puts a BOS token before every text."""
    if "tokenizer_config.json" in companions:
        says: bool | None = read_json(companions["tokenizer_config.json"], _Begins).get(
            "add_bos_token"
        )
        if says is not None:
            return says
    if "tokenizer.json" in companions:
        step = read_json(companions["tokenizer.json"], _Steps).get("post_processor") or {}
        steps = step.get("processors", [step])
        firsts = [part["single"][0] for part in steps if part.get("single")]
        return any("SpecialToken" in first for first in firsts)
    return "tokenizer.model" in companions  # LLaMA's SentencePiece tokenizers do


def copy_companions(companions: Mapping[str, Path], directory: Path) -> None:
    for name, path in companions.items():
        shutil.copyfile(path, directory / name)


def write_hugging_face(
    source: Source,
    directory: Path,
    advance: Callable[[int], None],
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> list[str]:
    """Fills an empty folder; returns lines to print about the result.

    `advance` is called with the bytes of every piece written.
    """
    dtype = next(iter(source.tensors.values())).dtype
    fields = _config_fields(source, str(dtype).removeprefix("torch."))
    tensors = {hugging_face_name(name): tensor for name, tensor in source.tensors.items()}
    files = list(_files(tensors, max_file_bytes))
    weight_map: dict[str, str] = {}
    for number, part in enumerate(files, start=1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors" if len(files) > 1 else WEIGHTS
        write_safetensors(directory / name, part, advance)
        weight_map |= dict.fromkeys(part, name)
    if len(files) > 1:
        _write_json(
            directory / INDEX,
            {"metadata": {"total_size": source.num_bytes}, "weight_map": weight_map},
        )
    copy_companions(source.companions, directory)
    _write_json(directory / CONFIG, fields)
    return _write_tokenizer(source, directory)


def _write_tokenizer(source: Source, directory: Path) -> list[str]:
    """Adds a tokenizer.json if there are only other tokenizer files; returns lines to print."""
    companions = source.companions
    if "tokenizer.json" in companions:
        return []
    pieces = companions.get("tokenizer.model")
    if pieces is None:
        if VOCAB_FILE in companions and MERGE_FILE in companions:
            write_gpt2_tokenizer_json(companions[VOCAB_FILE], companions[MERGE_FILE], directory)
        return []
    if write_tokenizer_json(pieces, directory, begins_texts=source.begins_with_bos):
        return []
    return [f"{pieces} is copied as it is: it has no equal in a tokenizer.json"]


def _stored_tensors(directory: Path) -> dict[str, LazyTensor]:
    if (directory / INDEX).is_file():
        index: _Index = read_json(directory / INDEX, _Index)
        names = sorted(set(index["weight_map"].values()))
        if any(Path(name).name != name for name in names):
            raise UserError(f"{directory / INDEX} is damaged (it names files elsewhere)")
    elif (directory / WEIGHTS).is_file():
        names = [WEIGHTS]
    else:
        raise UserError(
            f"{directory} has neither {WEIGHTS} nor {INDEX}: other files of weights may hold "
            "programs; have transformers save it with safe_serialization"
        )
    stored: dict[str, LazyTensor] = {}
    for name in names:
        stored |= open_safetensors(directory / name)
    return stored


def _superfluous(config: LlamaConfig) -> set[str]:
    """Tensors that older versions stored too: inverse frequencies, and a copy of a tied head."""
    layers = range(config.num_layers)
    buffers = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq" for layer in layers}
    return buffers | ({"lm_head.weight"} if config.tie_embeddings_and_output_weights else set())


def _missing_companions(directory: Path, companions: Mapping[str, Path]) -> Iterator[str]:
    if tokenizer_of(companions) is None:
        yield f"{directory} has no tokenizer: prompts are token ids"
    if GENERATION_CONFIG not in companions:
        yield f"{directory} has no {GENERATION_CONFIG}: none is written"


def _config_fields(source: Source, dtype: str) -> dict[str, Any]:
    """The source's own config.json if it describes this model; else a new one."""
    if CONFIG in source.companions:
        fields = read_json(source.companions[CONFIG], dict[str, Any])
        if llama_config(fields) == source.config:
            known = [name for name in ("dtype", "torch_dtype") if name in fields]
            return fields | dict.fromkeys(known or ["torch_dtype"], dtype)
    fields = hugging_face_config(replace(source.config, recompute=None))
    rope = fields.pop("rope_parameters")
    # In the form of transformers 4, which version 5 reads too.
    fields["rope_theta"] = rope.pop("rope_theta")
    fields["rope_scaling"] = rope if source.config.use_rope_scaling else None
    return fields | {"torch_dtype": dtype} | _special_ids(source)


def _special_ids(source: Source) -> dict[str, int | None]:
    """The BOS and EOS ids: without them transformers would assume 1 and 2."""
    unknown: dict[str, int | None] = {"bos_token_id": None, "eos_token_id": None}
    if source.tokenizer is None:
        return unknown
    try:
        tokenizer = build_tokenizer(TokenizerConfig(**source.tokenizer))
    except UserError as error:
        if not source.companions:  # its files are missing; the source's notes say so
            return unknown
        raise UserError(f"the tokenizer cannot be read: {error}") from error
    return {"bos_token_id": tokenizer.bos, "eos_token_id": tokenizer.eod}


def _files(tensors: Mapping[str, LazyTensor], limit: int) -> Iterator[dict[str, LazyTensor]]:
    part: dict[str, LazyTensor] = {}
    num_bytes = 0
    for name, tensor in tensors.items():
        if part and num_bytes + tensor.num_bytes > limit:
            yield part
            part, num_bytes = {}, 0
        part[name] = tensor
        num_bytes += tensor.num_bytes
    yield part


def _write_json(path: Path, fields: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
