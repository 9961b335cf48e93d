"""Limits of the ``npu_mla_prolog`` family."""

from __future__ import annotations

from collections.abc import Sequence

from npu_backend.testing.sim.limits import Place
from npu_backend.testing.sim.spec import TensorSpec
from npu_backend.testing.sim.validators.base import Check

__all__ = ["npu_mla_prolog", "npu_mla_prolog_v2", "npu_mla_prolog_v3"]

_V3 = "npu_mla_prolog_v3"


def _weights(
    check: Check,
    token_x: TensorSpec,
    weight_dq: TensorSpec,
    weight_uq_qr: TensorSpec,
    weight_uk: TensorSpec,
    weight_dkv_kr: TensorSpec,
) -> tuple[int, int, int]:
    """Check the weights' shapes; return (q_lora_rank, kv_lora_rank, rope)."""
    place = check.place
    check.rank("token_x", token_x, 2, 3)
    for name, spec in (("weight_dq", weight_dq), ("weight_uq_qr", weight_uq_qr)):
        check.rank(name, spec, 2)
    check.rank("weight_dkv_kr", weight_dkv_kr, 2)
    check.rank("weight_uk", weight_uk, 3)
    hidden = token_x.shape[-1]
    q_lora = weight_dq.shape[1]
    heads, nope, kv_lora = weight_uk.shape
    rope = weight_dkv_kr.shape[1] - kv_lora
    check.one_of("hidden size He", hidden, place.value(_V3, "hidden_size"))
    check.one_of("q_lora_rank Hcq", q_lora, place.value(_V3, "q_lora_rank"))
    check.one_of("kv_lora_rank Hckv", kv_lora, place.value(_V3, "kv_lora_rank"))
    check.one_of("qk_nope_head_dim D", nope, place.value(_V3, "qk_nope_head_dim"))
    check.one_of("qk_rope_head_dim Dr", rope, place.value(_V3, "qk_rope_head_dim"))
    most = place.value(_V3, "heads_max")
    check.that(
        1 <= heads <= most and heads & (heads - 1) == 0,
        f"head number N = {heads} must be a power of two, 1..{most}",
    )
    check.shape("weight_dq", weight_dq, hidden, q_lora)
    check.shape("weight_uq_qr", weight_uq_qr, q_lora, heads * (nope + rope))
    check.shape("weight_dkv_kr", weight_dkv_kr, hidden, kv_lora + rope)
    check.nz(weight_dq=weight_dq, weight_uq_qr=weight_uq_qr, weight_dkv_kr=weight_dkv_kr)
    check.nd(weight_uk=weight_uk)
    check.dtype("weight_uk", weight_uk, place.value(_V3, "dtypes"))
    return q_lora, kv_lora, rope


def _dtypes(
    check: Check, mode: int, token_x: TensorSpec, dq: TensorSpec, uq_qr: TensorSpec, dkv: TensorSpec
) -> None:
    floats = check.place.value(_V3, "dtypes")
    quantized = {0: (), 1: ("weight_uq_qr",)}.get(
        mode, ("token_x", "weight_dq", "weight_uq_qr", "weight_dkv_kr")
    )
    eight_bit = {3: ("float8_e4m3fn",), 4: ("float8_e4m3fn",), 5: ("uint8", "bits8")}
    named = {"token_x": token_x, "weight_dq": dq, "weight_uq_qr": uq_qr, "weight_dkv_kr": dkv}
    for name, spec in named.items():
        allowed = eight_bit.get(mode, ("int8",)) if name in quantized else floats
        check.dtype(f"{name} in weight_quant_mode {mode}", spec, allowed)


