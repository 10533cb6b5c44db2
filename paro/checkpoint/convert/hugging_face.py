"""Reads and writes Hugging Face folders: config, safetensors, tokenizer and generation config."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any, TypedDict

import torch

from data.hugging_face_tokenizer import ADDING_FILES, adds_tokens
from data.tokenizer import MERGE_FILE, VOCAB_FILE, build_tokenizer
from data.tokenizer_config import GPT2_TYPE, TokenizerConfig
from data.tokenizer_json import write_gpt2_tokenizer_json, write_tokenizer_json
from model.config import LlamaConfig
from model.hugging_face import hugging_face_config, hugging_face_name, llama_config, output_biases
from model.units import parameter_shapes
from paro.checkpoint.convert.source import (
    LazyTensor,
    ModelSource,
    checked_tensors,
    lazy,
    write_json,
)
from paro.checkpoint.convert.tensor_files import TensorFiles, open_safetensors, write_safetensors
from paro.checkpoint.directory import TokenIds, in_files
from paro.errors import UserError, about
from paro.files.schema import conform, read_json

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
COMPANIONS = "hugging_face"  # folder for the tokenizer and config files of a converted model
GENERATION_CONFIG = "generation_config.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    VOCAB_FILE,
    MERGE_FILE,
    *ADDING_FILES,
    "chat_template.jinja",
)
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
MAX_FILE_BYTES = 5 * 10**9  # the limit of transformers

# Parts of names that modules around a model, or around its blocks, put there: transformers' own
# `model`, and those of DataParallel, torch.compile, FSDP and activation checkpointing.
_AROUND = {"model", "module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
_BUFFER = "rotary_emb.inv_freq"  # buffer that older versions stored; it follows from RoPE fields


class _Step(TypedDict, total=False):
    """A step of a tokenizer.json's post_processor: the tokens that it puts around a text."""

    single: list[dict[str, Any]]
    processors: list[_Step]


def is_hugging_face(directory: Path) -> bool:
    return (directory / CONFIG).is_file()


def open_hugging_face(directory: Path) -> ModelSource:
    """Open a folder that transformers can load; `UserError` names the bad file or field."""
    if not is_hugging_face(directory):
        raise UserError(f"{directory} holds no Hugging Face model: it has no {CONFIG}")
    source = open_described(directory, directory, lambda _: _stored_tensors(directory))
    notes = source.notes
    if all((directory / name).is_file() for name in (WEIGHTS, INDEX)):
        unread = f"{directory} has {WEIGHTS} too, which transformers reads: {INDEX} is not read"
        notes = (unread, *notes)
    return replace(source, origin=str(directory.resolve()), notes=notes)


def open_described(
    assets: Path,
    directory: Path,
    stored_for: Callable[[LlamaConfig], Mapping[str, LazyTensor]],
    called: Callable[[str], str] = hugging_face_name,
) -> ModelSource:
    """Open tensors in a `directory`, of a model that the Hugging Face folder `assets` describes.

    `stored_for` returns the tensors of such a model by their names in the files; `called` names a
    parameter as the files do. `UserError` names the bad file, field or tensor.
    """
    fields = read_json(assets / CONFIG, dict[str, Any])
    with about(f"{assets / CONFIG} is not of this architecture: "):
        config = llama_config(fields)
        stated = {name: fields[name] for name in TOKEN_IDS if name in fields}
        token_ids: TokenIds = conform(stated, TokenIds, "")
    stored = stored_for(config)
    config, tensors, notes = _find_tensors(directory, config, output_biases(fields), stored, called)
    companions = companions_in(assets)
    begins = begins_with_bos(companions)
    tokenizer = tokenizer_of(companions, begins=begins)
    if tokenizer is None:
        notes.append(f"{assets} has no tokenizer: prompts are token ids")
    if GENERATION_CONFIG not in companions:
        notes.append(f"{assets} has no {GENERATION_CONFIG}: none is written")
    return ModelSource(
        config=config,
        tensors=checked_tensors(parameter_shapes(config), tensors, directory, called),
        companions=companions,
        tokenizer=tokenizer,
        begins_with_bos=begins,
        token_ids=token_ids,
        notes=tuple(notes),
    )


