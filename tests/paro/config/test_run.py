"""From flags to a run: derived values, rules between flags and for folders, launch scripts."""

from argparse import Namespace
from dataclasses import asdict, replace
from operator import attrgetter
from pathlib import Path

import pytest

from data.loader import SplitCounts
from model.config import LLAMA_PRESETS, RecomputeConfig
from paro.checkpoint.directory import TRACKER, begin_checkpoint, finish_checkpoint
from paro.config.resolve import with_checkpoint_args
from paro.config.run import RunConfig
from paro.distributed.world import World
from paro.planning.remedies import recompute_flags
from paro.training import assembly
from tests.helpers.refusals import refused
from tests.helpers.training import configured, llama

SMALL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--untie-embeddings-and-output-weights --tokenizer-type NullTokenizer --vocab-size 100 "
    "--mock-data --micro-batch-size 2 --global-batch-size 32 --train-iters 10 --lr 0.1"
)
PRESET = "--mock-data --micro-batch-size 1 --seq-length 512 --train-iters 10 --lr 0.1"
NO_BATCH = SMALL.replace("--global-batch-size 32 ", "")
YARN = "--position-embedding-type yarn --yarn-rotary-scaling-factor 4"
SELECTIVE = RecomputeConfig(granularity="selective")
FULL, EACH = "--recompute-granularity full", RecomputeConfig(granularity="full")
BLOCKS, KEPT = replace(EACH, method="block", num_layers=2), replace(EACH, keeps_core=True)
SOME = "--recompute-granularity selective --recompute-modules"
ZERO_1 = "--use-distributed-optimizer"
TWO_BY_TWO = World(size=4, ranks_per_node=2)


def count_samples(config: RunConfig) -> SplitCounts:
    return assembly.count_samples(config.data, config.train, config.batches)


def configure(words: str, world: World = TWO_BY_TWO) -> RunConfig:
    return configured(words, world)


# Flags, and fields that follow from them.
FOLLOWS: list[tuple[str, dict[str, object]]] = [
    (
        "",
        {
            "model.num_query_groups": 4,
            "model.recompute": None,
            "strategy.name": "IIG",
            "strategy.degrees": (2, 2, 4),
            "schedule.lr_decay_samples": 320,  # as long as the training
            "precision.compute": "fp32",
            "loss_scale.dynamic": False,
        },
    ),
    ("--group-query-attention --num-query-groups 2", {"model.num_query_groups": 2}),
    ("--group-query-attention", {"model.num_query_groups": 1}),
    ("--recompute-activations", {"model.recompute": SELECTIVE}),
    (FULL, {"model.recompute": replace(EACH, method="uniform", num_layers=1)}),
    (f"{FULL} --recompute-method block --recompute-num-layers 2", {"model.recompute": BLOCKS}),
    (f"{FULL} --paro-recompute-keep core_attn --bf16", {"model.recompute": KEPT}),
    ("--recompute-activations --recompute-modules core_attn", {"model.recompute": SELECTIVE}),
    (f"{SOME} layernorm core_attn", {"model.recompute": SELECTIVE}),
    # Norms are always recomputed.
    ("--recompute-activations --recompute-modules layernorm", {"model.recompute": None}),
    ("--paro-group-size 4", {"strategy.name": "IIG", "strategy.degrees": (4, 4, 4)}),
    ("--paro-strategy zero1", {"strategy.name": "NNG", "strategy.degrees": (1, 1, 4)}),
    ("--paro-strategy 1,2,4", {"strategy.name": "1,2,4", "strategy.degrees": (1, 2, 4)}),
    (ZERO_1, {"strategy.name": "NNG", "strategy.degrees": (1, 1, 4)}),
    (f"{ZERO_1} --paro-strategy zero1", {"strategy.name": "NNG"}),
    (
        "--lr-decay-iters 8 --lr-warmup-iters 2 --lr-wsd-decay-iters 3",
        {
            "schedule.lr_decay_samples": 256,
            "schedule.lr_warmup_samples": 64,
            "schedule.lr_wsd_decay_samples": 96,
            "schedule.weight_decay_incr_samples": 320,
        },
    ),
    ("--lr-warmup-fraction 0.01", {"schedule.lr_warmup_samples": 3.2}),
    ("--weight-decay 0.2", {f"schedule.{end}_weight_decay": 0.2 for end in ("start", "end")}),
    (
        "--start-weight-decay 0 --end-weight-decay 0.3 --weight-decay-incr-style cosine",
        {"schedule.start_weight_decay": 0.0, "schedule.end_weight_decay": 0.3},
    ),
    ("--padded-vocab-size 100", {"model.vocab_size": 100, "vocab_size": 100}),
    (
        "--padded-vocab-size 131 --make-vocab-size-divisible-by 64",
        {"model.vocab_size": 131, "vocab_size": 100},
    ),
    ("--bf16", {"precision.compute": "bf16", "loss_scale.dynamic": False}),
    ("--fp16 --loss-scale 128", {"precision.compute": "fp16", "loss_scale.dynamic": False}),
]


