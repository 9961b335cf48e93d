"""The planner's verdict is the simulated op's behaviour: at every limit, one below, at, one above,
for each CANN version and chip. Both read the catalog, so the figures themselves are pinned to
literal ones in tests/catalog and tests/sim/test_sim_validators.py."""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import Any

import pytest

from npu_backend import BmmSpec, Deployment, KvLayout, MlaLayer, Offer
from npu_backend.testing.sim import OpRejectedError, TensorSpec, validators
from npu_backend_builtin import mlapo, mlaprolog, transpose_bmm

CANNS = ("8.1.RC1", "8.2.RC1", "8.3.RC1", "8.5.0", "9.0.0", "9.1.0", "9.2.0")
SOCS = ("A2", "A3", "A5", "310P")
ROWS = (1, 1024, 1025, 65535, 65536, 200000)
PERMS = {transpose_bmm.TRANSPOSING: (1, 0, 2), transpose_bmm.EXPLICIT: (0, 1, 2)}


def _layer(**changes: Any) -> MlaLayer:
    values: dict[str, Any] = {
        "layer_id": 0,
        "hidden_size": 7168,
        "num_heads": 16,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    }
    return MlaLayer(**{**values, **changes})


def _accepts(call: Any) -> bool:
    try:
        call()
    except OpRejectedError:
        return False
    return True


def _kernel(
    strategy: str, b: int, k: int, n: int, rows: int, dtype: str, place: dict[str, str]
) -> Any:
    w = TensorSpec((b, k, n), dtype)
    if strategy == transpose_bmm.CUSTOM:
        return lambda: validators.batch_matmul_transpose(
            TensorSpec((rows, b, k), dtype), w, TensorSpec((rows, b, n), dtype), **place
        )
    perm = PERMS[strategy]
    shape = (rows, b, k) if perm == (1, 0, 2) else (b, rows, k)
    return lambda: validators.npu_transpose_batchmatmul(
        TensorSpec(shape, dtype), w, perm_x1=perm, perm_y=(1, 0, 2), **place
    )


SHAPES = [
    # B x K around 65536, by B and by K
    *((b, 512, 128) for b in (127, 128, 129)),
    *((128, k, 128) for k in (511, 512, 513, 496, 528, 384, 640)),
    # B, K and N each around 65536
    *((b, 16, 128) for b in (65535, 65536, 65537, 4095, 4096, 4097)),
    *((1, k, 128) for k in (65535, 65536, 65537, 65520, 65408)),
    *((1, 128, n) for n in (65535, 65536, 65537, 65520, 65408)),
    # alignment of K and N around 16 and 128
    *((16, k, 512) for k in (15, 16, 17, 127, 128, 129, 191, 192, 193)),
    *((16, 512, n) for n in (15, 16, 17, 127, 128, 129, 255, 256, 257)),
    # the bundled models: v_up and q_absorb
    *((h, 512, v) for h in (16, 20, 32, 64, 96, 128) for v in (128, 256)),
    *((h, k, 512) for h in (16, 20, 32, 64, 96, 128) for k in (128, 192, 256)),
]


@pytest.mark.parametrize("soc", SOCS)
@pytest.mark.parametrize("cann", CANNS)
def test_a_kernel_is_offered_exactly_where_the_op_takes_the_call(cann, soc, record_property):
    deployment = Deployment(soc=soc, cann=cann)
    place = {"soc": soc, "cann": cann}
    seen: Counter[tuple[str, bool]] = Counter()
    for (b, k, n), dtype in product(SHAPES, ("bfloat16", "float16", "float32")):
        bmm = BmmSpec(layer=_layer(), site="v_up", B=b, K=k, N=n, dtype=dtype, weight_dtype=dtype)
        records = {r.strategy: r for r in transpose_bmm.select_bmm_kernel(bmm, deployment)}
        for strategy in (*PERMS, transpose_bmm.CUSTOM):
            record = records[strategy]
            for rows in ROWS:
                offered = isinstance(record, Offer) and (
                    record.envelope.tokens[1] is None or rows <= record.envelope.tokens[1]
                )
                taken = _accepts(_kernel(strategy, b, k, n, rows, dtype, place))
                if strategy == transpose_bmm.CUSTOM and not isinstance(record, Offer):
                    pass_through = {"dtype", "soc.unsupported"}
                    assert {r.code for r in record.reasons} <= pass_through
                assert offered == taken, (strategy, (b, k, n), rows, dtype, record)
                seen[strategy, taken] += 1
    record_property("verdicts", sum(seen.values()))
    assert sum(seen.values()) == len(SHAPES) * 3 * 3 * len(ROWS)
    if soc == "A3" and cann != "8.1.RC1":
        assert all(seen[s, verdict] for s in PERMS for verdict in (True, False))


