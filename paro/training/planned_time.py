"""This run as the planner sees it on --paro-machine, and the time of a step there."""

from __future__ import annotations

from paro.config.plan import RankDevice, Task, case_of
from paro.config.run import RunConfig
from paro.planning.search.estimator import Estimator
from paro.planning.search.search_space import Workload
from paro.report.record import PlannedStep


def workload_of(config: RunConfig, device_type: str) -> Workload | None:
    """The planner's workload; None unless --paro-machine names a device."""
    machine = config.sharding.machine
    if machine is None or machine.device is None:
        return None
    task = Task(
        config.model,
        config.trainable,
        config.precision,
        config.muon,
        config.data.seq_length,
        RankDevice(device_type, config.launch.device_memory_gb),
        config.data.reset_attention_mask,
    )
    return case_of(task, config.batches, config.sharding)


def planned_step(config: RunConfig, device_type: str) -> PlannedStep | None:
    """What a step of the largest global batch takes; None where the planner cannot say."""
    workload = workload_of(config, device_type)
    if workload is None or not config.trained or config.train.skip_train:
        return None
    timeline = Estimator(workload).estimate(workload.candidate(config.strategy)).timeline
    waits = timeline.exposed
    context = {"context": waits["context"]} if workload.context.size > 1 else {}
    return PlannedStep(
        machine=workload.machine.name,
        global_batch_size=workload.global_batch_size,
        seconds={
            "step": timeline.seconds,
            "computing": timeline.compute_seconds + waits["agree"],
            "gather": waits["gather"],
            "reduce": waits["reduce"] + waits["finish"],
            "publish": waits["publish"],
            **context,
        },
    )
