"""A GPU without values: FakeTensors on cuda:0 run the code of GPUs, and every wait is recorded."""

# [Note: fake CUDA]
# A FakeTensor of torch has a device and a shape, and no values. To compute on those of cuda:0, with
# autograd, torch's CPU build lacks a device guard and the hooks that say that a GPU is there. They
# are in fake_cuda.cpp, which must be loaded before torch is imported: `run_apart` starts a process
# for it. Triton's kernels are compiled, for the arguments that they would have, and do not run. A
# dispatch mode sees every operation, also those in autograd's threads and in graphs of
# torch.compile, and notes where the host would wait for the GPU, which a CPU never shows, and where
# a stream does not wait for another (fake_nccl.py).
#
# torch's choice of an attention kernel asks the device; here the choice is written out.

from __future__ import annotations

import json
import re
import shutil
import subprocess
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from hashlib import sha256
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from tests.helpers.fake_nccl import Order, address
from tests.helpers.ranks import ROOT
from tests.helpers.scripts import python_apart
from tests.helpers.triton_kernels import CAPABILITIES, compiled

GPU = torch.device("cuda", 0)

aten = torch.ops.aten
_SOURCE = Path(__file__).with_suffix(".cpp")
_NUM_FRAMES = 3
# What these return, or its shape, depends on values: the host waits for them.
_NEEDS_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_BY_INDEX = {
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
}


# A process of its own #


def find_compiler() -> str | None:
    return next(filter(None, map(shutil.which, ("g++", "clang++"))), None)


def build(folder: Path) -> Path:
    """The library of fake_cuda.cpp for the torch of this process: that in `folder`, if it is there.

    Triton's kernels are kept beside it; Triton finds them by their source, types and constants.
    """
    compiler = find_compiler()
    assert compiler is not None, "no C++ compiler"
    kind = f"{compiler} {torch.__version__} {_SOURCE.read_text(encoding='utf-8')}"
    library = folder / f"{sha256(kind.encode()).hexdigest()}.so"
    if library.exists():
        return library
    torch_folder = Path(torch.__file__).parent
    libraries = torch_folder / "lib"
    with TemporaryDirectory(dir=folder) as name:
        made = Path(name) / library.name  # another worker may make it too
        command = [compiler, "-std=c++20", "-shared", "-fPIC", f"-I{torch_folder / 'include'}"]
        command += [str(_SOURCE), "-o", str(made), f"-L{libraries}", f"-Wl,-rpath,{libraries}"]
        done = subprocess.run([*command, "-ltorch_cpu", "-lc10"], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return made.replace(library)


_LOAD = "import ctypes, sys; ctypes.CDLL(sys.argv[1])"
_CALL = "from tests.helpers.fake_cuda import answer; answer(*sys.argv[2:])"


def run_apart(library: Path, module: str, function: str, argument: object) -> Any:
    """The function's result in a process with the library; argument and result go as JSON."""
    words = (str(library), module, function, json.dumps(argument))
    environment = {"CUDA_VISIBLE_DEVICES": "", "TRITON_CACHE_DIR": str(library.parent / "triton")}
    out = python_apart(f"{_LOAD}; {_CALL}", *words, **environment)
    return json.loads(out.splitlines()[-1])


def answer(module: str, function: str, argument: str) -> None:
    """Prints the result as JSON."""
    print(json.dumps(getattr(import_module(module), function)(json.loads(argument))))


# What is recorded #


@dataclass(frozen=True, slots=True)
class Note:
    """What an operation does beside computing on the GPU."""

    kind: str  # "wait" of the host, "copy" to the GPU without one, "mix" of devices, or "race"
    what: str
    place: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.what}, at {self.place}"


def _place() -> str:
    """The innermost lines of this repository on this thread's stack, and autograd's node."""
    found = []
    for frame, number in traceback.walk_stack(None):
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT) and path != Path(__file__) and ".venv" not in path.parts:
            found.append(f"{path.relative_to(ROOT)}:{number} ({frame.f_code.co_name})")
    node = torch._C._current_autograd_node()
    if node is not None:
        found.append(f"autograd's {node.name()}")
    return ", from ".join(found[:_NUM_FRAMES])


