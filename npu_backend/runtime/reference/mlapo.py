"""References of sgl-kernel-npu's and of vllm-ascend's ``mla_preprocess`` in static W8A8.

There: quant_mode ``per_tensor_quant_asymm`` with the cache modes ``krope_ctkv`` and ``nzcache``.
The two ops take other arguments, and vllm-ascend's can hand out the normed query latent as well.
Source of the formulas: the op's description and test inputs in sgl-kernel-npu; of the arguments,
the schemas in the catalog.
"""

from __future__ import annotations

import torch

from npu_backend.runtime.reference.caches import write_rows
from npu_backend.runtime.reference.numerics import (
    as_scale,
    int8_product,
    product,
    rms_scaled,
    rotate_halves,
    saturated,
)

__all__ = ["ascend_mla_preprocess", "mla_preprocess"]

_OP = "mla_preprocess"
_EPSILON = 1e-6
"""Of both norms; fixed inside the op, which takes no epsilon."""
_QUANT_MODE = "per_tensor_quant_asymm"
_CACHE_MODES = ("krope_ctkv", "nzcache")


def _as_matrix(weight: torch.Tensor) -> torch.Tensor:
    """Return an int8 weight as ``(K, N)``: from NZ blocks ``(1, K/32, N, 32)``, or ``(N, K)``."""
    if weight.dim() == 4:
        _, blocks, columns, inner = weight.shape
        return weight[0].permute(0, 2, 1).reshape(blocks * inner, columns)
    return weight.transpose(0, 1)


