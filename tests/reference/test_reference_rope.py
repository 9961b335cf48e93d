"""Norm, rotation and cache writes against formulas written out."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_backend.runtime.reference import (
    npu_interleave_rope,
    npu_kv_rmsnorm_rope_cache,
    npu_rms_norm,
)
from npu_backend.runtime.reference.caches import write_rows

LATENT, ROPE = 32, 16


def rotated_by_hand(row, position, width):
    """Rotate the pairs (2i, 2i + 1) of one row; evens first, then odds."""
    evens, odds = [], []
    for i in range(width // 2):
        angle = position * 10000.0 ** (-2 * i / width)
        a, b = float(row[2 * i]), float(row[2 * i + 1])
        evens.append(a * math.cos(angle) - b * math.sin(angle))
        odds.append(b * math.cos(angle) + a * math.sin(angle))
    return torch.tensor(evens + odds, dtype=torch.float64)


def normed_by_hand(row, gamma, epsilon):
    mean = sum(float(v) ** 2 for v in row) / len(row)
    return torch.tensor(
        [float(v) / math.sqrt(mean + epsilon) * float(g) for v, g in zip(row, gamma, strict=True)],
        dtype=torch.float64,
    )


def test_rms_norm_and_its_rstd(rand):
    x, gamma = rand(2, 3, 8), rand(8)
    y, rstd = npu_rms_norm(x, gamma, 1e-3)
    assert rstd.shape == (2, 3, 1)
    assert rstd.dtype == torch.float32
    torch.testing.assert_close(
        y[1, 2].double(), normed_by_hand(x[1, 2], gamma, 1e-3), rtol=1e-5, atol=1e-6
    )
    mean = float((x[1, 2].double() ** 2).mean())
    assert float(rstd[1, 2]) == pytest.approx(1 / math.sqrt(mean + 1e-3), rel=1e-5)


def test_interleave_rope_rotates_pairs_into_half_layout(rand, angles):
    x = rand(3, 2, 1, ROPE)
    cos, sin = angles([0, 5, 11], ROPE)
    out = npu_interleave_rope(x, cos.view(3, 1, 1, -1), sin.view(3, 1, 1, -1))
    for t, position in enumerate([0, 5, 11]):
        for h in range(2):
            expected = rotated_by_hand(x[t, h, 0], position, ROPE)
            torch.testing.assert_close(out[t, h, 0].double(), expected, rtol=1e-4, atol=1e-5)


def test_at_position_zero_only_the_order_changes(rand, angles):
    x = rand(1, 1, 1, ROPE)
    cos, sin = angles([0], ROPE)
    out = npu_interleave_rope(x, cos.view(1, 1, 1, -1), sin.view(1, 1, 1, -1))
    assert torch.equal(out[..., : ROPE // 2], x[..., 0::2])
    assert torch.equal(out[..., ROPE // 2 :], x[..., 1::2])


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 100_000), st.sampled_from([2, 8, 64]), st.integers(0, 2**31))
def test_rope_preserves_norms(position, width, seed):
    x = torch.randn(1, 2, 1, width, generator=torch.Generator().manual_seed(seed))
    half = torch.tensor([position * 10000.0 ** (-2 * i / width) for i in range(width // 2)])
    angle = torch.cat([half, half]).view(1, 1, 1, -1)
    out = npu_interleave_rope(x, angle.cos(), angle.sin())
    torch.testing.assert_close(out.norm(dim=-1), x.norm(dim=-1), rtol=1e-4, atol=1e-5)


def test_rope_scores_depend_on_the_distance_alone(rand, angles):
    q, k = rand(1, 1, 1, ROPE), rand(1, 1, 1, ROPE)

    def score(at_q, at_k):
        (cq, sq), (ck, sk) = angles([at_q], ROPE), angles([at_k], ROPE)
        a = npu_interleave_rope(q, cq.view(1, 1, 1, -1), sq.view(1, 1, 1, -1))
        b = npu_interleave_rope(k, ck.view(1, 1, 1, -1), sk.view(1, 1, 1, -1))
        return float((a * b).sum())

    assert score(9, 4) == pytest.approx(score(105, 100), abs=1e-3)
    assert score(9, 4) != pytest.approx(score(9, 5), abs=1e-3)


def caches(block_size=4, blocks=3, dtype=torch.float32):
    return (
        torch.full((blocks, block_size, 1, ROPE), torch.nan, dtype=dtype),
        torch.full((blocks, block_size, 1, LATENT), torch.nan, dtype=dtype),
    )


def write(rand, angles, slots, mode, **kwargs):
    tokens = len(slots)
    kv, gamma = rand(tokens, 1, 1, LATENT + ROPE), rand(LATENT)
    cos, sin = (a.view(tokens, 1, 1, -1) for a in angles(range(tokens), ROPE))
    k, ckv = caches()
    index = torch.tensor(slots)
    results = npu_kv_rmsnorm_rope_cache(
        kv, gamma, cos, sin, index, k, ckv, cache_mode=mode, epsilon=1e-5, **kwargs
    )
    return kv, gamma, k, ckv, results


@pytest.mark.parametrize("mode", ["PA", "PA_BNSD"])
def test_paged_caches_are_written_at_the_slots_and_nowhere_else(rand, angles, mode):
    slots = [5, 0, 11]
    kv, gamma, k, ckv, results = write(rand, angles, slots, mode, is_output_kv=True)
    assert results[0] is k
    assert results[1] is ckv
    for row, slot in enumerate(slots):
        normed = normed_by_hand(kv[row, 0, 0, :LATENT], gamma, 1e-5)
        turned = rotated_by_hand(kv[row, 0, 0, LATENT:], row, ROPE)
        block, offset = divmod(slot, 4)
        torch.testing.assert_close(ckv[block, offset, 0].double(), normed, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(k[block, offset, 0].double(), turned, rtol=1e-4, atol=1e-5)
        assert torch.equal(results[2][row, 0, 0], k[block, offset, 0])
        assert torch.equal(results[3][row, 0, 0], ckv[block, offset, 0])
    untouched = [s for s in range(12) if s not in slots]
    assert ckv.view(12, -1)[untouched].isnan().all()
    assert k.view(12, -1)[untouched].isnan().all()


@pytest.mark.parametrize(
    ("width", "dtype", "inner"), [(32, torch.float32, 16), (64, torch.int8, 32)]
)
def test_nz_order_is_column_blocks_then_rows(width, dtype, inner):
    slots, rows = [7, 2], torch.arange(2 * width).view(2, width).to(dtype)
    cache = torch.zeros(3, 4, 1, width, dtype=dtype)
    write_rows("test", cache, rows, torch.tensor(slots), nz=True)
    flat = cache.view(3, -1)
    for row, slot in enumerate(slots):
        for column in range(width):
            place = (column // inner) * (4 * inner) + (slot % 4) * inner + column % inner
            assert flat[slot // 4, place] == rows[row, column]


def test_pa_nz_of_the_op_is_the_nz_order_of_pa(rand, angles):
    kv, gamma = rand(2, 1, 1, LATENT + ROPE), rand(LATENT)
    cos, sin = (a.view(2, 1, 1, -1) for a in angles([3, 4], ROPE))
    index = torch.tensor([6, 1])
    k, ckv = caches()
    k_nz, ckv_nz = caches()
    npu_kv_rmsnorm_rope_cache(kv, gamma, cos, sin, index, k, ckv, cache_mode="PA")
    npu_kv_rmsnorm_rope_cache(kv, gamma, cos, sin, index, k_nz, ckv_nz, cache_mode="PA_NZ")
    for plain, nz in ((k, k_nz), (ckv, ckv_nz)):
        width = plain.shape[-1]
        back = nz.view(3, width // 16, 4, 16).transpose(1, 2).reshape(3, 4, 1, width)
        assert torch.equal(back.nan_to_num(9.0), plain.nan_to_num(9.0))
        # One block of columns is already in order; two are not.
        assert torch.equal(nz.nan_to_num(9.0), plain.nan_to_num(9.0)) == (width == 16)


def test_mode_norm_writes_positions_of_each_batch(rand, angles):
    kv, gamma = rand(2, 1, 3, LATENT + ROPE), rand(LATENT)
    cos, sin = angles(range(3), ROPE)
    cos, sin = (a.view(1, 1, 3, ROPE).expand(2, -1, -1, -1) for a in (cos, sin))
    k = torch.full((2, 1, 5, ROPE), torch.nan)
    ckv = torch.full((2, 1, 5, LATENT), torch.nan)
    index = torch.tensor([[0, 1, 2], [2, 4, -1]])
    npu_kv_rmsnorm_rope_cache(kv, gamma, cos, sin, index, k, ckv)
    expected = normed_by_hand(kv[1, 0, 1, :LATENT], gamma, 1e-5)
    torch.testing.assert_close(ckv[1, 0, 4].double(), expected, rtol=1e-4, atol=1e-5)
    expected = rotated_by_hand(kv[0, 0, 2, LATENT:], 2, ROPE)
    torch.testing.assert_close(k[0, 0, 2].double(), expected, rtol=1e-4, atol=1e-5)
    assert ckv[1, 0, [0, 1, 3]].isnan().all()
    assert not ckv[0, 0, :3].isnan().any()


def test_results_that_were_not_asked_for_cannot_be_mistaken_for_numbers(rand, angles):
    *_, results = write(rand, angles, [0, 1], "PA")
    assert results[2].isnan().all()
    assert results[3].isnan().all()
    assert results[2].shape == (2, 1, 1, ROPE)


def test_minus_one_writes_nothing(rand, angles):
    _, _, k, ckv, _ = write(rand, angles, [-1, 3], "PA")
    assert not ckv[0, 3].isnan().any()
    assert ckv.view(12, -1)[[i for i in range(12) if i != 3]].isnan().all()
    assert k.view(12, -1)[11].isnan().all()


@pytest.mark.parametrize(
    ("slots", "word"), [([0, 0], "same slot"), ([0, 12], "outside the 12 slots"), ([-2, 99], "99")]
)
def test_slots_that_would_hurt_are_refused(rand, angles, slots, word):
    with pytest.raises(ValueError, match=word):
        write(rand, angles, slots, "PA")


def test_an_off_by_one_slot_is_seen(rand, angles):
    _, _, _, right, _ = write(rand, angles, [4, 5], "PA")
    _, _, _, wrong, _ = write(rand, angles, [5, 6], "PA")
    assert not torch.equal(right.nan_to_num(), wrong.nan_to_num())
    assert right[1, 0].isfinite().all()
    assert wrong[1, 0].isnan().all()


def test_rounding_is_to_the_dtype_of_kv(rand, angles):
    kv, gamma = rand(2, 1, 1, LATENT + ROPE).bfloat16(), rand(LATENT).bfloat16()
    cos, sin = (a.view(2, 1, 1, -1).bfloat16() for a in angles([1, 2], ROPE))
    k, ckv = caches(dtype=torch.bfloat16)
    out = npu_kv_rmsnorm_rope_cache(
        kv, gamma, cos, sin, torch.tensor([0, 1]), k, ckv, cache_mode="PA", is_output_kv=True
    )
    exact = normed_by_hand(kv[0, 0, 0, :LATENT], gamma, 1e-5)
    assert out[3].dtype == torch.bfloat16
    assert torch.equal(out[3][0, 0, 0], exact.to(torch.bfloat16))


@pytest.mark.parametrize(
    ("change", "error", "word"),
    [
        ({"cache_mode": "PA_BLK_NZ"}, NotImplementedError, "PA_BLK_NZ"),
        ({"c_kv_scale": torch.ones(1)}, NotImplementedError, "c_kv_scale"),
        ({"v": torch.ones(1)}, NotImplementedError, " v"),
        ({"index": torch.zeros(1, dtype=torch.int32)}, ValueError, "int64"),
        ({"kv": torch.zeros(1, 1, 1, 9)}, ValueError, "kv must be"),
    ],
)
def test_what_is_not_there_is_named(change, error, word):
    k, ckv = caches()
    call = {
        "kv": torch.zeros(1, 1, 1, LATENT + ROPE),
        "gamma": torch.ones(LATENT),
        "cos": torch.ones(1, 1, 1, ROPE),
        "sin": torch.zeros(1, 1, 1, ROPE),
        "index": torch.zeros(1, dtype=torch.int64),
        "k_cache": k,
        "ckv_cache": ckv,
        "cache_mode": "PA",
    } | change
    with pytest.raises(error, match=word):
        npu_kv_rmsnorm_rope_cache(**call)


def test_interleave_rope_wants_four_dimensions():
    with pytest.raises(ValueError, match="4-D"):
        npu_interleave_rope(torch.zeros(2, 8), torch.zeros(1, 1, 1, 8), torch.zeros(1, 1, 1, 8))
