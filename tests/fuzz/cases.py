"""One case: an input is damaged, a program reads it, and its end is judged."""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import stat
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from random import Random

from data.block_checksums import BlockSums
from paro.arguments.megatron import RULES, FlagTreatment
from paro.arguments.parser import build_parser
from paro.checkpoint import folder_lock
from tests.fixtures.write import FIXTURES, MODEL
from tests.fuzz.mutations import add_inputs, mutations_of, odd_flags
from tests.helpers.ranks import RankError
from tests.helpers.scripts import run_script
from tests.helpers.warm_process import HANGS_AFTER

# Lines that may stand before an error: progress, and notices of other files.
PROGRESS = re.compile(r"partition |Processed |training \d+ pieces |.*: the last line is cut short")
# Tensors and pictures are read and written one by one: what stands by then is said.
SAYS_AS_IT_GOES = ("convert_checkpoint.py", "report.py")
SET = FIXTURES / "2026-11-21"
OFFLINE = {"HF_HUB_OFFLINE": "1"}  # a word for --input may be a data set of the Hugging Face Hub
NULL = "--tokenizer-type NullTokenizer --vocab-size 32"
BASE = f"pretrain_llama.py {MODEL}"
NULL_AND_CACHE = f"{NULL} --data-cache-path {{out}}/cache"
OWN = f"{BASE} --data-path {{set}}/corpus_text_document {NULL_AND_CACHE}"
MOCK = f"{BASE} --mock-data {NULL}"
DRY = "--dry-run --world-size 4"


# Megatron's flags that the parser does not have: they are refused, or have no effect.
OTHER_FLAGS = [
    argparse.Action([rule.flag.replace("*", "x")], "", nargs="*")
    for rule in RULES
    if rule.outcome is not FlagTreatment.ACCEPTED
]


@dataclass(frozen=True, slots=True)
class Target:
    """A program and the files that it reads; `{set}` is their folder, `{out}` an empty one."""

    command: str
    files: tuple[str, ...] = ()  # patterns in the set; none: only flags are damaged
    kept: tuple[str, ...] = ()  # flags that are not damaged
    continues: bool = False  # the program resumes from files in the set, and may change them
    has_checksums: bool = False  # so that no damage may be overlooked
    before: Callable[[], None] | None = None  # called in the program's process

    @property
    def script(self) -> Path:
        return Path(self.command.split()[0])

    @property
    def is_tool(self) -> bool:
        return self.script.parent.name == "tools"

    @property
    def takes_odd_flags(self) -> bool:
        """Of trainings only some do: others may rightly be long or large."""
        return not self.files or (self.is_tool and not self.continues)

    def parser(self) -> argparse.ArgumentParser:
        if not self.is_tool:
            return build_parser()
        made: argparse.ArgumentParser = import_module(f"tools.{self.script.stem}").make_parser()
        return made


def wait_briefly_for_heartbeats() -> None:
    """A lease is taken over when its heartbeat has not changed for this long: 60 s otherwise."""
    folder_lock.STILL_SECONDS = 0.2