# --- mlaprolog -----------------------------------------------------------------------------------

DIMS = {
    "hidden_size": (1023, 1024, 1025, 2048, 6143, 6144, 6145, 7167, 7168, 7169, 7680, 8192, 8193),
    "q_lora_rank": (1535, 1536, 1537, 2047, 2048, 2049),
    "kv_lora_rank": (511, 512, 513),
    "qk_nope_head_dim": (127, 128, 129, 191, 192, 193),
    "qk_rope_head_dim": (62, 64, 66),  # pairs; an odd width is no layer
    "num_heads": (1, 2, 3, 63, 64, 65, 96, 127, 128, 129, 256),
}
BLOCKS = (1, 15, 16, 17, 128, 1008, 1024, 1040)


def _prolog(layer: MlaLayer, deployment: Deployment, mode: int, cache_mode: str = "PA_BSND") -> Any:
    heads, block = layer.num_heads, layer.kv_layout.block_size
    nope, rope, latent = layer.qk_nope_head_dim, layer.qk_rope_head_dim, layer.kv_lora_rank
    full = "int8" if mode == 2 else layer.dtype
    q_b = "int8" if mode in (1, 2) else full
    q_lora = layer.q_lora_rank or 0
    sizes = {
        "x": (4, 1),
        "w_dq": (1, q_lora),
        "w_uq_qr": (1, heads * (nope + rope)),
        "w_dkv_kr": (1, latent + rope),
    }
    names = {0: (), 1: ("w_uq_qr",)}.get(mode, tuple(sizes))
    return lambda: validators.npu_mla_prolog_v3(
        TensorSpec((4, layer.hidden_size), full),
        TensorSpec((layer.hidden_size, q_lora), full, format=29),
        TensorSpec((q_lora, heads * (nope + rope)), q_b, format=29),
        TensorSpec((heads, nope, latent), layer.dtype),
        TensorSpec((layer.hidden_size, latent + rope), full, format=29),
        TensorSpec((q_lora,)),
        TensorSpec((latent,)),
        TensorSpec((4, rope)),
        TensorSpec((4, rope)),
        TensorSpec((2, block, 1, latent)),
        TensorSpec((2, block, 1, rope)),
        cache_index=TensorSpec((4,), "int64"),
        cache_mode=cache_mode,
        weight_quant_mode=mode,
        scales={f"dequant_scale_{n}": TensorSpec(sizes[n], "float32") for n in names},
        soc=deployment.soc.family,
        cann=deployment.cann,
    )


def _castable(layer: MlaLayer, mode: int) -> bool:
    """Whether weights of these sizes can be had in FRACTAL_NZ at all (K % 16, N % 16 or 32)."""
    wide = 32 if mode == 2 else 16
    q_wide = 32 if mode in (1, 2) else 16
    q_rows = layer.num_heads * (layer.qk_nope_head_dim + layer.qk_rope_head_dim)
    q_lora = layer.q_lora_rank or 0
    return (
        layer.hidden_size % 16 == 0
        and q_lora % wide == 0
        and q_lora % 16 == 0
        and q_rows % q_wide == 0
        and (layer.kv_lora_rank + layer.qk_rope_head_dim) % wide == 0
    )


def _layers() -> list[MlaLayer]:
    deepseek: dict[str, Any] = {}
    glm = {"hidden_size": 6144, "q_lora_rank": 2048, "qk_nope_head_dim": 192, "v_head_dim": 256}
    found = [
        _layer(**base, **{name: size})
        for base in (deepseek,)
        for name in DIMS
        for size in DIMS[name]
    ]
    found += [_layer(**{**glm, name: size}) for name in DIMS for size in DIMS[name]]
    found += [_layer(kv_layout=KvLayout(block_size=b)) for b in BLOCKS]
    found += [_layer(dtype=d, kv_layout=KvLayout(dtype=d)) for d in ("float16", "float32")]
    return found


QUANTS = {
    0: {},
    1: {"q_b_proj": "w8a8-dynamic"},
    2: {"fused_qkv_a_proj": "w8a8-dynamic", "q_b_proj": "w8a8-dynamic"},
}


