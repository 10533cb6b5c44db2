"""Mistakes in the flags of tools: one line names the flag with its value, and the remedy."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from tests.helpers.refusals import refused
from tests.tools.bench.test_benchmarks import SIZES
from tests.tools.planning.test_request import FLAGS, MODEL
from tests.tools.test_plan import CASE
from tools import (
    bench_checkpoint,
    compare_curves,
    convert_checkpoint,
    draw_profile,
    evaluate,
    generate,
    inspect_dataset,
    merge_checkpoints,
    plan,
    report,
)
from tools.bench import (
    bench_attention,
    bench_loader,
    bench_model,
    bench_newton_schulz,
    check_gpu,
    one_rank,
    study_averages,
    study_mup,
    study_plan,
)

NULL = "--tokenizer-type NullTokenizer --vocab-size 1001"
H100 = "--gpu h100 --inter 25gbit"
FEEDBACK = "--paro-inter-grad-error-feedback"
DUMP = f"--dump-samples x {NULL}"

# By tool and flags that are right: what a mistake is told after those.
MISTAKES: dict[tuple[ModuleType, str], dict[str, str]] = {
    (plan, CASE): {
        "--world-size 12": "groups of 8, which do not divide the 12 ranks",
        "--paro-machine nowhere.json": "--paro-machine nowhere.json: no such file",
        "--trainable some": "--trainable 'some' is none of all, last-blocks:SHARE, names:",
        "--device-memory-gb 0": "--device-memory-gb 0.0 must be a positive number",
        "--mtbf-hours inf": "--mtbf-hours: inf is not a finite number",
        "--mtbf-hours 9 --restart-seconds -1": "--restart-seconds -1.0 must be",
        "--mtbf-hours 9 --storage-gb-per-second 0.0": "second 0.0 must",
        "--json nowhere/plan.json": "--json nowhere/plan.json cannot be written",
        "--trainable names:zzz": "no parameter matches 'zzz'",
        "--paro-collective ring": "--paro-collective ring ... give native or ho-ring",
        "--loss-scale 0": "--loss-scale 0.0 must be a positive number",
        f"--paro-survive 1 --paro-inter-grad-bits 4 {FEEDBACK}": f"{FEEDBACK} and --paro-survive",
        "--paro-materialize rotate --paro-group-size 1": "III shards them over 1 and 1",
    },
    (plan, FLAGS): {"--context-parallel-size 16": "16 does not divide ... 1, 2, 4, 8"},
    (plan, f"{FLAGS} --longest-sequence"): {
        "--context-parallel-size 3": "--context-parallel-size 3 does not fit",
        "--context-parallel-size 16": "--context-parallel-size 16 does not fit",
        "--context-parallel-size 8 --cp-comm-type a2a --num-attention-heads 4": "8 ... 4 heads",
        "--context-parallel-size 2 --attention-backend local": "--attention-backend local",
        "--paro-materialize rotate --num-attention-heads 4": "--paro-materialize rotate",
        "--device-memory-gb 1": "--device-memory-gb 1: with 1,024 tokens nothing fits",
        "--context-parallel-size 2 --device-memory-gb 1": "use larger devices",
        "--json a.json": "--longest-sequence ... --json",
        "--mtbf-hours 5": "--longest-sequence ... --mtbf-hours",
    },
    (plan, MODEL): {
        "": "--paro-machine is missing",
        f"{H100} --paro-machine dgx-h100": "--paro-machine and --gpu contradict each other",
        "--paro-machine dgx-h100 --inter 25gbit": "--inter 25gbit needs --gpu",
        "--gpu h100": "--inter is missing ... 16 ranks are more than one node of 8",
        "--gpu h100 --inter 25": "--inter: '25' is no rate: write it as",
        f"{H100} --intra fast": "--intra: 'fast' is no rate",
        f"{H100} --gpus-per-node 3": "groups of 3 ... choose a multiple of 3",
        f"{H100} --gpus-per-node 0": "--gpus-per-node 0 must be at least 1",
        "--gpu k80 --inter 25gbit": "--gpu: invalid choice",
        f"{H100} --paro-group-size 3": "--paro-group-size 3 does not divide",
        "--paro-machine dgx-h100 --why-not NGX": "--why-not: --paro-strategy 'NGX'",
    },
    **{(tool, ""): {"s3://b/x": "local ... s3://b/x"} for tool in (report, compare_curves)},
    (draw_profile, ""): {"s3://b/x": "local ... s3://b/x"},
    (merge_checkpoints, "--input s3://b/x --last 2"): {
        "--output s3://b/y": "--output ... local ... s3://b/y",
    },
    (convert_checkpoint, "--from paro --to hf --input s3://b/x"): {
        "--output s3://b/y": "--output ... local ... s3://b/y",
    },
    (generate, "--load s3://b/x"): {"--prompt-file s3://b/y": "--prompt-file ... s3://b/y"},
    (evaluate, "--tasks x"): {"--load msc://b/x": "--load ... msc://b/x ... s3://, gs://, az://"},
    (inspect_dataset, ""): {
        "": "give --data-path PREFIX",
        "--data-path none": "none.idx is missing",
        "--data-path -0.3 x 1 y": "--data-path the weight -0.3 is no share",
        "--data-args-path none": "--data-args-path none cannot be read",
        "--data-path none --documents -1": "--documents -1 must be 0 or more",
        "--data-path none --histogram x.txt": "the name must end in .png",
        "--data-path none --no-such-flag": "--no-such-flag is unknown",
        f"{DUMP} --train-samples 3 --mock-data": "--seq-length is missing",
        f"{DUMP} --train-iters 3 --seq-length 3": "needs --global-batch-size",
        f"{DUMP} --seq-length 3 --mock-data": "--train-iters or --train-samples",
    },
    (bench_checkpoint, "--folder x"): {"--rounds 0": "--rounds 0 must be at least 1"},
    (bench_loader, "--folder x"): {"--samples 3": "--samples"},
    (bench_model, " ".join(SIZES)): {
        "--contenders ours,what": "--contenders ... ours, ... not what",
        "--num-attention-heads 3": "--hidden-size 16 ... --num-attention-heads 3",
        "--clip-grad -1": "--clip-grad -1.0 is not a norm; 0 turns clipping off",
        "--json nowhere/figures.json": "--json nowhere/figures.json cannot be written",
    },
    (bench_attention, ""): {
        "--seq-lengths 4k": "--seq-lengths: invalid int value: '4k'",
        "--json nowhere/x.json": "--json nowhere/x.json cannot be written",
    },
    (bench_newton_schulz, ""): {
        "--shapes 0x4": "'0x4' is no ROWSxCOLUMNS",
        "--json nowhere/x.json": "--json nowhere/x.json cannot be written",
    },
    (check_gpu, ""): {
        "--parts a,z": "--parts a,z: 'z' is none of a,b,c",
        "--parts i": "part i needs --gpus 2 or more",
        "--quick 1 --parts a": "--quick 1 chooses the parts, for one GPU: no --parts",
        "--quick 2 --gpus 8": "--quick 2 chooses the parts, for one GPU: no ... --gpus",
    },
    (one_rank, "--ranks 8 --machine dgx-h100"): {
        "--machine nowhere.json": "nowhere.json ... dgx-h100",
        "--contenders ddq": "fsdp2 ... not 'ddq'",
        "--ranks 1": "--ranks 1",
    },
    (study_averages, "--folder x --data ."): {
        "": "--data . holds no corpus ... make quickstart",
        "--train-iters 39": "--train-iters 39 must be at least 40",
    },
    (study_mup, "--folder x --data ."): {"": "--data . holds no corpus ... make quickstart"},
    (study_plan, "measure --folder . --settings"): {
        "IIG": "IIG: names no collective",
        "IIG@native+turn": "+turn is none of +rotate, +in-place, +4-bit",
        "IIG@native+muon": "+muon is not predicted: give +rotate, +in-place, +4-bit",
        "IIG@native+rotate": "cannot cut --num-attention-heads 6",  # of the wide model
        "IIX@native": "--paro-strategy 'IIX' is unknown",
    },
}


@pytest.mark.parametrize(
    ("tool", "words", "message"),
    [
        pytest.param(tool, f"{base} {flags}", message, id=f"{tool.__name__} {flags}")
        for (tool, base), rows in MISTAKES.items()
        for flags, message in rows.items()
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(
    tool: ModuleType, words: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    refused(lambda: tool.main(words.split()), message)
    assert not list(tmp_path.iterdir())
