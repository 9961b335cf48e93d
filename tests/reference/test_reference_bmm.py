"""The transposing batched matmuls against sums written out."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_backend.runtime.reference import batch_matmul_transpose, npu_transpose_batchmatmul
from npu_backend.runtime.reference.numerics import product


def by_hand(x, w):
    """(tokens, heads, K) x (heads, K, N), sum by sum, in double precision."""
    tokens, heads, depth = x.shape
    out = torch.zeros(tokens, heads, w.shape[2], dtype=torch.float64)
    for t in range(tokens):
        for h in range(heads):
            for n in range(w.shape[2]):
                total = 0.0
                for k in range(depth):
                    total += float(x[t, h, k]) * float(w[h, k, n])
                out[t, h, n] = total
    return out


def test_both_permutations_give_the_sums(rand):
    x, w = rand(3, 2, 4), rand(2, 4, 5)
    transposing = npu_transpose_batchmatmul(x, w, perm_x1=[1, 0, 2], perm_y=[1, 0, 2])
    straight = npu_transpose_batchmatmul(x.transpose(0, 1), w, perm_x1=[0, 1, 2], perm_y=[1, 0, 2])
    torch.testing.assert_close(transposing.double(), by_hand(x, w), rtol=1e-6, atol=1e-6)
    assert torch.equal(transposing, straight)
    assert transposing.is_contiguous()


def test_a_swapped_weight_is_multiplied_transposed(rand):
    x, w = rand(2, 2, 3), rand(2, 4, 3)
    out = npu_transpose_batchmatmul(x, w, perm_x1=[1, 0, 2], perm_x2=[0, 2, 1])
    torch.testing.assert_close(out.double(), by_hand(x, w.transpose(1, 2)), rtol=1e-6, atol=1e-6)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(1, 9),
    st.integers(1, 9),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.booleans(),
)
def test_transposed_matmul_equals_einsum_whatever_the_strides(m, b, k, n, dtype, strided):
    generator = torch.Generator().manual_seed(m * 1000 + b * 100 + k * 10 + n)
    x = torch.randn(m, b, k, generator=generator).to(dtype)
    w = torch.randn(b, k, n, generator=generator).to(dtype)
    if strided:
        w = w.transpose(1, 2).contiguous().transpose(1, 2)
        x = torch.cat([x, x], dim=-1)[..., :k]
    out = npu_transpose_batchmatmul(x, w, perm_x1=[1, 0, 2])
    expected = torch.einsum("mbk,bkn->mbn", x.double(), w.double())
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, rtol=torch.finfo(dtype).eps, atol=k * 1e-5)


def test_the_custom_op_writes_the_sums_and_returns_nothing(rand):
    x, w, c = rand(3, 2, 4), rand(2, 4, 5), torch.full((3, 2, 5), torch.nan)
    assert batch_matmul_transpose(x, w, c) is None
    torch.testing.assert_close(c.double(), by_hand(x, w), rtol=1e-6, atol=1e-6)


def test_the_custom_op_reads_nz_blocks(rand):
    x, w = rand(2, 3, 16), rand(3, 16, 32)
    blocks = torch.empty(3, 2, 16, 16)
    for column in range(32):
        blocks[:, column // 16, :, column % 16] = w[:, :, column]
    plain, nz = torch.empty(2, 3, 32), torch.empty(2, 3, 32)
    batch_matmul_transpose(x, w, plain)
    batch_matmul_transpose(x, blocks, nz)
    assert torch.equal(plain, nz)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_the_custom_op_refuses_a_stride_rather_than_give_wrong_numbers(rand, which):
    tensors = [rand(4, 2, 4), rand(2, 4, 4), rand(4, 2, 4)]
    tensors[which] = tensors[which].transpose(1, 2).contiguous().transpose(1, 2)
    name = ("tensor_a", "tensor_b", "tensor_c")[which]
    with pytest.raises(ValueError, match=f"{name} is not contiguous"):
        batch_matmul_transpose(*tensors)


@pytest.mark.parametrize(
    ("kwargs", "error", "word"),
    [
        ({"bias": torch.ones(1)}, ValueError, "bias"),
        ({"scale": torch.ones(1)}, NotImplementedError, "scale"),
        ({"batch_split_factor": 2}, NotImplementedError, "batch_split_factor"),
        ({"perm_x1": [2, 1, 0]}, ValueError, "perm_x1"),
        ({"perm_x2": [1, 0, 2]}, ValueError, "perm_x2"),
        ({"perm_y": [0, 1, 2]}, ValueError, "perm_y"),
    ],
)
def test_what_the_op_does_not_take_is_named(rand, kwargs, error, word):
    with pytest.raises(error, match=word):
        npu_transpose_batchmatmul(rand(2, 2, 2), rand(2, 2, 2), **kwargs)


def test_shapes_and_dtypes_must_fit(rand):
    with pytest.raises(ValueError, match="does not multiply"):
        npu_transpose_batchmatmul(rand(2, 3, 4), rand(2, 5, 4))
    with pytest.raises(ValueError, match="one dtype"):
        npu_transpose_batchmatmul(rand(2, 2, 2), rand(2, 2, 2).bfloat16())
    with pytest.raises(ValueError, match="one dtype"):
        batch_matmul_transpose(rand(2, 2, 2), rand(2, 2, 2), rand(2, 2, 2).bfloat16())
    with pytest.raises(ValueError, match="do not fit"):
        batch_matmul_transpose(rand(2, 2, 2), rand(2, 2, 2), rand(2, 2, 3))
    with pytest.raises(NotImplementedError, match="quant_mode"):
        batch_matmul_transpose(rand(2, 2, 2), rand(2, 2, 2), rand(2, 2, 2), quant_mode="x")


@pytest.mark.parametrize("shape", [(1100, 1100), (3, 600, 700), (1, 1500, 1500)])
def test_a_large_matrix_is_widened_in_pieces_that_add_up(rand, shape):
    b = rand(*shape, dtype=torch.bfloat16)
    a = rand(*shape[:-2], 2, shape[-2], dtype=torch.bfloat16)
    torch.testing.assert_close(product(a, b), a.float() @ b.float(), rtol=1e-4, atol=1e-3)
