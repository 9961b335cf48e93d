"""npu_mla_prolog_v3 against its formulas in double precision, and what a mistake would do."""

from __future__ import annotations

import pytest
import torch

from npu_backend.runtime.reference import npu_mla_prolog_v3, npu_mla_prolog_v3_functional

HIDDEN, Q_LORA, HEADS, NOPE, LATENT, ROPE = 48, 32, 2, 8, 32, 16
BLOCKS, BLOCK = 3, 4
SLOTS = [5, 0, 10]
POSITIONS = [3, 9, 0]


@pytest.fixture
def inputs(rand, angles):
    def make(dtype=torch.float32):
        cos, sin = angles(POSITIONS, ROPE, dtype)
        return {
            "token_x": rand(3, HIDDEN, dtype=dtype),
            "weight_dq": rand(HIDDEN, Q_LORA, dtype=dtype, scale=HIDDEN**-0.5),
            "weight_uq_qr": rand(Q_LORA, HEADS * (NOPE + ROPE), dtype=dtype, scale=Q_LORA**-0.5),
            "weight_uk": rand(HEADS, NOPE, LATENT, dtype=dtype, scale=NOPE**-0.5),
            "weight_dkv_kr": rand(HIDDEN, LATENT + ROPE, dtype=dtype, scale=HIDDEN**-0.5),
            "rmsnorm_gamma_cq": (1 + rand(Q_LORA, scale=0.1)).to(dtype),
            "rmsnorm_gamma_ckv": (1 + rand(LATENT, scale=0.1)).to(dtype),
            "rope_sin": sin,
            "rope_cos": cos,
            "kv_cache": torch.full((BLOCKS, BLOCK, 1, LATENT), torch.nan, dtype=dtype),
            "kr_cache": torch.full((BLOCKS, BLOCK, 1, ROPE), torch.nan, dtype=dtype),
            "cache_index": torch.tensor(SLOTS),
        }

    return make


def norm64(x, gamma, epsilon=1e-5):
    return x / (x.pow(2).mean(-1, keepdim=True) + epsilon).sqrt() * gamma.double()