def _find_tensors(
    directory: Path,
    config: LlamaConfig,
    biases: Sequence[str],
    stored: Mapping[str, LazyTensor],
    called: Callable[[str], str],
) -> tuple[LlamaConfig, dict[str, LazyTensor], list[str]]:
    """Return the model, the tensors under this project's names, and lines to print about them.

    If config.json ties the output layer but the files have an output layer with other values, the
    model is not tied. `biases` are names of tensors that may be present if they are zero.
    `UserError` names the file or tensor that is wrong.
    """
    untied = replace(config, tie_embeddings_and_output_weights=False)
    names = {name: called(name) for name in parameter_shapes(untied)}
    by_core_name = {core_name(theirs): theirs for theirs in (*names.values(), *biases)}
    places: dict[str, str] = {}  # {name of the format: name in the files}
    for there in stored:
        theirs = by_core_name.get(core_name(there))
        if theirs is None:
            if there.endswith(_BUFFER):
                continue
            raise UserError(f"{directory} has {there:.99}, which this model has not")
        if theirs in places:
            raise UserError(f"{directory} has {places[theirs]} and {there}: both are {theirs}")
        places[theirs] = there
    tensors = {name: stored[places[theirs]] for name, theirs in names.items() if theirs in places}
    size = config.hidden_size
    for theirs in filter(places.__contains__, biases):
        bias = stored[places[theirs]]
        if bias.shape != (size,) or bias.rows(0, size).any():
            raise UserError(
                f"{directory}: {places[theirs]} is not zero, and this model has no bias on the "
                "output projection of attention"
            )
    notes = []
    if config.tie_embeddings_and_output_weights and "head.weight" in tensors:
        head = tensors.pop("head.weight")
        embedding = tensors.setdefault("embedding.weight", head)
        if embedding is not head and not _are_equal(embedding, head):
            notes.append(
                f"{CONFIG} says tie_word_embeddings, and {directory} stores another "
                f"{names['head.weight']}: the output layer is not tied"
            )
            config, tensors["head.weight"] = untied, head
    return config, tensors, notes


def _stored_tensors(directory: Path) -> dict[str, LazyTensor]:
    """Return all tensors by their names in the files."""
    if (directory / WEIGHTS).is_file():
        return open_safetensors(directory / WEIGHTS)
    if not (directory / INDEX).is_file():
        raise UserError(
            f"{directory} has neither {WEIGHTS} nor {INDEX}: other files of weights may hold "
            "programs; have transformers save it with safe_serialization"
        )
    index = read_json(directory / INDEX, dict[str, Any])
    places = conform(index.get("weight_map"), dict[str, str], f"{directory / INDEX}: weight_map")
    if any(Path(file).name != file for file in places.values()):
        raise UserError(f"{directory / INDEX} is damaged (it names files elsewhere)")
    files = {file: open_safetensors(directory / file) for file in sorted({*places.values()})}
    stored = {name: tensor for file in files.values() for name, tensor in file.items()}
    for name, file in places.items():  # the index decides if several files have a tensor
        if name not in files[file]:
            raise UserError(f"{directory / file} has no {name}, which {INDEX} says it has")
        stored[name] = files[file][name]
    return stored


def core_name(name: str) -> str:
    """Return a tensor's name without the prefixes of wrapping modules."""
    return ".".join(part for part in name.split(".") if part not in _AROUND)


def _are_equal(first: LazyTensor, second: LazyTensor) -> bool:
    if first.shape != second.shape or not first.shape:
        return False
    return all(bool((first.rows(*rows) == second.rows(*rows)).all()) for rows in first.row_ranges())


