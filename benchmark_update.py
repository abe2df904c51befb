"""Times one complete minibatch update (loss, gradient, norm, clipping, optimizer) of the trainers: the paper's section 4.4.

Every measurement has a process of its own; a round goes over all methods and configurations before the next begins. Checks come
first: gradient and parameter change against FP64 on the same minibatch; a method out of tolerance is reported, not timed. On CUDA
an update is one CUDA graph. Also given: bytes of optimizer state, peak memory, launches, and the share of the floor: what the
update's memory traffic or its products, the slower of the two, would take at the ceilings measured in the same process.

    python benchmark_update.py                                      # as in the paper, on the GPU if there is one
    python benchmark_update.py --quick                              # one configuration, under a minute on the CPU
    python benchmark_update.py --configurations 2048x2048 --output 2048.json --plot 2048.png
"""

import copy
import csv
import gc
import importlib
import importlib.util
import json
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections import namedtuple
from dataclasses import asdict, dataclass
from typing import Literal

import torch
import tyro
from torch.utils._python_dispatch import TorchDispatchMode
from tqdm import tqdm

import ppo_fp32

RESULTS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "studies", "results")
OBS, ACTION = 17, 6  # dimensions of HalfCheetah's observations and actions
CONFIGURATIONS = ("64x64", "64x2048", "64x8192", "512x256", "512x2048", "512x8192", "2048x256", "2048x2048", "2048x8192")
STRETCH = 100  # updates from one return to the common start to the next
COLORS = {"FP32": "tab:gray", "FP32 fastest": "black", "AMP-FP16": "tab:blue", "AMP-BF16": "tab:green"}  # the others: red


@dataclass
class Args:
    device: Literal["cpu", "cuda"] = "cuda" if torch.cuda.is_available() else "cpu"  # where the updates run
    configurations: tuple[str, ...] = CONFIGURATIONS  # what to measure, each as WIDTHxMINIBATCH
    methods: tuple[str, ...] = ()  # methods to compare; without this, all that the device has
    processes: int = 5  # rounds, in each of which every method has a process for every configuration
    warmup: int = 500  # updates before the timed ones
    updates: int = 3000  # timed updates of each process
    cpu_seconds: float = 10.0  # on the CPU: seconds after which the updates of a process end, however many there were
    cuda_graph: bool = True  # on CUDA: capture the update in a CUDA graph
    compile: bool = False  # torch.compile the gradient of every method, and SHARP without the kernel, as the trainers do
    quick: bool = False  # one configuration, one process a method and few updates, to see that everything works
    output: str = os.path.join(RESULTS, "benchmark_update.json")  # file of the results; the table goes to the .csv beside it
    plot: str = ""  # file of a figure (.png, .pdf or .svg)


QUICK = dict(configurations=("64x64",), processes=1, warmup=50, updates=300, cpu_seconds=1.0)
Method = namedtuple("Method", "trainer flags products roundoff")  # roundoff: unit roundoff of what the products are given


def compiler(device):
    """Whether torch.compile has what it needs for the device."""
    if device == "cuda":
        return importlib.util.find_spec("triton") is not None
    return any(map(shutil.which, ("g++", "clang++", "c++")))


def all_methods(device):
    """What there is to compare on the device: name -> Method."""
    half, tf32 = torch.float16, 2**-11 if device == "cuda" else 2**-24  # the CPU has no TF32
    methods = {
        "FP32": Method("ppo_fp32", {}, torch.float32, 2**-24),
        "FP32 fastest": Method("ppo_fp32", {}, torch.float32, tf32),
        "AMP-FP16": Method("ppo_amp", dict(amp_dtype="float16"), half, 2**-11),
        "AMP-BF16": Method("ppo_amp", dict(amp_dtype="bfloat16"), torch.bfloat16, 2**-8),
        "PPO-FP16": Method("ppo_fp16", dict(cuda_kernel=device == "cuda"), half, 2**-11),
        "PPO-FP16, no kernel": Method("ppo_fp16", dict(cuda_kernel=False), half, 2**-11),
    }
    absent = ["PPO-FP16, no kernel"] if device == "cpu" else []  # where PPO-FP16 is just that
    absent += [] if compiler(device) else ["FP32 fastest"]
    return {name: method for name, method in methods.items() if name not in absent}


