"""Limits at N-1, N and N+1, against figures written out here from the ops' documents."""

from __future__ import annotations

import math

import pytest

from npu_backend.testing.sim import OpRejectedError, TensorSpec, validators

OLD = ("8.2.RC1", "8.3.RC1", "8.5.0", "9.0.0")
NEW = ("9.1.0", "9.1.1", "9.2.0")
SWAP = (1, 0, 2)


def bmm(m, b, k, n, *, perm=SWAP, dtype="bfloat16", nz=False, **place):
    """Check npu_transpose_batchmatmul on an x1 of (M, B, K), or (B, M, K) without the swap."""
    x1 = TensorSpec((m, b, k) if perm == SWAP else (b, m, k), dtype)
    x2 = TensorSpec((b, k, n), dtype, format=29 if nz else 2)
    validators.npu_transpose_batchmatmul(x1, x2, perm_x1=perm, **{"soc": "A3", **place})


def rejected(match: str):
    return pytest.raises(OpRejectedError, match=match)


@pytest.mark.parametrize("soc", ["A2", "A3", "Ascend910B3", "Ascend910_9391"])
@pytest.mark.parametrize("cann", OLD)
def test_b_times_k_stays_below_65536_up_to_cann_9_0(soc: str, cann: str) -> None:
    bmm(8, 127, 512, 128, soc=soc, cann=cann)  # 65024
    with rejected(r"B\*K = 65536 must be less than 65536"):
        bmm(8, 128, 512, 128, soc=soc, cann=cann)
    with rejected(r"B\*K = 66048"):
        bmm(8, 129, 512, 128, soc=soc, cann=cann)


@pytest.mark.parametrize("b", [127, 128, 129, 4096])
@pytest.mark.parametrize("cann", NEW)
def test_from_cann_9_1_any_b_times_k_is_legal_for_a_plain_call(cann: str, b: int) -> None:
    bmm(8, b, 512, 128, cann=cann)


@pytest.mark.parametrize("cann", NEW)
def test_from_cann_9_1_the_old_bound_holds_for_nz_scale_and_split(cann: str) -> None:
    x1, scale = TensorSpec((8, 128, 512)), TensorSpec((1,), "float32")
    nd, nz = TensorSpec((128, 512, 128)), TensorSpec((128, 512, 128), format=29)
    for x2, extra in ((nz, {}), (nd, {"scale": scale}), (nd, {"batch_split_factor": 2})):
        with rejected(r"B\*K = 65536 must be less than 65536"):
            validators.npu_transpose_batchmatmul(x1, x2, perm_x1=SWAP, cann=cann, **extra)
    bmm(8, 127, 512, 128, nz=True, cann=cann)


@pytest.mark.parametrize("cann", [*OLD, *NEW])
def test_with_the_identity_permutation_only_k_is_bounded(cann: str) -> None:
    bmm(8, 128, 512, 128, perm=(0, 1, 2), cann=cann)
    bmm(8, 2, 65536 - 128, 128, perm=(0, 1, 2), cann=cann)
    with rejected("K = 65536 must be less than 65536"):
        bmm(8, 2, 65536, 128, perm=(0, 1, 2), cann=cann)


@pytest.mark.parametrize("cann", [*OLD, *NEW])
def test_b_and_n_are_each_below_65536(cann: str) -> None:
    bmm(1, 65535, 128, 128, perm=(0, 1, 2), cann=cann)
    with rejected("B = 65536 must be less than 65536"):
        bmm(1, 65536, 128, 128, perm=(0, 1, 2), cann=cann)
    bmm(1, 2, 128, 65536 - 128, cann=cann)
    with rejected("N = 65536 must be less than 65536"):
        bmm(1, 2, 128, 65536, cann=cann)


@pytest.mark.parametrize("m", [1, 65535, 65536, 65537, 70000, 10_000_000])
def test_the_token_count_is_no_limit(m: int) -> None:
    bmm(m, 64, 512, 128, cann="9.0.0")


