"""Pre-trains a LLaMA: `python pretrain_llama.py --help`, or under torchrun or srun."""

from __future__ import annotations

from argparse import Namespace
from datetime import datetime

from data.loader import Datasets
from paro.arguments import parse_args
from paro.assembly import build_data, build_sources, build_training, run_facts, start_state
from paro.config import RunConfig
from paro.loop import Loop, Saving
from paro.placement import check_placement, placement_lines, predict_memory
from paro.report.log import Log
from paro.report.log_line import arguments_block
from paro.report.memory import MemoryForecast, resident_bytes
from paro.report.report import open_report
from paro.resume import Saver, load_run
from paro.runtime import (
    Control,
    distributed,
    read_world,
    run_script,
    seed_everything,
    user_mistakes,
)
from paro.training import Training, TrainState


def main() -> None:
    with user_mistakes():
        args = parse_args()
        world = read_world()
        config = RunConfig.from_args(args, world)
    with distributed(config.runtime, world) as control:
        run(args, config, control)


def run(args: Namespace, config: RunConfig, control: Control) -> None:
    """Builds the parts, says what was built, and trains to the end or evaluates alone."""
    only_evaluate = config.train.skip_train
    log = Log(rank=control.world.rank, world_size=control.world.size)
    log.log0(arguments_block(vars(args)))
    seed_everything(config.train.seed)

    bytes_before = resident_bytes(control.device)
    # What is only evaluated has no gradients and no optimizer state.
    training = build_training(config, control, is_trained=lambda _name: not only_evaluate)
    for line in (*config.notices, *placement_lines(config, training)):
        log.log0(line)
    check_placement(config, training)

    loaded = None
    if config.checkpoint.load is not None:
        with control.agreed():
            loaded = load_run(config, training, log)
    state = loaded or start_state(config)
    if only_evaluate:
        state.consumed_valid_samples = 0  # the same samples whenever the checkpoint was saved
    with control.agreed():
        datasets = build_data(config, state)
        if only_evaluate:
            check_held_out(config, datasets)
    for line in datasets.describe():
        log.log0(line)
    log.log0(f"[after dataloaders are built] datetime: {datetime.now()}")
    sources = build_sources(config, datasets, training, state)

    with control.agreed():
        report = open_report(
            config.report.without_records() if only_evaluate else config.report,
            run_facts(config, training),
            log,
            device=training.device,
            start_iteration=state.iteration,
            arguments=vars(args),
        )
    moment = predict_memory(config, training)
    report.start({"precision": config.precision.describe(), "memory": moment.describe()})
    forecast = MemoryForecast(
        predicted_bytes=moment.total, states_bytes=moment.states, bytes_before=bytes_before
    )
    loop = Loop(
        training,
        state,
        sources,
        report,
        saving=saving_of(args, config, training, log, loaded),
        forecast=forecast,
    )
    loop.run()
    report.close()
    if control.device.type == "cuda":
        training.close()  # gloo's groups go with the process


def check_held_out(config: RunConfig, datasets: Datasets) -> None:
    """Refuses to evaluate nothing."""
    if datasets.valid or datasets.named_valid or datasets.test:
        return
    split = config.data.split_in_use
    flags = f"--split {split}" if split else "--valid-data-path and --test-data-path"
    raise ValueError(
        f"--skip-train has nothing to evaluate: {flags} leaves no sample for validation or test"
    )


def saving_of(
    args: Namespace, config: RunConfig, training: Training, log: Log, loaded: TrainState | None
) -> Saving | None:
    """How the run is saved, if at all; what lies under --save already is not saved again."""
    checkpoint = config.checkpoint
    if checkpoint.save is None or config.train.skip_train:
        return None
    saver = Saver(config, training, log, arguments=vars(args))
    continued = loaded if checkpoint.save == checkpoint.load else None
    return Saving(
        write=saver.save,
        interval=checkpoint.save_interval,
        saved_iteration=None if continued is None else continued.iteration,
        settle=saver.settle,
        failed=lambda: saver.failed,
    )


if __name__ == "__main__":
    run_script("pretrain_llama.py", main)
