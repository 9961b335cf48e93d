"""npu_mla_prolog_v3 in every quantization it has, against numpy written from its documents."""

from __future__ import annotations

import math
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import numpy as np
import pytest

from npu_backend.catalog import load_catalog
from npu_backend.testing.sim import NotSimulatedError, OpRejectedError
from npu_backend.testing.sim.settings import installed_line

# Test modules are no package, so what stands beside them is loaded by its path.
_SPEC = spec_from_file_location("prolog_numpy", Path(__file__).with_name("prolog_numpy.py"))
expected = module_from_spec(_SPEC)
_SPEC.loader.exec_module(expected)

TOKENS, HEADS, NOPE, ROPE, KV, Q_LORA = 5, 2, 128, 64, 512, 1536
SLOTS = [20, 3, 31, 16, 0]
INT8 = [(0, 0, 0), (1, 0, 0), (1, 2, 0), (1, 3, 0), (2, 0, 0), (2, 1, 1), (2, 3, 0)]
FP8 = [(3, 0, 0), (3, 1, 1), (3, 3, 0), (4, 0, 0), (4, 1, 1), (4, 3, 0)]


def numbers(tensor) -> np.ndarray:
    """A tensor as float64; e8m0 as its exponents."""
    import torch

    if tensor.dtype == getattr(torch, "float8_e8m0fnu", None):
        return tensor.cpu().view(torch.uint8).numpy().astype(np.float64) - 127
    return tensor.cpu().float().double().numpy()


@cache
def hidden_size() -> int:
    """The smallest that the op takes on the installed line."""
    order = load_catalog().versions.line_order
    return 1024 if order(installed_line()) >= order("26.1") else 7168