class Recorder(TorchDispatchMode):
    """Notes what operations wait for, copy and mix, and the names of all operations and kernels."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # else nothing is compiled

    def __init__(self, fake: FakeTensorMode) -> None:
        super().__init__()
        self.notes: list[Note] = []
        self.operations: set[str] = set()
        self.order = Order(partial(self.note, "wait"))
        self._fake = fake
        self._pinned = WeakTensorKeyDictionary()
        self._locked: list[torch.UntypedStorage] = []

    def note(self, kind: str, what: str) -> None:
        self.notes.append(Note(kind, what, _place()))
        if kind == "wait":
            self.order.host_waited()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self.operations.add(str(func))
        if func is aten._pin_memory.default:
            return self._pin(args[0])
        if func is aten.is_pinned.default:
            return self._is_pinned(args[0])
        if func.namespace == "paro":  # what it computes, and not how it looks to a compiler
            with self:
                return func._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args)
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        devices = {each.device.type for each in tensors}
        if "cuda" in devices and _needs_values(func, args):
            self.note("wait", str(func))
        elif func in (aten.copy_.default, aten._to_copy.default):
            self._note_copy(func, args, kwargs)
        elif "cuda" in devices and len(devices) > 1:
            self.note("mix", str(func))
        if torch.Tag.data_dependent_output in func.tags:
            out = _made_up(func, args)
        elif func is aten.addmm.dtype_out:  # torch 2.11 takes the type for a factor
            out = kwargs["out"]
        else:
            out = func(*args, **kwargs)
        for race in self.order.races_of(func, args, kwargs, out):
            self.note("race", race)
        return out

    def lock(self, room: Tensor, _device: object) -> None:
        """Stands for `pin`, which page-locks memory that has views."""
        self._locked.append(room.untyped_storage())

    def _is_pinned(self, tensor: Tensor) -> bool:
        own = tensor.untyped_storage()._cdata
        return tensor in self._pinned or any(own == each._cdata for each in self._locked)

    def launch(self, name: str, *arguments: object, writes: int = 0) -> None:
        """Notes a Triton kernel, or a collective under NCCL that writes the first `writes`."""
        self.operations.add(name)
        tensors = [each for each in arguments if isinstance(each, Tensor)]
        if any(each.device.type != "cuda" for each in tensors):
            self.note("mix", name)
        for race in self.order.races_of_kernel(name, tensors, writes):
            self.note("race", race)

    def _note_copy(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if func is aten.copy_.default:
            to, source, *rest = args
            device, non_blocking = to.device, rest[0] if rest else kwargs.get("non_blocking")
        else:
            source, non_blocking = args[0], kwargs.get("non_blocking")
            device = torch.device(kwargs.get("device") or source.device)
        shape, way = tuple(source.shape), (source.device.type, device.type)
        if way == ("cuda", "cpu") and not non_blocking:
            self.note("wait", f"copy of {shape} to the host")
        elif way == ("cpu", "cuda"):
            waits = not (non_blocking and self._is_pinned(source))
            self.note("wait" if waits else "copy", f"copy of {shape} to the GPU")

    def _pin(self, tensor: Tensor) -> Tensor:
        fake = tensor.clone() if isinstance(tensor, FakeTensor) else self._fake.from_tensor(tensor)
        self._pinned[fake] = True
        return fake


def _needs_values(func: Any, args: Any) -> bool:
    if func in _BY_INDEX:  # numbers are read on the GPU, masks are counted
        indices = [each for each in args[1] if each is not None]
        return any(each.dtype in (torch.bool, torch.uint8) for each in indices)
    return not _NEEDS_VALUES.isdisjoint(func.tags)


def _made_up(func: Any, args: Any) -> float:
    """A number instead of a value: what a CPU tensor is known to hold, or 1."""
    if func not in (aten._local_scalar_dense.default, aten.item.default):
        return True
    constant = getattr(args[0], "constant", None)
    with no_dispatch():
        return torch.ones((), dtype=args[0].dtype).item() if constant is None else constant.item()


# What stands for a GPU #


def _functions(recorder: Recorder) -> dict[str, Any]:
    """Those of torch.cuda that the product and torch.compile call."""
    properties = SimpleNamespace(major=9, minor=0, multi_processor_count=132)
    return {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda _device: None,
        "get_device_capability": lambda _device=None: (9, 0),
        "get_device_properties": lambda _device=None: properties,
        "get_rng_state": lambda _device=None: torch.zeros(16, dtype=torch.uint8, device="cpu"),
        "set_rng_state": lambda _state, _device=None: None,
        "empty_cache": lambda: None,
        **recorder.order.functions(),
    }


def _attention(
    q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, enable_gqa: bool = False
) -> Tensor:
    """FlashAttention in 16 bits and the memory-efficient kernel in fp32, unless turned off."""
    # Only the former is inside a graph, where the setting cannot be read.
    is_fused = torch.compiler.is_compiling() or torch.backends.cuda.flash_sdp_enabled()
    if is_fused and q.dtype != torch.float32:
        return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)[0]
    if is_fused and not enable_gqa:
        return aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, is_causal)[0]
    math = aten._scaled_dot_product_attention_math
    return math(q, k, v, None, 0.0, is_causal, enable_gqa=enable_gqa)[0]


def _to_list(tensor: FakeTensor) -> Any:
    """One copy to the host, as of other tensors."""
    values = torch.ones(tensor.shape, dtype=tensor.dtype, device=tensor.device).cpu()
    with no_dispatch():
        return torch.ones(values.shape, dtype=values.dtype).tolist()


@cache
def _fake_mode() -> FakeTensorMode:
    """One for the process: caches of the product and of torch.compile keep its tensors."""
    return FakeTensorMode()


@contextmanager
def fake_cuda(capabilities: tuple[int, ...] = CAPABILITIES) -> Iterator[Recorder]:
    """In the block tensors have no values, and there is one GPU like an H100.

    Kernels are compiled for GPUs of these compute capabilities.
    """
    recorder = Recorder(_fake_mode())
    with ExitStack() as stack:
        for name, value in _functions(recorder).items():
            stack.enter_context(patch.object(torch.cuda, name, value))
        stack.enter_context(patch.object(F, "scaled_dot_product_attention", _attention))
        stack.enter_context(patch.object(torch.backends.cudnn, "version", lambda: 91900))
        # No tensor is ever on the device, not even to find out whether it works.
        stack.enter_context(patch.object(fake_tensor, "init_gpu_context", lambda _device: None))
        stack.enter_context(patch.object(FakeTensorMode, "avoid_device_init", True))
        stack.enter_context(patch.object(FakeTensor, "data_ptr", address))
        stack.enter_context(patch.object(FakeTensor, "tolist", _to_list))
        if find_spec("triton") is not None:
            from triton.runtime.jit import JITFunction

            def launch(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
                recorder.launch(kernel.__name__, *args)  # what it writes is not known here
                ptx = compiled(kernel, *args, capabilities=capabilities, **options)
                recorder.operations |= {*re.findall(r"satfinite\.\w+", ptx)}  # casts to fp8
                if re.search(r"\b(div|rem)\.[su]64", ptx):
                    recorder.operations.add(f"{kernel.__name__} divides in 64 bits")

            stack.enter_context(patch.object(JITFunction, "run", launch))
        stack.enter_context(_fake_mode())
        stack.enter_context(recorder)
        yield recorder


def noted(recorder: Recorder, collective: Callable[..., Any], writes: int) -> Callable[..., Any]:
    """A collective that writes its first tensors; all are checked to be on the GPU."""

    def checked(*args: Any, **kwargs: Any) -> Any:
        name = getattr(collective, "__name__", "collective")
        recorder.launch(name, *args, writes=writes)
        return collective(*args, **kwargs)

    return checked