def fail(message):
    """Prints one line and exits with status 2, which is how a bad argument ends the program before any work."""
    print(f"{os.path.basename(__file__)}: error: {' '.join(message.split())}", file=sys.stderr)
    raise SystemExit(2)


def check_args(args):
    """Ends the program through `fail` if an argument cannot be measured with."""
    for name, low in (("processes", 1), ("updates", 1), ("warmup", 0)):
        if getattr(args, name) < low:
            fail(f"--{name} is {getattr(args, name)}; it must be at least {low}")
    if not 0 < args.cpu_seconds < math.inf:
        fail(f"--cpu-seconds is {args.cpu_seconds}; it must be positive and finite")
    if args.device == "cuda" and not torch.cuda.is_available():
        fail("--device cuda: PyTorch finds no CUDA device here; use --device cpu")
    for configuration in args.configurations or ("nothing",):
        if not re.fullmatch(r"[1-9]\d*x([2-9]|[1-9]\d+)", configuration):
            fail(f"--configurations {configuration}: it must be WIDTHxMINIBATCH, 1x2 or larger, like 64x2048")
    for method in args.methods:
        if method not in (available := all_methods(args.device)):
            fail(f"--methods {method}: on {args.device} it must be one of {', '.join(map(repr, available))}")
    if args.device == "cuda" and "PPO-FP16" in (args.methods or ("PPO-FP16",)) and not importlib.util.find_spec("cupy"):
        fail("--methods: PPO-FP16 needs CuPy: pip install cupy-cuda13x, where 13 is the CUDA version of PyTorch; or leave it out")
    if args.compile and not compiler(args.device):
        fail(f"--compile: there is no {'C++ compiler' if args.device == 'cpu' else 'Triton'} here; leave it out")
    if args.plot and not importlib.util.find_spec("matplotlib"):
        fail("--plot needs matplotlib; install it with: pip install matplotlib")
    for flag, path, endings in (("output", args.output, (".json",)), ("plot", args.plot, (".png", ".pdf", ".svg", ""))):
        if os.path.splitext(path)[1] not in endings or not os.access(os.path.dirname(os.path.abspath(path)), os.W_OK):
            fail(f"--{flag} {path}: it must be a {' or '.join(filter(None, endings))} file, in a folder that you can write to")


def make_problem(width, minibatch, device):
    """What all methods are given: the policy to start from, and a minibatch that a policy near it has sampled, all in FP64.

    Returns an agent, and a dict of tensors: what the trainers store, and means (minibatch, ACTION) and old_log_std (ACTION,) of
    the behaviour policy. All but what is derived from those two lies on the FP16 grid, so that every trainer starts from the same
    numbers. Advantages are N(0, 1), half of them signal. Left out are samples whose clipping hangs on less than a margin, since
    there a rounding error of any size decides.
    """
    torch.manual_seed(1)
    agent = ppo_fp32.Agent(OBS, ACTION, width).half().double().to(device)
    clip, rows = ppo_fp32.Args.clip_coef, 2 * minibatch + 64  # of which about 30 % are left out
    obs, noise, shift, advantages, value_noise = (
        torch.randn(rows, n, dtype=torch.float64).to(device) for n in (OBS, ACTION, ACTION, 1, 1)
    )
    with torch.no_grad():
        obs = obs.half().double()
        mean, value, old_log_std = agent.mean(obs), agent.value(obs), (agent.log_std + 0.02).half().double()
        means = mean + 0.05 * shift
        actions = (means + old_log_std.exp() * noise).half().double()
        values = (value + 0.1 * value_noise[:, 0]).half().double()
        advantages = (math.sqrt(0.5) * advantages[:, 0] + 0.5 * obs[:, 0] + 0.5 * noise[:, 0]).half().double()
        returns = (values + advantages).half().double()
        log_probs = ppo_fp32.log_prob(actions, means, old_log_std)
        ratio_change = (ppo_fp32.log_prob(actions, mean, agent.log_std) - log_probs).expm1()
        clipped_value = values + (value - values).clamp(-clip, clip)
        hangs_on = ratio_change.abs() - clip, (value - values).abs() - clip, value + clipped_value - 2 * returns
        clear = torch.stack(hangs_on).abs().min(0).values > 0.05
    columns = dict(obs=obs, actions=actions, values=values, advantages=advantages, returns=returns)
    columns |= dict(log_probs=log_probs, means=means)
    return agent, {name: tensor[clear][:minibatch] for name, tensor in columns.items()} | dict(old_log_std=old_log_std)


