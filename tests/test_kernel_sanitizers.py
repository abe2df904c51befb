"""sharp_kernel.cu under g++'s sanitizers: unmodified it is clean, and each of the faults that are planted here is found.

The emulator runs the threads of a block as real threads: ThreadSanitizer sees a missing barrier, AddressSanitizer a wrong index,
UndefinedBehaviorSanitizer an access that is not aligned, and where a thread does not reach a barrier or shuffle the alarm rings.

What cannot be found so:
- whatever is between blocks, which run one after another with barriers of the emulator in between. `sharp_statistics` stays clean
  without its __threadfence, without the barrier that follows it, and with ++ in place of atomicAdd;
- the order in which a GPU's memory makes writes visible, and what only warps that run in lockstep or apart would show;
- a wrong index within the right buffer, such as the next row's: it changes bits, and test_kernel.py compares these;
- memory that is read before it is written: here shared memory starts as NaN, and only the bits can tell.
"""

import functools
import itertools
import math
import os
import signal
import struct
import subprocess

import emulated_cuda
import pytest
import recorded_graph
import torch

import ppo_fp16

# rows shorter and longer than an access of 8 elements and than a warp's pass of 256, at addresses aligned and not; in the second,
# the last root second moment is of a shared layer, and the last element of a matrix
LAYOUTS = [
    [((3,), False), ((5, 17), True), ((5,), False), ((4, 64), True), ((4,), False), ((2, 64), False), ((2,), False)],
    [((1,), False), ((7, 1), True), ((1, 601), True)],
]
STEPS = 2  # of each layout; the gradient of the second is not finite
THREAD, ADDRESS = ("-fsanitize=thread", "-Wno-tsan"), ("-fsanitize=address",)
UNDEFINED = ("-fsanitize=undefined", "-fno-sanitize-recover=all")
BARRIER = "    __syncthreads();\n"

# name: flags, what is replaced, by what, what the sanitizer then says
FAULTS = {
    "no barrier before partial sums are read": (
        THREAD,
        "partial[threadIdx.x / 32] = x;\n" + BARRIER,
        "partial[threadIdx.x / 32] = x;\n",
        "data race",
    ),
    "no barrier before partial sums are written again": (
        THREAD,
        "    __syncthreads();  // partial",
        "    // partial",
        "data race",
    ),
    "no barrier before `last` is read": (THREAD, BARRIER + "    if (!last)", "    if (!last)", "data race"),
    "no barrier before the layer's root second moments are read": (
        THREAD,
        BARRIER + "    for (int i = 0; i < layer_count",
        "    for (int i = 0; i < layer_count",
        "data race",
    ),
    "a row for two warps": (
        THREAD,
        "const int index = blockIdx.x * WARPS + threadIdx.x / 32;",
        "const int index = blockIdx.x * WARPS + threadIdx.x / 64;",
        "data race",
    ),
    "first moments written one too far": (ADDRESS, "store(exp_avg + at, n, m);", "store(exp_avg + at + 1, n, m);", "overflow"),
    "a row more than there are": (ADDRESS, "index >= row_count", "index > row_count", "overflow"),
    "a root second moment more than the layer has": (ADDRESS, "j < layers[i].rows;", "j <= layers[i].rows;", "overflow"),
    "eight elements where fewer are left": (ADDRESS, "if (i < n) to[i] =", "to[i] =", "overflow"),
    "sixteen bytes at any address": (
        ("-fsanitize=alignment", *UNDEFINED[1:]),
        "n >= 8 && reinterpret_cast<size_t>(to) % 16 == 0",
        "n >= 8",
        "misaligned address",
    ),
}
HANGS = {
    "a shuffle that half a warp reaches": ("        sum = warp_sum(sum);", "        if (lane() < 16) sum = warp_sum(sum);"),
    "a barrier that half a block reaches": (
        BARRIER + "    if (!last)",
        "    if (threadIdx.x < 128) __syncthreads();\n    if (!last)",
    ),
}


def why_not():
    """The reason why there are no sanitizers here, or an empty string."""
    if emulated_cuda.why_not():
        return emulated_cuda.why_not()
    for name in ("libtsan.so", "libasan.so", "libubsan.so"):
        path = subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()
        if not os.path.isabs(path):
            return f"g++ has no {name}"
    return ""


reason = why_not()
pytestmark = pytest.mark.skipif(bool(reason), reason=reason or "-")


class Recording:
    """As cupy.RawModule, but nothing is launched: `launches` keeps the kernel, grid, block and arguments."""

    def __init__(self):
        self.launches = []

    def get_function(self, name):
        return functools.partial(self.launch, name)

    def launch(self, name, grid, block, arguments, stream):
        self.launches.append((("sharp_statistics", "sharp_apply").index(name), grid[0], block[0], arguments))