def _caches(
    check: Check,
    cache_mode: str,
    kv_cache: TensorSpec,
    kr_cache: TensorSpec,
    kv_width: int,
    rope: int,
) -> None:
    place = check.place
    check.one_of("cache_mode", cache_mode, place.value(_V3, "cache_modes"))
    paged = cache_mode.startswith("PA_")
    rank = 3 if cache_mode == "TND" else 4
    check.rank("kv_cache", kv_cache, rank)
    check.rank("kr_cache", kr_cache, rank)
    check.that(
        kv_cache.shape[-1] == kv_width,
        f"kv_cache's last dimension should be {kv_width}, but is {kv_cache.shape[-1]}",
    )
    check.that(
        kr_cache.shape[-1] in (rope, 0),
        f"kr_cache's last dimension should be {rope}, but is {kr_cache.shape[-1]}",
    )
    check.that(kv_cache.shape[-2] == 1, f"kv_cache has {kv_cache.shape[-2]} KV heads, must be 1")
    if paged:
        size = kv_cache.shape[1]
        low, high = place.value(_V3, "block_size_min"), place.value(_V3, "block_size_max")
        step = place.value(_V3, "block_size_multiple")
        check.that(
            low <= size <= high and size % step == 0,
            f"block size {size} must be {low}..{high} in steps of {step}",
        )


def _cache_dtypes(
    check: Check,
    modes: tuple[int, int, int],
    kv_cache: TensorSpec,
    kr_cache: TensorSpec,
    floats: Sequence[str],
) -> None:
    weight, kv, _ = modes
    eight = {1: ("int8",), 2: ("int8",), 5: ("uint8", "bits8")}.get(weight, ("float8_e4m3fn",))
    check.dtype(f"kv_cache in modes {modes}", kv_cache, eight if kv else floats)
    if 0 not in kr_cache.shape:
        check.dtype(f"kr_cache in modes {modes}", kr_cache, eight if kv == 2 else floats)