def _asymmetric(x: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """Quantize by one scale and one offset for the whole tensor; rounds half to even."""
    return saturated(x.float() / scale.float() + offset.float(), torch.int8)


def mla_preprocess(
    hiddenState: torch.Tensor,
    gamma0: torch.Tensor,
    beta0: torch.Tensor,
    wdqkv: torch.Tensor,
    descale0: torch.Tensor,
    gamma1: torch.Tensor,
    beta1: torch.Tensor,
    wuq: torch.Tensor,
    descale1: torch.Tensor,
    gamma2: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    wuk: torch.Tensor,
    kv_cache: torch.Tensor,
    kv_cache_rope: torch.Tensor,
    slotmapping: torch.Tensor,
    quant_scale0: torch.Tensor,
    quant_offset0: torch.Tensor,
    bias0: torch.Tensor,
    quant_scale1: torch.Tensor,
    quant_offset1: torch.Tensor,
    bias1: torch.Tensor,
    *,
    ctkv_scale: torch.Tensor | None = None,
    q_nope_scale: torch.Tensor | None = None,
    cache_mode: str | None = None,
    quant_mode: str | None = None,
    q_out0: torch.Tensor,
    kv_cache_out0: torch.Tensor,
    q_out1: torch.Tensor,
    kv_cache_out1: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantize, project, norm, rotate, absorb; write queries and both caches, in place.

    RoPE rotates half against half: callers reorder the RoPE rows of both weights to half layout
    beforehand, and the caches hold half layout. Integer products are exact; after their scales they
    round to the dtype of ``hiddenState``, as do absorbed and rotated results. Norms are fp32.

    Args:
        hiddenState: ``(tokens, hidden)``, already normed by the layer; fp16 or bf16.
        gamma0: Not used by the op as it is called: the input is normed already.
        beta0: As ``gamma0``.
        wdqkv: int8, FRACTAL_NZ blocks ``(1, hidden/32, out, 32)``, or ``(out, hidden)``; the out
            rows are latent, then k_rope, then q.
        descale0: ``(out,)``: fp32, or int64 with fp32 bits.
        gamma1: ``(q_lora_rank,)``, norm of q.
        beta1: ``(q_lora_rank,)``, added after that norm.
        wuq: int8, as ``wdqkv``: ``(1, q_lora_rank/32, out, 32)`` or ``(out, q_lora_rank)``; out is
            heads * (nope + rope).
        descale1: ``(out,)``.
        gamma2: ``(latent,)``, norm of the latent.
        cos: ``(tokens, rope)``, each angle twice, half layout.
        sin: As ``cos``.
        wuk: ``(heads, nope, latent)``, contiguous.
        kv_cache: Not written itself; callers pass the tensor that is ``kv_cache_out0``.
        kv_cache_rope: As above, ``kv_cache_out1``.
        slotmapping: ``(tokens,)`` int32; negative slots write nothing.
        quant_scale0: ``(1,)``, of the input.
        quant_offset0: ``(1,)`` int8.
        bias0: ``(out,)`` int32, added to the integer product.
        quant_scale1: ``(1,)``, of the normed q.
        quant_offset1: ``(1,)`` int8.
        bias1: ``(out,)`` int32.
        ctkv_scale: Belongs to int8 caches; ignored here.
        q_nope_scale: As ``ctkv_scale``.
        cache_mode: ``krope_ctkv`` (the default) or ``nzcache``.
        quant_mode: ``per_tensor_quant_asymm``; note that the op's default is another one.
        q_out0: ``(tokens, heads, latent)``; written.
        kv_cache_out0: ``(blocks, block_size, 1, latent)``, for nzcache also as blocks
            ``(blocks, latent/16, block_size, 16)``; written.
        q_out1: ``(tokens, heads, rope)``; written.
        kv_cache_out1: As ``kv_cache_out0``, width rope; written.

    Returns:
        ``q_out0``, ``kv_cache_out0``, ``q_out1``, ``kv_cache_out1``: the tensors given.

    Raises:
        ValueError: Dtypes, strides or slots that the op does not take.
        NotImplementedError: Another quant_mode or cache_mode.
    """
    _preprocess(
        hiddenState,
        (wdqkv, descale0, quant_scale0, quant_offset0, bias0),
        gamma1,
        beta1,
        (wuq, descale1, quant_scale1, quant_offset1, bias1),
        gamma2,
        (cos, sin),
        wuk,
        slotmapping,
        (cache_mode, quant_mode),
        (q_out0, kv_cache_out0, q_out1, kv_cache_out1),
    )
    return q_out0, kv_cache_out0, q_out1, kv_cache_out1


def ascend_mla_preprocess(
    hiddenState: torch.Tensor,
    wdqkv: torch.Tensor,
    descale0: torch.Tensor,
    gamma1: torch.Tensor,
    beta1: torch.Tensor,
    wuq: torch.Tensor,
    descale1: torch.Tensor,
    gamma2: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    wuk: torch.Tensor,
    kv_cache: torch.Tensor,
    kv_cache_rope: torch.Tensor,
    slotmapping: torch.Tensor,
    quant_scale0: torch.Tensor,
    quant_offset0: torch.Tensor,
    bias0: torch.Tensor,
    quant_scale1: torch.Tensor,
    quant_offset1: torch.Tensor,
    bias1: torch.Tensor,
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
) -> None:
    """Compute as :func:`mla_preprocess`, with the arguments of ``_C_ascend::mla_preprocess``.

    Args:
        enable_inner_out: Write ``inner_out``.
        inner_out: ``(tokens, q_lora_rank)``: the query latent after norm and ``beta1``, before it
            is quantized; not touched without ``enable_inner_out``.

    The other arguments are those of :func:`mla_preprocess`; what the schema makes optional is
    needed in static W8A8 with rotation.

    Raises:
        ValueError: Dtypes, strides or slots that the op does not take.
        NotImplementedError: Another quant_mode or cache_mode.
    """
    normed = _preprocess(
        hiddenState,
        (wdqkv, descale0, quant_scale0, quant_offset0, bias0),
        gamma1,
        beta1,
        (wuq, descale1, quant_scale1, quant_offset1, bias1),
        gamma2,
        (cos, sin),
        wuk,
        slotmapping,
        (cache_mode, quant_mode),
        (q_out0, kv_cache_out0, q_out1, kv_cache_out1),
    )
    if enable_inner_out:
        inner_out.copy_(normed)


_Stage = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""A projection's weight, descale, and its input's scale, offset and the bias."""


def _preprocess(
    hiddenState: torch.Tensor,
    down_stage: _Stage,
    gamma1: torch.Tensor,
    beta1: torch.Tensor,
    up_stage: _Stage,
    gamma2: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor],
    wuk: torch.Tensor,
    slotmapping: torch.Tensor,
    modes: tuple[str | None, str | None],
    outs: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """Write the four outputs and return the query latent after its norm, fp32."""
    wdqkv, descale0, quant_scale0, quant_offset0, bias0 = down_stage
    wuq, descale1, quant_scale1, quant_offset1, bias1 = up_stage
    (cos, sin), (cache_mode, quant_mode) = tables, modes
    q_out0, kv_cache_out0, q_out1, kv_cache_out1 = outs
    quant = "per_token_quant_symm" if quant_mode is None else quant_mode
    if quant != _QUANT_MODE:
        raise NotImplementedError(f"{_OP}: the reference knows {_QUANT_MODE}, not {quant}")
    cache = "krope_ctkv" if cache_mode is None else cache_mode
    if cache not in _CACHE_MODES:
        raise NotImplementedError(f"{_OP}: the reference knows {_CACHE_MODES}, not {cache}")
    if slotmapping.dtype != torch.int32:
        raise ValueError(f"{_OP}: slotmapping must be int32, is {slotmapping.dtype}")
    named = {"wdqkv": wdqkv, "wuq": wuq}
    for name, weight in named.items():
        if weight.dtype != torch.int8:
            raise ValueError(f"{_OP}: {name} must be int8, is {weight.dtype}")
    pointers = {"hiddenState": hiddenState, "wuk": wuk, "q_out0": q_out0, "q_out1": q_out1, **named}
    for name, tensor in pointers.items():
        if not tensor.is_contiguous():
            raise ValueError(f"{_OP}: {name} must be contiguous, its strides are {tensor.stride()}")

    rounded, tokens = hiddenState.dtype, hiddenState.shape[0]
    heads, nope, latent = wuk.shape
    rope = cos.shape[-1]

    quantized = _asymmetric(hiddenState, quant_scale0, quant_offset0)
    down = int8_product(quantized, _as_matrix(wdqkv)) + bias0
    down = (down.float() * as_scale(descale0)).to(rounded)
    kv, k_rope, q = down[:, :latent], down[:, latent : latent + rope], down[:, latent + rope :]

    normed_q = rms_scaled(q, gamma1, _EPSILON) + beta1.float()
    quantized = _asymmetric(normed_q, quant_scale1, quant_offset1)
    up = int8_product(quantized, _as_matrix(wuq)) + bias1
    heads_q = (up.float() * as_scale(descale1)).to(rounded).reshape(tokens, heads, nope + rope)

    q_out0.copy_(product(heads_q[..., :nope].transpose(0, 1), wuk).transpose(0, 1))
    q_out1.copy_(rotate_halves(heads_q[..., nope:], cos.unsqueeze(1), sin.unsqueeze(1)))
    latents = rms_scaled(kv, gamma2, _EPSILON).to(rounded)
    keys = rotate_halves(k_rope, cos, sin).to(rounded)
    for out, rows in ((kv_cache_out0, latents), (kv_cache_out1, keys)):
        paged = out
        if cache == "nzcache" and out.shape[2] != 1:
            paged = out.view(out.shape[0], out.shape[2], 1, rows.shape[-1])
        write_rows(_OP, paged, rows, slotmapping, nz=cache == "nzcache", skip_negative=True)
    return normed_q
