"""Functions of the product in which a rank is paused while a fault strikes."""

from __future__ import annotations

from enum import StrEnum


class Point(StrEnum):
    """A function as `package.module:Class.function`, in the module where its callers look it up."""

    RENDEZVOUS = "paro.distributed.process_group:open_store"
    BUILDING = "paro.launch.setup:check_memory"
    READ_SAMPLE = "data.gpt_dataset:GPTDataset.__getitem__"
    READ_MOCK_SAMPLE = "data.batch:MockDataset.__getitem__"
    BUILD_INDEX = "data.gpt_dataset:build_order"
    STEP = "paro.training.loop:train_step"
    MICRO_BATCH = "paro.sharding.distributed_model:DistributedModel.forward_backward"
    EVALUATE = "paro.training.loop:evaluate"
    CLAIM_FOLDER = "paro.checkpoint.folder_lock:LockWaiter.attempt"
    WRITE_FILES = "paro.checkpoint.save:write_files"
    WRITE_DATA = "paro.checkpoint.storage:BoundedWriter.write_data"
    READ_BACK = "paro.checkpoint.save:_read_back"
    BARRIER = "paro.distributed.control:Control.barrier"
    CLOSE_REPORT = "paro.report.report:Report.close"
