"""Quantized weights and caches of npu_mla_prolog_v3, against double precision on what the 8-bit
values mean, with the roundings that each mode adds as tolerance."""

from __future__ import annotations

import pytest
import torch

from npu_backend.runtime.reference import (
    npu_dynamic_mx_quant,
    npu_dynamic_quant,
    npu_mla_prolog_v3,
    npu_quant_matmul,
)

HIDDEN, Q_LORA, HEADS, NOPE, LATENT, ROPE = 128, 64, 2, 32, 256, 16
TILE = 128
BLOCKS, BLOCK = 3, 16
SLOTS = [5, 0, 33]
POSITIONS = [3, 9, 0]
E4M3 = torch.float8_e4m3fn
E8M0 = torch.float8_e8m0fnu


def meant(values, scales, mode):
    """What 8-bit (in, out) weights mean, in double precision."""
    if mode == 3:
        powers = 2.0 ** (scales.view(torch.uint8).double() - 127)
        return values.double() * powers.t().repeat_interleave(32, 0)
    return values.double() * scales.double().reshape(1, -1)


def quantize(weight, mode):
    """Quantize (in, out) by channel, or by 32 inputs of a channel; returns values and scales."""
    if mode == 3:
        blocks = weight.t().double().reshape(weight.shape[1], -1, 32)
        power = torch.floor(torch.log2(blocks.abs().amax(-1))) - 8
        values = (blocks / 2.0 ** power.unsqueeze(-1)).reshape(weight.shape[1], -1)
        scales = (power + 127).to(torch.uint8).view(E8M0)
        return values.clamp(-448, 448).float().to(E4M3).t().contiguous(), scales
    top = 127 if mode in (1, 2) else 448
    scale = weight.abs().amax(0) / top
    values = weight / scale
    values = values.round().to(torch.int8) if mode in (1, 2) else values.to(E4M3)
    return values, scale.reshape(1, -1)