SAVED = "{set}/one-process/saved"
RESUMED = f"{OWN} --rampup-batch-size 4 4 16 --load {SAVED}"
CHECKPOINT = "one-process/saved/iter_0000004"
WORDS = "--tokenizer-type HuggingFaceTokenizer --tokenizer-model {set}/tokenizer.json"
PREPROCESS = "tools/preprocess_data.py --input {set}/text.jsonl --workers 1"
CONVERT = "tools/convert_checkpoint.py --make-vocab-size-divisible-by 4 --output {out}/back"
PLAN = (
    "tools/plan.py --llama-preset llama3.2-1B --seq-length 128 --world-size 2 "
    "--micro-batch-size 1 --global-batch-size 4 --device-memory-gb 80 --paro-machine "
    "{set}/machine.json"
)
CONVERT_HF = f"{CONVERT} --from hf --to paro --input {{set}}/hf"
INSPECT = f"tools/inspect_dataset.py --data-path {{set}}/corpus_text_document {NULL}"
INSPECT_SAVED = f"tools/inspect_checkpoint.py --load {SAVED}"
CURVES = (
    "tools/compare_curves.py {set}/iig/metrics.jsonl {set}/nng-bf16-async/metrics.jsonl "
    "--plot {out}/curves.svg"
)
REPORT = "tools/report.py {set}/iig/metrics.jsonl --output {out}/report.html"
MERGE = "tools/merge_datasets.py --output-prefix {out}/merged --input {set}"
# Flags with which a real run may rightly be long or large; a dry run takes them all.
LONG_FLAGS = (
    *("train_iters", "train_samples", "eval_iters", "global_batch_size", "micro_batch_size"),
    *("eval_global_batch_size", "eval_micro_batch_size", "rampup_batch_size", "seq_length"),
    *("num_layers", "hidden_size", "ffn_hidden_size", "kv_channels", "num_attention_heads"),
    *("step_batch_size_schedule", "llama_preset", "vocab_size", "padded_vocab_size"),
    *("make_vocab_size_divisible_by", "num_workers"),
)
TARGETS: dict[str, Target] = {
    "flags": Target(f"{MOCK} {DRY}"),
    "flags of a run": Target(f"{MOCK} --train-iters 3", kept=LONG_FLAGS),
    "gathering text": Target("tools/gather_text.py --output {out}/text.jsonl --min-bytes 1000"),
    "tokenizer training": Target(
        "tools/train_tokenizer.py --input {set}/text.jsonl --output-prefix {out}/t --vocab-size 270"
    ),
    "merge of checkpoints": Target(
        "tools/merge_checkpoints.py --input {set}/twice --last 2 --output {out}/merged"
    ),
    "dashboard": Target("tools/wandb_dashboard.py --wandb-project p --dry-run"),
    "corpus": Target(OWN, ("corpus_text_document.idx", "corpus_text_document.bin")),
    "checked corpus": Target(
        OWN.replace("{set}", "{set}/checked"),
        ("checked/*.bin", "checked/*.crc"),
        has_checksums=True,
    ),
    "tracker": Target(RESUMED, ("one-process/saved/latest*",)),
    "checkpoint": Target(RESUMED, (f"{CHECKPOINT}/.metadata", f"{CHECKPOINT}/*.distcp")),
    "records": Target(RESUMED, (f"{CHECKPOINT}/*.json",)),
    "lease": Target(
        f"{MOCK} --train-iters 3 --save {{set}}/owned",
        ("owned/lease_1.json",),
        continues=True,
        before=wait_briefly_for_heartbeats,
    ),
    "yaml": Target(f"{MOCK} {DRY} --yaml-cfg {{set}}/flags.yaml", ("flags.yaml",)),
    "blend": Target(
        f"{BASE} {NULL_AND_CACHE} --data-args-path {{set}}/blend.json", ("blend.json",)
    ),
    "machine": Target(
        f"{MOCK} --dry-run --world-size 2 --paro-group-size 1 --paro-strategy auto "
        "--paro-machine {set}/machine.json",
        ("machine.json",),
    ),
    "plan": Target(PLAN, ("machine.json",)),
    "tokenizer": Target(
        f"{BASE} --mock-data --tokenizer-type HuggingFaceTokenizer --tokenizer-model {{set}} {DRY}",
        ("tokenizer.json", "tokenizer_config.json"),
    ),
    "text": Target(f"{PREPROCESS} {WORDS} --output-prefix {{out}}/x", ("text.jsonl",)),
    "inspect dataset": Target(INSPECT, ("corpus_text_document.idx", "corpus_text_document.bin")),
    "inspect checkpoint": Target(
        INSPECT_SAVED, (f"{CHECKPOINT}/*.json", f"{CHECKPOINT}/.metadata")
    ),
    "fingerprint": Target(
        f"tools/inspect_dataset.py --data-path {{set}}/words {WORDS}", ("words.tokenizer",)
    ),
    "sentencepiece": Target(
        f"{PREPROCESS} --output-prefix {{out}}/x --tokenizer-type SentencePieceTokenizer "
        "--tokenizer-model {set}/spm.model",
        ("spm.model",),
    ),
    "tiktoken": Target(
        f"{PREPROCESS} --output-prefix {{out}}/x --tokenizer-type TikTokenizer "
        "--tokenizer-model {set}/ranks.tiktoken",
        ("ranks.tiktoken",),
    ),
    "gpt2": Target(
        f"{PREPROCESS} --output-prefix {{out}}/x --tokenizer-type GPT2BPETokenizer "
        "--vocab-file {set}/gpt2/gpt2-vocab.json --merge-file {set}/gpt2/gpt2-merges.txt "
        "--append-eod",
        ("gpt2/*",),
    ),
    "partitions": Target(
        f"{PREPROCESS} {WORDS} --append-eod --partitions 2 --output-prefix {{set}}/halfway",
        ("halfway_partitions/*.json", "halfway_partitions/*.idx"),
        continues=True,
    ),
    "trace": Target("tools/draw_profile.py {set}/trace.json", ("trace.json",)),
    "meta": Target(
        f"{CONVERT} --from meta --to paro --input {{set}}/meta",
        ("meta/params.json", "meta/consolidated.00.pth"),
    ),
    "native": Target(
        f"{CONVERT} --from paro --to hf --input {SAVED}",
        (f"{CHECKPOINT}/*.json", f"{CHECKPOINT}/.metadata", f"{CHECKPOINT}/*.distcp"),
    ),
    "generation": Target(
        "tools/generate.py --load {set}/hf --prompt-file {set}/prompts.txt --max-new-tokens 2",
        ("hf/*.json", "prompts.txt"),
    ),
    "curves": Target(CURVES, ("*/metrics.jsonl", "*/metrics.jsonl.run.json")),
    "metrics": Target(
        f"{RESUMED} --metrics-file {{set}}/one-process/metrics.jsonl",
        ("one-process/metrics.jsonl", "one-process/metrics.jsonl.run.json"),
        continues=True,
    ),
    "merge checked": Target(
        f"{MERGE}/checked", ("checked/*.bin", "checked/*.crc"), has_checksums=True
    ),
    "merge": Target(f"{MERGE}/parts", ("parts/*.idx", "parts/*.bin")),
    "hugging face": Target(CONVERT_HF, ("hf/config.json", "hf/model.safetensors")),
    "megatron": Target(
        f"{CONVERT} --from megatron --to paro --input {{set}}/megatron",
        ("megatron/release/*/*", "megatron/latest*"),
    ),
    "torch_dist": Target(
        f"{CONVERT} --from torch_dist --to paro --input {{set}}/dist",
        ("dist/release/*[!p]", "dist/release/.metadata", "dist/latest*"),  # values may change
    ),
    "torchtitan": Target(
        f"{CONVERT} --from torchtitan --to paro --input {{set}}/titan",
        ("titan/.metadata", "titan/hugging_face/config.json"),  # values may change
    ),
    "report": Target(REPORT, ("iig/metrics.jsonl", "iig/metrics.jsonl.run.json")),
}
BLEND = '[0.3, "{set}/corpus_text_document", 0.7, "{set}/corpus_text_document"]'
YAML = "lr: 0.5\nweight_decay: 0.1\nlog_interval: 2\n"