@pytest.mark.parametrize(("words", "wanted"), FOLLOWS)
def test_fields_follow_from_flags(words: str, wanted: dict[str, object]) -> None:
    config = configure(f"{SMALL} {words}")
    assert {path: attrgetter(path)(config) for path in wanted} == wanted


# The model


def test_sizes_that_are_not_given_follow_from_those_that_are() -> None:
    # 8/3 of 64 is 170, rounded down to a multiple of 64; 100 and the end of documents are padded.
    assert configure(SMALL).model == llama(4, 64, 128, heads=(4, 4, 16), length=32, vocab=128)


@pytest.mark.parametrize("name", LLAMA_PRESETS)
def test_a_preset_is_taken_whole_with_its_published_vocabulary(name: str) -> None:
    config, preset = configure(f"{PRESET} --llama-preset {name}"), LLAMA_PRESETS[name]
    assert config.model == preset
    assert (config.vocab_size, config.eod) == (preset.vocab_size, preset.vocab_size - 1)


def test_explicit_sizes_win_over_the_preset() -> None:
    preset = LLAMA_PRESETS["llama3.2-1B"]
    model = configure(
        f"{PRESET} --llama-preset llama3.2-1B --num-layers 2 --rotary-base 1e4 "
        "--untie-embeddings-and-output-weights"
    ).model
    assert (model.num_layers, model.rotary_base) == (2, 1e4)
    assert preset.tie_embeddings_and_output_weights
    assert not model.tie_embeddings_and_output_weights
    assert model.hidden_size == preset.hidden_size
    stretched = "--position-embedding-type yarn --yarn-rotary-scaling-factor 4"
    model = configure(f"{PRESET} --llama-preset llama3.2-1B {stretched}").model
    assert (model.use_rope_scaling, model.rope_scaling_factor) == (False, 8.0)


def test_what_follows_from_an_overridden_size_is_not_the_presets() -> None:
    words = f"{PRESET} --llama-preset 7B --hidden-size 256 --num-attention-heads 4"
    model = configure(words).model
    assert (model.kv_channels, model.num_query_groups) == (64, 4)


@pytest.mark.parametrize("chosen", [EACH, replace(KEPT, num_layers=2), BLOCKS])
def test_flags_of_a_plan_are_its_recomputation(chosen: RecomputeConfig) -> None:
    assert configure(f"{SMALL} --bf16 {recompute_flags(chosen)}").model.recompute == chosen


# Lengths


def test_lengths_in_iterations_follow_the_schedule() -> None:
    # 8 samples for the first 20, then 16: 8 8 8 | 16 16 ...
    config = configure(f"{NO_BATCH} --step-batch-size-schedule 0:8,640:16 --lr-warmup-iters 4")
    assert config.schedule.lr_decay_samples == 3 * 8 + 7 * 16
    assert config.schedule.lr_warmup_samples == 3 * 8 + 16
    assert count_samples(config).train == 3 * 8 + 7 * 16
    samples = NO_BATCH.replace("--train-iters 10", "--train-samples 100")
    steps = "--step-batch-size-schedule 0:8,640:16"
    assert configure(f"{samples} {steps}").train.train_iters == 3 + 4


def test_the_planner_plans_for_the_last_size() -> None:
    words = "--step-batch-size-schedule 0:8,640:16 --paro-machine dgx-a100-roce100 "
    words += "--paro-group-size 2"
    config = configure(f"{NO_BATCH} {words}")
    assert config.estimator.request.global_batch_size == 16


def test_evaluations_draw_as_many_samples_as_they_take() -> None:
    plan = f"{SMALL} --global-batch-size 16 --eval-interval 5 --eval-iters 3"
    counts = count_samples(configure(plan))
    assert (counts.train, counts.valid, counts.test) == (160, 3 * 3 * 16, 3 * 16)
    counts = count_samples(configure(f"{plan} --eval-global-batch-size 24"))
    assert (counts.train, counts.valid, counts.test) == (160, 3 * 3 * 24, 3 * 24)


# Folders


def test_a_missing_checkpoint_stops_only_where_asked(tmp_path: Path) -> None:
    words = f"{SMALL} --load {tmp_path}"
    assert configure(words).checkpoint.load == str(tmp_path)
    stops = f"{words} --exit-on-missing-checkpoint"
    refused(lambda: configure(stops), f"--load {tmp_path} holds no checkpoint")


