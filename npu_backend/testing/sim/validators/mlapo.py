"""Limits of sgl-kernel-npu's ``mla_preprocess``."""

from __future__ import annotations

from npu_backend.testing.sim.limits import Place
from npu_backend.testing.sim.spec import TensorSpec
from npu_backend.testing.sim.validators.base import Check

__all__ = ["CACHE_MODES", "QUANT_MODES", "mla_preprocess"]

CACHE_MODES = ("krope_ctkv", "int8_nzcache", "nzcache")
QUANT_MODES = ("per_tensor_quant_asymm", "per_token_quant_symm")


def _packed(check: Check, name: str, spec: TensorSpec, rows: int, columns: int) -> None:
    """A weight is stored as (1, K/32, N, 32): FRACTAL_NZ written out by the caller."""
    if spec.rank == 2:
        check.shape(name, spec, rows, columns)
        check.nz(**{name: spec})
    else:
        check.shape(name, spec, 1, columns // 32, rows, 32)


def mla_preprocess(
    hidden_state: TensorSpec,
    wdqkv: TensorSpec,
    descale0: TensorSpec,
    gamma1: TensorSpec,
    wuq: TensorSpec,
    descale1: TensorSpec,
    gamma2: TensorSpec,
    cos: TensorSpec,
    sin: TensorSpec,
    wuk: TensorSpec,
    kv_cache: TensorSpec,
    kv_cache_rope: TensorSpec,
    slotmapping: TensorSpec,
    *,
    cache_mode: str | None = None,
    quant_mode: str | None = None,
    soc: str = "A3",
    cann: str | None = None,
    line: str | None = None,
) -> None:
    """Check a call of ``mla_preprocess`` without memory.

    The op itself hard-codes q_lora_rank 1536, nope 128, kv_lora_rank 512 and rope 64 without a
    check and computes wrong numbers for others; here they are refused.

    Args:
        hidden_state: (tokens, hidden).
        wdqkv: int8, (1, hidden / 32, 2112, 32), or (2112, hidden) in FRACTAL_NZ.
        descale0: (2112,).
        gamma1: (1536,).
        wuq: int8, (1, 48, heads * 192, 32), or (heads * 192, 1536) in FRACTAL_NZ.
        descale1: (heads * 192,).
        gamma2: (512,).
        cos: (tokens, 64).
        sin: (tokens, 64).
        wuk: (heads, 128, 512).
        kv_cache: (blocks, block size, 1, 512).
        kv_cache_rope: (blocks, block size, 1, 64).
        slotmapping: int32, (tokens,).
        cache_mode: ``krope_ctkv`` (default), ``int8_nzcache`` or ``nzcache``.
        quant_mode: ``per_token_quant_symm`` (default) or ``per_tensor_quant_asymm``.
        soc: Chip or family.
        cann: CANN version; the newest known by default.
        line: TorchNPU line; the one paired with ``cann`` by default.

    Raises:
        OpRejectedError: The op would refuse the call, or compute wrong numbers.
    """
    op = "mla_preprocess"
    place = Place.of(soc, cann, line)
    check = Check(op, place)
    place.check_chip(op)
    check.rank("hiddenState", hidden_state, 2)
    check.dtype("hiddenState", hidden_state, place.value(op, "dtypes"))
    tokens, hidden = hidden_state.shape
    most = place.value(op, "tokens_max")
    check.that(1 <= tokens <= most, f"tokenNum = {tokens} must be 1..{most}")
    low, high = place.value(op, "hidden_size_min"), place.value(op, "hidden_size_max")
    check.that(low <= hidden <= high, f"hiddenSize = {hidden} must be {low}..{high}")
    check.that(hidden % 32 == 0, f"hiddenSize = {hidden} must be a multiple of 32")
    cache = cache_mode or CACHE_MODES[0]
    check.one_of("cache_mode", cache, CACHE_MODES)
    check.one_of("quant_mode", quant_mode or QUANT_MODES[1], QUANT_MODES)
    check.rank("wuk", wuk, 3)
    heads, nope, kv_lora = wuk.shape
    q_lora, rope = gamma1.shape[-1], cos.shape[-1]
    check.one_of("q_lora_rank", q_lora, place.value(op, "q_lora_rank"))
    check.one_of("qk_nope_head_dim", nope, place.value(op, "qk_nope_head_dim"))
    check.one_of("kv_lora_rank", kv_lora, place.value(op, "kv_lora_rank"))
    check.one_of("qk_rope_head_dim", rope, place.value(op, "qk_rope_head_dim"))
    check.dtype("wdqkv", wdqkv, ("int8",))
    check.dtype("wuq", wuq, ("int8",))
    _packed(check, "wdqkv", wdqkv, kv_lora + rope + q_lora, hidden)
    _packed(check, "wuq", wuq, heads * (nope + rope), q_lora)
    check.shape("descale0", descale0, kv_lora + rope + q_lora)
    check.shape("descale1", descale1, heads * (nope + rope))
    check.shape("gamma2", gamma2, kv_lora)
    check.shape("cos", cos, tokens, rope)
    check.shape("sin", sin, tokens, rope)
    check.shape("slotmapping", slotmapping, tokens)
    check.dtype("slotmapping", slotmapping, ("int32",))
    check.rank("kv_cache", kv_cache, 4)
    check.rank("kv_cache_rope", kv_cache_rope, 4)
    nz = cache != "krope_ctkv"
    block = kv_cache.shape[2 if nz else 1]
    if nz:
        only = place.value(op, "nz_block_size")
        check.that(block == only, f"block size {block} must be {only} in cache_mode {cache}")
    else:
        most, also = place.value(op, "block_size_max"), place.value(op, "block_size_also")
        check.that(
            1 <= block <= most or block in also,
            f"block size {block} must be at most {most}, or one of {also}",
        )
    check.contiguous(
        hiddenState=hidden_state,
        wdqkv=wdqkv,
        wuq=wuq,
        wuk=wuk,
        kv_cache=kv_cache,
        kv_cache_rope=kv_cache_rope,
    )
