"""``npu_mla_prolog_v3`` in numpy and float64, written from the op's documents alone.

Nothing here comes from the package: the 8-bit floats are a table built from their bits, and
rounding is a search in it. Tensors go in as numpy arrays of the numbers they stand for.
"""

from __future__ import annotations

import numpy as np

TILE, BLOCK = 128, 32


def e4m3_table() -> np.ndarray:
    """The 127 finite numbers from 0 to 448, by their code: 4 bits of exponent, 3 of mantissa."""
    codes = np.arange(127)
    exponent, mantissa = codes >> 3, codes & 7
    return np.where(
        exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    )


TABLE = e4m3_table()
assert TABLE[-1] == 448


def to_e4m3(x: np.ndarray) -> np.ndarray:
    """Nearest number of the table, ties to the even code, saturated."""
    size = np.minimum(np.abs(x), TABLE[-1])
    above = np.clip(np.searchsorted(TABLE, size), 1, 126)
    low, high = TABLE[above - 1], TABLE[above]
    up = (size - low > high - size) | ((size - low == high - size) & (above % 2 == 0))
    return np.sign(x) * np.where(up, high, low)


def to_int8(x: np.ndarray) -> np.ndarray:
    return np.clip(np.rint(x), -128, 127)


ROUND = {"int8": (to_int8, 127.0), "float8_e4m3fn": (to_e4m3, 448.0)}


def to_bf16(x: np.ndarray) -> np.ndarray:
    """Round to 8 bits of mantissa, ties to even."""
    mantissa, exponent = np.frexp(x)
    return np.ldexp(np.rint(mantissa * 256), exponent - 8)


def rows(x: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """One scale a row: (values, scales (..., 1))."""
    rounding, bound = ROUND[kind]
    scale = np.abs(x).max(-1, keepdims=True) / bound
    return rounding(x / np.where(scale == 0, 1, scale)), scale


def mx(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Blocks of 32 along the last axis share 2**k: (values, exponents (..., K / 32))."""
    blocks = x.reshape(*x.shape[:-1], -1, BLOCK)
    peak = np.abs(blocks).max(-1)
    k = np.floor(np.log2(np.where(peak == 0, 1, peak))) - 8
    k = np.clip(np.where(peak == 0, -127, k), -127, 127)
    return to_e4m3(blocks / 2.0 ** k[..., None]).reshape(x.shape), k


def mx_undo(values: np.ndarray, k: np.ndarray) -> np.ndarray:
    return values * 2.0 ** np.repeat(k, BLOCK, -1)


def norm(x: np.ndarray, gamma: np.ndarray, eps: float, factor: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * gamma * factor


def rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """Pairs (even, odd) as complex numbers; all real parts, then all imaginary ones."""
    half = x.shape[-1] // 2
    turned = (x[..., 0::2] + 1j * x[..., 1::2]) * (cos[..., :half] + 1j * sin[..., :half])
    return np.concatenate([turned.real, turned.imag], -1)


def product(mode: int, x, x_scale, w, w_scale) -> np.ndarray:
    if w_scale is None:
        return to_bf16(x @ w)
    if mode == 3:
        return mx_undo(x, x_scale) @ mx_undo(w.T, w_scale).T
    return (x @ w) * x_scale * w_scale


def prolog(mode, given: dict, *, eps=1e-5, factors=(1.0, 1.0)) -> dict:
    """All results of a call.

    Args:
        mode: (weight, kv, query).
        given: token_x, dq, uq_qr, uk, dkv_kr, gamma_cq, gamma_ckv, sin, cos, and scales by their
            names in the op; MX scales as exponents.

    Returns:
        query, query_rope, query_scale, query_norm, query_norm_scale, kv, kr, tile_scale.
    """
    weight, kv_mode, query_mode = mode
    kind = {0: None, 1: "int8", 2: "int8"}.get(weight, "float8_e4m3fn")
    heads, nope, latent = given["uk"].shape
    scale = {n: given.get(f"dequant_scale_{n}") for n in ("x", "w_dq", "w_uq_qr", "w_dkv_kr")}
    out: dict = {}

    low = product(weight, given["token_x"], scale["x"], given["dq"], scale["w_dq"])
    low = norm(low, given["gamma_cq"], eps, factors[0])
    low_scale = None
    if weight == 0:
        low = to_bf16(low)
    elif weight == 3:
        low, low_scale = mx(to_bf16(low))
    else:
        if "smooth_scales_cq" in given:
            low = low * given["smooth_scales_cq"]
        low, low_scale = rows(low, kind)
    out["query_norm"], out["query_norm_scale"] = low, low_scale
    q = product(weight, low, low_scale, given["uq_qr"], scale["w_uq_qr"])
    q = q.reshape(q.shape[0], heads, -1)
    query = to_bf16(np.einsum("thn,hnl->thl", to_bf16(q[..., :nope]), given["uk"]))
    cos, sin = given["cos"], given["sin"]
    turned = rotate(q[..., nope:], cos[:, None], sin[:, None])
    out["query_scale"] = None
    if query_mode:
        query, out["query_scale"] = rows(query, kind)
        turned = to_bf16(turned) * given["quant_scale_ckv"] / out["query_scale"]
    out["query"], out["query_rope"] = query, to_bf16(turned)

    kv = product(weight, given["token_x"], scale["x"], given["dkv_kr"], scale["w_dkv_kr"])
    key = norm(kv[:, :latent], given["gamma_ckv"], eps, factors[1])
    turned = rotate(kv[:, latent:], cos, sin)
    out["kr"] = to_bf16(turned)
    if kv_mode == 0:
        out["kv"] = to_bf16(key)
    elif kv_mode == 3:
        rounding, bound = ROUND[kind]
        tiles = key.reshape(key.shape[0], -1, TILE)
        peak = np.abs(tiles).max(-1, keepdims=True) * given.get("k_nope_clip_alpha", 1.0)
        tile_scale = peak / bound
        values = rounding(np.clip(tiles, -peak, peak) / tile_scale)
        out["kv"], out["tile_scale"] = values.reshape(key.shape), tile_scale[..., 0]
    else:
        out["kv"] = ROUND[kind][0](key * given["quant_scale_ckv"])
    if kv_mode == 2:
        out["kr"] = to_int8(turned * given["quant_scale_ckr"])
    return out