def turn64(x, positions):
    """Pairs (2i, 2i + 1) of (tokens, ..., ROPE), to all evens then all odds."""
    rate = torch.tensor([10000.0 ** (-2 * i / ROPE) for i in range(ROPE // 2)], dtype=torch.float64)
    angle = torch.tensor(positions, dtype=torch.float64).view(-1, *[1] * (x.dim() - 1)) * rate
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


def formulas(x, dq, uq, uk, dkv, gamma_q, gamma_kv, positions=POSITIONS):
    """The op's formulas in double precision, from float weights."""
    x, dq, uq, uk, dkv = (t.double() for t in (x, dq, uq, uk, dkv))
    cq = norm64(x @ dq, gamma_q)
    q = (cq @ uq).view(len(positions), HEADS, NOPE + ROPE)
    absorbed = torch.einsum("thn,hnl->thl", q[..., :NOPE], uk)
    down = x @ dkv
    return {
        "query": absorbed,
        "query_rope": turn64(q[..., NOPE:], positions),
        "query_norm": cq,
        "latent": norm64(down[:, :LATENT], gamma_kv),
        "k_rope": turn64(down[:, LATENT:], positions),
    }


def expected_of(given):
    return formulas(
        *(
            given[n]
            for n in (
                "token_x",
                "weight_dq",
                "weight_uq_qr",
                "weight_uk",
                "weight_dkv_kr",
                "rmsnorm_gamma_cq",
                "rmsnorm_gamma_ckv",
            )
        )
    )


def seen(results, given, slots=SLOTS):
    return {
        "query": results[0],
        "query_rope": results[1],
        "latent": given["kv_cache"].view(-1, LATENT)[slots],
        "k_rope": given["kr_cache"].view(-1, ROPE)[slots],
    }


def relative(a, b):
    return float((a.double() - b).norm() / b.norm())


def test_mode_0_gives_the_formulas(inputs):
    given = inputs()
    results = npu_mla_prolog_v3(**given, query_norm_flag=True)
    expected = expected_of(given)
    for name, value in seen(results, given).items():
        assert relative(value, expected[name]) < 1e-5, name
    assert relative(results[3], expected["query_norm"]) < 1e-5
    assert [tuple(r.shape) for r in results] == [
        (3, HEADS, LATENT),
        (3, HEADS, ROPE),
        (0,),
        (3, Q_LORA),
        (0,),
    ]
    untouched = [s for s in range(BLOCKS * BLOCK) if s not in SLOTS]
    assert given["kv_cache"].view(-1, LATENT)[untouched].isnan().all()


def test_bf16_rounds_within_a_few_units_of_the_last_place(inputs):
    given = inputs(torch.bfloat16)
    results = npu_mla_prolog_v3(**given)
    assert results[0].dtype == torch.bfloat16
    for name, value in seen(results, given).items():
        assert relative(value, expected_of(given)[name]) < 1e-2, name


def test_outputs_that_were_not_asked_for_are_empty(inputs):
    given = inputs()
    results = npu_mla_prolog_v3(**given)
    assert [tuple(r.shape) for r in results[2:]] == [(0,), (0,), (0,)]


def test_a_batch_and_a_length_are_as_good_as_tokens(inputs):
    flat, deep = inputs(), inputs()
    deep["token_x"] = flat["token_x"].view(3, 1, HIDDEN)
    for name in flat:
        if name.startswith(("weight", "rms")):
            deep[name] = flat[name]
    for name in ("rope_sin", "rope_cos"):
        deep[name] = flat[name].view(3, 1, ROPE)
    deep["cache_index"] = flat["cache_index"].view(3, 1)
    a = npu_mla_prolog_v3(**flat, query_norm_flag=True)
    b = npu_mla_prolog_v3(**deep, query_norm_flag=True)
    assert b[0].shape == (3, 1, HEADS, LATENT)
    assert b[3].shape == (3, 1, Q_LORA)
    assert torch.equal(a[0], b[0].view_as(a[0]))
    assert torch.equal(flat["kv_cache"].nan_to_num(), deep["kv_cache"].nan_to_num())


def test_nz_and_plain_caches_hold_the_same_values(inputs):
    plain = inputs()
    nz = dict(plain, kv_cache=plain["kv_cache"].clone(), kr_cache=plain["kr_cache"].clone())
    npu_mla_prolog_v3(**plain)
    npu_mla_prolog_v3(**nz, cache_mode="PA_NZ")
    for name, width in (("kv_cache", LATENT), ("kr_cache", ROPE)):
        back = (
            nz[name]
            .view(BLOCKS, width // 16, BLOCK, 16)
            .transpose(1, 2)
            .reshape(BLOCKS, BLOCK, 1, width)
        )
        assert torch.equal(back.nan_to_num(9.0), plain[name].nan_to_num(9.0))


def test_scale_factors_multiply_after_the_norm(inputs):
    one, two = inputs(), inputs()
    two |= {n: one[n] for n in one if n not in ("kv_cache", "kr_cache")}
    a = npu_mla_prolog_v3(**one)
    b = npu_mla_prolog_v3(**two, qc_qr_scale=2.0, kc_scale=0.5)
    torch.testing.assert_close(b[0], a[0] * 2)
    torch.testing.assert_close(two["kv_cache"], one["kv_cache"] * 0.5, equal_nan=True)
    torch.testing.assert_close(two["kr_cache"], one["kr_cache"], equal_nan=True)


def channel_quantized(weight):
    """(K, N) -> int8 and one scale a column."""
    scale = weight.abs().amax(0) / 127
    return (weight / scale).round().to(torch.int8), scale.view(1, -1)


def quantized_inputs(inputs, mode):
    given = inputs()
    exact = dict(given)
    names = {1: ["w_uq_qr"], 2: ["w_dq", "w_uq_qr", "w_dkv_kr"]}[mode]
    for short in names:
        q, scale = channel_quantized(given[f"weight_{short[2:]}"])
        given[f"weight_{short[2:]}"], given[f"dequant_scale_{short}"] = q, scale
        exact[f"weight_{short[2:]}"] = q.double() * scale.double()
    if mode == 2:
        scale = given["token_x"].abs().amax(-1) / 127
        given["token_x"] = (given["token_x"] / scale[:, None]).round().to(torch.int8)
        given["dequant_scale_x"] = scale
        exact["token_x"] = given["token_x"].double() * scale.double()[:, None]
    return given, exact


@pytest.mark.parametrize("mode", [1, 2])
def test_int8_modes_err_by_the_quantization_of_the_query_alone(inputs, mode):
    given, exact = quantized_inputs(inputs, mode)
    results = npu_mla_prolog_v3(**given, weight_quant_mode=mode, query_norm_flag=True)
    expected = expected_of(exact)
    found = seen(results, given)
    # Products are exact, so latent and key have fp32's error only.
    assert relative(found["latent"], expected["latent"]) < 1e-5
    assert relative(found["k_rope"], expected["k_rope"]) < 1e-5
    # c^Q has at most half a step of 1/127 of its largest value a token.
    assert relative(found["query"], expected["query"]) < 2e-2
    assert relative(found["query_rope"], expected["query_rope"]) < 2e-2
    assert results[3].dtype == torch.int8
    assert results[4].shape == (3, 1)
    assert relative(results[3].double() * results[4].double(), expected["query_norm"]) < 1e-2
    assert (results[3].abs().amax(-1) == 127).all()


def test_smooth_scales_are_multiplied_in_before_the_quantization(inputs):
    given, exact = quantized_inputs(inputs, 1)
    smooth = torch.linspace(0.5, 2.0, Q_LORA).view(1, -1)
    exact["weight_uq_qr"] = exact["weight_uq_qr"] * smooth.view(-1, 1).double()
    results = npu_mla_prolog_v3(**given, weight_quant_mode=1, smooth_scales_cq=smooth)
    assert relative(results[0], expected_of(exact)["query"]) < 2e-2


MUTATIONS = {
    "q and kv weights swapped": lambda g: (
        g | {"weight_dq": g["weight_dkv_kr"][:, :Q_LORA].contiguous()}
    ),
    "rope before nope": lambda g: (
        g
        | {
            "weight_uq_qr": g["weight_uq_qr"]
            .view(Q_LORA, HEADS, -1)
            .roll(ROPE, -1)
            .reshape(Q_LORA, -1)
        }
    ),
    "weights in half layout already": lambda g: (
        g
        | {
            "weight_dkv_kr": torch.cat(
                [
                    g["weight_dkv_kr"][:, :LATENT],
                    g["weight_dkv_kr"][:, LATENT::2],
                    g["weight_dkv_kr"][:, LATENT + 1 :: 2],
                ],
                -1,
            )
        }
    ),
    "cos and sin swapped": lambda g: g | {"rope_sin": g["rope_cos"], "rope_cos": g["rope_sin"]},
    "positions off by one": lambda g: (
        g | {"rope_sin": g["rope_sin"].roll(1, 0), "rope_cos": g["rope_cos"].roll(1, 0)}
    ),
    "slots off by one": lambda g: g | {"cache_index": g["cache_index"] + 1},
    "gammas swapped": lambda g: (
        g | {"rmsnorm_gamma_cq": g["rmsnorm_gamma_ckv"], "rmsnorm_gamma_ckv": g["rmsnorm_gamma_cq"]}
    ),
    "heads swapped": lambda g: g | {"weight_uk": g["weight_uk"].flip(0)},
    "caches of another call": lambda g: g | {"kv_cache": torch.zeros_like(g["kv_cache"])},
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_wrong_wiring_is_seen(inputs, mutation):
    given = inputs()
    results = npu_mla_prolog_v3(**MUTATIONS[mutation](given))
    expected = expected_of(given)
    errors = {
        name: relative(value.nan_to_num(), expected[name])
        for name, value in seen(results, given).items()
    }
    assert max(errors.values()) > 2e-2, errors


@pytest.mark.parametrize(
    "name",
    ["dequant_scale_x", "dequant_scale_w_dq", "dequant_scale_w_uq_qr", "dequant_scale_w_dkv_kr"],
)
def test_a_missing_or_stale_scale_is_seen(inputs, name):
    given, exact = quantized_inputs(inputs, 2)
    with pytest.raises(ValueError, match=name):
        npu_mla_prolog_v3(**{k: v for k, v in given.items() if k != name}, weight_quant_mode=2)
    stale = given | {name: given[name].flip(-1) * 1.5}
    results = npu_mla_prolog_v3(**stale, weight_quant_mode=2)
    errors = [
        relative(v.nan_to_num(), expected_of(exact)[k]) for k, v in seen(results, stale).items()
    ]
    assert max(errors) > 2e-2 or name == "dequant_scale_x"
    if name == "dequant_scale_x":
        # The norms undo a factor a token: only the key's RoPE part keeps it.
        assert errors[3] > 2e-2


def test_the_functional_form_leaves_its_caches_alone(inputs):
    given = inputs()
    seven = npu_mla_prolog_v3_functional(**given)
    assert len(seven) == 7
    assert given["kv_cache"].isnan().all()
    five = npu_mla_prolog_v3(**given)
    for a, b in zip(five, seven[:5], strict=True):
        assert torch.equal(a, b)
    assert torch.equal(seven[5].nan_to_num(), given["kv_cache"].nan_to_num())
    assert torch.equal(seven[6].nan_to_num(), given["kr_cache"].nan_to_num())


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"weight_quant_mode": 5}, "weight_quant_mode"),
        ({"cache_mode": "PA_BLK_BSND"}, "PA_BLK_BSND"),
        ({"cache_mode": "TND"}, "TND"),
        ({"token_x_dtype": 1}, "token_x_dtype"),
    ],
)
def test_what_is_not_there_is_named(inputs, change, word):
    with pytest.raises(NotImplementedError, match=word):
        npu_mla_prolog_v3(**(inputs() | change))


def test_what_the_op_refuses(inputs):
    given = inputs()
    for change, word in (
        ({"cache_index": None}, "cache_index"),
        ({"cache_index": torch.tensor(SLOTS, dtype=torch.int32)}, "int64"),
        ({"cache_index": torch.tensor([0, 1, 12])}, "12"),
        ({"cache_index": torch.tensor([0, 1, -1])}, "-1"),
        ({"token_x": given["token_x"].bfloat16()}, "token_x must be"),
        ({"weight_uq_qr": given["weight_uq_qr"][:, 1:]}, "do not fit"),
        ({"weight_dq": given["weight_dq"].t().contiguous().t()}, "weight_dq must be contiguous"),
        ({"kv_cache": given["kv_cache"].transpose(0, 1).contiguous().transpose(0, 1)}, "cache"),
    ):
        with pytest.raises(ValueError, match=word):
            npu_mla_prolog_v3(**(given | change))
