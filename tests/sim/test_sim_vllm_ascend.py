"""vllm-ascend's own mla_preprocess and batch_matmul_transpose: never those of sgl-kernel-npu."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npu_backend.catalog import load_catalog
from npu_backend.testing.sim import NotSimulatedError, OpRejectedError, TensorSpec
from npu_backend.testing.sim.validators import vllm_ascend

TOKENS, HEADS, ROPE, KV = 3, 2, 64, 512
# DeepSeek's sizes, and GLM's, which sgl-kernel-npu's op has not built in.
SIZES = [(1536, 128, 2048), (2048, 192, 1024)]
MLAPO, BMT = "_C_ascend::mla_preprocess", "_C_ascend::batch_matmul_transpose"
STATIC = "per_tensor_quant_asymm"


def rejected(match: str):
    return pytest.raises(OpRejectedError, match=match)


# --- schemas --------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", [MLAPO, BMT])
def test_the_ops_are_registered_with_the_catalogs_schemas(npu_sim, op) -> None:
    import torch

    (text,) = load_catalog().schemas["libraries"]["vllm-ascend"]["ops"][op]
    installed = torch._C._jit_get_schemas_for_operator(op)
    assert [torch._C.parse_schema(f"_C_ascend::{text}")] == list(installed)


def test_the_two_libraries_differ_as_documented(npu_sim) -> None:
    import torch

    ours, theirs = torch.ops._C_ascend, torch.ops.npu
    names = [a.name for a in ours.mla_preprocess.default._schema.arguments]
    other = [a.name for a in theirs.mla_preprocess.default._schema.arguments]
    assert set(other) - set(names) == {"gamma0", "beta0"}
    assert set(names) - set(other) == {"enable_inner_out", "inner_out"}
    assert len(ours.mla_preprocess.default._schema.returns) == 5
    written = [
        a.alias_info is not None for a in ours.batch_matmul_transpose.default._schema.arguments
    ]
    assert written == [False] * 5
    assert theirs.batch_matmul_transpose.default._schema.arguments[2].alias_info is not None


def test_older_releases_need_cos_and_sin() -> None:
    library = load_catalog().schemas["libraries"]["vllm-ascend"]
    (old,), (new,) = library["older_ops"][MLAPO], library["ops"][MLAPO]
    assert old.replace("Tensor cos, Tensor sin", "Tensor? cos, Tensor? sin") == new


# --- mla_preprocess -------------------------------------------------------------------------------


def mlapo_inputs(q_lora, nope, hidden, *, kind="bfloat16"):
    import torch

    g, kind = torch.Generator().manual_seed(3), getattr(torch, kind)

    def int8(*shape):
        return torch.randint(-20, 20, shape, generator=g, dtype=torch.int8)

    def wide(size):
        return torch.randint(-99, 99, (size,), generator=g, dtype=torch.int32)

    rows, columns = KV + ROPE + q_lora, HEADS * (nope + ROPE)
    angle = torch.rand(TOKENS, ROPE // 2, generator=g) * 6
    angle = torch.cat((angle, angle), -1)
    return {
        "x": torch.randn(TOKENS, hidden, generator=g).to(kind),
        "w1": int8(rows, hidden),
        "w2": int8(columns, q_lora),
        "d1": torch.rand(rows, generator=g) * 1e-4,
        "d2": torch.rand(columns, generator=g) * 1e-4,
        "b1": wide(rows),
        "b2": wide(columns),
        "gamma1": torch.randn(q_lora, generator=g).to(kind),
        "beta1": torch.randn(q_lora, generator=g).to(kind),
        "gamma2": torch.randn(KV, generator=g).to(kind),
        "s1": torch.tensor([0.03]).to(kind),
        "s2": torch.tensor([0.04]).to(kind),
        "o1": torch.tensor([3], dtype=torch.int8),
        "o2": torch.tensor([-2], dtype=torch.int8),
        "wuk": (torch.randn(HEADS, nope, KV, generator=g) * 0.1).to(kind),
        "cos": angle.cos().to(kind),
        "sin": angle.sin().to(kind),
        "slots": torch.tensor([100, 7, 130], dtype=torch.int32),
    }


def mlapo_expected(given_, q_lora, nope, *, rotated=True):
    """The op's description in fp64, rounded to the inputs' dtype where it stores something."""
    import torch

    kind = given_["x"].dtype

    def static(values, scale, offset):
        steps = values.double() / given_[scale].double() + given_[offset].double()
        return steps.round().clamp(-128, 127)

    def norm(values, gamma):
        values = values.double()
        rms = (values.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
        return values / rms * given_[gamma].double()

    def turn(values):
        if not rotated:
            return values.double()
        first, second = values.double().chunk(2, -1)
        lift, drop = (given_[n].double()[:, : ROPE // 2] for n in ("cos", "sin"))
        if values.dim() == 3:
            lift, drop = lift[:, None], drop[:, None]
        return torch.cat((first * lift - second * drop, second * lift + first * drop), -1)

    one = static(given_["x"], "s1", "o1") @ given_["w1"].double().t() + given_["b1"]
    one = (one * given_["d1"].double()).to(kind)
    low = (norm(one[:, KV + ROPE :], "gamma1") + given_["beta1"].double()).to(kind)
    two = static(low, "s2", "o2") @ given_["w2"].double().t() + given_["b2"]
    q = (two * given_["d2"].double()).to(kind).view(TOKENS, HEADS, nope + ROPE)
    return {
        "q": torch.einsum("thn,hnl->thl", q[..., :nope].double(), given_["wuk"].double()),
        "q_rope": turn(q[..., nope:]),
        "kv": norm(one[:, :KV], "gamma2"),
        "kr": turn(one[:, KV : KV + ROPE]),
        "inner": low.double(),
    }


def mlapo_call(npu_device, given_, *, cache_mode="krope_ctkv", layout="logical", inner=True,
               rotated=True, strided=False, packed=True, drop=(), op=None, **options):  # fmt: skip
    """Run the op; return its five results as the caller's own tensors."""
    import torch
    import torch_npu

    kind, q_lora = given_["x"].dtype, given_["gamma1"].shape[0]

    def at(name):
        return None if name in drop else given_[name].to(npu_device)

    def pack(name):
        weight = given_[name]
        n, k = weight.shape
        if not packed:
            return torch_npu.npu_format_cast(weight.to(npu_device), 29)
        blocks = weight.view(n, k // 32, 32).permute(1, 0, 2).contiguous()
        return blocks.view(1, k // 32, n, 32).to(npu_device)

    def cache(width):
        shape = (2, 128, 1, width) if layout == "logical" else (2, width // 16, 128, 16)
        if not strided:
            return torch.zeros(shape, dtype=kind, device=npu_device)
        return torch.zeros((4, *shape[1:]), dtype=kind, device=npu_device)[::2]

    def empty(*shape):
        return torch.zeros(shape, dtype=kind, device=npu_device)

    outs = empty(TOKENS, HEADS, KV), cache(KV), empty(TOKENS, HEADS, ROPE), cache(ROPE)
    inner_out = empty(TOKENS, q_lora) if inner else torch.tensor([], device=npu_device)
    result = (op or torch.ops._C_ascend.mla_preprocess)(
        at("x"), pack("w1"), at("d1"), at("gamma1"), at("beta1"), pack("w2"), at("d2"),
        at("gamma2"), at("cos") if rotated else None, at("sin") if rotated else None, at("wuk"),
        outs[1], outs[3], at("slots"), quant_scale0=at("s1"), quant_offset0=at("o1"),
        bias0=at("b1"), quant_scale1=at("s2"), quant_offset1=at("o2"), bias1=at("b2"),
        ctkv_scale=None, q_nope_scale=None,
        **{"cache_mode": cache_mode, "quant_mode": STATIC, "enable_inner_out": inner, **options},
        q_out0=outs[0], kv_cache_out0=outs[1], q_out1=outs[2], kv_cache_out1=outs[3],
        inner_out=inner_out,
    )  # fmt: skip
    # Compiled, the results are copies: the schema does not tie them to the arguments.
    assert op or [t.data_ptr() for t in result[:4]] == [t.data_ptr() for t in outs]
    return (*outs, inner_out)


def close(found, wanted, tolerance=6e-3):
    found = found.cpu().double()
    assert (found - wanted).norm() / wanted.norm() < tolerance


def written(memory, layout, slots, cache_mode):
    """Rows of a cache by slot, read from its bytes."""
    memory = memory.cpu()
    width = memory.shape[-1] if layout == "logical" else memory.shape[1] * 16
    if cache_mode == "nzcache":
        memory = memory.contiguous().view(2, width // 16, 128, 16).permute(0, 2, 1, 3)
    rows = memory.reshape(256, width)
    others = [i for i in range(256) if i not in slots]
    assert not rows[others].any()
    return rows[slots]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize(
    ("cache_mode", "layout"),
    [("krope_ctkv", "logical"), ("nzcache", "logical"), ("nzcache", "physical")],
)
@pytest.mark.parametrize("inner", [True, False])
@pytest.mark.parametrize("packed", [True, False])
def test_mla_preprocess(npu_device, sizes, cache_mode, layout, inner, packed) -> None:
    q_lora, nope, hidden = sizes
    given_ = mlapo_inputs(q_lora, nope, hidden)
    want = mlapo_expected(given_, q_lora, nope)
    out = mlapo_call(
        npu_device, given_, cache_mode=cache_mode, layout=layout, inner=inner, packed=packed
    )
    close(out[0], want["q"])
    close(out[2], want["q_rope"])
    slots = given_["slots"].tolist()
    close(written(out[1], layout, slots, cache_mode), want["kv"])
    close(written(out[3], layout, slots, cache_mode), want["kr"])
    if inner:
        close(out[4], want["inner"])
    else:
        assert out[4].numel() == 0


@pytest.mark.parametrize("cache_mode", ["krope_ctkv", "nzcache"])
def test_without_cos_and_sin_nothing_is_rotated(npu_device, cache_mode) -> None:
    q_lora, nope, hidden = SIZES[0]
    given_ = mlapo_inputs(q_lora, nope, hidden)
    want = mlapo_expected(given_, q_lora, nope, rotated=False)
    out = mlapo_call(npu_device, given_, cache_mode=cache_mode, rotated=False)
    close(out[2], want["q_rope"])
    close(written(out[3], "logical", given_["slots"].tolist(), cache_mode), want["kr"])


@pytest.mark.parametrize("cache_mode", ["krope_ctkv", "nzcache"])
def test_the_blocks_of_a_cache_may_lie_apart(npu_device, cache_mode) -> None:
    q_lora, nope, hidden = SIZES[0]
    given_ = mlapo_inputs(q_lora, nope, hidden)
    want = mlapo_expected(given_, q_lora, nope)
    out = mlapo_call(npu_device, given_, cache_mode=cache_mode, strided=True)
    slots = given_["slots"].tolist()
    close(written(out[1], "logical", slots, cache_mode), want["kv"])
    close(written(out[3], "logical", slots, cache_mode), want["kr"])


def test_half_precision_has_no_inner_out(npu_device) -> None:
    q_lora, nope, hidden = SIZES[0]
    given_ = mlapo_inputs(q_lora, nope, hidden, kind="float16")
    want = mlapo_expected(given_, q_lora, nope)
    close(mlapo_call(npu_device, given_, inner=False)[0], want["q"])
    with rejected("with enable_inner_out have no kernel: the op would compute nothing"):
        mlapo_call(npu_device, given_, inner=True)


def test_what_is_left_out_would_be_read_uninitialised(npu_device) -> None:
    given_ = mlapo_inputs(*SIZES[0])
    for short, name in (("d1", "descale0"), ("beta1", "beta1"), ("s2", "quant_scale1"),
                        ("o1", "quant_offset0"), ("b2", "bias1")):  # fmt: skip
        with rejected(f"{name} is needed in quant_mode {STATIC}"):
            mlapo_call(npu_device, given_, drop=(short,))
    with rejected("cos and sin must both be given or both be None"):
        mlapo_call(npu_device, given_, drop=("cos",))
    with pytest.raises(NotSimulatedError, match="quant_mode per_token_quant_symm"):
        mlapo_call(npu_device, given_, quant_mode=None)


def check(tokens=4, q_lora=1536, nope=128, kv=KV, rope=ROPE, hidden=7168, heads=16, **changes):
    kind = changes.pop("kind", "bfloat16")
    block = changes.pop("block", 128)
    rows, columns = kv + rope + q_lora, heads * (nope + rope)
    sizes = {"descale0": rows, "bias0": rows, "beta1": q_lora, "descale1": columns}
    sizes |= {"bias1": columns, "quant_scale0": 1, "quant_offset0": 1}
    sizes |= {"quant_scale1": 1, "quant_offset1": 1}
    given_ = {
        "hidden_state": TensorSpec((tokens, hidden), kind),
        "wdqkv": TensorSpec((1, hidden // 32, rows, 32), "int8"),
        "gamma1": TensorSpec((q_lora,), kind),
        "wuq": TensorSpec((1, q_lora // 32, columns, 32), "int8"),
        "gamma2": TensorSpec((kv,), kind),
        "cos": TensorSpec((tokens, rope), kind),
        "sin": TensorSpec((tokens, rope), kind),
        "wuk": TensorSpec((heads, nope, kv), kind),
        "kv_cache": TensorSpec((2, block, 1, kv), kind),
        "kv_cache_rope": TensorSpec((2, block, 1, rope), kind),
        "slotmapping": TensorSpec((tokens,), "int32"),
        "q_out0": TensorSpec((tokens, heads, kv), kind),
        "q_out1": TensorSpec((tokens, heads, rope), kind),
        "inner_out": TensorSpec((tokens, q_lora), kind),
        "optional": {name: TensorSpec((size,), "float32") for name, size in sizes.items()},
        "quant_mode": STATIC,
        "enable_inner_out": kind == "bfloat16",
    }
    vllm_ascend.mla_preprocess(**{**given_, **changes})


@given(st.one_of(st.integers(-1, 3), st.integers(1022, 1026)))
def test_mla_preprocess_takes_1_to_1024_tokens(tokens) -> None:
    if tokens < 0:
        return
    if 1 <= tokens <= 1024:
        check(tokens)
    else:
        with rejected("bIndex is out of range"):
            check(tokens)


def test_sizes_come_from_the_tensors_but_two() -> None:
    for q_lora, nope, hidden in ((1536, 128, 7168), (2048, 192, 6144), (768, 64, 1024)):
        check(q_lora=q_lora, nope=nope, hidden=hidden)
    for kv in (KV - 32, KV + 32):
        with rejected(f"kv_lora_rank = {kv} is not supported, only 512"):
            check(kv=kv)
    for rope in (ROPE - 16, ROPE + 16):
        with rejected(f"qk_rope_head_dim = {rope} is not supported, only 64"):
            check(rope=rope)


VARIANTS = {
    ("bfloat16", STATIC): {"kvcache", "krope_ctkv", "nzcache"},
    ("bfloat16", "per_token_quant_symm"): {"kvcache", "krope_ctkv", "int8_nzcache", "nzcache"},
    ("bfloat16", "no_quant"): {"krope_ctkv"},
    ("float16", STATIC): {"kvcache", "krope_ctkv"},
}


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "quant", [STATIC, "per_token_quant_symm", "per_token_quant_asymm", "no_quant"]
)
@pytest.mark.parametrize("cache", ["kvcache", "krope_ctkv", "int8_nzcache", "nzcache"])
@pytest.mark.parametrize("inner", [True, False])
def test_combinations_without_a_kernel_are_refused(kind, quant, cache, inner) -> None:
    there = cache in VARIANTS.get((kind, quant), ())
    if inner:
        there = there and kind == "bfloat16" and quant != "no_quant"
    options = {"quant_mode": quant, "cache_mode": cache, "enable_inner_out": inner, "kind": kind}
    if quant == "no_quant":
        options["wdqkv"] = TensorSpec((1, 7168 // 16, KV + ROPE + 1536, 16), kind)
        options["wuq"] = TensorSpec((1, 1536 // 16, 16 * 192, 16), kind)
    if there:
        check(**options)
    else:
        with rejected("have no kernel: the op would compute nothing, without an error"):
            check(**options)


def test_shapes_chips_and_modes_of_mla_preprocess() -> None:
    for soc in ("A5", "310P"):
        with rejected(f"not supported on {soc}, only on A2, A3"):
            check(soc=soc)
    check(soc="A2")
    for name, match in (("cache_mode", "pa"), ("quant_mode", "int8")):
        with rejected(f"{name} = {match} is not supported"):
            check(**{name: match})
    with rejected("inner_out should have shape"):
        check(inner_out=TensorSpec((4, 1535)))
    check(inner_out=TensorSpec((0,), "float32"), enable_inner_out=False)
    with rejected("slotmapping supports dtype int32"):
        check(slotmapping=TensorSpec((4,), "int64"))
    with rejected("may be non-contiguous in its first dimension only"):
        check(kv_cache=TensorSpec((2, 128, 1, KV), stride=(128 * KV * 2, KV * 2, KV * 2, 1)))
    check(kv_cache=TensorSpec((2, 128, 1, KV), stride=(128 * KV * 3, KV, KV, 1)))
    with rejected("kv_cache_rope should have shape"):
        check(kv_cache_rope=TensorSpec((2, 64, 1, ROPE)))
    for off in (-1, 1):
        with rejected("wdqkv should have shape"):
            check(wdqkv=TensorSpec((1, 224, KV + ROPE + 1536 + off, 32), "int8"))
        with rejected("q_out0 should have shape"):
            check(q_out0=TensorSpec((4, 16 + off, KV)))


# --- batch_matmul_transpose -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_batch_matmul_transpose(npu_device, kind) -> None:
    import torch

    kind = getattr(torch, kind)
    g = torch.Generator().manual_seed(5)
    a = torch.randn(5, 3, 64, generator=g).to(kind)
    b = torch.randn(3, 64, 32, generator=g).to(kind)
    wanted = torch.einsum("mbk,bkn->mbn", a.double(), b.double())
    c = torch.zeros(5, 3, 32, dtype=kind, device=npu_device)
    op = torch.ops._C_ascend.batch_matmul_transpose
    assert op(a.to(npu_device), b.to(npu_device), c) is None
    close(c, wanted)
    nz = b.view(3, 64, 2, 16).permute(0, 2, 1, 3).contiguous().to(npu_device)
    c.zero_()
    op(a.to(npu_device), nz, c, "NZ")
    close(c, wanted)
    with rejected("tensor_b should be 3D in format_mode ND, but is 4D"):
        op(a.to(npu_device), nz, c)
    with rejected("tensor_b should be 4D in format_mode NZ, but is 3D"):
        op(a.to(npu_device), b.to(npu_device), c, "NZ")


@given(st.one_of(st.integers(0, 3), st.integers(1022, 1026)))
def test_batch_matmul_transpose_takes_1_to_1024_rows(m) -> None:
    specs = TensorSpec((m, 16, 512)), TensorSpec((16, 512, 128)), TensorSpec((m, 16, 128))
    if 1 <= m <= 1024:
        vllm_ascend.batch_matmul_transpose(*specs)
    else:
        with rejected(f"{BMT}: batchIdx is out of range: M = {m}"):
            vllm_ascend.batch_matmul_transpose(*specs)


def test_modes_and_chips_of_batch_matmul_transpose() -> None:
    specs = TensorSpec((8, 16, 512)), TensorSpec((16, 512, 128)), TensorSpec((8, 16, 128))
    for mode in ("per_channel_symm", "per_channel_asymm", "per_token_symm"):
        vllm_ascend.batch_matmul_transpose(*specs, quant_mode=mode)
    with rejected("quant_mode = int8 is not supported"):
        vllm_ascend.batch_matmul_transpose(*specs, quant_mode="int8")
    with rejected("format_mode = XZ is not supported"):
        vllm_ascend.batch_matmul_transpose(*specs, format_mode="XZ")
    with rejected("not supported on A5, only on A2, A3"):
        vllm_ascend.batch_matmul_transpose(*specs, soc="A5")


def test_the_limits_are_entries_of_their_own() -> None:
    limits = load_catalog().limits
    for op, other in ((MLAPO, "mla_preprocess"), (BMT, "batch_matmul_transpose")):
        assert limits[op]["op"] == op
        ours = {f["source"] for k, f in limits[op].items() if k != "op"}
        theirs = {f["source"] for k, f in limits[other].items() if k != "op"}
        assert not ours & theirs
    assert "q_lora_rank" not in limits[MLAPO]


def test_a_compiler_drops_a_write_that_the_schema_does_not_mark(npu_device) -> None:
    """Of vllm-ascend's schema, not of the simulation: compiled, tensor_c stays as it was."""
    import torch

    a, b = (torch.ones(s, device=npu_device).half() for s in ((5, 3, 64), (3, 64, 32)))

    def product(op):
        def call(x, w, c):
            op(x, w, c)
            return c + 0

        c = torch.zeros(5, 3, 32, device=npu_device).half()
        return torch.compile(call, backend="aot_eager", fullgraph=True)(a, b, c)

    assert product(torch.ops.npu.batch_matmul_transpose).unique().tolist() == [64]
    assert product(torch.ops._C_ascend.batch_matmul_transpose).unique().tolist() == [0]


def test_mla_preprocess_compiles_to_what_it_gives_eagerly(npu_device) -> None:
    import torch

    given_ = mlapo_inputs(*SIZES[0])
    eager = mlapo_call(npu_device, given_)
    plain = torch.ops._C_ascend.mla_preprocess
    compiled = torch.compile(
        lambda *args, **kwargs: plain(*args, **kwargs), backend="aot_eager", fullgraph=True
    )
    for found, wanted in zip(mlapo_call(npu_device, given_, op=compiled), eager, strict=True):
        assert torch.equal(found.cpu(), wanted.cpu())