def build(name, start, problem, device, cuda_graph, compiled):
    """A method at the common start, put together from its trainer's own functions as the trainer's `main` does.

    Returns call(minibatch) -> metrics; gradient() -> the flat gradient of the loss; minibatch; optimizer; arguments.
    """
    method = all_methods(device)[name]
    trainer, stored = importlib.import_module(method.trainer), torch.float16 if method.trainer == "ppo_fp16" else torch.float32
    args, keywords, loss_scale = trainer.Args(**method.flags), {}, []
    with torch.device("meta"):  # the start has its weights already
        agent = trainer.Agent(OBS, ACTION, len(start.critic[0].bias), *([args.amp_dtype] if method.trainer == "ppo_amp" else []))
    agent.to_empty(device=device).to(stored).load_state_dict(start.state_dict())

    minibatch = {column: problem[column].to(stored) for column in ("obs", "actions", "values", "advantages", "returns")}
    if method.trainer == "ppo_fp16":
        agent.old_log_std.copy_(problem["old_log_std"])
        minibatch["means"] = problem["means"].to(stored)
        policies = problem["means"], problem["old_log_std"], minibatch["means"], agent.old_log_std
        minibatch["correction"] = trainer.sampling_correction(minibatch["actions"], *policies)
    else:
        minibatch["log_probs"] = problem["log_probs"].to(stored)

    gradient_function, exact = trainer.ppo_gradient, {"emulate_precision_casts": True, "cpp_wrapper": device == "cpu"}
    if compiled or name == "FP32 fastest":
        torch._dynamo.config.trace_autograd_ops = True  # forward and backward in one graph
        gradient_function = torch.compile(gradient_function, options=exact)
    if name == "FP32 fastest" and device == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32
    if method.trainer == "ppo_fp16":
        optimizer = trainer.make_optimizer(agent, args)
        if compiled and not args.cuda_kernel:
            optimizer.update = torch.compile(trainer.sharp_update, options=exact)
    else:
        optimizer = torch.optim.Adam([trainer.flatten(agent)], lr=args.learning_rate, eps=1e-5, fused=True)
    if method.trainer == "ppo_amp":
        keywords["scaler"] = torch.amp.GradScaler(device, enabled=args.amp_dtype == "float16")
        loss_scale = [keywords["scaler"].scale(torch.ones((), device=device))]
    keywords |= dict(agent=agent, optimizer=optimizer, args=args, gradient_function=gradient_function)

    def update(minibatch):
        return trainer.update_minibatch(minibatch=minibatch, **keywords)

    def gradient():
        scaled, _, _ = gradient_function(agent, minibatch, args, *loss_scale)
        return scaled.cpu().double() / float(loss_scale[0] if loss_scale else getattr(args, "loss_scale", 1))

    call = update
    if cuda_graph and device == "cuda":
        group = optimizer.param_groups[0]
        group["lr"], group["capturable"] = torch.tensor(float(group["lr"]), device=device), True
        call = trainer.CudaGraph(update)
    return call, gradient, minibatch, optimizer, args


