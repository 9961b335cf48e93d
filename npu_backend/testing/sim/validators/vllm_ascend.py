"""Limits of vllm-ascend's ``mla_preprocess`` and ``batch_matmul_transpose``.

They are ops of their own in ``torch.ops._C_ascend``, not those of sgl-kernel-npu: other arguments,
other results, sizes taken from the tensors instead of built in.
"""

from __future__ import annotations

from npu_backend.testing.sim.limits import Place
from npu_backend.testing.sim.spec import TensorSpec
from npu_backend.testing.sim.validators import bmm
from npu_backend.testing.sim.validators.base import Check

__all__ = ["batch_matmul_transpose", "mla_preprocess"]

_MLAPO = "_C_ascend::mla_preprocess"
_BMT = "_C_ascend::batch_matmul_transpose"
_CACHE_MODES = ("kvcache", "krope_ctkv", "int8_nzcache", "nzcache")
_QUANT_MODES = (
    "per_tensor_quant_asymm",
    "per_token_quant_symm",
    "per_token_quant_asymm",
    "no_quant",
)
# Optional in the schema. Left out, the op hands its kernel one uninitialised element instead.
_STATIC = ("quant_scale0", "quant_offset0", "bias0", "quant_scale1", "quant_offset1", "bias1")
_QUANTIZED = ("descale0", "beta1", "descale1")


def _variant(check: Check, dtype: str, quant: str, cache: str, inner: bool) -> None:
    """A combination that the kernel has no case for does nothing, without an error."""
    key = "inner_out_variants" if inner else "variants"
    table = check.place.value(_MLAPO, key)
    allowed = table.get(dtype, {}).get(quant, [])
    told = " with enable_inner_out" if inner else ""
    check.that(
        cache in allowed,
        f"{dtype}, quant_mode {quant} and cache_mode {cache}{told} have no kernel: the op would "
        f"compute nothing, without an error; cache modes there: {', '.join(allowed) or 'none'}",
    )