def test_a_place_to_save_is_tried_before_training(tmp_path: Path) -> None:
    words = f"{SMALL} --save {tmp_path / 'a' / 'b'} --save-interval 5"
    assert configure(words).checkpoint.save_interval == 5
    assert list(tmp_path.iterdir()) == [], "nothing is made before there is something to save"


# A launch script of Megatron-LM, unchanged except for the paths

LLAMA2_7B = """
    --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32
    --seq-length 4096 --max-position-embeddings 4096
    --tokenizer-type NullTokenizer --vocab-size 32000 --mock-data --split 949,50,1
    --micro-batch-size 1 --global-batch-size 256 --train-iters 500000 --lr-decay-iters 320000
    --distributed-backend nccl --lr 0.0003 --lr-decay-style cosine --min-lr 1.0e-5
    --weight-decay 1e-2 --clip-grad 1.0 --lr-warmup-fraction .01
    --optimizer adam --adam-beta1 0.9 --adam-beta2 0.95 --initial-loss-scale 65536
    --position-embedding-type rope --use-rotary-position-embeddings --rotary-percent 1.0
    --swiglu --normalization RMSNorm --norm-epsilon 1e-5 --disable-bias-linear
    --untie-embeddings-and-output-weights --make-vocab-size-divisible-by 1
    --attention-dropout 0 --hidden-dropout 0 --no-masked-softmax-fusion
    --attention-softmax-in-fp32 --no-gradient-accumulation-fusion --use-flash-attn
    --no-query-key-layer-scaling --transformer-impl transformer_engine --use-mcore-models
    --use-distributed-optimizer --overlap-grad-reduce --bf16
    --log-interval 100 --save-interval 10000 --eval-interval 1000 --eval-iters 10
    --log-validation-ppl-to-tensorboard --log-memory-to-tensorboard
    --log-timers-to-tensorboard --tensorboard-queue-size 5 --log-params-norm
"""


def test_a_llama2_script_runs_unchanged() -> None:
    config = configure(LLAMA2_7B, World(size=16, ranks_per_node=8))
    assert config.model == LLAMA_PRESETS["llama2-7B"]
    assert config.strategy.degrees == (1, 1, 16)
    assert config.schedule.lr_warmup_samples == 0.01 * 320000 * 256
    (notice,) = config.notices
    assert "--save-interval has no effect without --save" in notice
    assert config.report.log_timers_to_tensorboard
    assert config.train.log_params_norm


# Rules for folders, and flags of what is not chosen


@pytest.fixture
def used(tmp_path: Path) -> Path:
    """A folder with the checkpoints of a run."""
    root = tmp_path / "used"
    for iteration in (2, 4):
        finish_checkpoint(begin_checkpoint(root, iteration), iteration, {})
    return root


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "2 checkpoints, iterations 2 to 4 ... no --load ... --start-over"),
        ("--load {used}/../other", "/other is another folder: give --load {used} to continue"),
        ("--load {used}/../other --finetune", "give --load {used} without --finetune"),
        ("--load {used} --finetune", "--finetune begins at iteration 0: leave --finetune out"),
        ("--load {used}/ --start-over", "--load names the same folder"),
    ],
)
def test_checkpoints_of_another_run_are_not_mixed_up(used: Path, words: str, message: str) -> None:
    before = sorted(used.rglob("*"))
    flags = f"{SMALL} --save {used} {words.format(used=used)}"
    refused(lambda: configure(flags), message.format(used=used))
    assert sorted(used.rglob("*")) == before


@pytest.mark.parametrize(
    "words",
    [
        "--load {used}/../used",  # the same folder by another name
        "--load {used} --ckpt-step 2",
        "--start-over",
        "--load {used}/../other --finetune --start-over",
        "--skip-train",  # writes nothing
        "--dry-run --world-size 4",  # reports it at the end
    ],
)
def test_a_used_folder_may_be_continued_or_left_alone(used: Path, words: str) -> None:
    configure(f"{SMALL} --save {used} {words.format(used=used)}")


def test_the_folder_of_save_hf_may_exist_where_in_memory_copies_continue_a_run(
    tmp_path: Path,
) -> None:
    configure(f"{SMALL} --save-hf {tmp_path} --non-persistent-ckpt-type local")


@pytest.mark.parametrize("flag", ["--save", "--tensorboard-dir"])
def test_a_link_to_a_folder_that_is_gone_is_refused(flag: str, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "gone")
    message = f"{flag} {link}: {link} links to a folder that is not there"
    refused(lambda: configure(f"{SMALL} {flag} {link}"), message)


