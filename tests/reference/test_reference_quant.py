"""Quantizing ops against formulas written out."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_backend.runtime.reference import npu_dynamic_quant, npu_quant_matmul, npu_quantize
from npu_backend.runtime.reference.numerics import int8_product

BF16, INT8, FLOAT = 15, 1, 6


def test_dynamic_quant_by_hand():
    x = torch.tensor([[1.0, -2.0, 0.5], [0.0, 0.0, 0.0]])
    q, scale = npu_dynamic_quant(x)
    # scale 2/127; 1 -> 63.5 rounds to even 64; 0.5 -> 31.75 -> 32
    assert q.tolist() == [[64, -127, 32], [0, 0, 0]]
    assert scale.tolist() == pytest.approx([2 / 127, 0.0])
    assert scale.shape == (2,)


def test_dynamic_quant_smooths_first():
    x, smooth = torch.tensor([[1.0, 4.0]]), torch.tensor([4.0, 1.0])
    q, scale = npu_dynamic_quant(x, smooth_scales=smooth)
    assert q.tolist() == [[127, 127]]
    assert scale.tolist() == pytest.approx([4 / 127])


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 6), st.integers(1, 40), st.floats(1e-3, 1e3), st.integers(0, 2**31))
def test_dynamic_quant_errs_by_half_a_step_at_most(rows, width, size, seed):
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * size
    q, scale = npu_dynamic_quant(x)
    error = (q.float() * scale[:, None] - x).abs()
    assert (error <= scale[:, None] * 0.5001 + 1e-12).all()
    assert (q.abs().amax(-1) == 127).all()


@pytest.mark.parametrize(
    ("kwargs", "word"),
    [
        ({"group_index": torch.zeros(1)}, "group_index"),
        ({"dst_type": 23}, "23"),
        ({"dst_type": torch.uint8}, "uint8"),
        ({"quant_mode": "pertensor"}, "pertensor"),
        ({"dst_type_max": 3.0}, "dst_type_max"),
    ],
)
def test_dynamic_quant_names_what_is_not_there(kwargs, word):
    with pytest.raises(NotImplementedError, match=word):
        npu_dynamic_quant(torch.zeros(1, 2), **kwargs)


def test_quant_matmul_by_hand():
    x1 = torch.tensor([[1, -2], [3, 100]], dtype=torch.int8)
    x2 = torch.tensor([[5, 6, 7], [8, 9, -10]], dtype=torch.int8)
    scale, by_token = torch.tensor([0.5, 1.0, 2.0]), torch.tensor([1.0, 0.1])
    bias = torch.tensor([10, 20, 30], dtype=torch.int32)
    out = npu_quant_matmul(x1, x2, scale, pertoken_scale=by_token, bias=bias, output_dtype=FLOAT)
    # row 0: 5-16, 6-18, 7+20; row 1: 15+800, 18+900, 21-1000
    expected = [
        [(-11 + 10) * 0.5, (-12 + 20) * 1.0, (27 + 30) * 2.0],
        [(815 + 10) * 0.05, (918 + 20) * 0.1, (-979 + 30) * 0.2],
    ]
    torch.testing.assert_close(out, torch.tensor(expected))


def test_a_float_bias_comes_after_the_scales():
    x = torch.ones(1, 1, dtype=torch.int8)
    out = npu_quant_matmul(
        x, x, torch.tensor([4.0]), bias=torch.tensor([0.5]), output_dtype=torch.float32
    )
    assert out.item() == 4.5


def test_an_int8_result_takes_the_offset_and_saturates():
    x1 = torch.full((1, 4), 100, dtype=torch.int8)
    x2 = torch.full((4, 2), 100, dtype=torch.int8)
    scale, offset = torch.tensor([1.0, 0.0005]), torch.tensor([0.0, 3.0])
    out = npu_quant_matmul(x1, x2, scale, offset=offset)
    assert out.dtype == torch.int8
    assert out.tolist() == [[127, 23]]


def test_an_int64_scale_carries_fp32_bits():
    x = torch.full((1, 1), 3, dtype=torch.int8)
    bits = torch.tensor([0.25]).view(torch.int32).long() | (1 << 46)
    out = npu_quant_matmul(x, x, bits, output_dtype=FLOAT)
    assert out.item() == 2.25


def test_products_are_exact_beyond_what_fp32_holds():
    depth = 5000
    a = torch.full((1, depth), 127, dtype=torch.int8)
    b = torch.full((depth, 1), 127, dtype=torch.int8)
    a[0, 0] = 126
    assert int8_product(a, b).item() == (depth - 1) * 127 * 127 + 126 * 127


def test_products_equal_integer_sums(rand_int8):
    a, b = rand_int8(3, 2100), rand_int8(2100, 4)
    expected = (a.long().unsqueeze(-1) * b.long().unsqueeze(0)).sum(1)
    assert torch.equal(int8_product(a, b).long(), expected)


@pytest.mark.parametrize(
    ("kwargs", "word"),
    [
        ({"x1_dtype": 1}, "x1_dtype"),
        ({"y_scale": torch.ones(1)}, "y_scale"),
        ({"group_sizes": [1, 1, 32]}, "group_sizes"),
        ({"output_dtype": 99}, "99"),
    ],
)
def test_quant_matmul_names_what_is_not_there(kwargs, word):
    x = torch.ones(1, 1, dtype=torch.int8)
    with pytest.raises(NotImplementedError, match=word):
        npu_quant_matmul(x, x, torch.ones(1), **kwargs)


def test_quant_matmul_refuses_floats_and_misfits():
    x = torch.ones(1, 2, dtype=torch.int8)
    with pytest.raises(ValueError, match="int8"):
        npu_quant_matmul(x.float(), x.float(), torch.ones(1))
    with pytest.raises(ValueError, match="does not multiply"):
        npu_quant_matmul(x, x, torch.ones(1))


def test_quantize_by_hand():
    x = torch.tensor([[1.0, 2.0, -300.0]])
    out = npu_quantize(x, torch.tensor([0.5]), torch.tensor([3.0]), torch.qint8)
    assert out.tolist() == [[5, 7, -128]]
    assert npu_quantize(x, torch.tensor([0.5]), None, 13).tolist() == [[2, 4, 0]]
    assert npu_quantize(x, torch.tensor([0.5]), None, 14, div_mode=False).tolist() == [[0, 1, -150]]


def test_quantize_runs_along_its_axis():
    x = torch.ones(2, 2)
    out = npu_quantize(x, torch.tensor([1.0, 0.5]), None, torch.qint8, axis=0)
    assert out.tolist() == [[1, 1], [2, 2]]
    out = npu_quantize(x, torch.tensor([1.0, 0.5]), None, torch.qint8, axis=1)
    assert out.tolist() == [[1, 2], [1, 2]]


def test_quantize_names_what_does_not_fit():
    with pytest.raises(ValueError, match="3 values"):
        npu_quantize(torch.ones(2, 2), torch.ones(3), None, INT8)
    with pytest.raises(NotImplementedError, match="bfloat16"):
        npu_quantize(torch.ones(2, 2), torch.ones(1), None, BF16)
