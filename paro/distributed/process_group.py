"""Initializes and shuts down torch.distributed, on a checked device and network interface."""

# [Note: gloo's interface]
# By default gloo takes the interface of the host's name. It is often a loopback address: 127.0.1.1
# in /etc/hosts of Debian and Ubuntu, or 127.0.0.1 in a container with the host's network. Ranks of
# other nodes then connect to themselves.

from __future__ import annotations

import ctypes
import ipaddress
import os
import re
import socket
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist

from paro.distributed.control import Control
from paro.distributed.flight_recorder import record_flights
from paro.distributed.rendezvous import open_store, refusals_are_shared, rendezvous
from paro.distributed.world import World, read_address
from paro.errors import RunError, UserError, writing

IFNAME = "GLOO_SOCKET_IFNAME"
_MAX_MINUTES = 365 * 24 * 60
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # constants of glibc's malloc.h
# Bytes; larger tensors return to the system when freed. glibc before 2.35 takes only the second.
_LARGEST_KEPT = (1 << 30, 32 << 20)
_MOST_KEPT = (1 << 31) - 1  # free bytes that stay at the end of the heap: the largest int
_OLDEST_DRIVER = {"12": 525, "13": 580}  # CUDA major version -> driver, by NVIDIA's release notes


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeConfig:
    """Backend, timeout and flight recorder of torch.distributed."""

    distributed_backend: str = "nccl"  # "nccl": GPU ranks; "gloo": CPU ranks
    distributed_timeout_minutes: int = 10
    paro_nccl_launch_order: Literal["free", "implicit"] = "free"  # NCCL's order: see groups.py
    paro_nccl_copy_engine: bool = False  # all-gather inside nodes by [Note: copy engines]
    flight_recorder_dir: str | None = None
    object_storage_cache_path: str | None = None  # folder of blocks of objects; None: a default

    @property
    def timeout(self) -> timedelta:
        """The timeout of a collective."""
        return timedelta(minutes=self.distributed_timeout_minutes)

    @property
    def by_nccl(self) -> bool:
        """True if ranks have GPUs, and NCCL sends between them."""
        return self.distributed_backend == "nccl"

    @property
    def device_type(self) -> str:
        """The torch device type of ranks."""
        return "cuda" if self.by_nccl else "cpu"

    def __post_init__(self) -> None:
        minutes = self.distributed_timeout_minutes
        if not 0 < minutes <= _MAX_MINUTES:
            raise UserError(
                f"--distributed-timeout-minutes {minutes} must be positive and at most "
                f"{_MAX_MINUTES}, a year"
            )
        if self.paro_nccl_copy_engine and self.distributed_backend != "nccl":
            raise UserError(
                f"--paro-nccl-copy-engine is for GPUs, and --distributed-backend is "
                f"{self.distributed_backend}: leave one of them out"
            )


def device_for(config: RuntimeConfig, world: World) -> torch.device:
    """Return the GPU of this local rank for nccl, the CPU for gloo; `UserError` without the GPU."""
    if config.distributed_backend == "gloo":
        return torch.device("cpu")
    return check_gpu(world.local_rank)