def test_a_tracker_alone_is_a_checkpoint_and_an_unfinished_save_is_none(tmp_path: Path) -> None:
    begin_checkpoint(tmp_path / "unfinished", 3)
    configure(f"{SMALL} --save {tmp_path / 'unfinished'}")
    (tmp_path / TRACKER).write_text("7")
    refused(lambda: configure(f"{SMALL} --save {tmp_path}"), f"holds a {TRACKER}")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--lr-wsd-decay-iters 2", "--lr-wsd-decay-iters has no effect without"),
        (
            "--lr-wsd-decay-samples 9 --lr-wsd-decay-style cosine --lr-decay-style cosine",
            "--lr-wsd-decay-style, --lr-wsd-decay-samples have no effect without "
            "--lr-decay-style WSD: --lr-decay-style is cosine",
        ),
        ("--lr-wsd-decay-iters 2 --lr-decay-style WSD", None),
        ("--save-interval 5 --async-save", "--save-interval, --async-save have no effect without"),
        ("--muon-momentum 0.8 --muon-nesterov", "--muon-nesterov have no effect without --optim"),
        ("--muon-momentum 0.8 --optimizer muon --muon-extra-scale-factor 0.2", None),
        ("--lr-decay-style constant --min-lr 0.01", "--min-lr has no effect with --lr-decay-style"),
        ("--iterations-to-skip 3 99", "--iterations-to-skip has no effect beyond --train-iters"),
        (
            "--paro-outer-steps 4 --paro-strategy III",
            "no effect: all ranks are synchronous for the",
        ),
        (
            "--iterations-to-skip 1 --paro-outer-steps 4 --paro-outer-warmup 0 --paro-strategy III",
            None,
        ),
        ("--apply-wd-to-qk-layernorm", "--apply-wd-to-qk-layernorm has no effect without --qk-"),
        ("--apply-wd-to-qk-layernorm --qk-layernorm", None),
        (f"{YARN} --yarn-mscale 1", "--yarn-mscale has no effect without --yarn-mscale-all-dim"),
        (f"{YARN} --yarn-mscale-all-dim 1", "-all-dim has no effect without --yarn-mscale"),
        (f"{YARN} --yarn-mscale 1 --yarn-mscale-all-dim 1", None),
        ("", None),
    ],
)
def test_flags_of_what_is_not_chosen_are_said(words: str, message: str | None) -> None:
    notices = configure(f"{SMALL} {words}").notices
    if message is None:
        assert notices == ()
    else:
        (notice,) = notices
        assert message in notice


def test_the_longest_sequence_is_the_checkpoints_whatever_the_flag_says() -> None:
    model = {"vocab_size": 128, "num_attention_heads": 4, "num_query_groups": 2}
    common = {"model": model, "max_position_embeddings": 32}
    gpt2 = {"vocab_file": None, "merge_file": None}
    flags = {"tokenizer_type": "NullTokenizer", "finetune": False, **gpt2}
    args = Namespace(seq_length=32, max_position_embeddings=64, **flags)
    assert with_checkpoint_args(args, common).max_position_embeddings == 32
    args.seq_length = 64
    message = "--seq-length 64 is above --max-position-embeddings 32, which --use-checkpoint-args"
    refused(lambda: with_checkpoint_args(args, common), message)


def saved_by_muon(root: Path, momentum: object) -> str:
    """The flags that load a checkpoint with this momentum among its arguments."""
    saved = {"optimizer": "muon", "muon_momentum": momentum, "lora_rank": None}
    common = {"model": asdict(configure(SMALL).model), "arguments": saved}
    finish_checkpoint(begin_checkpoint(root, 5), 5, common)
    return f"{SMALL} --load {root}"


@pytest.mark.parametrize(
    ("words", "optimizer", "momentum"),
    [
        ("", "muon", 0.95),
        ("--muon-momentum 0.8", "muon", 0.8),
        ("--no-load-optim", "adam", 0.9),
        ("--finetune", "adam", 0.9),
        ("--lora-rank 2", "adam", 0.9),
    ],
)
def test_muon_is_the_checkpoints_where_its_states_are_continued(
    words: str, optimizer: str, momentum: float, tmp_path: Path
) -> None:
    load = saved_by_muon(tmp_path, 0.95)
    found = configure(f"{load} --use-checkpoint-args {words}")
    assert (found.precision.optimizer, found.muon.muon_momentum) == (optimizer, momentum)
    assert found.arguments["optimizer"] == optimizer
    assert not [line for line in found.notices if "--muon-momentum" in line]
    assert configure(load).precision.optimizer == "adam"


def test_muon_s_settings_in_a_damaged_checkpoint_are_refused(tmp_path: Path) -> None:
    words = f"{saved_by_muon(tmp_path, 'much')} --use-checkpoint-args"
    refused(lambda: configure(words), f"--load {tmp_path}: arguments: muon_momentum: 'much'")
