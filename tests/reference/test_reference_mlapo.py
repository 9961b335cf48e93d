"""mla_preprocess of sgl-kernel-npu against integer arithmetic written out."""

from __future__ import annotations

import pytest
import torch

from npu_backend.runtime.reference import mla_preprocess

HIDDEN, Q_LORA, HEADS, NOPE, LATENT, ROPE = 64, 32, 2, 8, 32, 16
OUT0, OUT1 = LATENT + ROPE + Q_LORA, HEADS * (NOPE + ROPE)
BLOCKS, BLOCK = 3, 4
SLOTS, POSITIONS = [5, 0, 10], [3, 9, 0]


def nz_blocks(weight):
    """(N, K) int8 -> (1, K/32, N, 32), element by element."""
    rows, depth = weight.shape
    out = torch.empty(1, depth // 32, rows, 32, dtype=torch.int8)
    for k in range(depth):
        out[0, k // 32, :, k % 32] = weight[:, k]
    return out


@pytest.fixture
def call(rand, rand_int8, angles):
    def make(dtype=torch.float32, nz=False, **change):
        cos, sin = angles(POSITIONS, ROPE, dtype)
        wdqkv, wuq = rand_int8(OUT0, HIDDEN), rand_int8(OUT1, Q_LORA)
        kv = torch.full((BLOCKS, BLOCK, 1, LATENT), torch.nan, dtype=dtype)
        kr = torch.full((BLOCKS, BLOCK, 1, ROPE), torch.nan, dtype=dtype)
        given = {
            "hiddenState": rand(3, HIDDEN, dtype=dtype),
            "gamma0": torch.ones(HIDDEN, dtype=dtype),
            "beta0": torch.zeros(HIDDEN, dtype=dtype),
            "wdqkv": nz_blocks(wdqkv) if nz else wdqkv,
            "descale0": rand(OUT0).abs() * 1e-4,
            "gamma1": (1 + rand(Q_LORA, scale=0.1)).to(dtype),
            "beta1": rand(Q_LORA, scale=0.1, dtype=dtype),
            "wuq": nz_blocks(wuq) if nz else wuq,
            "descale1": rand(OUT1).abs() * 1e-4,
            "gamma2": (1 + rand(LATENT, scale=0.1)).to(dtype),
            "cos": cos,
            "sin": sin,
            "wuk": rand(HEADS, NOPE, LATENT, dtype=dtype),
            "kv_cache": kv,
            "kv_cache_rope": kr,
            "slotmapping": torch.tensor(SLOTS, dtype=torch.int32),
            "quant_scale0": torch.tensor([0.03], dtype=dtype),
            "quant_offset0": torch.tensor([-7], dtype=torch.int8),
            "bias0": torch.randint(-50, 50, (OUT0,), dtype=torch.int32),
            "quant_scale1": torch.tensor([0.05], dtype=dtype),
            "quant_offset1": torch.tensor([4], dtype=torch.int8),
            "bias1": torch.randint(-50, 50, (OUT1,), dtype=torch.int32),
            "cache_mode": "krope_ctkv",
            "quant_mode": "per_tensor_quant_asymm",
            "q_out0": torch.zeros(3, HEADS, LATENT, dtype=dtype),
            "kv_cache_out0": kv,
            "q_out1": torch.zeros(3, HEADS, ROPE, dtype=dtype),
            "kv_cache_out1": kr,
        }
        return given | change

    return make


def asymmetric(x, scale, offset):
    return (x.double() / scale.double() + offset.double()).round().clamp(-128, 127)


def norm64(x, gamma):
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * gamma.double()


def turn64(x):
    """Component i with i + ROPE/2, by the positions."""
    rate = torch.tensor([10000.0 ** (-2 * i / ROPE) for i in range(ROPE // 2)], dtype=torch.float64)
    angle = torch.tensor(POSITIONS, dtype=torch.float64).view(-1, *[1] * (x.dim() - 1)) * rate
    a, b = x[..., : ROPE // 2], x[..., ROPE // 2 :]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


def formulas(g):
    """The op in double precision; (N, K) weights."""
    first = asymmetric(g["hiddenState"], g["quant_scale0"], g["quant_offset0"])
    down = (first @ g["wdqkv"].double().t() + g["bias0"]) * g["descale0"].double()
    latent, key, q = down[:, :LATENT], down[:, LATENT:-Q_LORA], down[:, -Q_LORA:]
    q = norm64(q, g["gamma1"]) + g["beta1"].double()
    second = asymmetric(q, g["quant_scale1"], g["quant_offset1"])
    up = (second @ g["wuq"].double().t() + g["bias1"]) * g["descale1"].double()
    up = up.view(3, HEADS, NOPE + ROPE)
    return {
        "q_out0": torch.einsum("thn,hnl->thl", up[..., :NOPE], g["wuk"].double()),
        "q_out1": turn64(up[..., NOPE:]),
        "latent": norm64(latent, g["gamma2"]),
        "k_rope": turn64(key),
    }


def seen(g):
    return {
        "q_out0": g["q_out0"],
        "q_out1": g["q_out1"],
        "latent": g["kv_cache_out0"].view(-1, LATENT)[SLOTS],
        "k_rope": g["kv_cache_out1"].view(-1, ROPE)[SLOTS],
    }


def relative(a, b):
    return float((a.double().nan_to_num() - b).norm() / b.norm())


def test_the_formulas(call):
    given = call()
    results = mla_preprocess(**given)
    assert [
        r is given[n]
        for r, n in zip(
            results, ("q_out0", "kv_cache_out0", "q_out1", "kv_cache_out1"), strict=True
        )
    ] == [True] * 4
    for name, value in formulas(given).items():
        # 3e-3: one fp32 rounding may move an int8 value of the second quantization by one step.
        assert relative(seen(given)[name], value) < 3e-3, name
    untouched = [s for s in range(BLOCKS * BLOCK) if s not in SLOTS]
    assert given["kv_cache_out0"].view(-1, LATENT)[untouched].isnan().all()


def test_bf16_within_its_rounding_and_one_quantization_step(call):
    given = call(torch.bfloat16)
    mla_preprocess(**given)
    for name, value in formulas(given).items():
        assert relative(seen(given)[name], value) < 3e-2, name


def test_nz_weight_blocks_are_the_same_weight(call):
    plain = call()
    blocks = plain | {
        "wdqkv": nz_blocks(plain["wdqkv"]),
        "wuq": nz_blocks(plain["wuq"]),
        "q_out0": plain["q_out0"].clone(),
        "q_out1": plain["q_out1"].clone(),
        "kv_cache_out0": plain["kv_cache_out0"].clone(),
        "kv_cache_out1": plain["kv_cache_out1"].clone(),
    }
    mla_preprocess(**plain)
    mla_preprocess(**blocks)
    for name, value in seen(plain).items():
        assert torch.equal(value, seen(blocks)[name])


@pytest.mark.parametrize("as_blocks", [False, True])
def test_nzcache_holds_the_values_of_krope_ctkv(call, as_blocks):
    plain = call()
    nz = dict(plain, cache_mode="nzcache")
    for name, width in (("kv_cache_out0", LATENT), ("kv_cache_out1", ROPE)):
        shape = (BLOCKS, width // 16, BLOCK, 16) if as_blocks else (BLOCKS, BLOCK, 1, width)
        nz[name] = torch.full(shape, torch.nan)
    mla_preprocess(**plain)
    mla_preprocess(**nz)
    for name, width in (("kv_cache_out0", LATENT), ("kv_cache_out1", ROPE)):
        back = nz[name].view(BLOCKS, width // 16, BLOCK, 16).transpose(1, 2)
        back = back.reshape(BLOCKS, BLOCK, 1, width)
        assert torch.equal(back.nan_to_num(9.0), plain[name].nan_to_num(9.0))


def test_the_first_norm_is_not_of_this_op(call):
    plain = call()
    other = dict(plain, gamma0=plain["gamma0"] * 5, beta0=plain["beta0"] + 1)
    mla_preprocess(**plain)
    before = plain["q_out0"].clone()
    mla_preprocess(**other)
    assert torch.equal(before, other["q_out0"])


def test_negative_slots_write_nothing(call):
    given = call(slotmapping=torch.tensor([-1, 0, -1], dtype=torch.int32))
    mla_preprocess(**given)
    flat = given["kv_cache_out0"].view(-1, LATENT)
    assert not flat[0].isnan().any()
    assert flat[1:].isnan().all()


MUTATIONS = {
    "kv and q swapped": lambda g: {"wdqkv": g["wdqkv"].roll(LATENT, 0)},
    "rope rows not reordered": lambda g: {
        "wdqkv": torch.cat(
            [
                g["wdqkv"][:LATENT],
                g["wdqkv"][LATENT:-Q_LORA]
                .view(-1, 2, HIDDEN)
                .transpose(0, 1)
                .reshape(ROPE, HIDDEN),
                g["wdqkv"][-Q_LORA:],
            ]
        )
    },
    "slots off by one": lambda g: {"slotmapping": g["slotmapping"] + 1},
    "offset forgotten": lambda g: {"quant_offset0": torch.zeros(1, dtype=torch.int8)},
    "stale scale": lambda g: {"quant_scale1": g["quant_scale1"] * 2},
    "bias of the other product": lambda g: {"bias1": g["bias0"][:OUT1] * 40},
    "descale reversed": lambda g: {"descale0": g["descale0"].flip(0)},
    "beta1 forgotten": lambda g: {"beta1": torch.zeros_like(g["beta1"])},
    "heads swapped": lambda g: {"wuk": g["wuk"].flip(0)},
    "cos and sin swapped": lambda g: {"cos": g["sin"], "sin": g["cos"]},
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_wrong_wiring_is_seen(call, mutation):
    given = call()
    expected = formulas(given)
    mla_preprocess(**(given | MUTATIONS[mutation](given)))
    assert max(relative(v, expected[n]) for n, v in seen(given).items()) > 1e-2


@pytest.mark.parametrize(
    ("change", "error", "word"),
    [
        ({"quant_mode": None}, NotImplementedError, "per_token_quant_symm"),
        ({"cache_mode": "int8_nzcache"}, NotImplementedError, "int8_nzcache"),
        ({"slotmapping": torch.tensor(SLOTS)}, ValueError, "int32"),
        ({"wuq": torch.zeros(OUT1, Q_LORA)}, ValueError, "wuq must be int8"),
        ({"wuk": torch.zeros(HEADS, LATENT, NOPE).transpose(1, 2)}, ValueError, "wuk"),
        ({"slotmapping": torch.tensor([0, 1, 12], dtype=torch.int32)}, ValueError, "12"),
    ],
)
def test_what_the_reference_does_not_take(call, change, error, word):
    with pytest.raises(error, match=word):
        mla_preprocess(**call(**change))


def test_an_int64_descale_carries_fp32_bits(call):
    given = call(torch.float16)
    mla_preprocess(**given)
    before = given["q_out1"].clone()
    bits = {n: given[n].view(torch.int32).long() | (1 << 46) for n in ("descale0", "descale1")}
    mla_preprocess(**(given | bits))
    assert torch.equal(before, given["q_out1"])
