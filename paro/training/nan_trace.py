"""Names the first operation of a step whose result is not finite, by a second pass: --trace-nan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from paro.distributed.control import Control

# Operations whose results are infinite or undefined on purpose: masks, and memory to be written.
_EXEMPT = ("empty", "full", "fill", "masked", "where", "scalar_tensor", "new_")
_SUMS = (
    "every activation and its gradient is finite: the sum of gradients over micro-batches or ranks "
    "is not"
)


class _Watch(TorchDispatchMode):
    """A record of the first operation that makes infinity or NaN from finite values.

    An operation counts if the output of its unit, or the gradient that leaves the unit, is not
    finite either: what a later operation masks was no fault.
    """

    def __init__(self) -> None:
        super().__init__()
        self.origin: str | None = None
        self.order = 0  # of `origin` among all operations
        self._unit = "forward of embedding"
        self._suspect: str | None = None

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        self.order += self.origin is None
        name = func.__name__.partition(".")[0].rstrip("_")  # in place or not
        looks = self.origin is None and self._suspect is None and not name.startswith(_EXEMPT)
        was_finite = looks and _all_finite(args)
        result = func(*args, **kwargs or {})
        if was_finite and not _all_finite(result):
            self._suspect = name
        return result

    def enter(self, unit: str, values: Any = None) -> None:
        """Note that the computation of `unit` begins, from `values` of the unit before."""
        if self.origin is None and not _all_finite(values):
            self.origin = f"{self._unit}: {self._suspect or 'a fused kernel'}"
        self._unit, self._suspect = unit, None

    def hook(self, name: str, module: nn.Module) -> Iterator[RemovableHandle]:
        """Watch a unit's forward and backward; yield the handles of the hooks."""

        def before(_: nn.Module, inputs: Any) -> None:
            self.enter(f"forward of {name}", inputs)
            for parameter, values in module.named_parameters():  # gathered by an earlier hook
                if self.origin is None and not _all_finite(values):
                    self.origin = f"parameter {name}.{parameter}"

        def after(_: nn.Module, inputs: Any, output: Tensor) -> None:
            self.enter(f"after the forward of {name}", output)
            if output.requires_grad:
                output.register_hook(partial(self.enter, f"backward of {name}"))

        yield module.register_forward_pre_hook(before)
        yield module.register_forward_hook(after)


def _all_finite(values: Any) -> bool:
    for each in tree_leaves(values):
        if isinstance(each, Tensor) and each.is_floating_point():
            # torch has no `isfinite` of some types of one byte.
            wide = each.float() if each.itemsize == 1 else each
            if not wide.isfinite().all():
                return False
    return True


def origin_of(model: nn.Module, run: Callable[[], object], control: Control) -> str:
    """Run a forward and backward again; return where its first infinity or NaN comes from.

    Collective over the ranks of `control`. It names the rank on which the fewest operations came
    before.
    """
    watch, blocks = _Watch(), model.get_submodule("blocks").named_children()
    names = ("embedding", *(f"blocks.{name}" for name, _ in blocks), "head")
    with ExitStack() as hooks:
        for name in names:
            for handle in watch.hook(name, model.get_submodule(name)):
                hooks.enter_context(handle)
        with watch:
            run()
        watch.enter("the end")
    everyone = control.gather((watch.origin is None, watch.order, watch.origin))
    (is_fine, _, origin), rank = min((result, rank) for rank, result in enumerate(everyone))
    return _SUMS if is_fine else f"rank {rank}: {origin}"