@pytest.mark.parametrize(
    ("cann", "multiple"),
    [("8.2.RC1", 128), ("8.3.RC1", 128), ("8.5.0", 128), ("9.0.0", 16), ("9.1.0", 1), ("9.2.0", 1)],
)
def test_k_and_n_are_multiples(cann: str, multiple: int) -> None:
    for k, n in ((multiple, 128), (128, multiple), (3 * multiple, 5 * multiple)):
        bmm(4, 8, k, n, cann=cann)
    if multiple == 1:
        return
    for off in (multiple - 1, multiple + 1):
        with rejected(f"K = {off} must be a multiple of {multiple}"):
            bmm(4, 8, off, 128, cann=cann)
        with rejected(f"N = {off} must be a multiple of {multiple}"):
            bmm(4, 8, 128, off, cann=cann)


def test_q_absorb_with_k_192_is_refused_by_cann_8_5_and_taken_by_9_0() -> None:
    with rejected("K = 192 must be a multiple of 128"):
        bmm(8, 64, 192, 512, cann="8.5.0")
    bmm(8, 64, 192, 512, cann="9.0.0")


@pytest.mark.parametrize("cann", NEW)
def test_an_nz_weight_needs_multiples_of_16_even_from_9_1(cann: str) -> None:
    bmm(4, 8, 48, 16, nz=True, cann=cann)
    with rejected("K = 40 must be a multiple of 16"):
        bmm(4, 8, 40, 16, nz=True, cann=cann)


def test_an_nz_weight_needs_line_26_0_and_cann_9_1() -> None:
    bmm(4, 8, 128, 128, nz=True, cann="9.1.0", line="26.1")
    with rejected("an internal-format weight is not supported"):
        bmm(4, 8, 128, 128, nz=True, cann="9.1.0", line="7.3")
    with rejected("a FRACTAL_NZ weight is not supported"):
        bmm(4, 8, 128, 128, nz=True, cann="9.0.0", line="26.0")


def test_limits_follow_the_lower_of_line_and_cann() -> None:
    with rejected(r"B\*K = 65536"):
        bmm(8, 128, 512, 128, cann="9.1.0", line="7.3")  # paired with 8.5
    with rejected(r"B\*K = 65536"):
        bmm(8, 128, 512, 128, cann="9.0.0", line="26.1")  # paired with 9.1
    bmm(8, 128, 512, 128, cann="9.1.0", line="26.2")


def test_a_transposed_weight_needs_cann_9_1_and_the_swap() -> None:
    x1, x2 = TensorSpec((4, 8, 128)), TensorSpec((8, 256, 128))
    call = {"perm_x2": (0, 2, 1), "perm_x1": SWAP}
    validators.npu_transpose_batchmatmul(x1, x2, **call, cann="9.1.0")
    with rejected("perm_x2"):
        validators.npu_transpose_batchmatmul(x1, x2, **call, cann="9.0.0")
    with rejected("perm_x2"):
        validators.npu_transpose_batchmatmul(
            TensorSpec((8, 4, 128)), x2, perm_x2=(0, 2, 1), cann="9.1.0"
        )


def test_a5_has_no_limit_of_size_or_alignment_and_310p_no_op() -> None:
    bmm(3, 4096, 513, 77, soc="A5", cann="9.0.0")
    with rejected("not supported on 310P"):
        bmm(3, 8, 512, 128, soc="310P")


def test_dtypes_of_the_bmm() -> None:
    for dtype in ("float16", "bfloat16", "float32"):
        bmm(4, 8, 128, 128, dtype=dtype)
    with rejected("supports dtype float16, bfloat16, float32, but is int8"):
        bmm(4, 8, 128, 128, dtype="int8")
    with rejected("one dtype is needed"):
        validators.npu_transpose_batchmatmul(
            TensorSpec((8, 4, 128), "float32"), TensorSpec((8, 128, 128), "bfloat16")
        )


