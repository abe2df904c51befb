import pathlib
import sys

import hypothesis
import torch

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
torch.set_num_threads(1)
hypothesis.settings.register_profile("deterministic", derandomize=True, deadline=None)
hypothesis.settings.load_profile("deterministic")
