"""Limits of the ``npu_mla_prolog`` family."""

from __future__ import annotations

from npu_backend.testing.sim.limits import Place
from npu_backend.testing.sim.spec import TensorSpec
from npu_backend.testing.sim.validators.base import Check
from npu_backend.testing.sim.validators.prolog_modes import Dims, Modes, check_arguments

__all__ = ["npu_mla_prolog", "npu_mla_prolog_v2", "npu_mla_prolog_v3"]

_V3 = "npu_mla_prolog_v3"


def _weights(
    check: Check,
    token_x: TensorSpec,
    weight_dq: TensorSpec,
    weight_uq_qr: TensorSpec,
    weight_uk: TensorSpec,
    weight_dkv_kr: TensorSpec,
) -> Dims:
    """Check the weights' shapes and formats; return the call's sizes."""
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
    tokens = 1
    for size in token_x.shape[:-1]:
        tokens *= size
    return Dims(tokens, hidden, q_lora, heads, nope, kv_lora, rope)


def _dtypes(
    check: Check,
    modes: Modes,
    token_x: TensorSpec,
    dq: TensorSpec,
    uq_qr: TensorSpec,
    dkv: TensorSpec,
) -> None:
    floats = check.place.value(_V3, "dtypes")
    named = {"token_x": token_x, "weight_dq": dq, "weight_uq_qr": uq_qr, "weight_dkv_kr": dkv}
    for name, spec in named.items():
        quantized = modes.all_quantized or (modes.weight == 1 and name == "weight_uq_qr")
        allowed = modes.eight_bit(check.place) if quantized else floats
        check.dtype(f"{name} in weight_quant_mode {modes.weight}", spec, allowed)


def _cache_mode(check: Check, modes: Modes, cache_mode: str, token_x: TensorSpec) -> None:
    place = check.place
    check.one_of("cache_mode", cache_mode, place.value(_V3, "cache_modes"))
    if modes.packed:
        allowed = place.value(_V3, "packed_cache_modes")
        check.one_of("cache_mode with kv_cache_quant_mode 3", cache_mode, allowed)
    flat = token_x.rank == 2
    other = "BSND" if flat else "TND"
    check.that(
        cache_mode != other,
        f"cache_mode {other} is not supported with a {token_x.rank}D token_x",
    )


def _caches(
    check: Check,
    modes: Modes,
    cache_mode: str,
    kv_cache: TensorSpec,
    kr_cache: TensorSpec,
    leading: tuple[int, ...],
    dims: Dims,
) -> None:
    place = check.place
    width = place.value(_V3, "packed_kv_width") if modes.packed else dims.kv_lora
    rank = 3 if cache_mode == "TND" else 4
    check.rank("kv_cache", kv_cache, rank)
    check.that(
        kv_cache.shape[-1] == width,
        f"kv_cache's last dimension should be {width}, but is {kv_cache.shape[-1]}",
    )
    check.that(kv_cache.shape[-2] == 1, f"kv_cache has {kv_cache.shape[-2]} KV heads, must be 1")
    check.dtype(f"kv_cache in {modes}", kv_cache, modes.kv_dtypes(place))
    if cache_mode.startswith("PA_"):
        size = kv_cache.shape[1]
        low, high = place.value(_V3, "block_size_min"), place.value(_V3, "block_size_max")
        step = place.value(_V3, "block_size_multiple")
        check.that(
            low <= size <= high and size % step == 0,
            f"block size {size} must be {low}..{high} in steps of {step}",
        )
    else:
        check.shape("kv_cache", kv_cache, *leading, 1, width)
    if modes.packed:
        check.that(
            0 in kr_cache.shape,
            f"kr_cache must be empty with ckvkr_repo_mode 1, but has shape {kr_cache.shape}",
        )
        return
    check.shape("kr_cache", kr_cache, *kv_cache.shape[:-1], dims.rope)
    check.dtype(f"kr_cache in {modes}", kr_cache, modes.kr_dtypes(place))