def record(layout):
    """The launches of a few steps, and all tensors that they use, first of all the parameters and the step."""
    size, module = sum(math.prod(shape) for shape, _ in layout), Recording()
    theta = torch.nn.Parameter(torch.linspace(-1, 1, size).half())
    optimizer = ppo_fp16.SHARP([theta], layout, residual=slice(0, layout[0][0][0]))
    optimizer.update = kernel = ppo_fp16.SharpKernel(optimizer, 0.5, 1.0, module=module)
    gradients = [torch.randn(size, generator=torch.Generator().manual_seed(i)).half() for i in range(STEPS)]
    gradients[1][-1] = math.inf
    for gradient in gradients:
        theta.grad = gradient
        optimizer.step()
    tables = [kernel.rows, kernel.layers, kernel.row_sums, kernel.layer_rms, kernel.scalars]
    return module.launches, [theta.detach(), *optimizer.state[theta].values(), *tables, *gradients]


def numbers(*values):
    return struct.pack(f"{len(values)}q", *values)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A file of the launches of all layouts, the blocks forwards or backwards, for replayed_launches.h; and all their tensors."""
    with recorded_graph.emulated():
        recordings = [record(layout) for layout in LAYOUTS]
    tensors = [tensor for _, tensors in recordings for tensor in tensors]
    index = {tensor.data_ptr(): i for i, tensor in enumerate(tensors)}
    contents = [tensor.numpy().tobytes() for tensor in tensors]
    launches = [(order, launch) for order, (launches, _) in enumerate(recordings) for launch in launches]
    path = tmp_path_factory.mktemp("launches") / "input"
    with open(path, "wb") as file:
        file.write(numbers(len(contents)) + b"".join(numbers(len(content)) + content for content in contents))
        file.write(numbers(len(launches)))
        for order, (kernel, grid, block, arguments) in launches:
            file.write(numbers(kernel, grid, block, order, len(arguments)))
            for x in arguments:  # a Python number is an address, a NumPy scalar a value
                file.write(numbers(1, index[x]) if isinstance(x, int) else numbers(0) + x.tobytes().ljust(8, b"\0"))
    return path, tensors


def run(recorded, folder, flags, before="", after=""):
    """Builds the kernel with one change, and repeats the launches; the finished process."""
    with open(emulated_cuda.SOURCE) as file:
        source = file.read()
    if before:
        assert source.count(before) == 1
        source = source.replace(before, after)
    (folder / "kernel.cu").write_text(source)
    program = emulated_cuda.build(str(folder), str(folder / "kernel.cu"), flags=("-O1", "-g1", *flags), program=True)
    options = dict(TSAN_OPTIONS="halt_on_error=1", ASAN_OPTIONS="detect_leaks=0")
    arguments = [program, str(recorded[0]), str(folder / "output")]
    done = subprocess.run(arguments, capture_output=True, text=True, env=dict(os.environ, **options))
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("g++'s ThreadSanitizer is too old for how this system places memory: sysctl vm.mmap_rnd_bits=28")
    return done


@pytest.mark.parametrize("flags", [THREAD, ADDRESS + UNDEFINED], ids=["thread", "address"])
def test_the_kernel_is_clean(recorded, tmp_path, flags):
    done = run(recorded, tmp_path, flags)
    assert (done.returncode, done.stderr) == (0, "")
    tensors = recorded[1]
    after = (tmp_path / "output").read_bytes()
    ends = list(itertools.accumulate(tensor.nbytes for tensor in tensors))
    for i in range(0, len(tensors), len(tensors) // len(LAYOUTS)):  # it did run: the parameters moved, once
        theta, step = after[ends[i] - tensors[i].nbytes : ends[i]], after[ends[i] : ends[i + 1]]
        assert theta != tensors[i].numpy().tobytes() and struct.unpack("f", step) == (STEPS - 1,)


@pytest.mark.parametrize("flags, before, after, message", FAULTS.values(), ids=FAULTS)
def test_a_fault_is_found(recorded, tmp_path, flags, before, after, message):
    done = run(recorded, tmp_path, flags, before, after)
    assert done.returncode > 0 and message in done.stderr and "kernel.cu" in done.stderr


@pytest.mark.parametrize("before, after", HANGS.values(), ids=HANGS)
def test_a_hang_ends_with_the_alarm(recorded, tmp_path, before, after):
    assert run(recorded, tmp_path, ("-DTIME_LIMIT=2",), before, after).returncode == -signal.SIGALRM