def companions_in(directory: Path) -> dict[str, Path]:
    """Return the config and tokenizer files of a folder, by name."""
    names = (CONFIG, GENERATION_CONFIG, *TOKENIZER_FILES)
    return {name: directory / name for name in names if (directory / name).is_file()}


def tokenizer_of(companions: Mapping[str, Path], *, begins: bool) -> dict[str, Any] | None:
    """Return the TokenizerConfig fields for these files; None without a tokenizer.

    `begins`: texts begin with BOS. Without a tokenizer.json, files that add tokens or name another
    end token need transformers.
    """
    plain: dict[str, Any] | None = None
    if "tokenizer.model" in companions:
        kind = "Llama2Tokenizer" if begins else "SentencePieceTokenizer"
        plain = {"tokenizer_type": kind, "tokenizer_model": str(companions["tokenizer.model"])}
    elif VOCAB_FILE in companions and MERGE_FILE in companions:
        files = {"vocab_file": companions[VOCAB_FILE], "merge_file": companions[MERGE_FILE]}
        plain = {"tokenizer_type": GPT2_TYPE} | {name: str(path) for name, path in files.items()}
    model = companions.get("tokenizer.json")
    if model is None and plain is not None:
        model = _adds_to(plain, companions)
    if model is None:
        return plain
    return {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(model)}


def _adds_to(plain: Mapping[str, Any], companions: Mapping[str, Path]) -> Path | None:
    """Return the folder if files there add tokens to a plain tokenizer, or name another end."""
    adding = next((companions[name] for name in ADDING_FILES if name in companions), None)
    if adding is None:
        return None
    try:
        tokenizer = build_tokenizer(TokenizerConfig(**plain))
    except UserError:  # such as tiktoken's tokenizer.model, which transformers converts
        return adding.parent
    is_more = adds_tokens(adding.parent, tokenizer.vocabulary, eos=tokenizer.eod, bos=tokenizer.bos)
    return adding.parent if is_more else None


def begins_with_bos(companions: Mapping[str, Path]) -> bool:
    """Return whether transformers puts a BOS token before every text."""
    if "tokenizer.json" in companions:  # it alone decides, whatever add_bos_token says
        path = companions["tokenizer.json"]
        fields = read_json(path, dict[str, Any])
        step = conform(fields.get("post_processor"), _Step | None, f"{path}: post_processor") or {}
        steps = step.get("processors", [step])
        firsts = [part["single"][0] for part in steps if part.get("single")]
        return any("SpecialToken" in first for first in firsts)
    if "tokenizer_config.json" not in companions:
        return False
    path = companions["tokenizer_config.json"]
    fields = read_json(path, dict[str, Any])
    adds = conform(fields.get("add_bos_token"), bool | None, f"{path}: add_bos_token")
    return bool(adds) and fields.get("bos_token", "") is not None