def _scales(
    check: Check,
    mode: int,
    given: dict[str, TensorSpec | None],
    sizes: dict[str, tuple[int, int]],
) -> None:
    """Check the dequantisation scales: which are given, their shapes and dtypes."""
    needed = {0: (), 1: ("w_uq_qr",)}.get(mode, tuple(sizes))
    for short, (channels, k) in sizes.items():
        name = f"dequant_scale_{short}"
        scale = given.get(name)
        if short not in needed:
            check.that(scale is None, f"{name} is not taken in weight_quant_mode {mode}")
            continue
        check.that(scale is not None, f"{name} is needed in weight_quant_mode {mode}")
        assert scale is not None
        if mode == 3:
            check.shape(name, scale, channels, k // 32)
            check.dtype(name, scale, ("float8_e8m0fnu",))
            continue
        check.dtype(name, scale, ("float32",))
        if short == "x":
            shapes: tuple[tuple[int, ...], ...] = ((channels,), (channels, 1))
        else:
            shapes = ((1, channels),)
        check.one_of(f"shape of {name}", scale.shape, shapes)
    if given.get("smooth_scales_cq") is not None:
        check.that(
            mode in (1, 2, 4, 5), f"smooth_scales_cq is not taken in weight_quant_mode {mode}"
        )


def _quant_scales(
    check: Check, mode: int, given: dict[str, TensorSpec | None], kv_lora: int, rope: int
) -> None:
    """Check the scales that the caches are quantised with."""
    wanted: dict[str, dict[int, tuple[int, ...]]] = {
        "quant_scale_ckv": {1: (1,), 2: (1, kv_lora)},
        "quant_scale_ckr": {2: (1, rope)},
    }
    for name, shapes in wanted.items():
        scale = given.get(name)
        if mode not in shapes:
            check.that(scale is None, f"{name} is not taken in kv_cache_quant_mode {mode}")
            continue
        check.that(scale is not None, f"{name} is needed in kv_cache_quant_mode {mode}")
        assert scale is not None
        check.shape(name, scale, *shapes[mode])
        check.dtype(name, scale, ("float32",))


def npu_mla_prolog_v3(
    token_x: TensorSpec,
    weight_dq: TensorSpec,
    weight_uq_qr: TensorSpec,
    weight_uk: TensorSpec,
    weight_dkv_kr: TensorSpec,
    rmsnorm_gamma_cq: TensorSpec,
    rmsnorm_gamma_ckv: TensorSpec,
    rope_sin: TensorSpec,
    rope_cos: TensorSpec,
    kv_cache: TensorSpec,
    kr_cache: TensorSpec,
    *,
    cache_index: TensorSpec | None = None,
    cache_mode: str = "PA_BSND",
    weight_quant_mode: int = 0,
    kv_cache_quant_mode: int = 0,
    query_quant_mode: int = 0,
    ckvkr_repo_mode: int = 0,
    quant_scale_repo_mode: int = 0,
    tile_size: int = 128,
    scales: dict[str, TensorSpec | None] | None = None,
    soc: str = "A3",
    cann: str | None = None,
    line: str | None = None,
    op: str = _V3,
) -> None:
    """Check a call of ``npu_mla_prolog_v3`` without memory; the token count has no limit.

    Args:
        token_x: (tokens, hidden) or (batch, length, hidden).
        weight_dq: (hidden, q_lora_rank), FRACTAL_NZ.
        weight_uq_qr: (q_lora_rank, heads * (nope + rope)), FRACTAL_NZ.
        weight_uk: (heads, nope, kv_lora_rank), ND.
        weight_dkv_kr: (hidden, kv_lora_rank + rope), FRACTAL_NZ.
        rmsnorm_gamma_cq: (q_lora_rank,).
        rmsnorm_gamma_ckv: (kv_lora_rank,).
        rope_sin: (tokens, rope), or (batch, length, rope).
        rope_cos: As ``rope_sin``.
        kv_cache: (blocks, block size, 1, kv_lora_rank) for paged modes.
        kr_cache: (blocks, block size, 1, rope) for paged modes.
        cache_index: int64, one slot a token, for ``PA_BSND`` and ``PA_NZ``.
        cache_mode: One of the op's cache modes.
        weight_quant_mode: 0 to 5.
        kv_cache_quant_mode: 0 to 3.
        query_quant_mode: 0 or 1.
        ckvkr_repo_mode: 1 where latent and key are packed into kv_cache, else 0.
        quant_scale_repo_mode: As ``ckvkr_repo_mode``.
        tile_size: Latents that share a scale in a packed cache.
        scales: The scale arguments by name.
        soc: Chip or family.
        cann: CANN version; the newest known by default.
        line: TorchNPU line; the one paired with ``cann`` by default.
        op: Name for the messages.

    Raises:
        OpRejectedError: The op would refuse the call.
    """
    place = Place.of(soc, cann, line)
    check = Check(op, place)
    place.check_line(op)
    place.check_chip(_V3)
    check.one_of("weight_quant_mode", weight_quant_mode, place.value(_V3, "weight_quant_modes"))
    modes = (weight_quant_mode, kv_cache_quant_mode, query_quant_mode)
    legal = [tuple(row) for row in place.value(_V3, "mode_triples")]
    check.one_of("(weight, kv_cache, query) quant modes", modes, legal)
    q_lora, kv_lora, rope = _weights(
        check, token_x, weight_dq, weight_uq_qr, weight_uk, weight_dkv_kr
    )
    _dtypes(check, weight_quant_mode, token_x, weight_dq, weight_uq_qr, weight_dkv_kr)
    leading = token_x.shape[:-1]
    check.shape("rope_sin", rope_sin, *leading, rope)
    check.shape("rope_cos", rope_cos, *leading, rope)
    check.shape("rmsnorm_gamma_cq", rmsnorm_gamma_cq, q_lora)
    check.shape("rmsnorm_gamma_ckv", rmsnorm_gamma_ckv, kv_lora)
    floats = place.value(_V3, "dtypes")
    for name, spec in (("rope_sin", rope_sin), ("rope_cos", rope_cos)):
        check.dtype(name, spec, floats)
    check.dtype("rmsnorm_gamma_cq", rmsnorm_gamma_cq, floats)
    check.dtype("rmsnorm_gamma_ckv", rmsnorm_gamma_ckv, floats)
    width = place.value(_V3, "packed_kv_width") if kv_cache_quant_mode == 3 else kv_lora
    _caches(check, cache_mode, kv_cache, kr_cache, width, rope)
    _cache_dtypes(check, modes, kv_cache, kr_cache, floats)
    packed = kv_cache_quant_mode == 3
    repos = (ckvkr_repo_mode, quant_scale_repo_mode)
    check.one_of("(ckvkr_repo_mode, quant_scale_repo_mode)", repos, ((1, 1) if packed else (0, 0),))
    check.that(
        packed == (0 in kr_cache.shape),
        "kr_cache must hold no element where it is packed, and must hold the key elsewhere",
    )
    if packed:
        check.one_of(
            "cache_mode of a packed cache", cache_mode, place.value(_V3, "packed_cache_modes")
        )
        check.one_of("tile_size", tile_size, (128,))
    if cache_mode in ("PA_BSND", "PA_NZ"):
        check.that(cache_index is not None, f"cache_index is needed in cache_mode {cache_mode}")
    if cache_index is not None:
        check.dtype("cache_index", cache_index, ("int64",))
        if cache_mode in ("PA_BSND", "PA_NZ"):
            check.shape("cache_index", cache_index, *leading)
    given = scales or {}
    rows = 1
    for size in leading:
        rows *= size
    sizes = {
        "x": (rows, token_x.shape[-1]),
        "w_dq": (q_lora, token_x.shape[-1]),
        "w_uq_qr": (weight_uq_qr.shape[1], q_lora),
        "w_dkv_kr": (kv_lora + rope, token_x.shape[-1]),
    }
    _scales(check, weight_quant_mode, given, sizes)
    _quant_scales(check, kv_cache_quant_mode, given, kv_lora, rope)
    check.contiguous(
        token_x=token_x,
        weight_dq=weight_dq,
        weight_uq_qr=weight_uq_qr,
        weight_uk=weight_uk,
        weight_dkv_kr=weight_dkv_kr,
        rmsnorm_gamma_cq=rmsnorm_gamma_cq,
        rmsnorm_gamma_ckv=rmsnorm_gamma_ckv,
        rope_sin=rope_sin,
        rope_cos=rope_cos,
        kv_cache=kv_cache,
        kr_cache=kr_cache,
        cache_index=cache_index,
        **given,
    )


def _older(
    op: str,
    tensors: tuple[TensorSpec, TensorSpec, TensorSpec, TensorSpec, TensorSpec],
    cache_index: TensorSpec,
    place: Place,
) -> None:
    check = Check(op, place)
    place.check_line(op)
    check.that(
        place.family in ("A2", "A3"), f"not supported on {place.family}, use npu_mla_prolog_v3"
    )
    _weights(check, *tensors)
    check.dtype("cache_index", cache_index, ("int64",))
    check.shape("cache_index", cache_index, *tensors[0].shape[:-1])


def npu_mla_prolog(
    token_x: TensorSpec,
    weight_dq: TensorSpec,
    weight_uq_qr: TensorSpec,
    weight_uk: TensorSpec,
    weight_dkv_kr: TensorSpec,
    cache_index: TensorSpec,
    *,
    soc: str = "A3",
    cann: str | None = None,
    line: str | None = None,
    op: str = "npu_mla_prolog",
) -> None:
    """Check a call of the first version of the op, by the figures of the third.

    Args:
        token_x: (tokens, hidden) or (batch, length, hidden).
        weight_dq: (hidden, q_lora_rank), FRACTAL_NZ.
        weight_uq_qr: (q_lora_rank, heads * (nope + rope)), FRACTAL_NZ.
        weight_uk: (heads, nope, kv_lora_rank), ND.
        weight_dkv_kr: (hidden, kv_lora_rank + rope), FRACTAL_NZ.
        cache_index: int64, one slot a token.
        soc: Chip or family.
        cann: CANN version; the newest known by default.
        line: TorchNPU line; the one paired with ``cann`` by default.
        op: Name for the messages.

    Raises:
        OpRejectedError: The op would refuse the call.
    """
    tensors = (token_x, weight_dq, weight_uq_qr, weight_uk, weight_dkv_kr)
    _older(op, tensors, cache_index, Place.of(soc, cann, line))


def npu_mla_prolog_v2(
    token_x: TensorSpec,
    weight_dq: TensorSpec,
    weight_uq_qr: TensorSpec,
    weight_uk: TensorSpec,
    weight_dkv_kr: TensorSpec,
    cache_index: TensorSpec,
    *,
    soc: str = "A3",
    cann: str | None = None,
    line: str | None = None,
) -> None:
    """Check a call of the second version; see :func:`npu_mla_prolog`.

    Raises:
        OpRejectedError: The op would refuse the call.
    """
    tensors = (token_x, weight_dq, weight_uq_qr, weight_uk, weight_dkv_kr)
    _older("npu_mla_prolog_v2", tensors, cache_index, Place.of(soc, cann, line))