def test_wrong_shapes_and_permutations_of_the_bmm() -> None:
    x1, x2 = TensorSpec((8, 4, 128)), TensorSpec((8, 128, 128))
    with rejected("should be 3D"):
        validators.npu_transpose_batchmatmul(TensorSpec((4, 128)), x2)
    with rejected("batches"):
        validators.npu_transpose_batchmatmul(TensorSpec((7, 4, 128)), x2)
    with rejected("the K of x1 and x2 differ"):
        validators.npu_transpose_batchmatmul(TensorSpec((8, 4, 256)), x2)
    with rejected("perm_y"):
        validators.npu_transpose_batchmatmul(x1, x2, perm_y=(0, 1, 2))
    with rejected("bias is not supported"):
        validators.npu_transpose_batchmatmul(x1, x2, bias=TensorSpec((128,)))


def test_the_op_is_missing_before_line_7_1() -> None:
    with rejected(r"line 7\.0 of torch_npu does not register it"):
        bmm(4, 8, 128, 128, cann="8.1.RC1")


def bmt(m=8, b=16, k=512, n=128, *, dtype="bfloat16", a=None, w=None, c=None, **place):
    validators.batch_matmul_transpose(
        a or TensorSpec((m, b, k), dtype),
        w or TensorSpec((b, k, n), dtype),
        c or TensorSpec((m, b, n), dtype),
        **place,
    )


def test_batch_matmul_transpose_takes_1_to_1024_rows() -> None:
    for m in (1, 1023, 1024):
        bmt(m)
    for m in (0, 1025, 1026):
        with rejected("batchIdx is out of range"):
            bmt(m)


def test_batch_matmul_transpose_knows_no_65536() -> None:
    bmt(8, 128, 512, 128, cann="8.5.0")


def test_batch_matmul_transpose_is_for_a2_and_a3_in_16_bit() -> None:
    bmt(soc="A2", dtype="float16")
    for soc in ("A5", "310P"):
        with rejected("not supported on"):
            bmt(soc=soc)
    with rejected("supports dtype float16, bfloat16"):
        bmt(dtype="float32")
    with rejected("tensor_a is bfloat16"):
        bmt(c=TensorSpec((8, 16, 128), "float16"))


@pytest.mark.parametrize("name", ["a", "w", "c"])
def test_batch_matmul_transpose_refuses_what_it_would_read_wrongly(name: str) -> None:
    shape, stride = {
        "a": ((8, 16, 512), (512, 8 * 512, 1)),
        "w": ((16, 512, 128), (512 * 128, 1, 512)),
        "c": ((8, 16, 128), (128, 8 * 128, 1)),
    }[name]
    with rejected("takes raw pointers"):
        bmt(**{name: TensorSpec(shape, stride=stride)})


def test_batch_matmul_transpose_nz_weights_are_4d_multiples_of_16() -> None:
    bmt(w=TensorSpec((16, 8, 512, 16)))
    with rejected("K = 520 must be a multiple of 16"):
        bmt(k=520, w=TensorSpec((16, 8, 520, 16)))
    with rejected("must be given as"):
        bmt(w=TensorSpec((16, 512, 128), format=29))