def cases(count: int, seed: int) -> list[tuple[str, int]]:
    """The targets in turn, with seeds of their damage drawn from `seed`."""
    draw = Random(seed)
    names = list(TARGETS)
    return [(names[i % len(names)], draw.randrange(2**32)) for i in range(count)]


def make_inputs(folder: Path) -> tuple[Path, Path]:
    """The files of all targets, and the empty folder to write to."""
    place, out = folder / "set", folder / "out"
    shutil.copytree(SET, place)
    out.mkdir()
    for name in ("parts/a", "checked/corpus_text_document"):
        (place / name).parent.mkdir()
        for suffix in ("idx", "bin"):
            shutil.copy(place / f"corpus_text_document.{suffix}", place / f"{name}.{suffix}")
    sums = BlockSums()
    sums.update((place / "corpus_text_document.bin").read_bytes())
    sums.write(place / "checked/corpus_text_document.bin.crc")
    for iteration in (4, 5):
        shutil.copytree(place / CHECKPOINT, place / "twice" / f"iter_{iteration:07d}")
    (place / "blend.json").write_text(BLEND.format(set=place))
    (place / "flags.yaml").write_text(YAML)
    add_inputs(place)
    (out / "empty").touch()
    (out / "zeros").symlink_to("/dev/zero")
    (out / "loop").symlink_to("loop")
    os.mkfifo(out / "pipe")
    return place, out