def reference(start, problem, optimizer, args, updates):
    """In FP64, ppo_fp32's gradient at the start, and the parameter change after some updates by the kind of optimizer given."""
    agent = copy.deepcopy(start)
    theta, settings = ppo_fp32.flatten(agent), dict(lr=args.learning_rate, eps=1e-5)
    if isinstance(optimizer, torch.optim.Adam):
        optimizer = torch.optim.Adam([theta], **settings)
    else:  # SHARP, which rounds to FP32 inside: far below what is tolerated of FP16
        optimizer = type(optimizer)([theta], optimizer.layout, optimizer.residual, **settings)
    before, gradients = theta.detach().clone(), []
    for _ in range(updates):
        theta.grad, clip_coef, _ = ppo_fp32.ppo_gradient(agent, problem, ppo_fp32.Args())
        gradients = gradients or [theta.grad.clone()]
        theta.grad *= clip_coef
        optimizer.step()
    return gradients[0].cpu(), (theta.detach() - before).cpu()


def check(method, start, exact, update, gradient, theta, updates):
    """The errors of gradient and parameter change, each over its tolerance: at most 1 if all is well, NaN if nothing is.

    Errors are relative, in L2, and of the worst of three blocks: log_std, critic, actor. The gradient may err by 16 unit
    roundoffs of what the products are given, for a dozen roundings on its way, and 256 of FP32, for log-densities that cancel
    and sums over the minibatch. Adam's first updates follow the gradient's signs: an error e turns about a share e of
    them, which is 2 sqrt(e) of the change. Where parameters are stored in 16 bits, every update may also round each by one unit.
    """
    tolerance = 16 * method.roundoff + 256 * 2**-24
    sizes = [len(start.log_std), *(sum(x.numel() for x in network.parameters()) for network in (start.critic, start.actor_mean))]
    before, found, errors = theta.detach().cpu().double(), gradient(), dict(gradient=[], change=[])
    for _ in range(updates):
        update()
    change = theta.detach().cpu().double() - before
    for g, g_exact, d, d_exact, old in zip(*(x.split(sizes) for x in (found, exact[0], change, exact[1], before))):
        rounding = updates * method.roundoff * old.norm() / d_exact.norm() if theta.element_size() == 2 else 0
        errors["gradient"].append((g - g_exact).norm() / g_exact.norm() / tolerance)
        errors["change"].append((d - d_exact).norm() / d_exact.norm() / (2 * math.sqrt(tolerance) + rounding))
    return {what: torch.stack(of_blocks).max().item() for what, of_blocks in errors.items()}


def elapsed(function, repeats, device):
    """Seconds that some calls take together: by CUDA events on CUDA, by the clock on the CPU."""
    if device == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
    begin = time.perf_counter()
    for _ in range(repeats):
        function()
    if device == "cpu":
        return time.perf_counter() - begin
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000


class CountCalls(TorchDispatchMode):
    """Counts the calls of operators, while it is entered."""

    calls = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls += 1
        return function(*args, **(kwargs or {}))


def count_launches(update, device):
    """Kernels, copies and fills that an update runs on the GPU; on the CPU, calls of operators."""
    if device == "cpu":
        with CountCalls() as count:
            update()
        return count.calls
    with torch.profiler.profile() as profile:
        update()
        torch.cuda.synchronize()
    events = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return sum(not event.is_user_annotation for event in events)