def prolog(
    tokens=(4,), hidden=7168, q_lora=1536, heads=16, nope=128, kv_lora=512, rope=64, **options
):
    """Check a call with a 16-bit KV cache; the other modes are test_sim_prolog_limits'."""
    mode = options.pop("mode", (0, 0, 0))
    block, index = options.pop("block", 128), options.pop("index", "int64")
    full = "int8" if mode[0] == 2 else options.pop("dtype", "bfloat16")
    q_b = "int8" if mode[0] in (1, 2) else full
    fmt, cache_mode = options.pop("format", 29), options.pop("cache_mode", "PA_BSND")
    rows, columns = math.prod(tokens), heads * (nope + rope)
    sizes = {"x": (rows, 1), "w_dq": (1, q_lora), "w_uq_qr": (1, columns)}
    sizes["w_dkv_kr"] = (1, kv_lora + rope)
    names = {0: (), 1: ("w_uq_qr",)}.get(mode[0], tuple(sizes))
    validators.npu_mla_prolog_v3(
        TensorSpec((*tokens, hidden), full),
        TensorSpec((hidden, q_lora), full, format=fmt),
        TensorSpec((q_lora, columns), q_b, format=fmt),
        TensorSpec((heads, nope, kv_lora)),
        TensorSpec((hidden, kv_lora + rope), full, format=fmt),
        TensorSpec((q_lora,)),
        TensorSpec((kv_lora,)),
        TensorSpec((*tokens, rope)),
        TensorSpec((*tokens, rope)),
        TensorSpec((2, block, 1, kv_lora)),
        TensorSpec((2, block, 1, rope)),
        cache_index=TensorSpec(tokens, index),
        cache_mode=cache_mode,
        weight_quant_mode=mode[0],
        kv_cache_quant_mode=mode[1],
        query_quant_mode=mode[2],
        scales={f"dequant_scale_{n}": TensorSpec(sizes[n], "float32") for n in names},
        **options,
    )


@pytest.mark.parametrize("hidden", [1024, 2048, 3072, 4096, 5120, 6144, 7168, 7680, 8192])
def test_prolog_hidden_sizes(hidden: int) -> None:
    prolog(hidden=hidden, cann="9.1.0")
    if hidden in (7168, 7680):
        prolog(hidden=hidden, cann="9.0.0")
    else:
        with rejected(f"He = {hidden} is not supported"):
            prolog(hidden=hidden, cann="9.0.0")
    for off in (hidden - 1, hidden + 1):
        with rejected(f"He = {off} is not supported"):
            prolog(hidden=off, cann="9.1.0")


@pytest.mark.parametrize(("name", "figure"), [("q_lora", 2048), ("nope", 192)])
def test_prolog_dims_of_glm_need_9_1(name: str, figure: int) -> None:
    prolog(**{name: figure}, cann="9.1.0")
    with rejected(f"{figure} is not supported"):
        prolog(**{name: figure}, cann="9.0.0")
    for off in (figure - 1, figure + 1):
        with rejected("is not supported"):
            prolog(**{name: off}, cann="9.1.0")


@pytest.mark.parametrize(("name", "figure"), [("kv_lora", 512), ("rope", 64)])
def test_prolog_fixed_dims(name: str, figure: int) -> None:
    for off in (figure - 1, figure + 1, figure * 2):
        with rejected("is not supported"):
            prolog(**{name: off}, cann="9.2.0")


def test_prolog_heads_are_powers_of_two_up_to_128() -> None:
    for heads in (1, 2, 4, 8, 16, 32, 64, 128):
        prolog(heads=heads)
    for heads in (3, 127, 129, 256):
        with rejected(f"head number N = {heads} must be a power of two"):
            prolog(heads=heads)


def test_prolog_block_sizes() -> None:
    for block in (16, 32, 1008, 1024):
        prolog(block=block)
    for block in (15, 17, 0, 1023, 1025, 1040):
        with rejected(f"block size {block} must be"):
            prolog(block=block)


def test_prolog_token_count_is_no_limit() -> None:
    prolog(tokens=(10_000_000,))
    prolog(tokens=(65536, 3))


@pytest.mark.parametrize(
    ("soc", "line", "legal"),
    [("A3", "7.3", 1), ("A2", "7.3", 0), ("A3", "26.0", 1), ("A2", "26.0", 0), ("A5", "26.0", 0),
     ("A2", "26.1", 1), ("A3", "26.1", 1), ("A5", "26.1", 1), ("310P", "26.2", 0)],
)  # fmt: skip
def test_prolog_chips_by_line(soc: str, line: str, legal: int) -> None:
    if legal:
        prolog(soc=soc, line=line)
    else:
        with rejected(f"not supported on {soc}"):
            prolog(soc=soc, line=line)


def test_prolog_is_missing_before_line_7_3() -> None:
    with rejected("does not register it"):
        prolog(cann="8.3.RC1")


