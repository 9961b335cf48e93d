"""Reference kernels of vllm-ascend's ops in ``torch.ops._C_ascend``.

Simulated: static per-tensor quantization (``per_tensor_quant_asymm``) with the cache modes
``krope_ctkv`` and ``nzcache``, with and without rotation and ``inner_out``. Source of schemas and
formulas: the catalog's entry of that library.
"""

from __future__ import annotations

import torch

from npu_backend.catalog import load_catalog
from npu_backend.testing.sim.kernels.base import (
    host,
    optional_spec,
    spec,
    unsupported_unless,
    where,
)
from npu_backend.testing.sim.kernels.bmm import multiply_into
from npu_backend.testing.sim.kernels.mlapo import Stage, compute, store
from npu_backend.testing.sim.validators import vllm_ascend as validators

__all__ = ["DEFINED", "FAKES", "KERNELS"]

_MLAPO = "_C_ascend::mla_preprocess"
_BMT = "_C_ascend::batch_matmul_transpose"


def _given(tensor: torch.Tensor | None) -> torch.Tensor:
    """Return an optional argument that the validator requires of a static call."""
    assert tensor is not None
    return tensor


def _stage(weight: torch.Tensor, *others: torch.Tensor | None) -> Stage:
    return Stage(weight, *map(_given, others))


def mla_preprocess(
    hidden_state: torch.Tensor,
    wdqkv: torch.Tensor,
    descale0: torch.Tensor | None,
    gamma1: torch.Tensor,
    beta1: torch.Tensor | None,
    wuq: torch.Tensor,
    descale1: torch.Tensor | None,
    gamma2: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    wuk: torch.Tensor,
    kv_cache: torch.Tensor,
    kv_cache_rope: torch.Tensor,
    slotmapping: torch.Tensor,
    quant_scale0: torch.Tensor | None,
    quant_offset0: torch.Tensor | None,
    bias0: torch.Tensor | None,
    quant_scale1: torch.Tensor | None,
    quant_offset1: torch.Tensor | None,
    bias1: torch.Tensor | None,
    ctkv_scale: torch.Tensor | None,
    q_nope_scale: torch.Tensor | None,
    cache_mode: str | None,
    quant_mode: str | None,
    enable_inner_out: bool | None,
    q_out0: torch.Tensor,
    kv_cache_out0: torch.Tensor,
    q_out1: torch.Tensor,
    kv_cache_out1: torch.Tensor,
    inner_out: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Write q_out0 (tokens, heads, 512), q_out1 (tokens, heads, 64), both caches and inner_out.

    ``inner_out`` (tokens, q_lora_rank) gets the query latent after norm and beta, before it is
    quantized, with ``enable_inner_out`` only.
    """
    validators.mla_preprocess(
        spec(hidden_state),
        spec(wdqkv),
        spec(gamma1),
        spec(wuq),
        spec(gamma2),
        optional_spec(cos),
        optional_spec(sin),
        spec(wuk),
        spec(kv_cache),
        spec(kv_cache_rope),
        spec(slotmapping),
        q_out0=spec(q_out0),
        q_out1=spec(q_out1),
        inner_out=spec(inner_out),
        optional={
            "descale0": optional_spec(descale0),
            "beta1": optional_spec(beta1),
            "descale1": optional_spec(descale1),
            "quant_scale0": optional_spec(quant_scale0),
            "quant_offset0": optional_spec(quant_offset0),
            "bias0": optional_spec(bias0),
            "quant_scale1": optional_spec(quant_scale1),
            "quant_offset1": optional_spec(quant_offset1),
            "bias1": optional_spec(bias1),
        },
        cache_mode=cache_mode,
        quant_mode=quant_mode,
        enable_inner_out=enable_inner_out,
        **where(),
    )
    quant, cache = quant_mode or "per_token_quant_symm", cache_mode or "krope_ctkv"
    unsupported_unless(quant == "per_tensor_quant_asymm", _MLAPO, f"quant_mode {quant}")
    unsupported_unless(cache in ("krope_ctkv", "nzcache"), _MLAPO, f"cache_mode {cache}")
    nz = cache == "nzcache"
    physical = nz and kv_cache_rope.shape[2] != 1
    rope_dim = kv_cache_rope.shape[-1] * (kv_cache_rope.shape[1] if physical else 1)
    out = compute(
        _MLAPO,
        hidden_state,
        (
            _stage(wdqkv, quant_scale0, quant_offset0, bias0, descale0),
            _stage(wuq, quant_scale1, quant_offset1, bias1, descale1),
        ),
        gamma1,
        _given(beta1),
        gamma2,
        wuk,
        None if cos is None or sin is None else (cos, sin),
        rope_dim,
    )
    host(q_out0, _MLAPO).copy_(out.query)
    host(q_out1, _MLAPO).copy_(out.query_rope)
    if enable_inner_out:
        host(inner_out, _MLAPO).copy_(out.query_norm)
    slots = host(slotmapping, _MLAPO).long()
    store(_MLAPO, kv_cache_out0, out.kv_rows, slots, nz)
    store(_MLAPO, kv_cache_out1, out.kr_rows, slots, nz)
    return q_out0, kv_cache_out0, q_out1, kv_cache_out1, inner_out


def _mla_preprocess_fake(
    *args: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    q_out0, kv_cache_out0, q_out1, kv_cache_out1, inner_out = args[-5:]
    return q_out0, kv_cache_out0, q_out1, kv_cache_out1, inner_out


def batch_matmul_transpose(
    tensor_a: torch.Tensor,
    tensor_b: torch.Tensor,
    tensor_c: torch.Tensor,
    format_mode: str | None = None,
    quant_mode: str | None = None,
) -> None:
    """(M, B, K) x (B, K, N) -> tensor_c (M, B, N); fp32 accumulation."""
    validators.batch_matmul_transpose(
        spec(tensor_a),
        spec(tensor_b),
        spec(tensor_c),
        format_mode=format_mode,
        quant_mode=quant_mode,
        **where(),
    )
    unsupported_unless(quant_mode is None, _BMT, f"quant_mode {quant_mode}")
    multiply_into(_BMT, tensor_a, tensor_b, tensor_c)


def _batch_matmul_transpose_fake(
    tensor_a: torch.Tensor,
    tensor_b: torch.Tensor,
    tensor_c: torch.Tensor,
    format_mode: str | None = None,
    quant_mode: str | None = None,
) -> None:
    """Writes into tensor_c and returns nothing."""


def _schemas() -> dict[str, str]:
    ops = load_catalog().schemas["libraries"]["vllm-ascend"]["ops"]
    return {name: ops[name][0] for name in (_MLAPO, _BMT)}


KERNELS = {_MLAPO: mla_preprocess, _BMT: batch_matmul_transpose}
DEFINED = _schemas()
FAKES = {_MLAPO: _mla_preprocess_fake, _BMT: _batch_matmul_transpose_fake}
