"""Which argument belongs to which quantization of npu_mla_prolog_v3, and its shape and dtype.

Written out from aclnnMlaPrologV3WeightNz and the op's tiling checks, not from the catalog.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npu_backend.catalog import load_catalog
from npu_backend.testing.sim import OpRejectedError, TensorSpec, validators

T, HIDDEN, Q_LORA, HEADS, NOPE, KV, ROPE = 4, 7168, 1536, 16, 128, 512, 64
COLUMNS = HEADS * (NOPE + ROPE)
FP32, E8M0, HIF8 = "float32", "float8_e8m0fnu", 290
TRIPLES = [
    (0, 0, 0), (1, 0, 0), (1, 2, 0), (1, 3, 0),
    *((w, *rest) for w in (2, 3, 4, 5) for rest in ((0, 0), (1, 1), (3, 0))),
]  # fmt: skip
EIGHT = {1: "int8", 2: "int8", 3: "float8_e4m3fn", 4: "float8_e4m3fn", 5: "uint8"}
PER_CHANNEL = {
    "dequant_scale_x": (T, 1),
    "dequant_scale_w_dq": (1, Q_LORA),
    "dequant_scale_w_uq_qr": (1, COLUMNS),
    "dequant_scale_w_dkv_kr": (1, KV + ROPE),
}
BLOCKS = {
    "dequant_scale_x": (T, HIDDEN // 32),
    "dequant_scale_w_dq": (Q_LORA, HIDDEN // 32),
    "dequant_scale_w_uq_qr": (COLUMNS, Q_LORA // 32),
    "dequant_scale_w_dkv_kr": (KV + ROPE, HIDDEN // 32),
}
OTHERS = ("quant_scale_ckv", "quant_scale_ckr", "smooth_scales_cq", "k_nope_clip_alpha")


def rejected(match: str):
    return pytest.raises(OpRejectedError, match=match)


def scales_of(mode):
    """The scales that a mode needs, as the documents list them."""
    weight, kv, _ = mode
    found = {}
    if weight == 1:
        found["dequant_scale_w_uq_qr"] = TensorSpec((1, COLUMNS), FP32)
    elif weight == 3:
        found = {name: TensorSpec(shape, E8M0) for name, shape in BLOCKS.items()}
    elif weight:
        found = {name: TensorSpec(shape, FP32) for name, shape in PER_CHANNEL.items()}
    if kv == 1:
        found["quant_scale_ckv"] = TensorSpec((1,), FP32)
    if kv == 2:
        found["quant_scale_ckv"] = TensorSpec((1, KV), FP32)
        found["quant_scale_ckr"] = TensorSpec((1, ROPE), FP32)
    if kv == 3 and weight in (1, 2):
        found["k_nope_clip_alpha"] = TensorSpec((1,), FP32)
    return found


def call(mode=(0, 0, 0), *, leading=(T,), cache_mode="PA_BSND", drop=(), add=None, **changes):
    """Check a call that is legal but for the changes named by the caller."""
    weight, kv, query = mode
    full = EIGHT[weight] if weight >= 2 else "bfloat16"
    q_b = EIGHT[weight] if weight else "bfloat16"
    packed = kv == 3
    kv_kind = {0: "bfloat16", 2: "int8"}.get(kv) or EIGHT[weight]
    kr_kind = "int8" if kv == 2 else "bfloat16"
    blocks = {"TND": leading, "BSND": leading}.get(cache_mode, (2, 128))
    scales = {n: s for n, s in scales_of(mode).items() if n not in drop} | (add or {})
    paged = cache_mode.startswith("PA_")
    hif8 = ("token_x_dtype", "weight_dq_dtype", "weight_uq_qr_dtype", "weight_dkv_kr_dtype")
    named = dict.fromkeys((*hif8, "kv_cache_dtype") if kv else hif8, HIF8) if weight == 5 else {}
    given_ = {
        "token_x": TensorSpec((*leading, HIDDEN), full),
        "weight_dq": TensorSpec((HIDDEN, Q_LORA), full, format=29),
        "weight_uq_qr": TensorSpec((Q_LORA, COLUMNS), q_b, format=29),
        "weight_uk": TensorSpec((HEADS, NOPE, KV)),
        "weight_dkv_kr": TensorSpec((HIDDEN, KV + ROPE), full, format=29),
        "rmsnorm_gamma_cq": TensorSpec((Q_LORA,)),
        "rmsnorm_gamma_ckv": TensorSpec((KV,)),
        "rope_sin": TensorSpec((*leading, ROPE)),
        "rope_cos": TensorSpec((*leading, ROPE)),
        "kv_cache": TensorSpec((*blocks, 1, 656 if packed else KV), kv_kind),
        "kr_cache": TensorSpec((0,) if packed else (*blocks, 1, ROPE), kr_kind),
        "cache_index": TensorSpec(leading, "int64") if paged else None,
        "cache_mode": cache_mode,
        "weight_quant_mode": weight,
        "kv_cache_quant_mode": kv,
        "query_quant_mode": query,
        "ckvkr_repo_mode": int(packed),
        "quant_scale_repo_mode": int(packed),
        "scales": scales,
        "dtypes": named,
        "soc": "A5" if weight >= 3 else "A3",
    }  # fmt: skip
    validators.npu_mla_prolog_v3(**{**given_, **changes})


@pytest.mark.parametrize("mode", TRIPLES, ids=str)
def test_a_call_with_exactly_what_the_mode_names_is_legal(mode) -> None:
    call(mode)
    if mode[0] in (0, 1, 2):
        call(mode, soc="A5")
    else:
        with rejected(f"weight_quant_mode = {mode[0]} is not supported"):
            call(mode, soc="A3")


def test_no_other_triple_is_legal() -> None:
    for w in range(6):
        for kv in range(-1, 5):
            for q in range(-1, 3):
                if (w, kv, q) not in TRIPLES:
                    with rejected("quant modes"):
                        call((0, 0, 0), weight_quant_mode=w, kv_cache_quant_mode=kv,
                             query_quant_mode=q, soc="A5")  # fmt: skip


@pytest.mark.parametrize("mode", TRIPLES, ids=str)
def test_each_needed_scale_is_needed(mode) -> None:
    for name in scales_of(mode):
        with rejected(f"{name} is needed in weight_quant_mode {mode[0]}"):
            call(mode, drop=(name,))


@pytest.mark.parametrize("mode", TRIPLES, ids=str)
def test_a_scale_of_another_mode_must_not_be_given(mode) -> None:
    needed = scales_of(mode)
    allowed = set(needed) | ({"smooth_scales_cq"} if mode[0] in (1, 2, 4, 5) else set())
    for name in (*PER_CHANNEL, *OTHERS):
        if name not in allowed:
            with rejected(f"{name} must not be given in weight_quant_mode {mode[0]}"):
                call(mode, add={name: TensorSpec((1,), FP32)})


@pytest.mark.parametrize("mode", [(1, 0, 0), (2, 0, 0), (4, 0, 0), (5, 0, 0)], ids=str)
def test_smooth_scales_are_optional(mode) -> None:
    call(mode, add={"smooth_scales_cq": TensorSpec((1, Q_LORA), FP32)})
    for shape in ((Q_LORA,), (1, Q_LORA - 1), (1, Q_LORA + 1)):
        with rejected("smooth_scales_cq should have shape"):
            call(mode, add={"smooth_scales_cq": TensorSpec(shape, FP32)})


@pytest.mark.parametrize("mode", [m for m in TRIPLES if m[0]], ids=str)
def test_shapes_and_dtypes_of_scales(mode) -> None:
    for name, spec in scales_of(mode).items():
        for axis in range(spec.rank):
            for off in (-1, 1):
                shape = list(spec.shape)
                shape[axis] += off
                with rejected(f"{name} should have shape"):
                    call(mode, add={name: TensorSpec(shape, spec.dtype)})
        for dtype in ("bfloat16", FP32 if spec.dtype == E8M0 else E8M0):
            with rejected(f"{name} in weight_quant_mode .* supports dtype {spec.dtype}, but is"):
                call(mode, add={name: TensorSpec(spec.shape, dtype)})


def test_bytes_stand_for_e8m0_on_line_26_0_only() -> None:
    """Which chips a line documents is another matter: 26.0 has the mode, and no A5."""
    figure = load_catalog().value
    assert "uint8" in figure("npu_mla_prolog_v3", "mx_scale_dtypes", line="26.0")
    for line in ("26.1", "26.2"):
        assert figure("npu_mla_prolog_v3", "mx_scale_dtypes", line=line) == [E8M0]
    with rejected("supports dtype float8_e8m0fnu, but is uint8"):
        call((3, 0, 0), add={"dequant_scale_x": TensorSpec((T, HIDDEN // 32), "uint8")})


@pytest.mark.parametrize("mode", TRIPLES, ids=str)
def test_repository_modes_are_one_exactly_where_the_cache_is_packed(mode) -> None:
    wanted = int(mode[1] == 3)
    for name in ("ckvkr_repo_mode", "quant_scale_repo_mode"):
        with rejected(f"{name} = {1 - wanted} must be {wanted}"):
            call(mode, **{name: 1 - wanted})


@given(st.sampled_from([m for m in TRIPLES if m[1] == 3]), st.sampled_from([0, 64, 127, 129, 256]))
def test_the_tile_is_128_where_the_cache_is_packed(mode, tile) -> None:
    call(mode, tile_size=128)
    with rejected(f"tile_size = {tile} must be 128"):
        call(mode, tile_size=tile)
    call((0, 0, 0), tile_size=tile)


@pytest.mark.parametrize("mode", TRIPLES, ids=str)
def test_the_cache_is_656_wide_where_packed_and_512_else(mode) -> None:
    width = 656 if mode[1] == 3 else 512
    kind = {0: "bfloat16", 2: "int8"}.get(mode[1]) or EIGHT[mode[0]]
    call(mode, kv_cache=TensorSpec((2, 128, 1, width), kind))
    for off in (width - 1, width + 1, 512 + 656 - width):
        with rejected(f"last dimension should be {width}, but is {off}"):
            call(mode, kv_cache=TensorSpec((2, 128, 1, off), kind))
    for wrong in {"bfloat16", "int8", "float8_e4m3fn", "float16"} - {kind}:
        with rejected("kv_cache in weight_quant_mode"):
            call(mode, kv_cache=TensorSpec((2, 128, 1, width), wrong))


@pytest.mark.parametrize("mode", TRIPLES, ids=str)
def test_the_key_cache_is_empty_exactly_where_the_cache_is_packed(mode) -> None:
    kind = "int8" if mode[1] == 2 else "bfloat16"
    if mode[1] == 3:
        for empty in ((0,), (2, 128, 1, 0), (0, 128, 1, 64)):
            call(mode, kr_cache=TensorSpec(empty))
        with rejected("kr_cache must be empty"):
            call(mode, kr_cache=TensorSpec((2, 128, 1, ROPE)))
        return
    for shape in ((0,), (2, 128, 1, 0), (2, 128, 1, 63), (2, 128, 1, 65), (3, 128, 1, 64)):
        with rejected("kr_cache should have shape"):
            call(mode, kr_cache=TensorSpec(shape, kind))
    with rejected("kr_cache in weight_quant_mode"):
        call(mode, kr_cache=TensorSpec((2, 128, 1, 64), "int8" if kind != "int8" else "bfloat16"))


@pytest.mark.parametrize("mode", [m for m in TRIPLES if m[1] == 3], ids=str)
def test_a_packed_cache_is_never_nz_nor_by_blocks(mode) -> None:
    call(mode)
    call(mode, cache_mode="TND")
    call(mode, cache_mode="BSND", leading=(2, 2))
    for cache_mode in ("PA_NZ", "PA_BLK_BSND", "PA_BLK_NZ"):
        with rejected("cache_mode with kv_cache_quant_mode 3"):
            call(mode, cache_mode=cache_mode)


def test_caches_of_one_slot_a_token_follow_the_tokens() -> None:
    call(cache_mode="TND")
    call(cache_mode="BSND", leading=(2, 2))
    with rejected("cache_mode TND is not supported with a 3D token_x"):
        call(cache_mode="TND", leading=(2, 2))
    with rejected("cache_mode BSND is not supported with a 2D token_x"):
        call(cache_mode="BSND")
    with rejected("cache_index must not be given in cache_mode TND"):
        call(cache_mode="TND", cache_index=TensorSpec((T,), "int64"))
    for tokens in (T - 1, T + 1):
        with rejected("kv_cache should have shape"):
            call(cache_mode="TND", kv_cache=TensorSpec((tokens, 1, KV)))
    for cache_mode in ("PA_BSND", "PA_NZ", "PA_BLK_BSND"):
        with rejected(f"cache_index is needed in cache_mode {cache_mode}"):
            call(cache_mode=cache_mode, cache_index=None)


def test_blocks_take_one_index_a_page() -> None:
    for length, pages in ((127, 1), (128, 1), (129, 2)):
        index = TensorSpec((2, pages), "int64")
        call(cache_mode="PA_BLK_NZ", leading=(2, length), cache_index=index)
        with rejected("cache_index should have shape"):
            wrong = TensorSpec((2, pages + 1), "int64")
            call(cache_mode="PA_BLK_NZ", leading=(2, length), cache_index=wrong)
    ends, pages_ = TensorSpec((2,), "int32"), TensorSpec((5,), "int64")
    call(cache_mode="PA_BLK_BSND", cache_index=pages_, actual_seq_len=ends)
    with rejected("actual_seq_len is needed in cache_mode PA_BLK_BSND with a 2D token_x"):
        call(cache_mode="PA_BLK_BSND", cache_index=pages_)
    with rejected("actual_seq_len supports dtype int32"):
        call(cache_mode="PA_BLK_BSND", cache_index=pages_, actual_seq_len=TensorSpec((2,), "int64"))


@pytest.mark.parametrize("mode", TRIPLES, ids=str)
def test_dtypes_of_inputs_and_weights(mode) -> None:
    weight = mode[0]
    for name, shape in (
        ("token_x", (T, HIDDEN)),
        ("weight_dq", (HIDDEN, Q_LORA)),
        ("weight_uq_qr", (Q_LORA, COLUMNS)),
        ("weight_dkv_kr", (HIDDEN, KV + ROPE)),
    ):
        quantized = weight >= 2 or (weight == 1 and name == "weight_uq_qr")
        right = EIGHT[weight] if quantized else "bfloat16"
        for wrong in {"bfloat16", "int8", "float8_e4m3fn", "float8_e5m2", "float16"} - {right}:
            with rejected(f"{name} in weight_quant_mode {weight} supports dtype"):
                call(mode, **{name: TensorSpec(shape, wrong, format=29)})
    with rejected("weight_uk supports dtype bfloat16"):
        call(mode, weight_uk=TensorSpec((HEADS, NOPE, KV), "int8"))


@pytest.mark.parametrize("mode", [(5, 0, 0), (5, 1, 1), (5, 3, 0)], ids=str)
def test_hifloat8_is_named_for_each_tensor_that_is_in_it(mode) -> None:
    names = ["token_x_dtype", "weight_dq_dtype", "weight_uq_qr_dtype", "weight_dkv_kr_dtype"]
    if mode[1]:
        names.append("kv_cache_dtype")
    call(mode, dtypes=dict.fromkeys(names, HIF8))
    for name in names:
        for wrong in (None, HIF8 - 1, HIF8 + 1):
            with rejected(f"{name} must be torch_npu.hifloat8"):
                call(mode, dtypes={**dict.fromkeys(names, HIF8), name: wrong})


def test_the_limits_are_figures_with_a_source() -> None:
    figure = load_catalog().figure
    for key, value in {
        "packed_cache_modes": ["PA_BSND", "BSND", "TND"],
        "packed_kv_width": 656,
        "packed_tile": 128,
        "clip_alpha_weight_modes": [1, 2],
        "smooth_weight_modes": [1, 2, 4, 5],
        "mx_block": 32,
    }.items():
        found = figure("npu_mla_prolog_v3", key)
        assert found is not None
        assert found.value == value
        assert len(found.source) > 30
    assert figure("npu_mla_prolog_v3", "mx_scale_dtypes", line="7.3") is None
