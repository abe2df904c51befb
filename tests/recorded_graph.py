"""CUDA graphs without a GPU: within `emulated()`, torch.cuda's graphs and streams work on the CPU, by the rules of a capture.

A capture executes nothing: it records kernels, with the addresses and numbers that they are given; a replay runs these again,
without Python. Here the operations below autograd are recorded, with their very storages and Python numbers. So what a GPU would
freeze is frozen: a number, a branch, a tensor that is later replaced instead of written to. As on a GPU

- tensors from before the capture are as they were after it, and those made in it hold nothing before the first replay;
- a replay uses the memory of all of them, and here raises if any is gone (a GPU reads whatever lies there by then);
- the host cannot read a tensor, nor make one of its own data (which a GPU allows, and freezes, if the tensor stays on the host);
- Adam must be capturable, and a stream must wait for another one before it goes on with its results.

Random numbers, which a GPU can record, are refused. A kernel that PyTorch does not launch goes through `launch`. What only a GPU
does, such as the branches for `x.is_cuda`, is not seen.
"""

import contextlib
import functools
import sys
from unittest import mock

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

streams, entered, capturing = [], [], []  # all; those entered, the current one last; the graph whose capture is under way


def refuse(what):
    raise RuntimeError(f"operation not permitted when stream is capturing: {what}")


class Stream:
    """As torch.cuda.Stream. cuda_stream: 0 for the default one."""

    def __init__(self):
        self.cuda_stream, self.waited = len(streams), set()  # waited: for these, since they last had work
        for stream in streams:
            stream.waited.add(self)
        streams.append(self)

    def wait_stream(self, stream):
        self.waited.add(stream)

    def check(self, *others):
        for other in others:
            if other is not self and other not in self.waited:
                raise RuntimeError(f"race: stream {self.cuda_stream} has not waited for stream {other.cuda_stream}")


def current_stream():
    return entered[-1]


def synchronize():
    if capturing:
        refuse("synchronize")
    for stream in streams:
        stream.waited.update(streams)


@contextlib.contextmanager
def enter(stream):
    """As torch.cuda.stream."""
    outer = current_stream()
    stream.check(outer)
    stream.waited.discard(outer)  # it may have work again before this one is next entered
    entered.append(stream)
    try:
        yield
    finally:
        entered.pop()
        outer.waited.discard(stream)


class External:
    """A tensor from before the capture: a place in memory that others keep."""

    def __init__(self, tensor):
        self.storage = StorageWeakRef(tensor.untyped_storage())
        self.dtype, self.layout = tensor.dtype, (tensor.storage_offset(), tensor.size(), tensor.stride())

    def tensor(self):
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        if storage is None:
            raise RuntimeError(f"a {self.dtype} tensor of shape {tuple(self.layout[1])} that the graph uses is gone")
        return torch.empty(0, dtype=self.dtype).set_(storage, *self.layout)


def storages(tree):
    """The storages of all tensors in a nest of them, by address."""
    found = [x.untyped_storage() for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]
    return {storage._cdata: storage for storage in found}


class Recorder(TorchDispatchMode):
    """Appends to `operations` every operation below autograd that makes or changes a tensor."""

    def __init__(self, operations):
        super().__init__()
        self.operations, self.made, self.before = operations, {}, {}  # storages: made here; from before, with their content

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.check(func, args)
        inputs = args, kwargs or {}
        given = storages(inputs)
        self.before |= {at: (x, x.clone()) for at, x in given.items() if at not in self.made and at not in self.before}
        recorded = tree_map_only(torch.Tensor, self.place, inputs)
        results = func(*inputs[0], **inputs[1])
        made = {at: x for at, x in storages(results).items() if at not in given}
        self.made |= made
        if made or func._schema.is_mutable:  # else it is a view
            outputs = [x.detach() if made.keys() & storages(x).keys() else None for x in tree_leaves(results)]
            self.operations.append(functools.partial(execute, func, recorded, outputs))
        return results

    def place(self, tensor):
        return tensor.detach() if tensor.untyped_storage()._cdata in self.made else External(tensor)

    @staticmethod
    def check(func, args):
        aten, tags = torch.ops.aten, set(func.tags)
        if func == aten.lift_fresh.default:
            refuse("a tensor of Python's numbers, which are copied from the host")
        if func in (aten.index.Tensor, aten.index_put_.default):
            if any(index is not None and index.dtype == torch.bool for index in args[1]):
                refuse(f"{func} with a mask, whose elements the host counts")
        elif tags & {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.nondeterministic_seeded}:
            refuse(func)