@pytest.fixture
def call(rand, angles):
    """Return ``call(mode, kv, **more)``: the op's results, its caches, and what they should be."""

    def run(mode, kv=0, without=None, **more):
        cos, sin = angles(POSITIONS, ROPE, torch.bfloat16)
        shapes = {"dq": (HIDDEN, Q_LORA), "uq_qr": (Q_LORA, HEADS * (NOPE + ROPE)),
                  "dkv_kr": (HIDDEN, LATENT + ROPE)}  # fmt: skip
        given, real = {}, {}
        for name, shape in shapes.items():
            weight = rand(*shape, scale=shape[0] ** -0.5)
            if mode == 0 or (mode == 1 and name != "uq_qr"):
                given[f"weight_{name}"] = weight.to(torch.bfloat16)
                real[name] = given[f"weight_{name}"].double()
                continue
            values, scales = quantize(weight, mode)
            given[f"weight_{name}"], given[f"dequant_scale_w_{name}"] = values, scales
            real[name] = meant(values, scales, mode)
        x = rand(3, HIDDEN).to(torch.bfloat16)
        given["token_x"] = x
        if mode in (2, 4):
            values, scale = npu_dynamic_quant(x, dst_type=torch.int8 if mode == 2 else E4M3)
            given["token_x"], given["dequant_scale_x"] = values, scale.unsqueeze(-1)
        if mode == 3:
            values, scale = npu_dynamic_mx_quant(x, dst_type=E4M3)
            given["token_x"], given["dequant_scale_x"] = values, scale.flatten(-2).view(E8M0)
        uk = rand(HEADS, NOPE, LATENT, scale=NOPE**-0.5).to(torch.bfloat16)
        eight = torch.int8 if mode in (1, 2) else E4M3
        width = LATENT + 2 * ROPE + 4 * LATENT // TILE if kv == 3 else LATENT
        caches = {
            "kv_cache": torch.zeros(
                BLOCKS, BLOCK, 1, width, dtype=eight if kv else torch.bfloat16
            ),
            "kr_cache": torch.zeros(
                BLOCKS, BLOCK, 1, 0 if kv == 3 else ROPE,
                dtype=eight if kv == 2 else torch.bfloat16,
            ),
        }  # fmt: skip
        if kv == 1:
            more["quant_scale_ckv"] = torch.tensor([20.0 if mode == 2 else 50.0])
        if kv == 2:
            more["quant_scale_ckv"] = torch.linspace(15, 25, LATENT).reshape(1, -1)
            more["quant_scale_ckr"] = torch.linspace(15, 25, ROPE).reshape(1, -1)
        given.pop(without, None)
        packed = int(kv == 3)
        if packed and mode in (1, 2):
            more.setdefault("k_nope_clip_alpha", torch.ones(1))
        ones = {"rmsnorm_gamma_cq": Q_LORA, "rmsnorm_gamma_ckv": LATENT}
        results = npu_mla_prolog_v3(
            **given,
            weight_uk=uk,
            **{n: torch.ones(w, dtype=torch.bfloat16) for n, w in ones.items()},
            rope_sin=sin,
            rope_cos=cos,
            **caches,
            cache_index=torch.tensor(SLOTS),
            query_norm_flag=True,
            weight_quant_mode=mode,
            kv_cache_quant_mode=kv,
            query_quant_mode=int(kv == 1),
            ckvkr_repo_mode=packed,
            quant_scale_repo_mode=packed,
            tile_size=TILE,
            **more,
        )

        def norm(v):
            return v / (v.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()

        def turn(v):
            rate = torch.tensor([10000.0 ** (-2 * i / ROPE) for i in range(ROPE // 2)]).double()
            at = torch.tensor(POSITIONS).double().view(-1, *[1] * (v.dim() - 1)) * rate
            a, b = v[..., 0::2], v[..., 1::2]
            return torch.cat([a * at.cos() - b * at.sin(), b * at.cos() + a * at.sin()], -1)

        cq = norm(x.double() @ real["dq"])
        q = (cq @ real["uq_qr"]).view(3, HEADS, NOPE + ROPE)
        down = x.double() @ real["dkv_kr"]
        expected = {
            "query": torch.einsum("thn,hnl->thl", q[..., :NOPE], uk.double()),
            "rope": turn(q[..., NOPE:]),
            "norm": cq,
            "latent": norm(down[:, :LATENT]),
            "key": turn(down[:, LATENT:]),
        }
        flat = {n: c.view(BLOCKS * BLOCK, -1) for n, c in caches.items()}
        return results, flat, expected, more

    return run


def off(found, expected):
    return float((found.double() - expected).norm() / expected.norm())


# e4m3 keeps 4 significant bits: one value is off by at most 2**-4, in the root mean square by
# 0.42 * 2**-4 = 2.6e-2; input and compressed query are both quantized.
TOLERANCE = {0: 1e-2, 1: 2e-2, 2: 3e-2, 3: 6e-2, 4: 6e-2}


@pytest.mark.parametrize("mode", [0, 1, 2, 3, 4])
def test_outputs_of_each_weight_mode_are_the_formulas(call, mode):
    (query, rope, scale_q, norm, norm_scale), caches, want, _ = call(mode)
    bound = TOLERANCE[mode]
    assert off(query, want["query"]) < bound
    assert off(rope, want["rope"]) < bound
    assert off(caches["kv_cache"][SLOTS], want["latent"]) < bound
    assert off(caches["kr_cache"][SLOTS], want["key"]) < bound
    assert scale_q.numel() == 0
    if mode == 3:
        assert norm_scale.shape == (3, Q_LORA // 32)
        norm = meant(norm.t(), norm_scale, 3).t()
    elif mode:
        assert norm_scale.shape == (3, 1)
        norm = norm.double() * norm_scale.double()
    assert off(norm, want["norm"]) < bound


@pytest.mark.parametrize("mode", [1, 2, 3, 4])
def test_a_quantized_mode_does_not_agree_by_chance(call, mode):
    """Half the weight's scale: the same call is far away."""
    (query, *_), _, want, _ = call(mode)
    assert off(query.double() / 2, want["query"]) > 0.4


@pytest.mark.parametrize("mode", [1, 2, 3, 4])
def test_a_packed_row_is_values_then_key_then_scales(call, mode):
    _, caches, want, _ = call(mode, 3)
    rows = caches["kv_cache"][SLOTS]
    eight = torch.int8 if mode in (1, 2) else E4M3
    assert rows.dtype == eight
    assert caches["kr_cache"].numel() == 0
    raw = rows.view(torch.uint8)
    values = raw[:, :LATENT].contiguous().view(eight).double()
    key = raw[:, LATENT : LATENT + 2 * ROPE].contiguous().view(torch.bfloat16)
    scales = raw[:, LATENT + 2 * ROPE :].contiguous().view(torch.float32).double()
    assert scales.shape == (3, LATENT // TILE)
    latent = (values.view(3, -1, TILE) * scales.unsqueeze(-1)).view(3, LATENT)
    assert off(latent, want["latent"]) < TOLERANCE[mode]
    assert off(key, want["key"]) < TOLERANCE[mode]
    top = 127 if mode in (1, 2) else 448
    assert values.abs().view(3, -1, TILE).amax(-1).tolist() == [[top] * (LATENT // TILE)] * 3


@pytest.mark.parametrize("mode", [2, 3, 4])
def test_a_cache_quantized_per_tensor_comes_with_a_quantized_query(call, mode):
    (query, rope, scale_q, *_), caches, want, more = call(mode, 1)
    assert query.dtype == caches["kv_cache"].dtype == (torch.int8 if mode == 2 else E4M3)
    assert scale_q.shape == (3, HEADS, 1)
    bound = TOLERANCE[mode] + 0.03
    assert off(query.double() * scale_q.double(), want["query"]) < bound
    # One scale for the whole score: the rotated part is divided by it beforehand.
    straight = rope.double() * scale_q.double() / more["quant_scale_ckv"].double()
    assert off(straight, want["rope"]) < bound
    latent = caches["kv_cache"][SLOTS].double() / more["quant_scale_ckv"].double()
    assert off(latent, want["latent"]) < bound
    assert caches["kr_cache"].dtype == torch.bfloat16


def test_a_cache_quantized_per_channel_holds_the_key_in_int8_too(call):
    (query, *_), caches, want, more = call(1, 2)
    assert query.dtype == torch.bfloat16
    for cache, scale, name in (
        ("kv_cache", "quant_scale_ckv", "latent"),
        ("kr_cache", "quant_scale_ckr", "key"),
    ):
        assert caches[cache].dtype == torch.int8
        assert off(caches[cache][SLOTS].double() / more[scale].double(), want[name]) < 5e-2


@pytest.mark.parametrize("mode, kv", [(0, 1), (0, 2), (0, 3), (1, 1), (2, 2), (3, 2), (4, 2)])
def test_modes_that_do_not_go_together_are_refused(call, mode, kv):
    with pytest.raises(ValueError, match="do not go together"):
        call(mode, kv)


@pytest.mark.parametrize("mode, name", [(1, "uq_qr"), (2, "dq"), (3, "dkv_kr"), (4, "dq")])
def test_a_missing_scale_is_named(call, mode, name):
    with pytest.raises(ValueError, match=f"dequant_scale_w_{name} is needed"):
        call(mode, without=f"dequant_scale_w_{name}")


@pytest.mark.parametrize(
    "largest, power",
    [(448.0, 0), (447.0, 0), (511.0, 0), (512.0, 1), (1.75, -8), (1.0, -8), (0.0, -127)],
)
def test_the_shared_exponent_of_a_block(largest, power):
    """OCP: floor(log2(largest)) - 8; 448 is e4m3's largest value, and 511 saturates to it."""
    row = torch.zeros(1, 64)
    row[0, 7] = largest
    values, scales = npu_dynamic_mx_quant(row, dst_type=24)
    assert scales.shape == (1, 1, 2)
    assert scales.dtype == torch.uint8
    assert scales.tolist() == [[[power + 127, 0]]]
    assert values[0, 7].item() == pytest.approx(min(largest * 2.0**-power, 448.0), rel=2**-4)


@pytest.mark.parametrize("kind", ["fp8", "mx"])
def test_quantized_products(rand, kind):
    x, w = rand(4, 128).to(torch.bfloat16), rand(128, 8, scale=0.1)
    expected = x.double() @ w.double()
    if kind == "fp8":
        values, by_token = npu_dynamic_quant(x, dst_type=24)
        weight, scale = quantize(w, 4)
        out = npu_quant_matmul(
            values, weight, scale.reshape(-1), pertoken_scale=by_token, output_dtype=15
        )
    else:
        values, by_token = npu_dynamic_mx_quant(x, dst_type=24)
        weight, scale = quantize(w, 3)
        paired = scale.view(torch.uint8).unflatten(-1, (-1, 2)).transpose(0, 1)
        assert paired.shape == (2, 8, 2)
        out = npu_quant_matmul(
            values,
            weight,
            paired,
            pertoken_scale=by_token,
            output_dtype=15,
            scale_dtype=293,
            pertoken_scale_dtype=293,
            group_sizes=[1, 1, 32],
        )
    assert out.dtype == torch.bfloat16
    assert off(out, expected) < 5e-2


@pytest.mark.parametrize("mode", [1, 2])
def test_a_packed_int8_row_is_clipped_by_alpha(call, mode):
    _, caches, want, _ = call(mode, 3, k_nope_clip_alpha=torch.tensor([0.5]))
    raw = caches["kv_cache"][SLOTS].view(torch.uint8)
    values = raw[:, :LATENT].contiguous().view(torch.int8).double().view(3, -1, TILE)
    scales = raw[:, LATENT + 2 * ROPE :].contiguous().view(torch.float32).double().unsqueeze(-1)
    found, tiles = values * scales, want["latent"].view(3, -1, TILE)
    edge = tiles.abs().amax(-1, keepdim=True) * 0.5
    assert off(found, tiles.clamp(-edge, edge)) < TOLERANCE[mode]
    assert (values.abs() == 127).sum() > 3 * values.shape[1]


@pytest.mark.parametrize(
    ("mode", "kv", "alpha"), [(1, 3, None), (2, 3, None), (3, 3, 1.0), (2, 0, 1.0)]
)
def test_alpha_belongs_to_packed_int8_alone(call, mode, kv, alpha):
    given = None if alpha is None else torch.tensor([alpha])
    with pytest.raises(ValueError, match="k_nope_clip_alpha"):
        call(mode, kv, k_nope_clip_alpha=given)