def state_bytes(optimizer):
    """Bytes of all tensors that the optimizer keeps from one step to the next."""
    tensors = [tensor for state in optimizer.state.values() for tensor in state.values()]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def work(width, minibatch, trainer):
    """Bytes that an update must move, and FLOPs of its matrix products.

    A layer's forward pass reads weights and input and writes the output; its backward pass reads the output's gradient and the
    input, writes the weights' gradient and, except in first layers, reads the weights and writes the input's gradient. The norm
    reads the gradient; the optimizer reads gradient, parameters and states and writes parameters and states. All else is
    taken as fused into these; log_std and biases count in the optimizer alone.
    """
    stored, product = 2 if trainer == "ppo_fp16" else 4, 4 if trainer == "ppo_fp32" else 2
    layers = [layer for head in (ACTION, 1) for layer in ((OBS, width, False), (width, width, True), (width, head, True))]
    traffic = flops = 0
    for inputs, outputs, hidden_input in layers:
        weights, x, y = inputs * outputs, minibatch * inputs, minibatch * outputs
        flops += 2 * minibatch * weights * (2 + hidden_input)
        traffic += product * (2 * (weights + x + y) + hidden_input * (weights + x))
    parameters = ACTION + sum((inputs + 1) * outputs for inputs, outputs, _ in layers)
    if trainer == "ppo_fp16":
        roots = parameters - 2 * width * (OBS + width) + 4 * width  # one a row of the hidden layers' weights
        traffic += stored * (6 * parameters + 2 * roots) + 2 * 4 * ACTION  # the last: residual of log_std
    else:
        traffic += stored * 8 * parameters
    if trainer == "ppo_amp":  # the 16-bit copy of the parameters, and the FP32 copy of the gradient
        traffic += 2 * (stored + product) * parameters
    return traffic + stored * minibatch * (2 * ACTION + 4 if trainer == "ppo_fp16" else ACTION + 4), flops


def ceilings(products, device):
    """Bytes/s of a copy and FLOP/s of a matrix product, the best of five; on the CPU all trainers' products are FP32."""
    x, n = torch.ones(2**28 if device == "cuda" else 2**24, device=device), 8192 if device == "cuda" else 1024
    y, a = torch.empty_like(x), torch.ones(n, n, device=device, dtype=products if device == "cuda" else torch.float32)
    copy_seconds = min(elapsed(lambda: y.copy_(x), 1, device) for _ in range(5))
    product_seconds = min(elapsed(lambda: a @ a, 1, device) for _ in range(5))
    return 2 * x.numel() * x.element_size() / copy_seconds, 2 * n**3 / product_seconds


def measure(name, width, minibatch, device, warmup, updates, cpu_seconds, cuda_graph, compile, **_):
    """Checks and times one method in one configuration. Returns a dict: the results, or an `error`."""
    method, checked = all_methods(device)[name], 10 if device == "cuda" else 3  # updates: enough to capture and replay a graph
    torch.set_num_threads(1)
    start, problem = make_problem(width, minibatch, device)
    call, gradient, rows, optimizer, args = build(name, start, problem, device, cuda_graph, compile)
    theta = optimizer.param_groups[0]["params"][0]
    exact, begin = reference(start, problem, optimizer, args, checked), theta.detach().to("cpu", copy=True)
    start.cpu()
    problem.clear()
    gc.collect()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()  # from here on the memory is the method's own
    errors = check(method, start, exact, lambda: call(rows), gradient, theta, checked)
    if not all(error <= 1 for error in errors.values()):
        found = ", ".join(f"{what} {error:.3g} times" for what, error in errors.items())
        return dict(error=f"out of tolerance, so not timed: error of {found} what is allowed")

    def run(updates, seconds_left):
        """Seconds an update takes and how many were done; often from the start again, since few are trained on one minibatch."""
        seconds = done = 0
        while done < updates and (seconds < seconds_left or device == "cuda"):
            if done % STRETCH == 0:
                theta.data.copy_(begin)
                for tensor in optimizer.state[theta].values():
                    tensor.zero_()
            repeats = min(STRETCH, updates - done) if device == "cuda" else 1
            seconds, done = seconds + elapsed(lambda: call(rows), repeats, device), done + repeats
        return seconds / max(done, 1), done

    run(warmup, cpu_seconds * warmup / (warmup + updates))
    seconds, done = run(updates, cpu_seconds * updates / (warmup + updates))
    if not theta.isfinite().all():
        return dict(error="parameters are not finite after the timed updates")
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else None
    unseen = device == "cpu" and (compile or name == "FP32 fastest")  # compiled code calls no operators
    launches = None if unseen else count_launches(lambda: call(rows), device)
    (traffic, flops), (bandwidth, rate) = work(width, minibatch, method.trainer), ceilings(method.products, device)
    results = dict(seconds=seconds, updates=done, state_bytes=state_bytes(optimizer), peak_bytes=peak, launches=launches)
    results |= dict(update_bytes=traffic, update_flops=flops, copy_bytes_per_second=bandwidth, product_flops_per_second=rate)
    results["share_of_floor"] = max(traffic / bandwidth, flops / rate) / seconds
    return results | {f"{what}_error": error for what, error in errors.items()}