def _weight(check: Check, name: str, spec: TensorSpec, rows: int, columns: int, inner: int) -> None:
    """A weight (N, K) in FRACTAL_NZ, or its bytes written out as (1, K / inner, N, inner)."""
    if spec.rank == 2:
        check.shape(name, spec, rows, columns)
        check.nz(**{name: spec})
    else:
        check.shape(name, spec, 1, columns // inner, rows, inner)
    check.contiguous(**{name: spec})


def _cache(check: Check, name: str, spec: TensorSpec, width: int, nz: bool, block: int) -> None:
    check.rank(name, spec, 4)
    inner = 32 if spec.dtype == "int8" else 16
    shapes = [(spec.shape[0], block, 1, width)]
    if nz:
        shapes.append((spec.shape[0], width // inner, block, inner))
    check.that(
        spec.shape in shapes,
        f"{name} should have shape {' or '.join(map(str, shapes))}, but has {spec.shape}",
    )
    whole = TensorSpec(spec.shape[1:], spec.dtype, spec.stride[1:])
    check.that(
        whole.is_contiguous,
        f"{name} may be non-contiguous in its first dimension only, strides {spec.stride}",
    )


def mla_preprocess(
    hidden_state: TensorSpec,
    wdqkv: TensorSpec,
    gamma1: TensorSpec,
    wuq: TensorSpec,
    gamma2: TensorSpec,
    cos: TensorSpec | None,
    sin: TensorSpec | None,
    wuk: TensorSpec,
    kv_cache: TensorSpec,
    kv_cache_rope: TensorSpec,
    slotmapping: TensorSpec,
    *,
    q_out0: TensorSpec,
    q_out1: TensorSpec,
    inner_out: TensorSpec,
    optional: dict[str, TensorSpec | None] | None = None,
    cache_mode: str | None = None,
    quant_mode: str | None = None,
    enable_inner_out: bool | None = None,
    soc: str = "A3",
    cann: str | None = None,
    line: str | None = None,
) -> None:
    """Check a call of vllm-ascend's ``mla_preprocess`` without memory.

    Args:
        hidden_state: (tokens, hidden).
        wdqkv: int8, (1, hidden / 32, kv + rope + q, 32), or that many rows in FRACTAL_NZ; 16-bit in
            quant_mode ``no_quant``, 16 wide.
        gamma1: (q_lora_rank,).
        wuq: As ``wdqkv``, with heads * (nope + rope) rows and q_lora_rank columns.
        gamma2: (kv_lora_rank,).
        cos: (tokens, rope), or None with ``sin``: nothing is rotated.
        sin: As ``cos``.
        wuk: (heads, nope, kv_lora_rank).
        kv_cache: (blocks, block size, 1, kv_lora_rank), in NZ also (blocks, kv_lora_rank / 16,
            block size, 16); only its first dimension may be strided.
        kv_cache_rope: As ``kv_cache``, rope wide.
        slotmapping: int32, (tokens,).
        q_out0: (tokens, heads, kv_lora_rank), written by the op.
        q_out1: (tokens, heads, rope), written by the op.
        inner_out: (tokens, q_lora_rank) with ``enable_inner_out``: the normed query latent.
        optional: descale0, beta1, descale1, quant_scale0 and the others by name.
        cache_mode: ``krope_ctkv`` by default.
        quant_mode: ``per_token_quant_symm`` by default.
        enable_inner_out: Whether ``inner_out`` is written.
        soc: Chip or family.
        cann: CANN version; the newest known by default.
        line: TorchNPU line; the one paired with ``cann`` by default.

    Raises:
        OpRejectedError: The op would refuse the call, compute wrong numbers or nothing.
    """
    place = Place.of(soc, cann, line)
    check = Check(_MLAPO, place)
    place.check_chip(_MLAPO)
    check.rank("hiddenState", hidden_state, 2)
    check.dtype("hiddenState", hidden_state, place.value(_MLAPO, "dtypes"))
    tokens, hidden = hidden_state.shape
    most = place.value(_MLAPO, "tokens_max")
    check.that(1 <= tokens <= most, f"bIndex is out of range: {tokens} tokens, must be 1..{most}")
    cache, quant = cache_mode or "krope_ctkv", quant_mode or "per_token_quant_symm"
    check.one_of("cache_mode", cache, _CACHE_MODES)
    check.one_of("quant_mode", quant, _QUANT_MODES)
    check.that((cos is None) == (sin is None), "cos and sin must both be given or both be None")
    _variant(check, hidden_state.dtype, quant, cache, bool(enable_inner_out))

    check.rank("wuk", wuk, 3)
    check.rank("gamma1", gamma1, 1)
    heads, nope, kv_lora = wuk.shape
    q_lora, nz = gamma1.shape[0], cache.endswith("nzcache")
    check.rank("kv_cache_rope", kv_cache_rope, 4)
    physical = nz and kv_cache_rope.shape[2] != 1
    rope = kv_cache_rope.shape[-1] * (kv_cache_rope.shape[1] if physical else 1)
    check.one_of("kv_lora_rank", kv_lora, place.value(_MLAPO, "kv_lora_rank"))
    check.one_of("qk_rope_head_dim", rope, place.value(_MLAPO, "qk_rope_head_dim"))
    plain = quant == "no_quant"
    inner, kinds = (16, (hidden_state.dtype,)) if plain else (32, ("int8",))
    for name, spec in (("wdqkv", wdqkv), ("wuq", wuq)):
        check.dtype(f"{name} in quant_mode {quant}", spec, kinds)
    rows = kv_lora + rope + q_lora
    _weight(check, "wdqkv", wdqkv, rows, hidden, inner)
    _weight(check, "wuq", wuq, heads * (nope + rope), q_lora, inner)
    check.shape("gamma2", gamma2, kv_lora)
    for name, table in (("cos", cos), ("sin", sin)):
        if table is not None:
            check.shape(name, table, tokens, rope)
    check.shape("slotmapping", slotmapping, tokens)
    check.dtype("slotmapping", slotmapping, ("int32",))
    block = kv_cache.shape[2 if nz and kv_cache.shape[2] != 1 else 1]
    _cache(check, "kv_cache", kv_cache, kv_lora, nz, block)
    _cache(check, "kv_cache_rope", kv_cache_rope, rope, nz, block)

    given = optional or {}
    needed: tuple[str, ...] = () if plain else _QUANTIZED
    if quant == "per_tensor_quant_asymm":
        needed += _STATIC
    for name in needed:
        check.that(
            given.get(name) is not None,
            f"{name} is needed in quant_mode {quant}: without it the kernel reads uninitialised "
            "memory",
        )
    sizes = {"descale0": rows, "bias0": rows, "beta1": q_lora}
    sizes |= dict.fromkeys(("descale1", "bias1"), heads * (nope + rope))
    for name, size in sizes.items():
        found = given.get(name)
        if found is not None:
            check.shape(name, found, size)
    check.shape("q_out0", q_out0, tokens, heads, kv_lora)
    check.shape("q_out1", q_out1, tokens, heads, rope)
    if enable_inner_out:
        check.shape("inner_out", inner_out, tokens, q_lora)
        check.dtype("inner_out", inner_out, (hidden_state.dtype,))
        check.contiguous(inner_out=inner_out)
    check.contiguous(
        hiddenState=hidden_state, wuk=wuk, q_out0=q_out0, q_out1=q_out1, cos=cos, sin=sin
    )


def batch_matmul_transpose(
    tensor_a: TensorSpec,
    tensor_b: TensorSpec,
    tensor_c: TensorSpec,
    *,
    format_mode: str | None = None,
    quant_mode: str | None = None,
    soc: str = "A3",
    cann: str | None = None,
    line: str | None = None,
) -> None:
    """Check a call of vllm-ascend's ``batch_matmul_transpose`` without memory.

    Args:
        tensor_a: (M, B, K), contiguous.
        tensor_b: (B, K, N) contiguous, or (B, N/16, K, 16) with ``format_mode="NZ"``.
        tensor_c: (M, B, N), contiguous; written by the op though its schema does not say so.
        format_mode: ``ND`` (default) or ``NZ``; it decides the rank of ``tensor_b``.
        quant_mode: One of the op's names; ignored by the limits.
        soc: Chip or family.
        cann: CANN version; the newest known by default.
        line: TorchNPU line; the one paired with ``cann`` by default.

    Raises:
        OpRejectedError: The op would refuse the call, or read a non-contiguous tensor wrongly.
    """
    place = Place.of(soc, cann, line)
    check = Check(_BMT, place)
    if quant_mode is not None:
        check.one_of("quant_mode", quant_mode, place.value(_BMT, "quant_modes"))
    if format_mode in (None, "ND", "NZ"):
        rank = 4 if format_mode == "NZ" else 3
        check.that(
            tensor_b.rank == rank,
            f"tensor_b should be {rank}D in format_mode {format_mode or 'ND'}, "
            f"but is {tensor_b.rank}D",
        )
    bmm.batch_matmul_transpose(
        tensor_a,
        tensor_b,
        tensor_c,
        format_mode=format_mode,
        quant_mode=quant_mode,
        soc=soc,
        cann=cann,
        line=line,
        op=_BMT,
    )