@pytest.mark.parametrize("mode", range(-1, 7))
@pytest.mark.parametrize("soc", ["A2", "A3", "A5"])
def test_prolog_weight_modes_by_chip(soc: str, mode: int) -> None:
    legal = mode in ({0, 1, 2, 3, 4, 5} if soc == "A5" else {0, 1, 2})
    if not legal:
        with rejected(f"weight_quant_mode = {mode} is not supported"):
            prolog(mode=(mode, 0, 0), soc=soc)
    elif mode in (0, 1, 2):
        prolog(mode=(mode, 0, 0), soc=soc)


def test_prolog_mode_triples() -> None:
    for triple in ((1, 1, 0), (2, 2, 0), (0, 3, 0), (2, 0, 1), (2, 1, 0), (0, 0, 1)):
        with rejected("quant modes"):
            prolog(mode=triple)


def test_prolog_dtypes_formats_and_scales() -> None:
    with rejected("supports dtype bfloat16, but is float16"):
        prolog(dtype="float16")
    with rejected("must be in FRACTAL_NZ"):
        prolog(format=2)
    with rejected("cache_index supports dtype int64"):
        prolog(index="int32")
    with rejected("cache_mode = PA_BNSD is not supported"):
        prolog(cache_mode="PA_BNSD")


def mlapo(tokens=4, hidden=7168, q_lora=1536, nope=128, heads=16, block=128, **options):
    rope, kv = options.pop("rope", 64), options.pop("kv", 512)
    nz = options.get("cache_mode") == "nzcache"
    index = options.pop("index", "int32")
    kv_cache = (2, kv // 16, block, 16) if nz else (2, block, 1, kv)
    kr_cache = (2, rope // 16, block, 16) if nz else (2, block, 1, rope)
    validators.mla_preprocess(
        TensorSpec((tokens, hidden)),
        TensorSpec((1, hidden // 32, kv + rope + q_lora, 32), "int8", format=29),
        TensorSpec((kv + rope + q_lora,), "float32"),
        TensorSpec((q_lora,)),
        TensorSpec((1, q_lora // 32, heads * (nope + rope), 32), "int8", format=29),
        TensorSpec((heads * (nope + rope),), "float32"),
        TensorSpec((kv,)),
        TensorSpec((tokens, rope)),
        TensorSpec((tokens, rope)),
        TensorSpec((heads, nope, kv)),
        TensorSpec(kv_cache),
        TensorSpec(kr_cache),
        TensorSpec((tokens,), index),
        **options,
    )


def test_mlapo_takes_1_to_1024_tokens() -> None:
    for tokens in (1, 1023, 1024):
        mlapo(tokens)
    for tokens in (0, 1025, 1026):
        with rejected(f"tokenNum = {tokens} must be 1..1024"):
            mlapo(tokens)


def test_mlapo_hidden_sizes() -> None:
    for hidden in (2048, 2080, 8192):
        mlapo(hidden=hidden)
    for hidden in (2047, 2016, 8193, 8224):
        with rejected(f"hiddenSize = {hidden} must be 2048..8192"):
            mlapo(hidden=hidden)


@pytest.mark.parametrize(
    ("name", "figure"), [("q_lora", 1536), ("nope", 128), ("kv", 512), ("rope", 64)]
)
def test_mlapo_dims_are_fixed(name: str, figure: int) -> None:
    mlapo(**{name: figure})
    for off in (figure - 32, figure + 32):
        with rejected(f"{off} is not supported"):
            mlapo(**{name: off})


def test_mlapo_blocks_chips_and_modes() -> None:
    for block in (1, 127, 128, 256):
        mlapo(block=block)
    for block in (129, 255, 257):
        with rejected(f"block size {block} must be at most 128, or one of"):
            mlapo(block=block)
    mlapo(cache_mode="nzcache")
    for block in (127, 129, 256):
        with rejected(f"block size {block} must be 128"):
            mlapo(block=block, cache_mode="nzcache")
    mlapo(soc="A2")
    with rejected("not supported on A5"):
        mlapo(soc="A5")
    with rejected("cache_mode = PA_BSND"):
        mlapo(cache_mode="PA_BSND")
    with rejected("slotmapping supports dtype int32"):
        mlapo(index="int64")


@pytest.mark.parametrize(
    ("shape", "dtype", "expected"),
    [
        ((16, 16), "bfloat16", True),
        ((15, 16), "bfloat16", False),
        ((17, 16), "float16", False),
        ((16, 15), "float16", False),
        ((16, 32), "int8", True),
        ((16, 31), "int8", False),
        ((16, 33), "int8", False),
        ((16, 16), "int8", False),
        ((6144, 360), "int8", False),
        ((16, 32), "float8_e4m3fn", True),
        ((16, 16), "float32", False),
        ((8, 16, 16), "bfloat16", True),
        ((16,), "bfloat16", False),
    ],
)
def test_what_can_be_cast_to_nz(shape, dtype, expected) -> None:
    assert validators.castable(TensorSpec(shape, dtype)) is expected


def test_interleave_rope_is_64_wide_and_contiguous() -> None:
    x, cos = TensorSpec((4, 8, 1, 64)), TensorSpec((4, 1, 1, 64))
    validators.npu_interleave_rope(x, cos, cos)
    for off in (63, 65, 128):
        with rejected(f"D of x = {off} is not supported"):
            validators.npu_interleave_rope(TensorSpec((4, 8, 1, off)), cos, cos)
    turned = TensorSpec((4, 8, 2, 64), stride=(1024, 64, 512, 1))
    with rejected("x must be contiguous"):
        validators.npu_interleave_rope(turned, cos, cos)


def test_kv_rmsnorm_rope_cache_is_576_wide() -> None:
    def call(width=576, mode="PA_BNSD", index=(4,), kind="int64"):
        validators.npu_kv_rmsnorm_rope_cache(
            TensorSpec((4, 1, 1, width)),
            TensorSpec((512,)),
            TensorSpec((4, 1, 1, 64)),
            TensorSpec((4, 1, 1, 64)),
            TensorSpec(index, kind),
            TensorSpec((2, 128, 1, 64)),
            TensorSpec((2, 128, 1, 512)),
            cache_mode=mode,
        )

    call()
    for off in (575, 577):
        with rejected(f"hidden_size of kv = {off} is not supported"):
            call(off)
    with rejected("cache_mode = PA_BSND is not supported"):
        call(mode="PA_BSND")
    with rejected("index should have shape"):
        call(index=(4, 1))
    with rejected("index supports dtype int64"):
        call(kind="int32")


def test_mx_quant_is_for_a5_from_line_26_0() -> None:
    x = TensorSpec((4, 64))
    validators.npu_dynamic_mx_quant(x)
    with rejected("only on A5"):
        validators.npu_dynamic_mx_quant(x, soc="A3")
    with rejected("does not register it"):
        validators.npu_dynamic_mx_quant(x, cann="8.5.0")
    for off in (0, 16, 33, 1056):
        with rejected(f"block_size {off}"):
            validators.npu_dynamic_mx_quant(x, block_size=off)


def test_a_refusal_carries_op_reason_and_place() -> None:
    with pytest.raises(OpRejectedError) as caught:
        bmm(8, 128, 512, 128, soc="Ascend910_9391", cann="9.0.0")
    error = caught.value
    assert error.op == "npu_transpose_batchmatmul"
    assert error.where == "A3, CANN 9.0.0, line 26.0"
    assert isinstance(error, RuntimeError)


def test_specs_know_contiguity() -> None:
    assert TensorSpec((2, 3, 4)).stride == (12, 4, 1)
    assert TensorSpec((2, 3, 4)).is_contiguous
    assert TensorSpec((2, 1, 4), stride=(4, 99, 1)).is_contiguous
    assert not TensorSpec((2, 3), stride=(1, 2)).is_contiguous
    assert TensorSpec((0, 3), stride=(1, 9)).is_contiguous