def in_own_process(job):
    command = [sys.executable, os.path.abspath(__file__), "--worker", json.dumps(job)]
    process = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ, OMP_NUM_THREADS="1"))
    if process.returncode:
        return dict(error=(process.stderr.strip() or f"exit status {process.returncode}").splitlines()[-1])
    return json.loads(process.stdout.splitlines()[-1])


def summarize(measurements):
    """A row for each configuration and method."""
    runs = {}
    for run in measurements:
        runs.setdefault((run["configuration"], run["method"]), {})[run["round"]] = run
    return [summarize_method(runs, configuration, method) for configuration, method in runs]


def summarize_method(runs, configuration, method):
    """Medians over the processes; for ratios, of those within each round. None where there is nothing to take it of."""
    timed = {i: run for i, run in runs[configuration, method].items() if "error" not in run}

    def over(choose, column):
        values = [run[column] for run in timed.values() if run[column] is not None]
        return choose(values) if values else None

    def ratio(column, baseline):
        bases = runs.get((configuration, baseline), {})
        ratios = [bases[i][column] / run[column] for i, run in timed.items() if column in bases.get(i, {})]
        return statistics.median(ratios) if ratios else None

    state_ratio = ratio("state_bytes", "FP32")
    return dict(
        configuration=configuration,
        method=method,
        processes=len(timed),
        updates=over(statistics.median_low, "updates"),
        seconds=over(statistics.median, "seconds"),
        least_seconds=over(min, "seconds"),
        most_seconds=over(max, "seconds"),
        speedup=ratio("seconds", "FP32"),
        speedup_over_fastest=ratio("seconds", "FP32 fastest"),
        state_bytes=over(max, "state_bytes"),
        state_change=state_ratio and 1 / state_ratio - 1,
        peak_bytes=over(max, "peak_bytes"),
        launches=over(max, "launches"),
        share_of_floor=over(statistics.median, "share_of_floor"),
        gradient_error=over(max, "gradient_error"),
        change_error=over(max, "change_error"),
        error=next((run["error"] for run in runs[configuration, method].values() if "error" in run), None),
    )