@pytest.mark.parametrize("soc", SOCS)
@pytest.mark.parametrize("cann", CANNS)
def test_mlaprolog_is_offered_exactly_where_the_op_takes_the_call(cann, soc):
    deployment = Deployment(soc=soc, cann=cann)
    seen: Counter[bool] = Counter()
    for mode, plain in product(QUANTS, _layers()):
        layer = _layer(
            **{name: getattr(plain, name) for name in DIMS},
            dtype=plain.dtype,
            kv_layout=plain.kv_layout,
            quant=QUANTS[mode],
        )
        record = mlaprolog.select_preprocess_path(layer, deployment)
        offered = (
            isinstance(record, Offer)
            and layer.kv_layout in (record.kv_layouts or ())
            and _castable(layer, mode)
        )
        taken = _accepts(_prolog(layer, deployment, mode)) and _castable(layer, mode)
        assert offered == taken, (mode, layer, record)
        seen[taken] += 1
    assert seen[False]
    if soc == "A3" and cann in ("8.5.0", "9.0.0", "9.1.0", "9.2.0"):
        assert seen[True]


# --- mlapo ---------------------------------------------------------------------------------------

STATIC = {"fused_qkv_a_proj": "w8a8-static", "q_b_proj": "w8a8-static"}
MLAPO_DIMS = {
    "hidden_size": (2016, 2047, 2048, 2049, 2080, 7168, 8160, 8191, 8192, 8193, 8224),
    "q_lora_rank": (1535, 1536, 1537),
    "kv_lora_rank": (511, 512, 513),
    "qk_nope_head_dim": (127, 128, 129),
    "qk_rope_head_dim": (62, 64, 66),  # pairs; an odd width is no layer
}


def _mlapo(layer: MlaLayer, rows: int, deployment: Deployment) -> Any:
    heads, block = layer.num_heads, layer.kv_layout.block_size
    nope, rope, latent = layer.qk_nope_head_dim, layer.qk_rope_head_dim, layer.kv_lora_rank
    q_lora, width = (
        layer.q_lora_rank or 0,
        layer.num_heads * (layer.qk_nope_head_dim + layer.qk_rope_head_dim),
    )
    nz = layer.kv_layout.cache_mode == "PA_NZ"
    return lambda: validators.mla_preprocess(
        TensorSpec((rows, layer.hidden_size)),
        TensorSpec((1, layer.hidden_size // 32, latent + rope + q_lora, 32), "int8", format=29),
        TensorSpec((latent + rope + q_lora,), "float32"),
        TensorSpec((q_lora,)),
        TensorSpec((1, q_lora // 32, width, 32), "int8", format=29),
        TensorSpec((width,), "float32"),
        TensorSpec((latent,)),
        TensorSpec((rows, rope)),
        TensorSpec((rows, rope)),
        TensorSpec((heads, nope, latent)),
        TensorSpec((2, latent // 16, block, 16) if nz else (2, block, 1, latent)),
        TensorSpec((2, rope // 16, block, 16) if nz else (2, block, 1, rope)),
        TensorSpec((rows,), "int32"),
        cache_mode="nzcache" if nz else "krope_ctkv",
        soc=deployment.soc.family,
        cann=deployment.cann,
    )


@pytest.mark.parametrize("soc", SOCS)
@pytest.mark.parametrize("cann", CANNS)
def test_mlapo_is_offered_exactly_where_the_op_takes_the_call(cann, soc):
    deployment = Deployment(soc=soc, cann=cann)
    layers = [_layer(quant=STATIC, **{n: s}) for n, sizes in MLAPO_DIMS.items() for s in sizes]
    layers += [
        _layer(quant=STATIC, kv_layout=KvLayout(cache_mode=m, block_size=b))
        for m in ("PA_BSND", "PA_NZ")
        for b in (1, 127, 128, 129, 255, 256, 257)
    ]
    seen: Counter[bool] = Counter()
    for layer, rows in product(layers, (1, 1023, 1024, 1025)):
        record = mlapo.select_preprocess_path(layer, deployment)
        offered = (
            isinstance(record, Offer)
            and layer.kv_layout in (record.kv_layouts or ())
            and rows <= (record.envelope.tokens[1] or rows)
        )
        # The blocked weight of the op is whole blocks of 32 only; other sizes have no such form.
        whole = layer.hidden_size % 32 == 0 and (layer.q_lora_rank or 0) % 32 == 0
        taken = _accepts(_mlapo(layer, rows, deployment))
        assert offered == taken or not whole, (layer, rows, record)
        seen[taken] += 1
    assert seen[False]
    assert bool(seen[True]) is (soc in ("A2", "A3"))