@dataclass(frozen=True, slots=True)
class HuggingFacePlan:
    """The plan of a Hugging Face folder: its config.json, and which tensors each file holds."""

    source: ModelSource
    fields: Mapping[str, Any]  # of config.json
    files: TensorFiles

    @staticmethod
    def of(source: ModelSource) -> HuggingFacePlan:
        """Plan the folder of a source, of which no tensor is read."""
        fields = config_fields(source)
        tensors = {hugging_face_name(name): tensor for name, tensor in source.tensors.items()}
        zeros = torch.zeros(source.config.hidden_size)
        for layer, name in enumerate(output_biases(fields)):
            tensors[name] = lazy(zeros.to(source.tensors[f"blocks.{layer}.bq"].dtype))
        bunches = [*in_files(tensors, lambda name: tensors[name].num_bytes, MAX_FILE_BYTES)]
        names = [WEIGHTS]
        if (count := len(bunches)) > 1:
            names = [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
        files = {
            file: {name: tensors[name] for name in bunch}
            for file, bunch in zip(names, bunches, strict=True)
        }
        return HuggingFacePlan(source, fields, files)

    @property
    def num_bytes(self) -> int:
        """The bytes of all tensors."""
        return sum(each.num_bytes for file in self.files.values() for each in file.values())

    def write_rest(self, directory: Path) -> list[str]:
        """Write the other files, when tensors are written; return lines to print about them."""
        notes = write_description(self.source, self.fields, directory)
        if len(self.files) > 1:
            places = {name: file for file, tensors in self.files.items() for name in tensors}
            index = {"metadata": {"total_size": self.num_bytes}, "weight_map": places}
            write_json(directory / INDEX, index)
        return notes


def write_hugging_face(source: ModelSource, directory: Path) -> list[str]:
    """Fill an empty folder; return lines to print about the result."""
    plan = HuggingFacePlan.of(source)
    write_safetensors(plan.files, directory)
    return plan.write_rest(directory)


def write_description(source: ModelSource, fields: Mapping[str, Any], directory: Path) -> list[str]:
    """Write config.json of these fields and the tokenizer into a folder, made if it is missing.

    A tokenizer.json is added if there are only other tokenizer files. Return lines to print about
    the result.
    """
    source.copy_companions(directory)
    write_json(directory / CONFIG, fields)
    companions = source.companions
    if "tokenizer.json" in companions or companions.keys() & {*ADDING_FILES}:
        return []  # transformers opens the folder as it was
    if (pieces := companions.get("tokenizer.model")) is not None:
        if not write_tokenizer_json(pieces, directory, begins_texts=source.begins_with_bos):
            return [f"{pieces} is copied as it is: it has no equal in a tokenizer.json"]
    elif VOCAB_FILE in companions and MERGE_FILE in companions:
        write_gpt2_tokenizer_json(companions[VOCAB_FILE], companions[MERGE_FILE], directory)
    return []


def config_fields(source: ModelSource) -> dict[str, Any]:
    """Return the source's own config.json if it describes this model; else a new one."""
    tied = source.config.tie_embeddings_and_output_weights
    if CONFIG in source.companions:
        fields = read_json(source.companions[CONFIG], dict[str, Any])
        described = llama_config(fields)
        if replace(described, tie_embeddings_and_output_weights=tied) == source.config:
            if described.tie_embeddings_and_output_weights != tied:  # another is stored
                fields["tie_word_embeddings"] = tied
            stated = [name for name in ("dtype", "torch_dtype") if name in fields]
            dtype = _stated_dtype(source, [fields[name] for name in stated])
            return fields | dict.fromkeys(stated or ["torch_dtype"], dtype)
    fields = hugging_face_config(source.config)
    return fields | {"torch_dtype": _stated_dtype(source, [])} | _special_ids(source)


def _stated_dtype(source: ModelSource, before: Sequence[Any]) -> str:
    """Return the dtype for config.json: one `before` that tensors have, else one that holds all."""
    dtypes = {tensor.dtype for tensor in source.tensors.values()}
    names = {str(dtype).removeprefix("torch.") for dtype in dtypes}
    widest = str(reduce(torch.promote_types, dtypes)).removeprefix("torch.")
    return next((name for name in before if name in names), widest)


def _special_ids(source: ModelSource) -> TokenIds:
    """Return the configuration's ids, else the tokenizer's: transformers would assume some."""
    ids: TokenIds = {"bos_token_id": None, "eos_token_id": None}
    if source.tokenizer is not None:
        try:
            tokenizer = build_tokenizer(TokenizerConfig(**source.tokenizer))
            ids = {"bos_token_id": tokenizer.bos, "eos_token_id": tokenizer.eod}
        except UserError as error:
            if source.companions:  # else its files are missing; the source's notes say so
                raise UserError(f"the tokenizer cannot be read: {error}") from error
    return ids | source.token_ids
