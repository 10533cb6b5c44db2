"""The launch scripts: what they start, that it configures and fits, and their comments."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from data.blend import read_phases, starts_of
from model.config import LLAMA_PRESETS
from model.units import num_parameters
from paro.distributed.world import World
from paro.planning.run_memory import RunMemory
from tests.data.test_tokenizer import train_sentencepiece
from tests.end_to_end.conftest import BIN, EXAMPLES, Started, bash, planned, start
from tests.end_to_end.test_training import run_main
from tests.helpers.ranks import ROOT
from tests.helpers.training import configured
from tests.helpers.warm_python import warm_python

pytestmark = pytest.mark.process

# On nodes of 8 GPUs; the other scripts are small.
CLUSTER = [f"pretrain_llama_{size}_{how}.sh" for size in ("7b", "65b") for how in ("dgx", "slurm")]
CORE = "pretrain_llama.sh"  # which those source
STEPS = "steps.sh"  # of which quickstart.sh and finetune.sh have functions
ONE_MACHINE = "one_machine.sh"  # a launcher
ADAPTERS = "finetune_llama_65b_lora_dgx.sh"
STEP_BY_STEP = ("quickstart.sh", "finetune.sh")
SCRIPTS = [*CLUSTER, ADAPTERS, "single_gpu.sh", "cpu_emulated_cluster.sh", *STEP_BY_STEP]
RECIPE = {"7b": 1e12, "65b": 1.4e12}  # tokens


def size_of(script: str) -> str:
    return script.split("_")[2]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_sentencepiece(tmp_path_factory.mktemp("tokenizer") / "x.model")


# Dry runs, as a user makes them


@pytest.mark.parametrize("script", [*CLUSTER, "cpu_emulated_cluster.sh", "single_gpu.sh"])
def test_a_launch_is_planned_on_any_machine(recorders: Path, script: str, tmp_path: Path) -> None:
    """The script's process is run here: its start costs more than its work."""
    before = sorted(ROOT.iterdir())
    nodes = {"NNODES": 2, "GPUS_PER_NODE": 8, "RANKS_PER_NODE": 8, "DRY_RUN": 1}
    # That of the cluster gives its arguments to the run.
    folders = () if script.startswith("cpu_") else (tmp_path / "save", tmp_path / "board")
    started = start(recorders, script, *folders, **nodes)
    assert started.launcher == ["python"]
    ended = run_main(["pretrain_llama.py", *started.flags])
    assert ended.mistake is None, ended.mistake
    ranks = "1 rank on 1 node of 1" if script == "single_gpu.sh" else "16 ranks on 2 nodes of 8"
    assert f"> dry run of {ranks}, " in ended.printed
    assert "> the launch is sound; nothing was started and nothing written\n" in ended.printed
    assert list(tmp_path.iterdir()) == []
    assert sorted(ROOT.iterdir()) == before


def test_adapters_continue_where_they_are_saved(recorders: Path, tmp_path: Path) -> None:
    saved, base = tmp_path / "adapters", tmp_path / "base"
    for load in (base, saved):
        started = start(recorders, ADAPTERS, saved, "board", "MOCK", "MOCK", base)
        assert started.launcher[:5] == shlex.split("torchrun --nproc-per-node 8 --nnodes 4")
        assert started.flags[started.flags.index("--load") + 1] == str(load)
        saved.mkdir(exist_ok=True)
        (saved / "latest_checkpointed_iteration.txt").touch()


def test_the_quickstarts_training_is_planned_once_its_tokenizer_is_there(
    tmp_path: Path, tokenizer: Path
) -> None:
    environment = {"RUN_DIR": tmp_path, "RANKS": 4, "DRY_RUN": 1, "path": str(warm_python())}
    (tmp_path / "tokenizer.model").write_bytes(tokenizer.read_bytes())
    out = bash("quickstart.sh", **environment)
    assert "> dry run of 4 ranks on 1 node of 4, gloo\n" in out
    assert "> strategy: IIG, 4 ranks in groups of 2, collectives native\n" in out
    assert f"> data: {tmp_path}/corpus_text_document is not on this machine" in out
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer.model"]


# What they start