def _index(
    check: Check,
    cache_mode: str,
    block: int,
    leading: tuple[int, ...],
    cache_index: TensorSpec | None,
    actual_seq_len: TensorSpec | None,
) -> None:
    if not cache_mode.startswith("PA_"):
        check.that(cache_index is None, f"cache_index must not be given in cache_mode {cache_mode}")
        return
    if cache_index is None:
        raise check.place.reject(check.op, f"cache_index is needed in cache_mode {cache_mode}")
    check.dtype("cache_index", cache_index, ("int64",))
    if "BLK" not in cache_mode:
        check.shape("cache_index", cache_index, *leading)
    elif len(leading) == 2:
        check.shape("cache_index", cache_index, leading[0], -(-leading[1] // block))
    else:
        check.rank("cache_index", cache_index, 1)
        if actual_seq_len is None:
            raise check.place.reject(
                check.op, f"actual_seq_len is needed in cache_mode {cache_mode} with a 2D token_x"
            )
        check.rank("actual_seq_len", actual_seq_len, 1)
        check.dtype("actual_seq_len", actual_seq_len, ("int32",))


def _repository(check: Check, modes: Modes, ckvkr: int, scales: int, tile: int) -> None:
    wanted = int(modes.packed)
    for name, value in (("ckvkr_repo_mode", ckvkr), ("quant_scale_repo_mode", scales)):
        check.that(
            value == wanted,
            f"{name} = {value} must be {wanted} with kv_cache_quant_mode {modes.kv}",
        )
    if modes.packed:
        only = check.place.value(_V3, "packed_tile")
        check.that(tile == only, f"tile_size = {tile} must be {only}")


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
    actual_seq_len: TensorSpec | None = None,
    scales: dict[str, TensorSpec | None] | None = None,
    dtypes: dict[str, int | None] | None = None,
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
        kv_cache: (blocks, block size, 1, kv_lora_rank) for paged modes, (tokens, 1, kv_lora_rank)
            for ``TND``, (batch, length, 1, kv_lora_rank) for ``BSND``; 656 wide in
            kv_cache_quant_mode 3.
        kr_cache: As ``kv_cache``, rope wide; empty in kv_cache_quant_mode 3.
        cache_index: int64: one slot a token for ``PA_BSND`` and ``PA_NZ``, one block a page for
            ``PA_BLK_BSND`` and ``PA_BLK_NZ``, none for the others.
        cache_mode: One of the op's cache modes.
        weight_quant_mode: 0 none, 1 int8 weight_uq_qr, 2 int8, 3 MXFP8, 4 fp8, 5 hifloat8.
        kv_cache_quant_mode: 0 none, 1 per tensor, 2 per channel, 3 per tile, packed.
        query_quant_mode: 0 none, 1 per token and head.
        ckvkr_repo_mode: 1 where latent and rotated key share a row, else 0.
        quant_scale_repo_mode: 1 where the scales are in that row, too, else 0.
        tile_size: Latents a scale of kv_cache_quant_mode 3.
        actual_seq_len: int32 (batch,), ends of the sequences; for paged blocks and 2D ``token_x``.
        scales: The scale arguments by name, ``k_nope_clip_alpha`` among them.
        dtypes: The ``*_dtype`` arguments by name, for hifloat8.
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
    modes = Modes(weight_quant_mode, kv_cache_quant_mode, query_quant_mode)
    legal = [tuple(row) for row in place.value(_V3, "mode_triples")]
    triple = (modes.weight, modes.kv, modes.query)
    check.one_of("(weight, kv_cache, query) quant modes", triple, legal)
    _repository(check, modes, ckvkr_repo_mode, quant_scale_repo_mode, tile_size)
    dims = _weights(check, token_x, weight_dq, weight_uq_qr, weight_uk, weight_dkv_kr)
    _dtypes(check, modes, token_x, weight_dq, weight_uq_qr, weight_dkv_kr)
    leading = token_x.shape[:-1]
    check.shape("rope_sin", rope_sin, *leading, dims.rope)
    check.shape("rope_cos", rope_cos, *leading, dims.rope)
    check.shape("rmsnorm_gamma_cq", rmsnorm_gamma_cq, dims.q_lora)
    check.shape("rmsnorm_gamma_ckv", rmsnorm_gamma_ckv, dims.kv_lora)
    floats = place.value(_V3, "dtypes")
    for name, spec in (("rope_sin", rope_sin), ("rope_cos", rope_cos)):
        check.dtype(name, spec, floats)
    check.dtype("rmsnorm_gamma_cq", rmsnorm_gamma_cq, floats)
    check.dtype("rmsnorm_gamma_ckv", rmsnorm_gamma_ckv, floats)
    _cache_mode(check, modes, cache_mode, token_x)
    _caches(check, modes, cache_mode, kv_cache, kr_cache, leading, dims)
    block = kv_cache.shape[1] if cache_mode.startswith("PA_") else 1
    _index(check, cache_mode, block, leading, cache_index, actual_seq_len)
    given = scales or {}
    check_arguments(check, modes, dims, given, dtypes or {})
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
        actual_seq_len=actual_seq_len,
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
