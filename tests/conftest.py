import os
import pathlib
import sys

import hypothesis
import pytest
import recorded_graph
import torch

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
torch.set_num_threads(1)
hypothesis.settings.register_profile("deterministic", derandomize=True, deadline=None)
hypothesis.settings.load_profile("deterministic")

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
skipped = []


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=needs_gpu)])
def device(request):
    """Where CUDA graphs are tested: on the CPU by their stand-in, and on a GPU where there is one."""
    if request.param == "cuda":
        yield torch.device("cuda")
    else:
        with recorded_graph.emulated():
            yield torch.device("cpu")


def pytest_runtest_logreport(report):
    if report.skipped and "no CUDA device" not in str(report.longrepr):
        skipped.append(f"{report.nodeid}: {report.longrepr[-1]}")


def pytest_sessionfinish(session):
    """On a user's machine a missing tool skips a test; in CI, which has them all, only a missing GPU may."""
    if os.environ.get("CI") and skipped:
        print("\nskipped for another reason than a missing GPU:", *skipped, sep="\n")
        session.exitstatus = 1