@pytest.mark.parametrize("script", CLUSTER)
def test_its_flags_configure_what_its_name_says(
    recorders: Path, script: str, tmp_path: Path
) -> None:
    nodes = 4
    saved = tmp_path / "saved here"
    started = start(recorders, script, saved, tmp_path / "board", NNODES=nodes, MASTER_ADDR="n0")
    world = World(size=nodes * 8, ranks_per_node=8)
    config = configured(started.flags, world)
    preset = LLAMA_PRESETS[size_of(script).upper()]
    assert num_parameters(config.model) == num_parameters(preset)
    assert config.model.vocab_size == preset.vocab_size
    assert config.precision.compute == "bf16"
    assert config.checkpoint.save == config.checkpoint.load == str(saved)
    assert config.data.mock_data
    assert not config.launch.dry_run
    tokens = config.batches.samples_after(config.train.train_iters) * config.data.seq_length
    assert tokens == pytest.approx(RECIPE[size_of(script)], rel=1e-5)


def test_it_takes_a_tokenizer_and_a_corpus(
    recorders: Path, tmp_path: Path, tokenizer: Path
) -> None:
    paths = (tmp_path, tmp_path, tokenizer, "some/corpus_text_document")
    for script in (CLUSTER[0], ADAPTERS, "single_gpu.sh"):
        plan = planned(start(recorders, script, *paths, NNODES=4, DRY_RUN=1))
        assert plan.config.data.data_path == ("some/corpus_text_document",)
        assert plan.config.tokenizer.tokenizer_model == str(tokenizer)


@pytest.mark.parametrize("script", [name for name in CLUSTER if "slurm" in name])
def test_srun_starts_the_ranks_without_torchrun(recorders: Path, script: str) -> None:
    job = {
        "SLURM_JOB_NODELIST": "node[3-6]",
        "SLURM_JOB_NUM_NODES": 4,
        "SLURM_NTASKS_PER_NODE": 4,
        "SLURM_CPUS_PER_TASK": 12,
        "SLURM_SUBMIT_DIR": ROOT,
    }
    started = start(recorders, script, **job)
    assert started.launcher == ["srun", "python", "-u"]
    assert started.flags[started.flags.index("--paro-group-size") + 1] == "4"
    wanted = {"MASTER_ADDR": "first", "MASTER_PORT": "6000", "SRUN_CPUS_PER_TASK": "12"}
    assert wanted.items() | {("OMP_NUM_THREADS", "1")} <= started.environment.items()
    inside = start(recorders, script, **job, CONTAINER_IMAGE="image.sqsh", CONTAINER_MOUNTS="a:b")
    assert inside.launcher == shlex.split(
        f"srun --container-image image.sqsh --container-mounts a:b --container-workdir {ROOT} "
        "python -u"
    )
    header = re.findall(r"^#SBATCH (--\S+)", (EXAMPLES / script).read_text(), re.M)
    # Enough time for a step, on the fewest nodes, and for a checkpoint.
    signal = {"7b": "--signal=TERM@300", "65b": "--signal=TERM@1800"}[script.split("_")[2]]
    assert {"--ntasks-per-node=8", "--gpus-per-node=8", signal} <= set(header)


