"""Watch one forward and backward on the meta device and write down every allocation and free, in order (torch).

A block is a tensor storage: it is allocated when an operation first returns it and freed when Python and autograd have let
go of it. In backward the module of an operation is found from the autograd node that runs: nodes are numbered as forward
creates them, so each module call owns an interval of numbers. Nothing is inserted into the graph, which would change it.
"""

from __future__ import annotations

import bisect
import gc
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from explorer.errors import CouldNotRun
from explorer.estimator import standins
from explorer.estimator.autocast import Autocast
from explorer.estimator.program import ACTIVATION, ALLOCATE, BACKWARD, CUBLAS, CUBLASLT, END_OF_FORWARD, ENTER, FORWARD, FREE, GRADIENT, LEAVE, MATMUL, RECOMPUTE, TEMPORARY
from explorer.estimator.tape import Varying

Event = tuple[Any, ...]
"""(ALLOCATE, block, bytes, Varying|None, module) · (FREE, block) · (GRADIENT, parameter, block) · (ENTER|LEAVE, module, direction) · (END_OF_FORWARD,) · (MATMUL, CUBLAS|CUBLASLT)"""

_PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"}


class _Call:
    """One call of a module's forward, and the interval of autograd nodes it made."""

    __slots__ = ("start", "end", "module", "parent", "closed")

    def __init__(self, start: int, module: str, parent: _Call | None) -> None:
        self.start, self.end, self.module, self.parent, self.closed = start, None, module, parent, False

    def owns(self, node: int) -> bool:
        return self.start <= node and (self.end is None or node < self.end)


