"""Limits of the RoPE and RMSNorm ops."""

from __future__ import annotations

from npu_backend.testing.sim.limits import Place
from npu_backend.testing.sim.spec import TensorSpec
from npu_backend.testing.sim.validators.base import Check

__all__ = ["npu_interleave_rope", "npu_kv_rmsnorm_rope_cache", "npu_rms_norm"]

_HALVES = ("float16", "bfloat16")
KV_CACHE_MODES = ("Norm", "PA", "PA_BNSD", "PA_NZ", "PA_BLK_BNSD", "PA_BLK_NZ")


def npu_rms_norm(
    x: TensorSpec,
    gamma: TensorSpec,
    *,
    soc: str = "A3",
    cann: str | None = None,
    line: str | None = None,
) -> None:
    """Check a call of ``npu_rms_norm``: gamma has the shape of x's last dimensions.

    Raises:
        OpRejectedError: The op would refuse the call.
    """
    check = Check("npu_rms_norm", Place.of(soc, cann, line))
    check.dtype("self", x, (*_HALVES, "float32"))
    check.dtype("gamma", gamma, (*_HALVES, "float32"))
    check.that(
        1 <= gamma.rank <= x.rank and x.shape[x.rank - gamma.rank :] == gamma.shape,
        f"gamma of shape {gamma.shape} does not fit the last dimensions of {x.shape}",
    )


def npu_interleave_rope(
    x: TensorSpec,
    cos: TensorSpec,
    sin: TensorSpec,
    *,
    soc: str = "A3",
    cann: str | None = None,
    line: str | None = None,
) -> None:
    """Check a call of ``npu_interleave_rope``: x (B, N, S, 64), cos and sin (B, 1, S or 1, 64).

    Raises:
        OpRejectedError: The op would refuse the call.
    """
    op = "npu_interleave_rope"
    place = Place.of(soc, cann, line)
    check = Check(op, place)
    for name, spec in (("x", x), ("cos", cos), ("sin", sin)):
        check.rank(name, spec, 4)
        check.dtype(name, spec, _HALVES)
        check.that(spec.dtype == x.dtype, f"{name} is {spec.dtype}, x is {x.dtype}")
        check.one_of(f"D of {name}", spec.shape[3], place.value(op, "head_dim"))
    check.that(cos.shape == sin.shape, f"cos {cos.shape} and sin {sin.shape} differ")
    check.that(cos.shape[0] == x.shape[0], f"B of cos is {cos.shape[0]}, of x {x.shape[0]}")
    check.that(cos.shape[1] == 1, f"N of cos and sin must be 1, but is {cos.shape[1]}")
    check.that(cos.shape[2] in (1, x.shape[2]), f"S of cos is {cos.shape[2]}, of x {x.shape[2]}")
    check.contiguous(x=x, cos=cos, sin=sin)


def npu_kv_rmsnorm_rope_cache(
    kv: TensorSpec,
    gamma: TensorSpec,
    cos: TensorSpec,
    sin: TensorSpec,
    index: TensorSpec,
    k_cache: TensorSpec,
    ckv_cache: TensorSpec,
    *,
    cache_mode: str = "Norm",
    quantized: bool = False,
    soc: str = "A3",
    cann: str | None = None,
    line: str | None = None,
    op: str = "npu_kv_rmsnorm_rope_cache",
) -> None:
    """Check a call of ``npu_kv_rmsnorm_rope_cache`` or its ``_v2`` without memory.

    Args:
        kv: (B, 1, S, 576).
        gamma: (512,).
        cos: (B, 1, S, 64).
        sin: (B, 1, S, 64).
        index: int64, (B, S) in mode Norm, (B * S,) in the paged modes; without duplicates.
        k_cache: (blocks, block size, 1, 64), or (B, 1, length, 64) in mode Norm.
        ckv_cache: As ``k_cache`` with width 512.
        cache_mode: ``Norm``, ``PA``, ``PA_BNSD``, ``PA_NZ``, ``PA_BLK_BNSD`` or ``PA_BLK_NZ``.
        quantized: Whether scales are given.
        soc: Chip or family.
        cann: CANN version; the newest known by default.
        line: TorchNPU line; the one paired with ``cann`` by default.
        op: Name for the messages.

    Raises:
        OpRejectedError: The op would refuse the call.
    """
    place = Place.of(soc, cann, line)
    check = Check(op, place)
    check.one_of("cache_mode", cache_mode, KV_CACHE_MODES)
    check.rank("kv", kv, 4)
    check.rank("gamma", gamma, 1)
    check.dtype("kv", kv, _HALVES)
    for name, spec in (("gamma", gamma), ("cos", cos), ("sin", sin)):
        check.that(spec.dtype == kv.dtype, f"{name} is {spec.dtype}, kv is {kv.dtype}")
    batch, heads, length, width = kv.shape
    check.that(heads == 1, f"N of kv must be 1, but is {heads}")
    check.one_of("hidden_size of kv", width, place.value("npu_kv_rmsnorm_rope_cache", "kv_width"))
    norm = gamma.shape[0]
    rope = width - norm
    for name, spec in (("cos", cos), ("sin", sin)):
        check.rank(name, spec, 4)
        check.that(
            spec.shape in ((batch, 1, length, rope), (batch, 1, 1, rope)),
            f"{name} should have shape {(batch, 1, length, rope)}, but has {spec.shape}",
        )
    check.dtype("index", index, ("int64",))
    for name, spec, last in (("k_cache", k_cache, rope), ("ckv_cache", ckv_cache, norm)):
        check.rank(name, spec, 4)
        check.that(spec.shape[3] == last, f"{name}'s width should be {last}, is {spec.shape[3]}")
        check.dtype(name, spec, ("int8",) if quantized else (kv.dtype,))
    if cache_mode == "Norm":
        check.shape("index", index, batch, length)
        for name, spec in (("k_cache", k_cache), ("ckv_cache", ckv_cache)):
            check.that(spec.shape[:2] == (batch, 1), f"{name} should start with {(batch, 1)}")
            check.that(spec.shape[2] >= length, f"{name} holds {spec.shape[2]}, needs {length}")
        return
    check.that(k_cache.shape[:3] == ckv_cache.shape[:3], "k_cache and ckv_cache differ in blocks")
    check.that(k_cache.shape[2] == 1, f"the caches have {k_cache.shape[2]} heads, must be 1")
    blocks = -(-length // k_cache.shape[1]) if k_cache.shape[1] else 0
    check.shape("index", index, batch * (blocks if "BLK" in cache_mode else length))