@cache
def drawn(mode, alpha, smooth):
    """Seeded inputs: float weights quantized by numpy, as tensors by the op's argument names."""
    import torch

    hidden = hidden_size()

    weight, kv, _ = mode
    rng = np.random.default_rng(11)
    kind = {0: None, 1: "int8", 2: "int8"}.get(weight, "float8_e4m3fn")
    fp8 = kind == "float8_e4m3fn"
    angle = rng.uniform(0, 6, (TOKENS, ROPE // 2))
    angle = np.concatenate([angle, angle], -1)

    def bf16(array):
        return torch.from_numpy(np.asarray(array)).to(torch.bfloat16)

    def eight(array):
        return torch.from_numpy(array).to(torch.float8_e4m3fn if fp8 else torch.int8)

    def exponents(k):
        codes = torch.from_numpy(np.ascontiguousarray(k + 127).astype(np.uint8))
        return codes.contiguous().view(torch.float8_e8m0fnu)

    def fp32(array):
        return torch.from_numpy(np.asarray(array, dtype=np.float32))

    floats = {
        "dq": rng.normal(0, 0.02, (hidden, Q_LORA)),
        "uq_qr": rng.normal(0, 0.05, (Q_LORA, HEADS * (NOPE + ROPE))),
        "dkv_kr": rng.normal(0, 0.02, (hidden, KV + ROPE)),
    }
    x = rng.normal(0, 1, (TOKENS, hidden)) * rng.uniform(0.5, 4, (TOKENS, 1))
    tensors = {"token_x": bf16(x), **{n: bf16(w) for n, w in floats.items()}}
    scales = {}
    names = {0: (), 1: ("uq_qr",)}.get(weight, ("dq", "uq_qr", "dkv_kr"))
    for name in names:
        if weight == 3:
            values, k = expected.mx(floats[name].T)
            tensors[name] = eight(np.ascontiguousarray(values.T))
            scales[f"dequant_scale_w_{name}"] = exponents(k)
        else:
            values, scale = expected.rows(floats[name].T, kind)
            tensors[name] = eight(np.ascontiguousarray(values.T))
            scales[f"dequant_scale_w_{name}"] = fp32(scale.T)
    if weight == 3:
        values, k = expected.mx(x)
        tensors["token_x"], scales["dequant_scale_x"] = eight(values), exponents(k)
    elif weight >= 2:
        values, scale = expected.rows(x, kind)
        tensors["token_x"], scales["dequant_scale_x"] = eight(values), fp32(scale)
    if smooth:
        scales["smooth_scales_cq"] = fp32(rng.uniform(0.5, 2, (1, Q_LORA)))
    if kv == 1:
        scales["quant_scale_ckv"] = fp32([37.0])
    elif kv == 2:
        scales["quant_scale_ckv"] = fp32(rng.uniform(20, 60, (1, KV)))
        scales["quant_scale_ckr"] = fp32(rng.uniform(20, 60, (1, ROPE)))
    elif kv == 3 and weight in (1, 2):
        scales["k_nope_clip_alpha"] = fp32([alpha])
    tensors["uk"] = bf16(rng.normal(0, 0.1, (HEADS, NOPE, KV)))
    tensors["gamma_cq"], tensors["gamma_ckv"] = (bf16(rng.normal(1, 0.2, n)) for n in (Q_LORA, KV))
    tensors["cos"], tensors["sin"] = bf16(np.cos(angle)), bf16(np.sin(angle))
    return tensors, scales


def inputs(mode, *, alpha=1.0, smooth=False):
    """Return fresh dictionaries of the tensors and of the scales."""
    tensors, scales = drawn(mode, alpha, smooth)
    return dict(tensors), dict(scales)


def reference(mode, tensors, scales, **options):
    given = {name: numbers(t) for name, t in {**tensors, **scales}.items()}
    return expected.prolog(mode, given, **options)


def call(npu_device, mode, tensors, scales, cache_mode="PA_BSND", blocks=(2, 16), **options):
    """Run the op; return its five results and both caches, whose unwritten rows are zeros."""
    import torch
    import torch_npu

    weight, kv, query = mode
    packed = kv == 3
    eight = torch.float8_e4m3fn if weight >= 3 else torch.int8
    kinds = {0: (torch.bfloat16,) * 2, 2: (torch.int8,) * 2}.get(kv, (eight, torch.bfloat16))
    lead = {"TND": (TOKENS,), "BSND": (1, TOKENS)}.get(cache_mode, blocks)
    widths = (656 if packed else KV), ROPE
    caches = [
        torch.zeros((*lead, 1, width), dtype=kind, device=npu_device)
        for width, kind in zip(widths, kinds, strict=True)
    ]
    if packed:
        caches[1] = torch.empty(0, dtype=torch.bfloat16, device=npu_device)
    batched = cache_mode == "BSND" or options.pop("batched", False)

    def at(name):
        return tensors[name].to(npu_device)

    def by_token(name):
        return at(name)[None] if batched else at(name)

    def nz(name):
        return torch_npu.npu_format_cast(at(name), 29)

    if cache_mode.startswith("PA_") and "cache_index" not in options:
        index = torch.tensor(SLOTS, device=npu_device)
        options["cache_index"] = index[None] if batched else index
    out = torch_npu.npu_mla_prolog_v3(
        by_token("token_x"), nz("dq"), nz("uq_qr"), at("uk"), nz("dkv_kr"), at("gamma_cq"),
        at("gamma_ckv"), by_token("sin"), by_token("cos"), *caches, cache_mode=cache_mode,
        **{name: scale.to(npu_device) for name, scale in scales.items()},
        **{"weight_quant_mode": weight, "kv_cache_quant_mode": kv, "query_quant_mode": query,
           "ckvkr_repo_mode": int(packed), "quant_scale_repo_mode": int(packed),
           "query_norm_flag": True, **options},
    )  # fmt: skip
    return out, caches


def close(found, wanted, tolerance=4e-3):
    """Bf16 rounds to 2**-9; a few results lie beside a rounding boundary of an 8-bit step."""
    found = numbers(found).reshape(wanted.shape)
    assert np.isfinite(found).all()
    error = np.linalg.norm(found - wanted) / np.linalg.norm(wanted)
    assert error < tolerance, error


def same_codes(found, wanted, fraction=0.995):
    """Quantized values agree but for those beside a rounding boundary, which differ by one step."""
    found = numbers(found).reshape(wanted.shape)
    assert (found == wanted).mean() > fraction
    assert np.abs(found - wanted).max() <= np.maximum(np.abs(wanted) / 7, 1).max()


def check(npu_device, mode, cache_mode="PA_BSND", factors=(1.0, 1.0), **options):
    import torch

    made = {k: options.pop(k) for k in ("alpha", "smooth") if k in options}
    tensors, scales = inputs(mode, **made)
    want = reference(mode, tensors, scales, factors=factors)
    weight, _, query = mode
    eight = torch.float8_e4m3fn if weight >= 3 else torch.int8
    (q, rope, q_scale, q_norm, norm_scale), caches = call(
        npu_device, mode, tensors, scales, cache_mode,
        qc_qr_scale=factors[0], kc_scale=factors[1], **options,
    )  # fmt: skip
    lead = (1, TOKENS) if cache_mode == "BSND" else (TOKENS,)
    assert (q.shape, rope.shape) == ((*lead, HEADS, KV), (*lead, HEADS, ROPE))
    assert (q.dtype, rope.dtype) == (eight if query else torch.bfloat16, torch.bfloat16)
    close(rope, want["query_rope"])
    if query:
        assert (q_scale.shape, q_scale.dtype) == ((TOKENS, HEADS, 1), torch.float32)
        close(q_scale, want["query_scale"])
        same_codes(q, want["query"], 0.97)
    else:
        assert (q_scale.numel(), q_scale.dtype) == (0, torch.float32)
        close(q, want["query"])
    assert (q_norm.shape, q_norm.dtype) == ((*lead, Q_LORA), eight if weight else torch.bfloat16)
    if weight == 0:
        assert norm_scale.numel() == 0
        close(q_norm, want["query_norm"])
    else:
        same_codes(q_norm, want["query_norm"])
        width, kind = (Q_LORA // 32, scales["dequant_scale_x"].dtype) if weight == 3 else (
            1, torch.float32)  # fmt: skip
        assert (norm_scale.shape, norm_scale.dtype) == ((TOKENS, width), kind)
        close(norm_scale, want["query_norm_scale"], 1e-5)
    return want, caches


def cache_rows(cache, width):
    import torch

    raw = cache.cpu()
    raw = raw.view(torch.uint8) if raw.element_size() == 1 else raw
    return raw.reshape(-1, width).view(cache.dtype)


def check_caches(mode, want, caches, kv_rows, kr_rows):
    """Both caches hold the expected rows, as their bytes say it."""
    import torch

    if mode[1] == 3:
        kind = caches[0].dtype
        values = kv_rows.view(torch.uint8)
        latent = values[:, :512].contiguous().view(kind)
        rotated = values[:, 512:640].contiguous().view(torch.bfloat16)
        scale = values[:, 640:].contiguous().view(torch.float32)
        same_codes(latent, want["kv"], 0.99)
        close(rotated, want["kr"])
        close(scale, want["tile_scale"], 1e-5)
        return
    if mode[1] == 0:
        close(kv_rows, want["kv"])
    else:
        same_codes(kv_rows, want["kv"], 0.99)
    if mode[1] == 2:
        same_codes(kr_rows, want["kr"], 0.98)
    else:
        close(kr_rows, want["kr"])


def run(npu_device, mode, **options):
    want, caches = check(npu_device, mode, **options)
    kv_all = cache_rows(caches[0], 656 if mode[1] == 3 else KV)
    kr_all = None if mode[1] == 3 else cache_rows(caches[1], ROPE)
    check_caches(mode, want, caches, kv_all[SLOTS] if kv_all.element_size() > 1 else picked(kv_all),
                 kr_all if kr_all is None else picked(kr_all))  # fmt: skip
    untouched = [i for i in range(32) if i not in SLOTS]
    assert not numbers(picked(kv_all, untouched)).any()


def picked(rows, slots=None):
    """Rows by slot; 8-bit floats through their bytes, which every torch can index."""
    import torch

    raw = rows.view(torch.uint8) if rows.element_size() == 1 else rows
    return raw[SLOTS if slots is None else slots].view(rows.dtype)


@pytest.mark.needs_line("7.3")
@pytest.mark.parametrize("mode", INT8, ids=str)
def test_modes_of_a3(npu_device, mode) -> None:
    run(npu_device, mode)


@pytest.mark.npu(soc="A5")
@pytest.mark.needs_line("26.1")
@pytest.mark.parametrize("mode", [*INT8[:2], *FP8], ids=str)
def test_modes_of_a5(npu_device, mode) -> None:
    run(npu_device, mode)


@pytest.mark.needs_line("7.3")
@pytest.mark.parametrize("mode", [(1, 0, 0), (2, 1, 1)], ids=str)
def test_smooth_scales_and_the_two_factors(npu_device, mode) -> None:
    run(npu_device, mode, smooth=True, factors=(0.75, 1.5))


@pytest.mark.npu(soc="A5")
@pytest.mark.needs_line("26.1")
def test_smooth_scales_in_fp8(npu_device) -> None:
    run(npu_device, (4, 1, 1), smooth=True, factors=(0.75, 1.5))


@pytest.mark.needs_line("7.3")
@pytest.mark.parametrize("mode", [(1, 3, 0), (2, 3, 0)], ids=str)
def test_a_clip_alpha_below_one_clips_each_tile(npu_device, mode) -> None:
    run(npu_device, mode, alpha=0.5)


@pytest.mark.needs_line("7.3")
@pytest.mark.parametrize("cache_mode", ["TND", "BSND"])
@pytest.mark.parametrize("mode", [(0, 0, 0), (1, 2, 0), (2, 1, 1), (2, 3, 0)], ids=str)
def test_caches_with_a_slot_a_token(npu_device, mode, cache_mode) -> None:
    want, caches = check(npu_device, mode, cache_mode)
    kv = cache_rows(caches[0], 656 if mode[1] == 3 else KV)
    kr = None if mode[1] == 3 else cache_rows(caches[1], ROPE)
    check_caches(mode, want, caches, kv, kr)


@pytest.mark.needs_line("7.3")
@pytest.mark.parametrize("mode", [(0, 0, 0), (1, 2, 0), (2, 1, 1)], ids=str)
def test_pa_nz_blocks_are_16_wide_and_32_in_8_bit(npu_device, mode) -> None:
    want, caches = check(npu_device, mode, "PA_NZ")
    rows = []
    for memory, width in zip(caches, (KV, ROPE), strict=True):
        inner = 16 if memory.element_size() == 2 else 32
        blocked = memory.cpu().view(2, width // inner, 16, inner)
        rows.append(torch_rows(blocked, width))
    check_caches(mode, want, caches, *rows)


def torch_rows(blocked, width):
    """Rows of (blocks, width / inner, size, inner) by slot."""
    flat = blocked.permute(0, 2, 1, 3).reshape(-1, width)
    return picked(flat)


@pytest.mark.needs_line("7.3")
@pytest.mark.parametrize("batched", [False, True])
def test_paged_blocks_take_a_block_a_page(npu_device, batched) -> None:
    """Pages of 16 slots: five tokens of one sequence, or 2 and 3 of two, each from a new block."""
    import torch

    index = torch.tensor([1] if batched else [2, 0], device=npu_device)
    more = {"cache_index": index[None] if batched else index, "batched": batched}
    if not batched:
        more["actual_seq_len"] = torch.tensor([2, 5], dtype=torch.int32, device=npu_device)
    mode = (0, 0, 0)
    tensors, scales = inputs(mode)
    want = reference(mode, tensors, scales)
    _, caches = call(npu_device, mode, tensors, scales, "PA_BLK_BSND", (3, 16), **more)
    slots = [16, 17, 18, 19, 20] if batched else [32, 33, 0, 1, 2]
    close(picked(cache_rows(caches[0], KV), slots), want["kv"])
    close(picked(cache_rows(caches[1], ROPE), slots), want["kr"])
    assert int((caches[0].cpu().view(48, KV).abs().sum(-1) > 0).sum()) == TOKENS


@pytest.mark.needs_line("7.3")
@pytest.mark.parametrize("mode", [(1, 3, 0), (2, 3, 0)], ids=str)
def test_a_tile_of_zeros_has_the_scale_zero(npu_device, mode) -> None:
    import torch

    tensors, scales = inputs(mode)
    tensors["gamma_ckv"] = tensors["gamma_ckv"].clone()
    tensors["gamma_ckv"][128:256] = 0
    _, caches = call(npu_device, mode, tensors, scales)
    row = cache_rows(caches[0], 656)[SLOTS[0]].view(torch.uint8)
    assert not row[128:256].any()
    scale = row[640:].contiguous().view(torch.float32)
    assert [bool(s > 0) for s in scale] == [True, False, True, True]
    assert float(scale[1]) == 0


@pytest.mark.needs_line("7.3")
def test_the_rotated_query_carries_the_scales_of_a_quantized_score(npu_device) -> None:
    """(query * s_q) . (latent / s_c) + rope . key = s_q / s_c * (query . latent + rope' . key)."""
    tensors, scales = inputs((2, 0, 0))
    plain, _ = call(npu_device, (2, 0, 0), tensors, scales)
    scales |= inputs((2, 1, 1))[1]
    quantized, _ = call(npu_device, (2, 1, 1), tensors, scales)
    restored = numbers(quantized[1]) * numbers(quantized[2]) / float(scales["quant_scale_ckv"])
    wanted = numbers(plain[1])
    assert np.linalg.norm(restored - wanted) < 0.01 * np.linalg.norm(wanted)


@pytest.mark.npu(soc="A5")
@pytest.mark.needs_line("26.1")
def test_hifloat8_is_legal_on_a5_and_not_simulated(npu_device) -> None:
    import torch

    tensors, scales = inputs((4, 0, 0))
    for name in ("token_x", "dq", "uq_qr", "dkv_kr"):
        tensors[name] = tensors[name].view(torch.uint8)
    names = ("token_x_dtype", "weight_dq_dtype", "weight_uq_qr_dtype", "weight_dkv_kr_dtype")
    with pytest.raises(NotSimulatedError, match=r"weight_quant_mode 5 \(hifloat8\)"):
        call(npu_device, (5, 0, 0), tensors, scales, **dict.fromkeys(names, 290))
    with pytest.raises(OpRejectedError, match=r"token_x_dtype must be torch_npu.hifloat8"):
        call(npu_device, (5, 0, 0), tensors, scales)


@pytest.mark.npu(soc="A5")
@pytest.mark.needs_line("26.1")
@pytest.mark.parametrize("mode", [(0, 0, 0), (2, 1, 1), (3, 0, 0), (3, 1, 1), (4, 3, 0)], ids=str)
@pytest.mark.parametrize("flag", [False, True])
def test_results_are_those_of_torch_npus_own_fake_kernel(npu_device, mode, flag) -> None:
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    tensors, scales = inputs(mode)
    out, caches = call(npu_device, mode, tensors, scales, query_norm_flag=flag)
    names = ("token_x", "dq", "uq_qr", "uk", "dkv_kr", "gamma_cq", "gamma_ckv", "sin", "cos")
    with FakeTensorMode(allow_non_fake_inputs=True) as fakes:

        def fake(tensor):
            return fakes.from_tensor(tensor.to(npu_device))

        told = torch.ops.npu.npu_mla_prolog_v3(
            *(fake(tensors[n]) for n in names), *(fake(c) for c in caches),
            cache_index=fake(torch.tensor(SLOTS)), weight_quant_mode=mode[0],
            kv_cache_quant_mode=mode[1], query_quant_mode=mode[2], query_norm_flag=flag,
            ckvkr_repo_mode=int(mode[1] == 3), quant_scale_repo_mode=int(mode[1] == 3),
            **{n: fake(s) for n, s in scales.items()},
        )  # fmt: skip
    assert [(t.shape, t.dtype) for t in out] == [(t.shape, t.dtype) for t in told]


@pytest.mark.npu(soc="A5")
@pytest.mark.needs_line("26.1")
def test_bytes_are_not_taken_for_e8m0_scales(npu_device) -> None:
    import torch

    tensors, scales = inputs((3, 0, 0))
    as_bytes = {name: scale.view(torch.uint8) for name, scale in scales.items()}
    with pytest.raises(OpRejectedError, match="supports dtype float8_e8m0fnu, but is uint8"):
        call(npu_device, (3, 0, 0), tensors, as_bytes)


def test_the_table_of_e4m3_is_torchs() -> None:
    import torch

    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    assert codes.tolist() == expected.TABLE.tolist()
    values = np.array([0.0, 447, 449, 1000, -17, 17, 2**-10, 3 * 2**-10, 0.3, math.pi])
    torchs = torch.from_numpy(values).float().clamp(-448, 448).to(torch.float8_e4m3fn).float()
    assert torchs.tolist() == expected.to_e4m3(values).tolist()