class HostReads(TorchFunctionMode):
    """Refuses what on the CPU reads memory without an operation that a `Recorder` sees."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in (torch.Tensor.cpu, torch.Tensor.numpy, torch.Tensor.tolist):
            refuse(f"Tensor.{func.__name__}")
        return func(*args, **(kwargs or {}))


def execute(func, inputs, outputs):
    """One recorded operation; what it makes is copied to where it was in the capture."""
    args, kwargs = tree_map_only(External, External.tensor, inputs)
    for recorded, result in zip(outputs, tree_leaves(func(*args, **kwargs))):
        if recorded is not None:
            recorded.copy_(result)


class CUDAGraph:
    """As torch.cuda.CUDAGraph."""

    operations = None

    def capture_begin(self):
        self.operations, self.modes = [], contextlib.ExitStack()
        self.recorder = self.modes.enter_context(Recorder(self.operations))
        self.modes.enter_context(HostReads())
        capturing.append(self)

    def capture_end(self):
        capturing.pop()
        self.modes.close()
        for storage, content in self.recorder.before.values():
            storage.copy_(content)
        for storage in self.recorder.made.values():
            storage.fill_(0xFF)  # NaN
        del self.recorder

    @torch.no_grad()
    def replay(self):
        if self.operations is None:
            raise RuntimeError("replay without a successful capture")
        current_stream().check(*streams)
        for operation in self.operations:
            operation()


@contextlib.contextmanager
def graph(cuda_graph, pool=None, stream=None, capture_error_mode="global"):
    """As torch.cuda.graph."""
    synchronize()
    entered.append(stream or Stream())
    cuda_graph.capture_begin()
    try:
        yield
    except BaseException:
        cuda_graph.operations = None
        raise
    finally:
        cuda_graph.capture_end()
        entered.pop()


def launch(kernel, stream):
    """Calls kernel() as if launched on a stream (its number): in a capture not now, but at each replay, if it captures."""
    if not capturing:
        kernel()
    elif stream == current_stream().cuda_stream:
        capturing[-1].operations.append(kernel)
    elif stream == 0:
        refuse("launch on the default stream")
    else:
        kernel()


def check_capturable(optimizer):
    if capturing and not all(group["capturable"] for group in optimizer.param_groups):
        raise RuntimeError(f"operation not permitted when stream is capturing: {type(optimizer).__name__} is not capturable")


@contextlib.contextmanager
def emulated():
    """torch.cuda's graphs and streams on the CPU, which PyTorch's optimizers then take for a device that can capture."""
    optimizer, adam, devices = torch.optim.Optimizer, sys.modules["torch.optim.adam"], lambda *args, **kwargs: ["cpu"]
    names = dict(CUDAGraph=CUDAGraph, graph=graph, Stream=Stream, stream=enter, current_stream=current_stream)
    names |= dict(synchronize=synchronize, is_current_stream_capturing=lambda: bool(capturing))
    with contextlib.ExitStack() as patches:
        for name, stand_in in names.items():
            patches.enter_context(mock.patch.object(torch.cuda, name, stand_in))
        patches.enter_context(mock.patch.object(optimizer, "_accelerator_graph_capture_health_check", check_capturable))
        patches.enter_context(mock.patch.object(adam, "_get_capturable_supported_devices", devices))
        streams.clear()
        entered[:] = [Stream()]
        yield
