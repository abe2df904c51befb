"""ppo_fp16.py with other number formats than a dtype has, for the studies; the trainer itself knows nothing of them.

    python studies/patched.py --mantissa-bits 8 --env-id HalfCheetah-v5     # E5M8
    python studies/patched.py --fp32-root --dtype bfloat16                  # SHARP's root second moment in FP32

--mantissa-bits emulates a format of five exponent bits and fewer mantissa bits in the tensors that PPO-FP16 keeps: parameters,
gradients, both moments, rollout. They stay FP16 tensors, and hold only values of the shorter format; activations remain FP16, and
what the modules have in FP32 remains so. What SHARP writes is rounded once, from FP32, and its residual of log_std knows of it.
Gradients and rollout are rounded from FP16, in which the trainer has them; the rollout as it is written, so that the policy acts
on the observations and from the means that are kept. Only its values are rounded after GAE has read them.
"""

import os
import sys
from dataclasses import dataclass

import torch
import tyro
from torch.overrides import TorchFunctionMode

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import ppo_fp16  # noqa: E402


@dataclass
class Args(ppo_fp16.Args):
    mantissa_bits: int | None = None  # mantissa bits of the tensors in FP16, 10 of which it has
    fp32_root: bool = False  # keep SHARP's root second moment in FP32


def round_mantissa(x, bits):
    """x rounded to the nearest number of 1 sign, 5 exponent and `bits` mantissa bits, ties to even; returned in FP16.

    x: FP16 or FP32. As in FP16, the smallest normal number is 2^-14, the numbers below it keep its spacing, 2^(-14 - bits), and
    what would round to 2^16 is infinite. With bits = 10 this is `x.half()`.
    """
    x = x.float()
    power = (x / torch.frexp(x).mantissa).nan_to_num(0).clamp(min=2**-13)  # the next power of two above |x|
    spacing = power * 2 ** -(bits + 1)
    return (torch.round(x / spacing) * spacing).half()


class Rounded(TorchFunctionMode):
    """While it is active, the given functions write FP16 tensors with `bits` mantissa bits."""

    def __init__(self, bits, *functions):
        self.bits, self.functions = bits, functions

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function in self.functions and result.dtype == torch.float16:
            exact = args[0] if function is torch.Tensor.to else result
            result.copy_(round_mantissa(exact, self.bits))
        return result


def emulate(bits):
    """Makes ppo_fp16 keep `bits` mantissa bits of parameters, gradients, moments and rollout."""
    make_optimizer, sharp_update, rollout = ppo_fp16.make_optimizer, ppo_fp16.sharp_update, ppo_fp16.rollout

    def rounded_optimizer(agent, args):
        optimizer = make_optimizer(agent, args)
        optimizer.theta.data.copy_(round_mantissa(optimizer.theta.data, bits))
        for parameter in agent.parameters():
            parameter.register_hook(lambda gradient: round_mantissa(gradient, bits))
        return optimizer

    def rounded_update(*args):
        with Rounded(bits, torch.Tensor.to):
            sharp_update(*args)

    def rounded_rollout(*args):
        with Rounded(bits, torch.Tensor.copy_, torch.add):
            batch, episodes = rollout(*args)
        return {name: round_mantissa(tensor, bits) for name, tensor in batch.items()}, episodes

    ppo_fp16.make_optimizer, ppo_fp16.sharp_update, ppo_fp16.rollout = rounded_optimizer, rounded_update, rounded_rollout


def keep_root_in_fp32():
    """Makes ppo_fp16 keep SHARP's root second moment in FP32."""
    make_optimizer = ppo_fp16.make_optimizer

    def optimizer_with_root(agent, args):
        optimizer = make_optimizer(agent, args)
        state = optimizer.state[optimizer.theta]
        state["root_exp_avg_sq"] = state["root_exp_avg_sq"].float()
        return optimizer

    ppo_fp16.make_optimizer = optimizer_with_root


def main(args):
    if not args.module_c:
        ppo_fp16.fail("--no-module-c leaves nothing of SHARP to patch; leave it out")
    args.cuda_kernel = False  # it has one format
    if args.fp32_root:
        keep_root_in_fp32()
    if args.mantissa_bits is not None:
        if not 1 <= args.mantissa_bits <= 10 or args.dtype != "float16":
            ppo_fp16.fail(f"--mantissa-bits is {args.mantissa_bits}; it must be from 1 to 10, with --dtype float16")
        if args.writeback == "stochastic":
            ppo_fp16.fail("--mantissa-bits rounds to nearest; leave out --writeback stochastic")
        emulate(args.mantissa_bits)
        args.compile = False  # compiled code does not see a TorchFunctionMode
    ppo_fp16.main(args)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
