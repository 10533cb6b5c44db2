"""The launch scripts: their flags configure a run on their world, and it fits into their GPUs."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from model.config import LLAMA_PRESETS, num_parameters
from paro.arguments import parse_args
from paro.config import RunConfig
from paro.planning.llama import MicroBatch, activations_of, units_of
from paro.planning.working_memory import peak_memory
from paro.precision import BYTES_OF
from paro.runtime import World
from paro.topology import make_topology
from tests.helpers.ranks import ROOT
from tools.train_tokenizer import main as train_tokenizer

EXAMPLES = ROOT / "examples"
GPU_BYTES = 80e9

# Each script with the nodes of 8 GPUs that it is run on.
LAUNCHES = [
    ("pretrain_llama_7b_dgx.sh", 1),
    ("pretrain_llama_7b_dgx.sh", 4),
    ("pretrain_llama_65b_dgx.sh", 4),
    ("pretrain_llama_65b_dgx.sh", 8),
    ("pretrain_llama_slurm.sbatch", 4),
]


def dry_run(script: str, *args: object, **environment: object) -> list[str]:
    """The words of the command that a script would run."""
    done = subprocess.run(
        ["bash", str(EXAMPLES / script), *map(str, args)],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], "DRY": "1", **{k: str(v) for k, v in environment.items()}},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    return shlex.split(done.stdout)


def configured(words: list[str], world_size: int) -> RunConfig:
    flags = words[words.index("pretrain_llama.py") + 1 :]
    return RunConfig.from_args(parse_args(flags), World(size=world_size, ranks_per_node=8))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    text = folder / "text.txt"
    text.write_text("some words to make pieces of, and some more of them\n" * 20, encoding="utf-8")
    prefix = str(folder / "pieces")
    args = ["--input", str(text), "--output-prefix", prefix, "--vocab-size", "290"]
    assert train_tokenizer(args) == 0
    return Path(f"{prefix}.model")


@pytest.mark.parametrize(("script", "nodes"), LAUNCHES)
def test_its_flags_configure_what_its_name_says(script: str, nodes: int, tmp_path: Path) -> None:
    saved = tmp_path / "saved here"
    words = dry_run(script, saved, tmp_path / "board", NNODES=nodes, MASTER_ADDR="node0")
    config = configured(words, nodes * 8)
    size = "65B" if "65b" in script else "7B"
    preset = LLAMA_PRESETS[size]
    assert num_parameters(config.model) == num_parameters(preset)
    assert config.model.vocab_size == preset.vocab_size
    assert config.strategy.degrees == (8, 8, 8 * nodes)
    assert config.precision.compute == "bf16"
    assert config.checkpoint.save == config.checkpoint.load == str(saved)
    assert config.data.mock_data
    tokens = config.batches.samples_after(config.train.train_iters) * config.data.seq_length
    recipe = 1.4e12 if size == "65B" else 1e12
    assert tokens == pytest.approx(recipe, rel=1e-5)


@pytest.mark.parametrize(("script", "nodes"), LAUNCHES)
def test_it_fits_into_its_gpus(script: str, nodes: int, tmp_path: Path) -> None:
    world_size = nodes * 8
    words = dry_run(script, tmp_path, tmp_path, NNODES=nodes, MASTER_ADDR="node0")
    config = configured(words, world_size)
    batch = MicroBatch(
        size=config.batches.micro_batch_size,
        seq_length=config.data.seq_length,
        compute_bytes=BYTES_OF[config.precision.compute],
        device_type="cuda",
    )
    peak = peak_memory(
        config.strategy,
        make_topology(world_size=world_size, group_size=8, degrees=config.strategy.degrees),
        units_of(config.model, world_size=world_size),
        config.precision,
        activations_of(config.model, batch),
        prefetch_units=config.sharding.prefetch_units,
        num_micro_batches=config.batches.num_micro_batches_at(0),
    )
    # The rest is for the CUDA context, communication buffers and fragmentation.
    assert peak.total < 0.9 * GPU_BYTES, peak.describe()


@pytest.mark.parametrize(("script", "nodes"), LAUNCHES)
def test_it_takes_a_tokenizer_and_a_corpus(
    script: str, nodes: int, tmp_path: Path, tokenizer: Path
) -> None:
    paths = (tmp_path, tmp_path, tokenizer, "some/corpus_text_document")
    words = dry_run(script, *paths, NNODES=nodes, MASTER_ADDR="node0")
    config = configured(words, nodes * 8)
    assert config.data.data_path == ("some/corpus_text_document",)
    assert config.tokenizer.tokenizer_model == str(tokenizer)


def test_torchrun_is_told_of_every_node() -> None:
    environment = {"NNODES": 4, "NODE_RANK": 3, "MASTER_ADDR": "node0", "MASTER_PORT": 7}
    words = dry_run("pretrain_llama_7b_dgx.sh", **environment)
    assert words[: words.index("pretrain_llama.py")] == shlex.split(
        "torchrun --nproc-per-node 8 --nnodes 4 --node-rank 3 --master-addr node0 --master-port 7"
    )


def test_srun_starts_the_ranks_without_torchrun() -> None:
    words = dry_run("pretrain_llama_slurm.sbatch", MASTER_ADDR="node0", SLURM_NTASKS_PER_NODE=4)
    assert words[: words.index("pretrain_llama.py")] == ["srun", "python", "-u"]
    assert words[words.index("--paro-group-size") + 1] == "4"
    assert "torchrun" not in words


def test_every_example_is_tested() -> None:
    scripts = {path.name for path in EXAMPLES.iterdir() if path.is_file()}
    assert scripts == {script for script, _ in LAUNCHES} | {"quickstart.sh"}
