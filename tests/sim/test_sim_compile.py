"""torch.compile over npu:: ops, one full graph, on the backends that need no device compiler."""

from __future__ import annotations

import pytest

BACKENDS = ["eager", "aot_eager"]


@pytest.fixture(autouse=True)
def _fresh(npu_sim):
    import torch

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.needs_line("7.1")
@pytest.mark.parametrize("backend", BACKENDS)
def test_transpose_batchmatmul_compiles_without_a_break_for_every_row_count(
    npu_device, backend: str
) -> None:
    import torch
    import torch_npu

    def call(x, w):
        out = torch_npu.npu_transpose_batchmatmul(
            x, w, perm_x1=(1, 0, 2), perm_x2=(0, 1, 2), perm_y=(1, 0, 2)
        )
        return out.flatten(1) * 2

    compiled = torch.compile(call, backend=backend, fullgraph=True, dynamic=True)
    w = torch.randn(4, 128, 256, device=npu_device)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for rows in (2, 3, 17):
            x = torch.randn(rows, 4, 128, device=npu_device)
            assert torch.equal(compiled(x, w), call(x, w))


@pytest.mark.parametrize("backend", BACKENDS)
def test_batch_matmul_transpose_compiles(npu_device, backend: str) -> None:
    import torch

    def call(a, b):
        c = torch.empty(a.shape[0], a.shape[1], b.shape[2], dtype=a.dtype, device=a.device)
        torch.ops.npu.batch_matmul_transpose(a, b, c)
        return c + 1

    compiled = torch.compile(call, backend=backend, fullgraph=True, dynamic=True)
    b = torch.randn(4, 64, 32, device=npu_device).half()
    for rows in (2, 5):
        a = torch.randn(rows, 4, 64, device=npu_device).half()
        assert torch.equal(compiled(a, b), call(a, b))


@pytest.mark.needs_line("7.3")
@pytest.mark.parametrize("backend", BACKENDS)
def test_mla_prolog_v3_compiles_and_writes_its_caches(npu_device, backend: str) -> None:
    import torch
    import torch_npu

    kind = torch.bfloat16

    def full(*shape):
        return torch.full(shape, 0.01, dtype=kind, device=npu_device)

    weights = [torch_npu.npu_format_cast(full(7168, 1536), 29)]
    weights += [torch_npu.npu_format_cast(full(1536, 192), 29), full(1, 128, 512)]
    weights += [torch_npu.npu_format_cast(full(7168, 576), 29)]
    rest = [full(1536), full(512), full(2, 64), full(2, 64)]
    index = torch.tensor([1, 5], device=npu_device)

    def call(x, kv_cache, kr_cache):
        out = torch_npu.npu_mla_prolog_v3(x, *weights, *rest, kv_cache, kr_cache, cache_index=index)
        return out[0] + 1, out[1]

    compiled = torch.compile(call, backend=backend, fullgraph=True)
    results = []
    for run in (call, compiled):
        caches = (
            torch.zeros(1, 16, 1, 512, dtype=kind, device=npu_device),
            torch.zeros(1, 16, 1, 64, dtype=kind, device=npu_device),
        )
        results.append([*run(full(2, 7168), *caches), *caches])
    for expected, actual in zip(*results, strict=True):
        assert torch.equal(expected, actual)
    assert float(results[1][2].abs().sum()) > 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_format_cast_and_norm_compile(npu_device, backend: str) -> None:
    import torch
    import torch_npu

    def call(x, gamma, w):
        normed = torch_npu.npu_rms_norm(x, gamma, 1e-6)[0]
        quantized, scale = torch_npu.npu_dynamic_quant(normed)
        return quantized.float() * scale[:, None] @ torch_npu.npu_format_cast(w, 29).float()

    compiled = torch.compile(call, backend=backend, fullgraph=True)
    x = torch.randn(3, 32, device=npu_device).half()
    gamma = torch.ones(32, device=npu_device).half()
    w = torch.randn(32, 16, device=npu_device).half()
    torch.testing.assert_close(compiled(x, gamma, w), call(x, gamma, w))


def test_mla_preprocess_is_one_graph_on_the_eager_backend(npu_device) -> None:
    import torch

    seen = []

    def record(graph, inputs):
        seen.append(graph)
        return lambda *args: (args[0],)

    def call(x, cache):
        out = torch.ops.npu.mla_preprocess(
            *([x] * 22), q_out0=x, kv_cache_out0=cache, q_out1=x, kv_cache_out1=cache
        )
        return out[0]

    torch.compile(call, backend=record, fullgraph=True)(
        torch.ones(2, device=npu_device), torch.ones(3, device=npu_device)
    )
    assert len(seen) == 1


@pytest.mark.needs_line("7.1")
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_released_weight_raises_in_a_compiled_graph(npu_device, backend: str) -> None:
    import torch
    import torch_npu

    def call(x, w):
        return torch_npu.npu_transpose_batchmatmul(x, w, perm_x1=(1, 0, 2))

    compiled = torch.compile(call, backend=backend, fullgraph=True)
    x = torch.randn(2, 4, 128, device=npu_device)
    w = torch.randn(4, 128, 256, device=npu_device)
    compiled(x, w)
    w.untyped_storage().resize_(0)
    with pytest.raises(Exception, match="touches released memory"):
        compiled(x, w)