class Trace(TorchDispatchMode):
    """The events of one run; use `record`."""

    def __init__(self, model: torch.nn.Module, padded: bool | None, autocast: Autocast | None) -> None:
        super().__init__()
        self.padded, self.autocast = padded, autocast
        self.events: list[Event] = []
        self.categories: dict[int, int] = {}
        self.modules = {id(module): name for name, module in model.named_modules()}
        self.known: dict[int, tuple[int, weakref.ref]] = {}
        self.count = 0
        self.in_backward = False
        self.workspaces: set[int] = set()
        """Libraries that have taken their workspace in this thread."""
        self.node = -1
        """Sequence number of the autograd node that runs."""
        self.makers: dict[int, int] = {}
        """Block → the node that made it."""
        self.sum: tuple[int, int, int] | None = None
        """Of the sum of gradients just made: the block it could be made in, its own storage, the events before it was done."""
        self.stack: list[_Call] = []
        self.calls: list[_Call] = []
        self.starts: list[int] = []
        self.open: list[_Call] = []
        self.scope: set[int] = set()
        self.gradients: set[int] = set()
        self.safe_softmaxes: set[int] = set()
        self.kept = [t.untyped_storage() for t in (*model.parameters(), *model.buffers())]
        self.foreign = {storage._cdata for storage in self.kept}

    # --- blocks

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].device.type == "meta":
            return _scalar(args[0], self.padded)
        owner = self._visit()
        out = func(*args, **(kwargs or {}))
        results = out if isinstance(out, tuple | list) else (out,)
        if func is torch.ops.aten.native_dropout.default:
            results = results[::-1]  # CUDA's kernel makes the mask first (ATen/native/cuda/Dropout.cu)
        self.sum = None
        for tensor in results:
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "meta":
                self._see(tensor, owner)
        self._watch_sum(func, args, out)
        if func.name() in _PRODUCTS:
            self._multiply(CUBLASLT if func.name() == "aten::addmm" and args[0].dim() == 1 else CUBLAS)
        for n_bytes, how in standins.scratch_after(func, args, out, self.safe_softmaxes):
            self._scratch(n_bytes, how, owner)
        return out

    def _see(self, tensor: torch.Tensor, owner: str) -> int:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.foreign:
            return 0
        if key in self.known:
            return self.known[key][0]
        number = self._allocate(storage.nbytes(), standins.annotation(), owner)
        self.known[key] = number, weakref.ref(storage, lambda _: self._gone(key))
        return number

    def _allocate(self, n_bytes: int, how: Varying | None, owner: str) -> int:
        self.count += 1
        self.events.append((ALLOCATE, self.count, n_bytes, how, owner))
        self.scope.add(self.count)
        self.categories[self.count] = TEMPORARY
        self.makers[self.count] = self.node
        return self.count

    def _multiply(self, library: int) -> None:
        """Note a thread's first matrix product in each library, which makes it take its workspace; cuBLASLt adds biases, after cuBLAS has set up."""
        for each in (CUBLAS, library):
            if each not in self.workspaces:
                self.workspaces.add(each)
                self.events.append((MATMUL, each))

    def _watch_sum(self, func: Any, args: tuple[Any, ...], out: Any) -> None:
        """Note a sum of gradients that autograd may make in place on a real device, but not on meta (torch/csrc/autograd/input_buffer.cpp, `accumulate`).

        Autograd adds what a node has just made to what an earlier node left; a formula's own sums are of its own making. A view
        shares its storage with its base, and is never added to in place.
        """
        if not self.in_backward or self.stack or func is not torch.ops.aten.add.Tensor or not isinstance(args[1], torch.Tensor) or args[0]._is_view():
            return
        old, other = (tensor.untyped_storage()._cdata for tensor in args[:2])
        if old in self.known and old != other and self.makers[self.known[old][0]] != self.node and args[0].numel() == out.numel() and args[0].untyped_storage().nbytes() == out.untyped_storage().nbytes():
            self.sum = self.known[old][0], out.untyped_storage()._cdata, len(self.events)

    def _in_place(self, number: int) -> bool:
        """Whether the sum just made was the last to hold block `number`: then it was made in that block."""
        if self.sum is None or self.sum[0] != number or any(e[0] != FREE for e in self.events[self.sum[2] :]):
            return False
        _, key, after = self.sum
        self.sum = None
        if key not in self.known or self.events[after - 1][0] != ALLOCATE:
            return False
        made, reference = self.known[key]
        del self.events[after - 1]
        self.known[key] = number, reference
        self.scope.discard(made)
        del self.categories[made]
        self.count -= 1
        return True

    def _gone(self, key: int) -> None:
        number, _ = self.known.pop(key)
        if self._in_place(number):
            return
        self.safe_softmaxes.discard(key)
        self.scope.discard(number)
        if number not in self.gradients:
            self.events.append((FREE, number))

    def _scratch(self, n_bytes: int, how: Varying | None, owner: str) -> None:
        number = self._allocate(n_bytes, how, owner)
        self.scope.discard(number)
        self.events.append((FREE, number))

    def _end_of_forward(self) -> None:
        """What outlives a forward was saved by autograd: the category rule of the house."""
        for number in self.scope:
            self.categories[number] = ACTIVATION
        self.scope = set()

    # --- modules

    def _before(self, module: torch.nn.Module, args: Any) -> None:
        name = self.modules.get(id(module))
        if name is None:
            return
        if self.in_backward and not self.stack:
            self._leave_others()
            self.scope = set()
            if self.autocast is not None:
                self.autocast.__enter__()
        call = _Call(torch._C._autograd._get_sequence_nr(), name, self.stack[-1] if self.stack else None)
        self.stack.append(call)
        self.calls.append(call)
        self.starts.append(call.start)
        self.events.append((ENTER, name, RECOMPUTE if self.in_backward else FORWARD))

    def _after(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        name = self.modules.get(id(module))
        if name is None:
            return
        call = self.stack.pop()
        call.end = torch._C._autograd._get_sequence_nr()
        self.events.append((LEAVE, name, RECOMPUTE if self.in_backward else FORWARD))
        if self.in_backward and not self.stack:
            self._end_of_forward()
            if self.autocast is not None:
                self.autocast.__exit__(None, None, None)

    def _visit(self) -> str:
        """The module of the operation that is about to run; in backward, opens and closes modules on the way."""
        if self.stack:
            return self.stack[-1].module
        node = torch._C._current_autograd_node() if self.in_backward else None
        if node is None:
            return ""
        self.node = node._sequence_nr()
        call = self._owner(self.node)
        if call is None:
            return ""
        self._move_to(call)
        return call.module

    def _owner(self, node: int) -> _Call | None:
        i = bisect.bisect_right(self.starts, node) - 1
        call = self.calls[i] if i >= 0 else None
        while call is not None and not call.owns(node):
            call = call.parent
        return call

    def _move_to(self, call: _Call) -> None:
        chain = _with_parents(call)
        self._close_all_but(chain)
        opened = set(map(id, self.open))
        for step in reversed(chain):
            if id(step) not in opened and not step.closed:
                self.open.append(step)
                self.events.append((ENTER, step.module, BACKWARD))

    def _leave_others(self) -> None:
        """A recomputed forward begins when its layer's last node asks for what it saved: the modules whose backward came before are done."""
        node = torch._C._current_autograd_node()
        self._close_all_but(_with_parents(None if node is None else self._owner(node._sequence_nr())))

    def _close_all_but(self, calls: list[_Call]) -> None:
        inside = set(map(id, calls))
        while self.open and id(self.open[-1]) not in inside:
            self._close()

    def _close(self) -> None:
        call = self.open.pop()
        call.closed = True
        self.events.append((LEAVE, call.module, BACKWARD))

    # --- gradients

    def gradient_hook(self, name: str) -> Callable[[torch.Tensor], None]:
        """A hook that hands the gradient of parameter `name` over to the rules: they say when it is freed."""

        def ready(parameter: torch.Tensor) -> None:
            storage = parameter.grad.untyped_storage()
            number = self.known[storage._cdata][0]
            self.gradients.add(number)
            self.events.append((GRADIENT, name, number))
            del storage
            parameter.grad = None

        return ready


def _with_parents(call: _Call | None) -> list[_Call]:
    chain = []
    while call is not None:
        chain.append(call)
        call = call.parent
    return chain


def _scalar(tensor: torch.Tensor, padded: bool | None) -> Any:
    """A question about values has no answer on the meta device; whether a batch's mask is all ones has, which is what transformers' models ask."""
    if tensor.dtype == torch.bool and padded is not None:
        return not padded
    raise CouldNotRun("the model's forward looks at tensor values, which a recording does not have; try eager attention, or the probe")


@contextmanager
def _hooks(trace: Trace, model: torch.nn.Module) -> Iterator[None]:
    names = {id(p): n for n, p in model.named_parameters()}
    handles = [register_module_forward_pre_hook(trace._before), register_module_forward_hook(trace._after, always_call=True)]
    handles += [p.register_post_accumulate_grad_hook(trace.gradient_hook(names[id(p)])) for p in model.parameters() if p.requires_grad]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _no_collection() -> Iterator[None]:
    """Reference cycles (checkpointing makes some) would be freed whenever Python's collector happens to run: here, at the end. What earlier runs left stays till then too."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def record(model: torch.nn.Module, batch: Mapping[str, Any], generation: str, forced_attention: str | None = None, padded: bool | None = False, autocast: Autocast | None = None) -> Trace:
    """Run `loss = model(**batch).loss; loss.backward()` on the meta device and return what it did.

    `padded`: the answer to a model that asks whether its mask has a gap; None where nobody knows what a model asks.
    The events keep gradients allocated (their rules free them), and free whatever else is left at the end.
    """
    trace = Trace(model, padded, autocast)
    trace.foreign |= {t.untyped_storage()._cdata for t in batch.values() if isinstance(t, torch.Tensor)}
    with _no_collection(), standins.installed(generation, forced_attention, autocast), _hooks(trace, model), trace:
        with autocast or nullcontext():
            loss = model(**batch).loss
        trace._end_of_forward()
        trace.events.append((END_OF_FORWARD,))
        trace.in_backward, trace.workspaces = True, set()
        loss.backward()
        while trace.open:
            trace._close()
        del loss
    for number, _ in list(trace.known.values()):
        if number not in trace.gradients:
            trace.events.append((FREE, number))
    trace.known.clear()
    return trace
