"""Whether this torch can use the GPU of a rank, and why not, before anything is allocated."""

from __future__ import annotations

import os
import re
import warnings

import torch

from paro.errors import UserError

_OLDEST_DRIVER = {"12": 525, "13": 580}  # by major version of CUDA, from NVIDIA's release notes


def check_gpu(local_rank: int) -> torch.device:
    """The GPU of this local rank; `UserError` without one that this torch has kernels for.

    Sets how its memory is cut, and how many processes compile, unless the environment does.
    """
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "4")  # of each rank of the node; not 32
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # its older name
        # Units of different sizes come and go, and leave gaps that others do not fit in.
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    with warnings.catch_warnings(record=True) as caught:  # torch says once why it sees none
        warnings.simplefilter("always")
        is_available = torch.cuda.is_available()
    if not is_available:
        raise UserError(
            f"--distributed-backend nccl needs CUDA devices and torch sees none: "
            f"{_why_none([str(warning.message) for warning in caught])}; give "
            "--distributed-backend gloo to run on CPU ranks"
        )
    if local_rank >= torch.cuda.device_count():
        raise UserError(
            f"local rank {local_rank} has no GPU: torch sees {torch.cuda.device_count()}; "
            "start one process per GPU, and under SLURM give GPUs to the node (--gpus-per-node) "
            "instead of one to each task, so that ranks see each other's"
        )
    device = torch.device("cuda", local_rank)
    capability, built_for = torch.cuda.get_device_capability(device), torch.cuda.get_arch_list()
    if not any(_runs(arch, capability) for arch in built_for):
        raise UserError(
            f"torch {torch.__version__} has no kernels for {torch.cuda.get_device_name(device)}, "
            f"of compute capability {capability[0]}.{capability[1]}: it was built for "
            f"{', '.join(built_for)}; install one built for that GPU, such as a wheel for an "
            "older CUDA"
        )
    return device


def _why_none(warned: list[str]) -> str:
    cuda = torch.version.cuda
    if cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    said = next((text.partition("\n")[0][:200] for text in warned if "CUDA" in text), "")
    oldest = _OLDEST_DRIVER.get(cuda.partition(".")[0])
    needs = f"torch {torch.__version__} needs a driver for CUDA {cuda}"
    needs += f", {oldest} or newer" if oldest is not None else ""
    return f"{said} ({needs})" if said else f"{needs}, and CUDA_VISIBLE_DEVICES may hide some"


def _runs(arch: str, capability: tuple[int, int]) -> bool:
    """Whether code for an architecture runs on a GPU: binaries on later minors, PTX on all later.

    Binaries with a suffix use features of that capability alone.
    """
    parsed = re.fullmatch(r"(sm|compute)_([0-9]+)([a-z]?)", arch)
    if parsed is None:
        return False
    built = divmod(int(parsed[2]), 10)
    if parsed[3]:
        return built == capability
    if parsed[1] == "compute":
        return built <= capability
    return built[0] == capability[0] and built[1] <= capability[1]