def table(rows, device):
    """The rows in Markdown, and under it the methods that failed."""
    columns = {  # heading: key, format, unit
        "ms an update": ("seconds", ".3g", 1e-3),
        "least": ("least_seconds", ".3g", 1e-3),
        "most": ("most_seconds", ".3g", 1e-3),
        "processes": ("processes", ".0f", 1),
        "updates": ("updates", ".0f", 1),
        "x FP32": ("speedup", ".2f", 1),
        "x FP32 fastest": ("speedup_over_fastest", ".2f", 1),
        "state, KiB": ("state_bytes", ".1f", 2**10),
        "over FP32's": ("state_change", "+.1%", 1),
        "peak, MiB": ("peak_bytes", ".2f", 2**20),
        "GPU operations" if device == "cuda" else "operator calls": ("launches", ".0f", 1),
        "share of floor": ("share_of_floor", ".1%", 1),
        "error / tolerance: gradient": ("gradient_error", ".2f", 1),
        "change": ("change_error", ".2f", 1),
    }
    lines = [["width x minibatch", "method", *columns]]
    for row in rows:
        cells = ["" if row[key] is None else format(row[key] / unit, form) for key, form, unit in columns.values()]
        lines.append([row["configuration"], row["method"], *cells])
    widths = [max(map(len, column)) for column in zip(*lines)]
    lines.insert(1, ["-" * width for width in widths])
    lines = ["| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in lines]
    return "\n".join(lines + [f"{row['configuration']}, {row['method']}: {row['error']}" for row in rows if row["error"]])


def plot(rows, path, title):
    """Time of an update: a panel for each configuration, whiskers from the fastest process to the slowest."""
    from matplotlib.figure import Figure

    panels = {}
    for row in rows:
        panels.setdefault(row["configuration"], []).extend([row] if row["processes"] else [])
    shape = math.ceil(len(panels) / 3), min(3, len(panels))
    figure = Figure(figsize=(4.5 * shape[1], 2.5 * shape[0]), layout="constrained")
    for i, (configuration, rows) in enumerate(panels.items()):
        axes = figure.add_subplot(*shape, i + 1)
        median, least, most = ([1e3 * row[key] for row in rows] for key in ("seconds", "least_seconds", "most_seconds"))
        whiskers = [[m - x for m, x in zip(median, least)], [x - m for m, x in zip(median, most)]]
        colors = [COLORS.get(row["method"], "tab:red") for row in rows]
        axes.barh([row["method"] for row in rows], median, xerr=whiskers, color=colors, ecolor="tab:orange")
        axes.invert_yaxis()
        axes.set(title=f"width {configuration.replace('x', ', minibatch ')}", xlabel="ms an update")
    figure.suptitle(title, fontsize="small")
    figure.savefig(path)


def main(args):
    if args.quick:  # but what the command line says stays
        vars(args).update({name: value for name, value in QUICK.items() if getattr(args, name) == getattr(Args, name)})
    check_args(args)
    description = ppo_fp32.describe(args, torch.device(args.device))
    del description["output"], description["plot"]
    if args.device == "cpu":
        cpu = re.search(r"model name\s*: (.*)", open("/proc/cpuinfo").read()) if os.path.exists("/proc/cpuinfo") else None
        description["device"] = f"CPU ({cpu[1] if cpu else description['device']}), threads=1. CPU: says nothing about a GPU"
        print("PPO-FP16 is without the kernel here, products are FP32 inside, FP32 fastest has no TF32, peak memory is left out.")
    print(description["device"])
    if "FP32 fastest" not in all_methods(args.device):
        print("FP32 fastest is left out: there is nothing to compile it with.")
    names = [name for name in all_methods(args.device) if not args.methods or name in args.methods]
    jobs = [(i, configuration, name) for i in range(args.processes) for configuration in args.configurations for name in names]
    measurements = []
    for i, configuration, name in tqdm(jobs, unit="process"):
        width, minibatch = map(int, configuration.split("x"))
        found = in_own_process(asdict(args) | dict(name=name, width=width, minibatch=minibatch))
        measurements.append(dict(configuration=configuration, method=name, round=i) | found)
        rows = summarize(measurements)
        with open(args.output, "w") as file:  # every time, so that an interruption loses nothing
            json.dump(dict(description, rows=rows, measurements=measurements), file, indent=1)
    with open(args.output.removesuffix(".json") + ".csv", "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    print(table(rows, args.device))
    if args.plot:
        plot(rows, args.plot, description["device"])
    raise SystemExit(any(row["error"] for row in rows))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        print(json.dumps(measure(**json.loads(sys.argv[2]))))
    else:
        main(tyro.cli(Args, description=__doc__))