def run_case(name: str, seed: int, folder: Path) -> tuple[str | None, str]:
    """Damages a target's inputs in an empty folder and runs it: its fault, and how it came."""
    place, out = make_inputs(folder)
    target, draw = TARGETS[name], Random(seed)
    words = target.command.format(set=place, out=out).split()
    names: list[str] = []
    changed = False
    by_flags = target.takes_odd_flags and not (target.files and draw.random() < 0.7)
    if not by_flags:
        path = draw.choice(sorted({p for pattern in target.files for p in place.glob(pattern)}))
        mutate = draw.choice(mutations_of(path))
        whole = path.read_bytes()
        mutate(path, draw)
        # Without a file of checksums there is nothing to compare with.
        changed = os.path.lexists(path) and not (path.is_file() and path.read_bytes() == whole)
        damage = f"{mutate.__name__} {path.relative_to(place)}"
        names = [path.stem, path.parent.name, path.parent.parent.name]
    else:
        names = [str(place), str(out)]
        odd = odd_flags(damaged_flags(target, draw), draw)
        words += [word.replace("{set}", str(place)).replace("{out}", str(out)) for word in odd]
        damage = " ".join(word[:60] for word in odd)
    before = fingerprint(place)
    try:
        done = run_script(words, env=OFFLINE, before=target.before)
    except RankError:
        return f"it did not end within {HANGS_AFTER:.0f} s", damage
    fault = fault_of(words[0], done.returncode, done.stdout, done.stderr, names)
    # Before an error of a training stands its log, or a dry run's report.
    is_silent = target.is_tool and target.script.name not in SAYS_AS_IT_GOES
    if fault is None and done.returncode == 2 and is_silent and done.stdout:
        fault = "it prints before its error"
    if fault is None and target.has_checksums and done.returncode == 0 and changed:
        fault = "the damage was overlooked"
    after = fingerprint(place)
    is_kept = before.items() <= after.items() if by_flags else before == after
    if fault is None and not target.continues and not is_kept:
        fault = "the inputs were changed"
    return fault, f"{damage[:200]}: {fault}\n{done.stderr[-2000:]}"


def fault_of(script: str, status: int, stdout: str, stderr: str, names: list[str]) -> str | None:
    """What is not clean about an end: a success, or a line with its cause and status 2."""
    control = re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", stdout + stderr)
    if control:
        return f"it prints {control[0]!r}"
    if "Traceback" in stdout + stderr:
        return "it prints a traceback"
    if status == 0:
        return None
    if status != 2:
        return f"its status is {status}"
    lines = stderr.splitlines()
    start = f"{Path(script).name}: error: "
    (last, *others) = [i for i, line in enumerate(lines) if line.startswith(start)] or [None]
    if last is None or others:
        return "it prints no line with its name and the error, or several"
    if not all(map(PROGRESS.match, lines[:last])):
        return "a line stands before its error"
    message = "\n".join(lines[last:])
    if max(map(len, lines)) > 2000:
        return "it prints a line of more than 2,000 characters"
    names_flag = re.search(r"(?<!\w)--?[a-z]|unrecognized arguments: ", message)
    if names_flag is None and not any(name in message for name in names):
        return "its line names neither the file nor a flag"
    return None


def fingerprint(folder: Path) -> dict[str, str]:
    """The contents of all regular files, and what else there is."""
    found = {}
    for path in sorted(folder.rglob("*")):
        kind = stat.S_IFMT(path.lstat().st_mode)
        text = hashlib.sha256(path.read_bytes()).hexdigest() if kind == stat.S_IFREG else str(kind)
        found[str(path.relative_to(folder))] = text
    return found


def damaged_flags(target: Target, draw: Random) -> list[argparse.Action]:
    """The flags of a target that may be damaged; half the time with those that are refused."""
    own = [
        action
        for action in target.parser()._actions
        if action.option_strings and action.dest not in ("help", "dry_run", *target.kept)
    ]
    return own if target.is_tool or draw.random() < 0.5 else [*own, *OTHER_FLAGS]