@contextmanager
def distributed(
    config: RuntimeConfig, world: World, settings: Mapping[str, str] | None = None
) -> Iterator[Control]:
    """Initialize torch.distributed for the block, unless the world is a single process.

    `UserError` on all ranks if `settings` differ between ranks or if a rank has no device.
    """
    with refusals_are_shared():
        device = device_for(config, world)
        if config.flight_recorder_dir is not None:
            with writing(f"--flight-recorder-dir {config.flight_recorder_dir}"):
                record_flights(config.flight_recorder_dir, world.rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        keep_freed_memory()
    store = _connect(config, world, settings or {}) if world.size > 1 else None
    control = Control(world, device, store=store)
    yield control
    # Not after an exception: with a dead peer this would hang. A gloo group is not destroyed: its
    # destructor holds the GIL and sometimes deadlocks with one of its own threads, which needs the
    # GIL to free its last tensor (torch 2.13).
    try:
        control.barrier()
    except RuntimeError as error:
        raise RuntimeError(f"at the end, while waiting for the others: {error}") from error


def _connect(config: RuntimeConfig, world: World, settings: Mapping[str, str]) -> dist.Store:
    """Make the default group of all ranks, once they agree, and return the store of its ranks.

    `RunError` if some ranks do not connect.
    """
    store = rendezvous(open_store(world, config.timeout), world, config.timeout, settings)
    choose_interface(store, world)
    try:
        dist.init_process_group(
            "gloo", store=store, rank=world.rank, world_size=world.size, timeout=config.timeout
        )
    except RuntimeError as error:  # a DistError is one
        reason = str(error).partition("\n")[0]
        raise RunError(f"ranks do not reach each other ({reason}): {interface_text()}") from error
    return store


def choose_interface(store: dist.Store, world: World) -> None:
    """Set gloo's variable, if it is unset and several nodes train; all ranks call it.

    The value is the interface in NCCL's variable, else the interface towards MASTER_ADDR. Where
    that is the loopback, as on rank 0's node, it is the interface towards the next node. If there
    is no such interface, gloo chooses.
    """
    if world.size <= world.ranks_per_node:
        return
    ip = _source_towards(read_address()[0])
    store.set(f"address/{world.rank}", ip)
    if os.environ.get(IFNAME):
        return
    of_nccl, names = os.environ.get("NCCL_SOCKET_IFNAME", ""), dict(socket.if_nameindex()).values()
    if of_nccl in names:
        os.environ[IFNAME] = of_nccl
        return
    if _is_loopback(ip) and world.rank < world.ranks_per_node:
        ip = _source_towards(store.get(f"address/{world.ranks_per_node}").decode())
    reaching = [] if _is_loopback(ip) else [name for name in names if ip in _addresses_of(name)]
    if reaching:
        os.environ[IFNAME] = reaching[0]


def interface_text() -> str:
    """Describe the address that gloo uses here, and how to choose another, for an error."""
    chosen = os.environ.get(IFNAME)
    if chosen:  # gloo, too, takes the first address of an interface
        addresses = [address for name in chosen.split(",") for address in _addresses_of(name)[:1]]
        where = f"{', '.join(addresses) or 'no address'} (interface {chosen})"
    else:
        name, address = socket.gethostname(), "127.0.0.1"  # gloo's choice if it does not resolve
        with suppress(OSError):
            address = str(socket.getaddrinfo(name, None)[0][4][0])
        where = f"{address} (host name {name})"
    return f"gloo uses {where}: on every node set {IFNAME} to an interface that all nodes reach"


def _source_towards(host: str) -> str:
    """Return this host's address from which packets to `host` would leave; sends no packet."""
    family, _, _, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def _addresses_of(interface: str) -> list[str]:
    """Return the addresses of an interface, IPv4 first."""
    import psutil

    addresses = psutil.net_if_addrs().get(interface, [])
    ip = (entry.address for entry in addresses if entry.family != psutil.AF_LINK)
    return [address.partition("%")[0] for address in ip]


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def keep_freed_memory() -> None:
    """Make glibc's malloc keep freed memory; do nothing where there is another malloc.

    By default it gives the memory of large tensors back to the system. The system then maps the
    memory of the next tensors page by page: a page fault and a page of zeros each.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and any(mallopt(_M_MMAP_THRESHOLD, size) for size in _LARGEST_KEPT):
        mallopt(_M_TRIM_THRESHOLD, _MOST_KEPT)


def check_gpu(local_rank: int) -> torch.device:
    """Return this local rank's GPU; `UserError` if there is none or torch has no kernels for it.

    Sets variables for torch's allocator and number of compile processes, if they are unset.
    """
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "4")  # per rank; torch's default: 32
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # the variable's older name
        # Freed units leave gaps into which units of other sizes do not fit.
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    with warnings.catch_warnings(record=True) as caught:  # torch tells once why it sees no GPU
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
    """Return whether code for an architecture runs on a GPU of a compute capability.

    A binary (sm_90) runs on later minor versions, PTX (compute_90) on all later versions, and a
    binary with a suffix (sm_90a) on exactly one version.
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