def test_a_script_and_its_core_are_all_that_a_copy_needs(recorders: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / CORE).write_bytes((EXAMPLES / CORE).read_bytes())
    (folder / CLUSTER[0]).write_bytes((EXAMPLES / CLUSTER[0]).read_bytes())
    copied = start(recorders, folder / CLUSTER[0], "ckpt", MASTER_ADDR="node0", NNODES=2)
    assert copied == start(recorders, CLUSTER[0], "ckpt", MASTER_ADDR="node0", NNODES=2)
    other = folder / "pretrain_llama_13b_dgx.sh"
    other.write_text((EXAMPLES / CLUSTER[0]).read_text().replace("MODEL=7B", "MODEL=13B"))
    done = subprocess.run(["bash", other], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"{other}: MODEL=13B has no case in {folder / CORE}\n"


def test_streams_and_rails_are_kept_apart(recorders: Path) -> None:
    given = {"MASTER_ADDR": "node0", "CUDA_DEVICE_MAX_CONNECTIONS": 1}
    for more, rails in (({}, "0"), ({"NCCL_CROSS_NIC": 2}, "2")):
        started = start(recorders, CLUSTER[0], **given, **more)
        assert "CUDA_DEVICE_MAX_CONNECTIONS" not in started.environment
        assert started.environment["NCCL_CROSS_NIC"] == rails


# What their comments say


@pytest.mark.parametrize("script", [*CLUSTER[::2], ADAPTERS, "single_gpu.sh"])  # one a model
def test_memory_in_comments_is_the_predictors(recorders: Path, script: str) -> None:
    text = (EXAMPLES / (CORE if script in CLUSTER else script)).read_text()
    if script in CLUSTER:  # its case of the core
        text = text.partition(f"\n{size_of(script).upper()})\n")[2].partition("\n    ;;\n")[0]
    rows = re.findall(r"^ *# +(\d+) +([NIG]{3}) +(\d+) +(\d+\.\d)$", text, re.M)
    assert {gpus for gpus, *_ in rows} >= ({"1"} if script == "single_gpu.sh" else {"16", "128"})
    for row in rows:
        config = configured(start(recorders, script, DRY_RUN=1, NNODES=int(row[0]) // 8).flags)
        memory = RunMemory(config.sharding.machine).of(config.spec).total
        micro_batch_size = str(config.batches.micro_batch_size)
        found = (str(config.world.size), config.strategy.name, micro_batch_size)
        assert (*found, f"{memory / 1e9:.1f}") == row


# The scripts themselves


@pytest.mark.parametrize("script", [*SCRIPTS, ONE_MACHINE])
def test_a_script_says_what_it_takes_and_starts_nothing(recorders: Path, script: str) -> None:
    for flag in ("-h", "--help"):
        printed = bash(script, flag, path=str(recorders)).splitlines()
        head = (EXAMPLES / script).read_text().partition("\nset -euo pipefail\n")[0].splitlines()
        comment = [line for line in head if not line.startswith(("#!", "#SBATCH"))]
        assert printed == [line.removeprefix("#").removeprefix(" ") for line in comment]


def test_the_shell_finds_nothing_to_say() -> None:
    scripts = sorted(EXAMPLES.rglob("*.sh"))
    done = subprocess.run(
        [BIN / "shellcheck", "--enable", "quote-safe-variables", *scripts],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, "")
    assert {path.name for path in scripts} > {*SCRIPTS, CORE, STEPS, ONE_MACHINE}


@pytest.mark.root
@pytest.mark.ranks
def test_the_emulated_cluster_trains_and_goes() -> None:
    out = bash(
        "cpu_emulated_cluster.sh",
        *("--num-layers", 2, "--hidden-size", 64, "--seq-length", 16),  # later flags count
        path=f"{warm_python()}:{BIN}",
        HOME=os.environ["HOME"],
        NNODES=2,
        RANKS_PER_NODE=2,
        TRAIN_ITERS=1,
        CLUSTER="examples",
    )
    assert "> strategy: IIG, 4 ranks in groups of 2, collectives ho-ring\n" in out
    assert re.findall(r"iteration +(\d)/ +1 \|", out) == ["1"]
    sent = re.search(r"^all NICs +([\d,]+)", out, re.M)
    assert int(sent[1].replace(",", "")) > 1_000_000
    namespaces = subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout
    assert "examples" not in namespaces


# Recipes: what they configure, that they fit, and that narrow twins of them train

FOLDER = EXAMPLES / "recipes"
NARROW = shlex.split(
    "--num-layers 2 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 8 "
    "--group-query-attention --num-query-groups 4 --seq-length 16 --vocab-size 64 "
    "--make-vocab-size-divisible-by 8 --micro-batch-size 1 --global-batch-size 4 "
    "--train-iters 10 --lr-warmup-iters 2 --lr-wsd-decay-iters 4 --eval-iters 1 "
    "--distributed-backend gloo"
)


PAGE = (FOLDER / "README.md").read_text()
ROWS = dict(re.findall(r"^\| `(.*\w+\.sh)` \| (.+) \|$", PAGE, re.M))


def start_recipe(recorders: Path, name: str, *args: object, **environment: object) -> Started:
    *settings, script = name.split()
    variables = dict(setting.split("=") for setting in settings)
    return start(recorders, FOLDER / script, *args, **variables, **environment)


def test_every_example_is_tested_and_the_page_has_every_recipe() -> None:
    files = {path.name for path in EXAMPLES.iterdir() if path.is_file()}
    assert files == {*SCRIPTS, CORE, STEPS, ONE_MACHINE, "Dockerfile"}
    named = {name.split()[-1] for name in ROWS}
    assert {path.name for path in FOLDER.glob("*.sh")} == {"recipe.sh", *named}


@pytest.mark.parametrize("name", ROWS)
def test_it_configures_what_the_page_says_and_fits(
    recorders: Path, name: str, tmp_path: Path
) -> None:
    plan = planned(start_recipe(recorders, name, tmp_path / "saved", DRY_RUN=1))
    batches, number = plan.config.batches, num_parameters(plan.config.model)
    in_words = f"{number / 1e9:.1f} billion" if number >= 1e9 else f"{number / 1e6:.0f} million"
    tokens = f"{batches.samples_after(1) * plan.config.data.seq_length:,}"
    steps = f"{plan.config.train.train_iters:,}"
    gigabytes = f"{plan.config.memory.total / 1e9:.1f}"
    assert ROWS[name] == f"{in_words} | {tokens} | {steps} | {gigabytes}"
    assert plan.config.memory.total / 1e9 < plan.config.launch.device_memory_gb


def test_it_takes_a_corpus_and_a_tokenizer(recorders: Path, tmp_path: Path) -> None:
    for name, environment in (
        ("llama_125m.sh", {"VOCAB_FILE": "v.json", "MERGE_FILE": "m.txt"}),
        ("tinyllama_1b.sh", {"TOKENIZER_MODEL": "v.json"}),
        ("llama3_8b.sh", {"TOKENIZER_MODEL": "v.json"}),
    ):
        started = start(recorders, FOLDER / name, tmp_path, "corpus", NNODES=2, **environment)
        assert started.launcher[:5] == ["torchrun", "--nproc-per-node", "8", "--nnodes", "2"]
        assert started.flags[started.flags.index("--data-path") + 1] == "corpus"
        assert set(environment.values()) <= set(started.flags)


def test_it_takes_the_phases_of_the_page(recorders: Path, tmp_path: Path) -> None:
    (written,) = re.findall(r"```json\n(.*?)```", PAGE, re.S)
    file = tmp_path / "phases.json"
    file.write_text(written)
    steps = [start // 576 for start in starts_of(read_phases(str(file)))]
    assert steps == [0, 3_450_000, 4_200_000]
    flags = start(recorders, FOLDER / "smollm3_3b.sh", tmp_path, file, VALID_DATA="held_out").flags
    assert flags[flags.index("--data-phases") + 1] == str(file)
    assert flags[flags.index("--valid-data-path") + 1] == "held_out"
    flags = start(recorders, FOLDER / "olmo2_7b.sh", tmp_path, file, STAGE=2).flags
    assert "--valid-data-path" not in flags
    assert flags[len(flags) - flags[::-1].index("--eval-iters")] == "0"


def test_a_second_stage_begins_with_the_rate_at_which_the_first_ends(
    recorders: Path, tmp_path: Path
) -> None:
    for stage in (1, 2):
        name, settings = "olmo2_7b.sh", {"STAGE": stage, "DRY_RUN": 1}
        started = start_recipe(recorders, name, tmp_path / "saved", "MOCK", **settings)
        rate = configured(started.flags).schedule.lr_at(928_646 * 1024)
        assert rate == pytest.approx(6.15e-5, rel=0.005)


@pytest.mark.slow("trains")
@pytest.mark.parametrize(
    "name",
    [name if "muon" in name else pytest.param(name, marks=pytest.mark.verify) for name in ROWS],
)
def test_a_narrow_twin_trains(recorders: Path, name: str, tmp_path: Path) -> None:
    started = start_recipe(recorders, name, tmp_path, "MOCK", *NARROW)
    ended = run_main(["pretrain_llama.py", *started.flags])
    assert ended.mistake is None, ended.mistake
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert max(json.loads(line).get("iteration", 0) for line in lines) == 10
    (begun,) = json.loads((tmp_path / "metrics.jsonl.run.json").read_text())["starts"]
    assert begun["arguments"]["optimizer"] == ("muon" if "muon" in name else "adam")
