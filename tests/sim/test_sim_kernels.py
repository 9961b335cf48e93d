"""Reference kernels: real schemas, the ops' meaning, refusals as on the device, loud gaps."""

from __future__ import annotations

import math

import pytest

from npu_backend.testing.sim import NotSimulatedError, OpRejectedError

TOKENS, HEADS, NOPE, ROPE, KV, Q_LORA, HIDDEN = 3, 2, 128, 64, 512, 1536, 7168


def rope_of(x, cos, sin):
    """Rotate each (even, odd) pair as a complex number; all real parts, then all imaginary."""
    import torch

    half = x.shape[-1] // 2
    pairs = torch.complex(x[..., 0::2].double(), x[..., 1::2].double())
    angle = torch.complex(cos[..., :half].double(), sin[..., :half].double())
    turned = pairs * angle
    return torch.cat((turned.real, turned.imag), -1)


def angles(tokens=TOKENS):
    import torch

    angle = torch.rand(tokens, ROPE // 2, generator=torch.Generator().manual_seed(4)) * 6
    angle = torch.cat((angle, angle), -1)
    return angle.cos().to(torch.bfloat16), angle.sin().to(torch.bfloat16)


def norm(x, gamma, eps=1e-5):
    x = x.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * gamma.double()


def close(actual, expected, tolerance=0.02):
    import torch

    torch.testing.assert_close(
        actual.cpu().double(), expected.double(), rtol=tolerance, atol=tolerance * 0.5
    )


@pytest.mark.needs_line("7.1")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("perm", [(1, 0, 2), (0, 1, 2), None])
@pytest.mark.parametrize("strided", [False, True])
def test_transpose_batchmatmul(npu_device, dtype, perm, strided) -> None:
    import torch
    import torch_npu

    kind = getattr(torch, dtype)
    x = torch.randn(5, 3, 128).to(kind)  # (M, B, K)
    w = torch.randn(3, 256, 128).transpose(1, 2) if strided else torch.randn(3, 128, 256)
    w = w.to(kind)
    given = x if perm == (1, 0, 2) else x.transpose(0, 1)
    out = torch_npu.npu_transpose_batchmatmul(
        given.to(npu_device), w.to(npu_device), perm_x1=perm, perm_x2=(0, 1, 2), perm_y=(1, 0, 2)
    )
    assert (out.shape, out.dtype, out.device) == ((5, 3, 256), kind, npu_device)
    assert out.is_contiguous()
    close(out, torch.einsum("mbk,bkn->mbn", x.double(), w.double()))


@pytest.mark.needs_line("7.1")
def test_transpose_batchmatmul_gaps_are_loud(npu_device) -> None:
    import torch
    import torch_npu

    x, w = torch.ones(2, 4, 128, device=npu_device), torch.ones(2, 128, 128, device=npu_device)
    with pytest.raises(NotSimulatedError, match="batch_split_factor 2 is not simulated"):
        torch_npu.npu_transpose_batchmatmul(x, w, batch_split_factor=2)
    with pytest.raises(NotSimulatedError, match="an output scale"):
        torch_npu.npu_transpose_batchmatmul(x, w, scale=torch.ones(1, device=npu_device))
    with pytest.raises(RuntimeError, match="same device"):
        torch_npu.npu_transpose_batchmatmul(x, w.cpu())


def refused(x1, x2, match):
    import torch_npu

    with pytest.raises(RuntimeError, match=match):
        torch_npu.npu_transpose_batchmatmul(x1, x2, perm_x1=(1, 0, 2))


@pytest.mark.needs_line("7.1")
@pytest.mark.npu(cann="9.0.0", soc="Ascend910_9391")
def test_the_kernel_refuses_65536_at_cann_9_0(npu_device) -> None:
    import torch

    w = torch.zeros(128, 512, 128, dtype=torch.bfloat16, device=npu_device)
    refused(torch.zeros(1, 128, 512, dtype=torch.bfloat16, device=npu_device), w, r"B\*K = 65536")
    nz = torch.ops.npu.npu_format_cast(w[:8].contiguous(), 29)
    x = torch.zeros(1, 8, 512, dtype=torch.bfloat16, device=npu_device)
    refused(x, nz, "weight is not supported")


@pytest.mark.needs_line("7.1")
@pytest.mark.npu(cann="9.0.0", soc="Ascend910_9391")
def test_the_explicit_transpose_serves_the_refused_shape_at_cann_9_0(npu_device) -> None:
    import torch
    import torch_npu

    w = torch.ones(128, 512, 128, dtype=torch.bfloat16, device=npu_device)
    x = torch.ones(3, 128, 512, dtype=torch.bfloat16, device=npu_device)
    out = torch_npu.npu_transpose_batchmatmul(x.transpose(0, 1), w, perm_x1=(0, 1, 2))
    assert out.shape == (3, 128, 128)
    assert out.unique().tolist() == [512]


@pytest.mark.needs_line("7.1")
@pytest.mark.npu(cann="9.0.0", soc="Ascend910_9391")
def test_fake_kernels_check_no_sizes_so_a_compiled_call_fails_in_the_kernel(npu_device) -> None:
    import torch
    import torch_npu

    call = torch.compile(
        lambda x, w: torch_npu.npu_transpose_batchmatmul(x, w, perm_x1=(1, 0, 2)),
        backend="eager",
        fullgraph=True,
    )
    w = torch.zeros(128, 512, 128, dtype=torch.bfloat16, device=npu_device)
    with pytest.raises(RuntimeError, match="65536"):
        call(torch.zeros(1, 128, 512, dtype=torch.bfloat16, device=npu_device), w)


@pytest.mark.npu(cann="9.2.0")
@pytest.mark.needs_line("26.1")
def test_at_cann_9_2_the_same_shape_is_legal(npu_device) -> None:
    import torch
    import torch_npu

    w = torch.ones(128, 512, 128, dtype=torch.bfloat16, device=npu_device)
    x = torch.ones(1, 128, 512, dtype=torch.bfloat16, device=npu_device)
    assert torch_npu.npu_transpose_batchmatmul(x, w, perm_x1=(1, 0, 2)).unique().item() == 512


def test_batch_matmul_transpose_writes_into_c(npu_device) -> None:
    import torch

    a, b = torch.randn(5, 3, 64).half(), torch.randn(3, 64, 32).half()
    c = torch.empty(5, 3, 32, dtype=torch.half, device=npu_device)
    assert torch.ops.npu.batch_matmul_transpose(a.to(npu_device), b.to(npu_device), c) is None
    expected = torch.einsum("mbk,bkn->mbn", a.double(), b.double())
    close(c, expected)
    nz = b.view(3, 64, 2, 16).permute(0, 2, 1, 3).contiguous()
    c.zero_()
    torch.ops.npu.batch_matmul_transpose(a.to(npu_device), nz.to(npu_device), c, "NZ")
    close(c, expected)


def test_batch_matmul_transpose_refuses_1025_rows_and_strides(npu_device) -> None:
    import torch

    def call(m, w):
        a = torch.zeros(m, 1, 16, dtype=torch.half, device=npu_device)
        c = torch.zeros(m, 1, 16, dtype=torch.half, device=npu_device)
        torch.ops.npu.batch_matmul_transpose(a, w, c)

    w = torch.zeros(1, 16, 16, dtype=torch.half, device=npu_device)
    call(1024, w)
    with pytest.raises(OpRejectedError, match="batchIdx is out of range"):
        call(1025, w)
    with pytest.raises(OpRejectedError, match="raw pointers"):
        call(8, w.transpose(1, 2))


def test_schemas_of_the_library_ops_are_the_librarys(npu_sim) -> None:
    import torch

    assert str(torch.ops.npu.batch_matmul_transpose.default._schema) == (
        "npu::batch_matmul_transpose(Tensor tensor_a, Tensor tensor_b, Tensor(a!) tensor_c, "
        "str? format_mode=None, str? quant_mode=None) -> ()"
    )
    text = str(torch.ops.npu.mla_preprocess.default._schema)
    assert text.startswith("npu::mla_preprocess(Tensor hiddenState, Tensor gamma0, Tensor beta0, ")
    assert "Tensor bias1, *, Tensor? ctkv_scale=None, Tensor? q_nope_scale=None, " in text
    assert text.endswith("-> (Tensor(a!), Tensor(b!), Tensor(c!), Tensor(d!))")


def test_format_cast_copies_remembers_and_returns_its_input(npu_device) -> None:
    import torch
    import torch_npu

    w = torch.randn(64, 48, device=npu_device).to(torch.bfloat16)
    nz = torch_npu.npu_format_cast(w, 29)
    assert int(torch_npu.get_npu_format(w)) == 2
    assert int(torch_npu.get_npu_format(nz)) == 29
    assert torch.equal(nz, w)
    assert nz.data_ptr() != w.data_ptr()
    assert torch_npu.npu_format_cast(nz, 29) is nz
    assert int(torch_npu.get_npu_format(torch_npu.npu_format_cast(nz, 2))) == 2
    odd = torch.zeros(64, 360, dtype=torch.int8, device=npu_device)
    assert torch_npu.npu_format_cast(odd, 29) is odd  # 360 % 32: not castable
    with pytest.raises(OpRejectedError, match="acl_format = 3"):
        torch_npu.npu_format_cast(w, 3)


def test_rms_norm(npu_device) -> None:
    import torch
    import torch_npu

    x, gamma = torch.randn(4, 6, 32).half(), torch.randn(32).half()
    out, rstd = torch_npu.npu_rms_norm(x.to(npu_device), gamma.to(npu_device), epsilon=1e-6)
    close(out, norm(x, gamma, 1e-6))
    assert (rstd.shape, rstd.dtype) == ((4, 6, 1), torch.float32)
    close(rstd, 1 / (x.double().pow(2).mean(-1, keepdim=True) + 1e-6).sqrt())


def test_interleave_rope_gives_the_half_layout(npu_device) -> None:
    import torch
    import torch_npu

    cos, sin = angles()
    x = torch.randn(TOKENS, HEADS, 1, ROPE).to(torch.bfloat16)
    cos4, sin4 = cos.view(TOKENS, 1, 1, ROPE), sin.view(TOKENS, 1, 1, ROPE)
    out = torch_npu.npu_interleave_rope(x.to(npu_device), cos4.to(npu_device), sin4.to(npu_device))
    close(out, rope_of(x, cos4, sin4))


@pytest.mark.parametrize("mode", ["PA_BNSD", "PA_NZ", "Norm", "PA_BLK_BNSD"])
def test_kv_rmsnorm_rope_cache(npu_device, mode: str) -> None:
    import torch
    import torch_npu

    batch, length = (2, 3) if mode != "PA_BNSD" else (6, 1)
    cos, sin = angles(6)
    kv = torch.randn(batch, 1, length, KV + ROPE).to(torch.bfloat16)
    gamma = torch.randn(KV).to(torch.bfloat16)
    turns = [a.view(batch, 1, length, ROPE) for a in (cos, sin)]
    if mode == "Norm":
        caches = [torch.zeros(batch, 1, 8, w, dtype=kv.dtype) for w in (ROPE, KV)]
        index = torch.tensor([[1, 2, 5], [0, 7, 3]])
    else:
        caches = [torch.zeros(2, 16, 1, w, dtype=kv.dtype) for w in (ROPE, KV)]
        index = torch.tensor([3, 17] if "BLK" in mode else [3, 17, 0, 31, 8, 9])
    args = [t.to(npu_device) for t in (kv, gamma, *turns, index, *caches)]
    k_cache, ckv_cache, rotated, normed = torch_npu.npu_kv_rmsnorm_rope_cache(
        *args, cache_mode=mode, is_output_kv=True
    )
    assert k_cache.data_ptr() == args[5].data_ptr()
    assert ckv_cache.data_ptr() == args[6].data_ptr()
    close(rotated, rope_of(kv[..., KV:], *turns))
    close(normed, norm(kv[..., :KV], gamma))
    flat = {"Norm": lambda i: (i // 3, 0, int(index[i // 3, i % 3]))}
    for cache, rows in ((k_cache, rotated), (ckv_cache, normed)):
        cache, rows = cache.cpu(), rows.cpu().reshape(6, -1)
        if mode == "PA_NZ":
            width = rows.shape[1]
            cache = cache.view(2, width // 16, 16, 16).permute(0, 2, 1, 3).reshape(2, 16, 1, width)
        for i in range(6):
            if mode == "Norm":
                found = cache[flat["Norm"](i)]
            else:
                slot = int(index[i]) if len(index) == 6 else int(index[i // 3]) + i % 3
                found = cache[slot // 16, slot % 16, 0]
            assert torch.equal(found, rows[i])
        assert int((cache.flatten(0, -2).abs().sum(-1) > 0).sum()) == 6


def test_kv_cache_slots_that_would_write_elsewhere_are_refused(npu_device) -> None:
    import torch
    import torch_npu

    def call(index):
        cos, sin = (a.view(TOKENS, 1, 1, ROPE) for a in angles())
        torch_npu.npu_kv_rmsnorm_rope_cache(
            *(
                t.to(npu_device)
                for t in (
                    torch.ones(TOKENS, 1, 1, KV + ROPE, dtype=torch.bfloat16),
                    torch.ones(KV, dtype=torch.bfloat16),
                    cos,
                    sin,
                    torch.tensor(index),
                    torch.zeros(2, 16, 1, ROPE, dtype=torch.bfloat16),
                    torch.zeros(2, 16, 1, KV, dtype=torch.bfloat16),
                )
            ),
            cache_mode="PA_BNSD",
        )

    call([0, 31, -1])
    with pytest.raises(OpRejectedError, match="cache index 32 is outside the 32 slots"):
        call([0, 32, 1])
    with pytest.raises(OpRejectedError, match="duplicates"):
        call([4, 4, 1])


def prolog_inputs(mode: int):
    import torch

    g = torch.Generator().manual_seed(7)

    def rand(*shape, scale=1.0):
        return (torch.randn(*shape, generator=g) * scale).to(torch.bfloat16)

    def quantized(weight):
        scale = weight.float().abs().amax(0, keepdim=True) / 127
        return (weight.float() / scale).round().to(torch.int8), scale

    cos, sin = angles()
    x = rand(TOKENS, HIDDEN)
    floats = {
        "dq": rand(HIDDEN, Q_LORA, scale=0.02),
        "uq_qr": rand(Q_LORA, HEADS * (NOPE + ROPE), scale=0.05),
        "dkv_kr": rand(HIDDEN, KV + ROPE, scale=0.02),
    }
    scales, weights = {}, dict(floats)
    if mode == 2:
        per_token = x.float().abs().amax(-1, keepdim=True) / 127
        x8 = (x.float() / per_token).round().to(torch.int8)
        scales["dequant_scale_x"] = per_token
        for name in floats:
            weights[name], scales[f"dequant_scale_w_{name}"] = quantized(floats[name])
    elif mode == 1:
        weights["uq_qr"], scales["dequant_scale_w_uq_qr"] = quantized(floats["uq_qr"])
    uk = rand(HEADS, NOPE, KV, scale=0.1)
    gammas = rand(Q_LORA), rand(KV)
    return {
        "x": x,
        "token_x": x8 if mode == 2 else x,
        "floats": floats,
        "weights": weights,
        "uk": uk,
        "gammas": gammas,
        "cos": cos,
        "sin": sin,
        "scales": scales,
    }


def prolog_expected(given):
    """The op's formulas in fp64 from the unquantized weights."""
    import torch

    x, w = given["x"].double(), {k: v.double() for k, v in given["floats"].items()}
    c_q = norm(x @ w["dq"], given["gammas"][0])
    q = (c_q @ w["uq_qr"]).view(TOKENS, HEADS, NOPE + ROPE)
    query = torch.einsum("thn,hnl->thl", q[..., :NOPE], given["uk"].double())
    cos, sin = given["cos"], given["sin"]
    query_rope = rope_of(q[..., NOPE:], cos[:, None], sin[:, None])
    kv = x @ w["dkv_kr"]
    return (
        query,
        query_rope,
        norm(kv[:, :KV], given["gammas"][1]),
        rope_of(kv[:, KV:], cos, sin),
        c_q,
    )


def prolog_call(npu_device, given, mode, op=None, **options):
    import torch
    import torch_npu

    def nz(weight):
        return torch_npu.npu_format_cast(weight.to(npu_device), 29)

    w, kind = given["weights"], torch.bfloat16
    caches = [torch.zeros(2, 16, 1, d, dtype=kind, device=npu_device) for d in (KV, ROPE)]
    out = (op or torch_npu.npu_mla_prolog_v3)(
        given["token_x"].to(npu_device),
        nz(w["dq"]),
        nz(w["uq_qr"]),
        given["uk"].to(npu_device),
        nz(w["dkv_kr"]),
        *(g.to(npu_device) for g in given["gammas"]),
        given["sin"].to(npu_device),
        given["cos"].to(npu_device),
        *caches,
        cache_index=torch.tensor([20, 3, 31], device=npu_device),
        weight_quant_mode=mode,
        **{name: scale.to(npu_device) for name, scale in given["scales"].items()},
        **options,
    )
    return out, caches


@pytest.mark.needs_line("7.3")
@pytest.mark.parametrize(("mode", "tolerance"), [(0, 0.05), (1, 0.1), (2, 0.15)])
def test_mla_prolog_v3(npu_device, mode: int, tolerance: float) -> None:
    import torch

    given = prolog_inputs(mode)
    out, caches = prolog_call(npu_device, given, mode, query_norm_flag=True)
    query, query_rope, kv, kr, c_q = prolog_expected(given)
    for actual, expected in ((out[0], query), (out[1], query_rope)):
        assert actual.dtype == torch.bfloat16
        error = (actual.cpu().double() - expected).norm() / expected.norm()
        assert error < tolerance
    assert out[2].numel() == 0
    if mode == 0:
        assert (out[3].dtype, out[3].shape) == (torch.bfloat16, (TOKENS, Q_LORA))
        assert out[4].numel() == 0
        restored = out[3].cpu().double()
    else:
        assert (out[3].dtype, out[4].dtype) == (torch.int8, torch.float32)
        assert out[4].shape == (TOKENS, 1)
        restored = out[3].cpu().double() * out[4].cpu().double()
    assert (restored - c_q).norm() / c_q.norm() < tolerance
    for cache, rows in zip(caches, (kv, kr), strict=True):
        written = cache.cpu().view(32, -1)[[20, 3, 31]].double()
        assert (written - rows).norm() / rows.norm() < tolerance
        assert int((cache.cpu().view(32, -1).abs().sum(-1) > 0).sum()) == 3


@pytest.mark.needs_line("7.3")
def test_mla_prolog_v3_functional_leaves_its_caches_alone(npu_device) -> None:
    import torch

    given = prolog_inputs(0)
    plain, written = prolog_call(npu_device, given, 0)
    op = torch.ops.npu.npu_mla_prolog_v3_functional
    out, untouched = prolog_call(npu_device, given, 0, op=op)
    assert len(out) == 7
    assert all(int(cache.abs().sum()) == 0 for cache in untouched)
    assert torch.equal(out[0], plain[0])
    assert torch.equal(out[5], written[0])
    assert torch.equal(out[6], written[1])


@pytest.mark.needs_line("7.3")
@pytest.mark.parametrize(("version", "results"), [("", 4), ("_v2", 5)])
def test_older_prologs_agree_with_the_third(npu_device, version: str, results: int) -> None:
    import torch
    import torch_npu

    given = prolog_inputs(1)
    expected, expected_caches = prolog_call(npu_device, given, 1)
    w = given["weights"]
    kv, kr = (torch.zeros_like(cache) for cache in expected_caches)

    def at(tensor):
        return tensor.to(npu_device)

    out = getattr(torch_npu, "npu_mla_prolog" + version)(
        at(given["token_x"]),
        torch_npu.npu_format_cast(at(w["dq"]), 29),
        torch_npu.npu_format_cast(at(w["uq_qr"]), 29),
        at(given["uk"]),
        torch_npu.npu_format_cast(at(w["dkv_kr"]), 29),
        *(at(g) for g in given["gammas"]),
        at(given["sin"]),
        at(given["cos"]),
        torch.tensor([20, 3, 31], device=npu_device),
        kv,
        kr,
        dequant_scale_w_uq_qr=at(given["scales"]["dequant_scale_w_uq_qr"]),
    )
    assert len(out) == results
    assert torch.equal(out[0], expected[0])
    assert torch.equal(out[1], expected[1])
    assert torch.equal(kv, expected_caches[0])
    assert torch.equal(kr, expected_caches[1])


@pytest.mark.needs_line("7.3")
def test_mla_prologs_refusals_are_the_devices(npu_device) -> None:
    given = prolog_inputs(0)
    with pytest.raises(OpRejectedError, match="weight_quant_mode = 3 is not supported"):
        prolog_call(npu_device, given, 3)
    with pytest.raises(OpRejectedError, match="dequant_scale_w_uq_qr is needed"):
        prolog_call(npu_device, {**prolog_inputs(1), "scales": {}}, 1)


@pytest.mark.parametrize("cache_mode", ["krope_ctkv", "nzcache"])
@pytest.mark.parametrize("packed", [True, False])
def test_mla_preprocess(npu_device, cache_mode: str, packed: bool) -> None:
    import torch
    import torch_npu

    g = torch.Generator().manual_seed(3)
    kind, hidden = torch.bfloat16, 2048
    x = torch.randn(TOKENS, hidden, generator=g).to(kind)
    w1 = torch.randint(-20, 20, (KV + ROPE + Q_LORA, hidden), generator=g, dtype=torch.int8)
    w2 = torch.randint(-20, 20, (HEADS * (NOPE + ROPE), Q_LORA), generator=g, dtype=torch.int8)
    d1 = torch.rand(w1.shape[0], generator=g) * 1e-4
    d2 = torch.rand(w2.shape[0], generator=g) * 1e-4
    b1 = torch.randint(-99, 99, (w1.shape[0],), generator=g, dtype=torch.int32)
    b2 = torch.randint(-99, 99, (w2.shape[0],), generator=g, dtype=torch.int32)
    gamma1, beta1, gamma2 = (torch.randn(n, generator=g).to(kind) for n in (Q_LORA, Q_LORA, KV))
    s1, s2 = torch.tensor([0.03]).to(kind), torch.tensor([0.04]).to(kind)
    o1, o2 = torch.tensor([3], dtype=torch.int8), torch.tensor([-2], dtype=torch.int8)
    wuk = (torch.randn(HEADS, NOPE, KV, generator=g) * 0.1).to(kind)
    cos, sin = angles()

    def pack(weight):
        n, k = weight.shape
        blocks = weight.view(n, k // 32, 32).permute(1, 0, 2).contiguous()
        if packed:
            return blocks.view(1, k // 32, n, 32).to(npu_device)
        return torch_npu.npu_format_cast(weight.to(npu_device), 29)

    nz = cache_mode == "nzcache"
    shapes = [(1, d // 16, 128, 16) if nz else (1, 128, 1, d) for d in (KV, ROPE)]
    caches = [torch.zeros(s, dtype=kind, device=npu_device) for s in shapes]
    outs = [torch.zeros(TOKENS, HEADS, d, dtype=kind, device=npu_device) for d in (KV, ROPE)]
    unused = torch.zeros(hidden, dtype=kind)
    slots = torch.tensor([100, 7, 64], dtype=torch.int32)

    def at(*tensors):
        return [t.to(npu_device) for t in tensors]

    torch.ops.npu.mla_preprocess(
        *at(x, unused, unused), pack(w1), *at(d1, gamma1, beta1), pack(w2),
        *at(d2, gamma2, cos, sin, wuk), *caches, *at(slots, s1, o1, b1, s2, o2, b2),
        cache_mode=cache_mode, quant_mode="per_tensor_quant_asymm",
        q_out0=outs[0], kv_cache_out0=caches[0], q_out1=outs[1], kv_cache_out1=caches[1],
    )  # fmt: skip

    def static(values, scale, offset):
        return (values.double() / scale.double() + offset.double()).round().clamp(-128, 127)

    def turn(values):
        first, second = values.double().chunk(2, -1)
        lift, drop = cos.double().chunk(2, -1)[0], sin.double().chunk(2, -1)[0]
        if values.dim() == 3:
            lift, drop = lift[:, None], drop[:, None]
        return torch.cat((first * lift - second * drop, second * lift + first * drop), -1)

    first = ((static(x, s1, o1) @ w1.double().t() + b1) * d1.double()).to(kind)
    low = (norm(first[:, KV + ROPE :], gamma1, 1e-6) + beta1.double()).to(kind)
    q = ((static(low, s2, o2) @ w2.double().t() + b2) * d2.double()).to(kind)
    q = q.view(TOKENS, HEADS, NOPE + ROPE)
    close(outs[0], torch.einsum("thn,hnl->thl", q[..., :NOPE].double(), wuk.double()), 0.1)
    close(outs[1], turn(q[..., NOPE:]), 0.1)
    rows = norm(first[:, :KV], gamma2, 1e-6), turn(first[:, KV : KV + ROPE])
    for cache, expected in zip(caches, rows, strict=True):
        found = cache.cpu()
        if nz:
            found = found.permute(0, 2, 1, 3).reshape(1, 128, 1, -1)
        close(found[0, slots.long(), 0], expected, 0.05)


def test_mla_preprocess_refuses_what_it_hard_codes(npu_device) -> None:
    import torch

    small = torch.zeros(1, dtype=torch.int32, device=npu_device)
    with pytest.raises(OpRejectedError, match="mla_preprocess: hiddenState should be 2D"):
        torch.ops.npu.mla_preprocess(
            *([small] * 22), q_out0=small, kv_cache_out0=small, q_out1=small, kv_cache_out1=small
        )


def test_dynamic_quant(npu_device) -> None:
    import torch
    import torch_npu

    x, smooth = torch.randn(2, 3, 16).half(), torch.rand(16).half()
    x[0, 1] = 0
    out, scale = torch_npu.npu_dynamic_quant(x.to(npu_device))
    assert (out.dtype, scale.dtype, scale.shape) == (torch.int8, torch.float32, (2, 3))
    expected = x.float().abs().amax(-1) / 127
    torch.testing.assert_close(scale.cpu(), expected)
    assert out.cpu()[0, 1].unique().tolist() == [0]
    assert out.abs().amax(-1).cpu()[1].unique().tolist() == [127]
    restored = out.cpu().float() * scale.cpu()[..., None]
    assert (restored - x.float()).abs().max() <= expected.max() * 0.501
    out, scale = torch_npu.npu_dynamic_quant(x.to(npu_device), smooth_scales=smooth.to(npu_device))
    torch.testing.assert_close(scale.cpu(), (x.float() * smooth.float()).abs().amax(-1) / 127)
    with pytest.raises(OpRejectedError, match="dst_type = int32 is not supported, only int8"):
        torch_npu.npu_dynamic_quant(x.to(npu_device), dst_type=torch.int32)


@pytest.mark.npu(soc="A5")
@pytest.mark.needs_line("26.0")
def test_dynamic_mx_quant_on_a5(npu_device) -> None:
    import torch
    import torch_npu

    x = torch.randn(4, 96).to(torch.bfloat16)
    x[1, 32:64] = 0
    x[2, 0] = 1000.0
    out, scale = torch_npu.npu_dynamic_mx_quant(x.to(npu_device), dst_type=torch.float8_e4m3fn)
    assert (out.dtype, out.shape) == (torch.float8_e4m3fn, (4, 96))
    assert (scale.dtype, scale.shape) == (torch.uint8, (4, 2, 2))
    codes = scale.cpu().view(4, 4)
    for row in range(4):
        for block in range(3):
            values = x[row, block * 32 : block * 32 + 32].float()
            largest = float(values.abs().max())
            power = math.floor(math.log2(largest)) - 8 if largest else -127
            assert int(codes[row, block]) == power + 127
            stored = out.cpu()[row, block * 32 : block * 32 + 32].float() * 2.0**power
            # Three mantissa bits; what lies above 448 of the block's scale saturates.
            assert (stored - values).abs().max() <= max(largest / 7, 0)
    assert int(codes[:, 3].sum()) == 0
    with pytest.raises(NotSimulatedError, match="dtype number 296"):
        torch_npu.npu_dynamic_mx_quant(x.to(npu_device))


def test_quant_matmul(npu_device) -> None:
    import torch
    import torch_npu

    a = torch.randint(-128, 128, (5, 64), dtype=torch.int8)
    b = torch.randint(-128, 128, (64, 32), dtype=torch.int8)
    scale, token = torch.rand(32) * 1e-3, torch.rand(5)
    bias = torch.randint(-50, 50, (32,), dtype=torch.int32)
    exact = a.double() @ b.double()
    at = [t.to(npu_device) for t in (a, b, scale)]
    out = torch_npu.npu_quant_matmul(*at, output_dtype=torch.bfloat16)
    assert out.dtype == torch.bfloat16
    close(out, exact * scale.double())
    out = torch_npu.npu_quant_matmul(
        *at, pertoken_scale=token.to(npu_device), bias=bias.to(npu_device),
        output_dtype=torch.float16,
    )  # fmt: skip
    close(out, (exact + bias) * scale.double() * token.double()[:, None])
    assert torch_npu.npu_quant_matmul(*at).dtype == torch.int8


@pytest.mark.parametrize("div_mode", [True, False])
def test_quantize(npu_device, div_mode: bool) -> None:
    import torch
    import torch_npu

    x, scale = torch.randn(3, 8), torch.rand(8) + 0.01
    zero = torch.full((8,), 4.0) if not div_mode else torch.full((8,), 4, dtype=torch.int32)
    out = torch_npu.npu_quantize(
        x.to(npu_device), scale.to(npu_device), zero.to(npu_device), torch.qint8, -1, div_mode
    )
    expected = (x / scale if div_mode else x * scale) + 4
    assert torch.equal(out.cpu(), expected.round().clamp(-128, 127).to(torch.int8))


@pytest.mark.needs_line("7.2")
def test_shapes_and_dtypes_are_those_of_torch_npus_own_fake_kernels(npu_device) -> None:
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    kind = torch.bfloat16
    cos = torch.ones(4, 1, 1, ROPE, dtype=kind)
    int8 = torch.ones(16, 32, dtype=torch.int8)
    calls = {
        "npu_transpose_batchmatmul": ((torch.ones(2, 3, 128), torch.ones(2, 128, 128)), {}),
        "npu_rms_norm": ((torch.ones(4, 8, dtype=kind), torch.ones(8, dtype=kind)), {}),
        "npu_interleave_rope": ((torch.ones(4, 2, 1, ROPE, dtype=kind), cos, cos), {}),
        "npu_dynamic_quant": ((torch.ones(4, 8, dtype=kind),), {}),
        "npu_quantize": ((torch.ones(4, 8), torch.ones(8), None, torch.qint8, -1, False), {}),
        "npu_quant_matmul": ((int8, int8.t(), torch.ones(16)), {"output_dtype": torch.bfloat16}),
        "npu_kv_rmsnorm_rope_cache_v2": (
            (
                torch.ones(4, 1, 1, KV + ROPE, dtype=kind),
                torch.ones(KV, dtype=kind),
                cos,
                cos,
                torch.arange(4),
                torch.zeros(1, 16, 1, ROPE, dtype=kind),
                torch.zeros(1, 16, 1, KV, dtype=kind),
            ),
            {"cache_mode": "PA_BNSD"},
        ),
    }

    def place(value):
        return value.to(npu_device) if isinstance(value, torch.Tensor) else value

    def describe(out):
        out = out if isinstance(out, tuple | list) else [out]
        return [(tuple(t.shape), t.dtype) for t in out]

    for name, (args, kwargs) in calls.items():
        op = getattr(torch.ops.npu, name)
        real = describe(op(*(place(a) for a in args), **kwargs))
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fakes = [mode.from_tensor(place(a)) if isinstance(a, torch.Tensor) else a for a in args]
            assert describe(op(*fakes, **kwargs)) == real, name
