"""A stand-in for cupy.RawModule that runs sharp_kernel.cu, unmodified, on the CPU (see cuda_on_cpu.h)."""

import ctypes
import functools
import importlib.util
import os
import re
import shutil
import subprocess

import numpy as np
import recorded_graph

TESTS = os.path.dirname(os.path.abspath(__file__))
SOURCE = os.path.join(os.path.dirname(TESTS), "sharp_kernel.cu")


def include_folders():
    """Where the CUDA headers of the nvidia and CuPy wheels are; none if one of them is not installed."""
    nvidia, cupy = importlib.util.find_spec("nvidia"), importlib.util.find_spec("cupy")
    if nvidia is None or cupy is None:
        return []
    folders = [os.path.join(path, "cu13", "include") for path in nvidia.submodule_search_locations]
    folders += [os.path.join(path, "_core/include/cupy/_cccl/libcudacxx") for path in cupy.submodule_search_locations]
    return folders if any(os.path.exists(os.path.join(path, "cuda_fp16.h")) for path in folders) else []


def why_not():
    """The reason why the kernel cannot be run here, or an empty string."""
    if not shutil.which("g++"):
        return "no g++"
    return "" if include_folders() else "no CUDA headers: pip install -r tests/requirements.txt"


def build(folder, source=None, flags=("-O2",), program=False):
    """Compiles a .cu file, by default the project's, for the CPU; returns the path of the shared library.

    program: make a program of it instead, which repeats recorded launches (see replayed_launches.h).
    """
    with open(source or SOURCE) as file:
        kernels = re.findall(r"__global__ .*?void (\w+)", file.read())
    wrapper = os.path.join(folder, "wrapper.cpp")
    with open(wrapper, "w") as file:
        file.write(f'#include "{TESTS}/cuda_on_cpu.h"\n#include "{source or SOURCE}"\n')
        file.writelines(f"EXPORT({kernel})\n" for kernel in kernels)
        if program:
            launches = ", ".join(f"launch_{kernel}" for kernel in kernels)
            file.write(f'#include "{TESTS}/replayed_launches.h"\n')
            file.write(f"int main(int, char** argv) {{ return replay(argv, {{{launches}}}); }}\n")
    output = os.path.join(folder, "kernel" if program else "kernel.so")
    includes = [option for path in include_folders() for option in ("-isystem", path)]
    options = ["-std=c++20", "-ffp-contract=off", "-pthread", *([] if program else ["-fPIC", "-shared"]), *flags, *includes]
    subprocess.run(["g++", *options, wrapper, "-o", output], check=True)
    return output


class Module:
    """As cupy.RawModule. order: of the blocks; 0 forwards, 1 backwards, another number shuffles them."""

    def __init__(self, library, order=0):
        self.library, self.order = ctypes.CDLL(library), order

    def get_function(self, name):
        return functools.partial(self.launch, name)

    def launch(self, name, grid, block, arguments, stream):
        """Rejects what CuPy would get wrong silently: another number of arguments, or another width, than the kernel has."""
        sizes = (ctypes.c_int * 64)()
        sizes = sizes[: getattr(self.library, f"sizes_{name}")(sizes)]
        # CuPy passes a bare int or float as 8 bytes and a NumPy scalar as it is
        values = [np.int64(x) if isinstance(x, int) else np.float64(x) if type(x) is float else x for x in arguments]
        if [value.nbytes for value in values] != sizes:
            raise TypeError(f"{name} takes arguments of {sizes} bytes, not {[value.nbytes for value in values]}")
        buffers = [np.atleast_1d(value).copy() for value in values]
        pointers = (ctypes.c_void_p * len(buffers))(*(buffer.ctypes.data for buffer in buffers))
        kernel = functools.partial(getattr(self.library, f"launch_{name}"), grid[0], block[0], pointers, self.order)
        kernel.arguments = buffers  # kept for as long as the pointers to them
        recorded_graph.launch(kernel, stream.ptr)
