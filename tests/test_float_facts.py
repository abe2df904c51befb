"""Facts of FP16 that the method is built on: of torch.float16 itself, not of our code."""

import math

import pytest
import torch

torch.set_num_threads(1)


def fp16(x):
    return torch.tensor(x, dtype=torch.float16)


def test_a_tenth_is_stored_as_the_nearest_multiple_of_2_to_the_minus_14():
    assert fp16(0.1).item() == 0.0999755859375


def test_largest_finite_number():
    assert fp16(65504.0).item() == 65504.0 == torch.finfo(torch.float16).max
    assert fp16(65519.0).item() == 65504.0
    assert fp16(65520.0).item() == math.inf
    assert (fp16(65504.0) + fp16(16.0)).item() == math.inf  # half of the last spacing
    assert (fp16(256.0) * fp16(256.0)).item() == math.inf  # why norms cannot square in FP16


def test_smallest_positive_number():
    assert fp16(2.0**-24).item() == 2.0**-24
    assert fp16(2.0**-25).item() == 0.0  # a tie, to even
    assert fp16(1.01 * 2.0**-25).item() == 2.0**-24
    assert fp16(2.0**-14).item() == torch.finfo(torch.float16).smallest_normal


def test_2048_plus_1_is_2048():
    assert (fp16(2048.0) + fp16(1.0)).item() == 2048.0
    assert (fp16(2048.0) + fp16(2.0)).item() == 2050.0
    assert (fp16(1024.0) + fp16(1.0)).item() == 1025.0


def test_small_updates_never_move_an_fp16_weight_but_move_an_fp32_master():
    weight, master, update = fp16(1.0), torch.tensor(1.0), torch.tensor(2.0**-11.5)
    for _ in range(4000):
        weight = (weight.float() + update).half()
        master = master + update
    assert weight.item() == 1.0
    assert master.item() == pytest.approx(2.381, abs=5e-4)


def test_the_same_updates_carry_a_smaller_weight_up_to_1_where_it_stops():
    weight, update, steps = fp16(0.62), torch.tensor(2.0**-11.5), 0
    while weight < 1:
        new = (weight.float() + update).half()
        assert new > weight
        weight, steps = new, steps + 1
    assert 700 < steps < 800
    assert weight.item() == 1.0
    assert (weight.float() + update).half().item() == 1.0


def test_loss_scaling_and_an_fp32_master_save_a_gradient_that_fp16_would_lose():
    true_gradient, scale, lr = 2e-8, 1024.0, 0.1
    assert fp16(true_gradient).item() == 0.0
    scaled = fp16(true_gradient * scale)
    assert 0 < scaled.item() < torch.finfo(torch.float16).smallest_normal  # subnormal, but there
    master, steps = torch.tensor(0.02), 0
    start = master.half().item()
    while master.half().item() == start:
        master, steps = master - lr * (scaled.float() / scale), steps + 1
    assert steps == 1802
    assert master.half().item() == pytest.approx(0.0199890, abs=5e-8)
    weight = fp16(0.02)
    assert ((weight.float() - lr * true_gradient).half() == weight).item()  # without a master: not even one of these


def test_an_fp16_accumulator_of_products_stops_at_2048():
    generator = torch.Generator().manual_seed(0)
    products = (torch.rand(32768, generator=generator) * torch.rand(32768, generator=generator)).clamp(max=1 - 2**-11).half()
    total = fp16(0.0)
    for product in products.unbind():
        total += product
    assert total.item() == 2048.0
    assert products.double().sum().item() > 8000


def test_exp_of_a_log_std_underflows_below_minus_17_33():
    assert -17.33 < 25 * math.log(0.5) < -17.32
    above, below = fp16(-17.328125), fp16(-17.34375)  # neighbours
    assert torch.exp(above).item() == 2.0**-24
    assert torch.exp(below).item() == 0.0
    assert torch.exp(-below).item() == math.inf


def test_variance_underflows_for_small_standard_deviations():
    assert fp16(1.74e-4).square().item() == 2.0**-24
    assert fp16(1.72e-4).square().item() == 0.0
    assert math.sqrt(2.0**-25) == pytest.approx(1.73e-4, rel=5e-3)


def test_epsilons_of_adam():
    assert fp16(1e-8).item() == 0.0
    assert 0 < fp16(1e-5).item() < torch.finfo(torch.float16).smallest_normal
    assert fp16(1e-5).item() == pytest.approx(1e-5, rel=3e-3)
