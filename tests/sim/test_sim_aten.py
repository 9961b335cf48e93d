"""aten computes on the device, gives what the CPU gives, and never reads released memory."""

from __future__ import annotations

import copy
import io

import pytest

from npu_backend.testing.sim import StorageReleasedError


def test_about_a_thousand_aten_ops_compute(npu_sim) -> None:
    assert npu_sim.aten_ops > 1000


@pytest.mark.parametrize(
    "expression",
    [
        "a + b",
        "a @ b.t()",
        "torch.matmul(a, b.t()).softmax(-1)",
        "torch.cat([a, b], 1)[:, 2:5]",
        "torch.where(a > 0, a, b)",
        "a.to(torch.bfloat16).float()",
        "a.t().contiguous()",
        "torch.einsum('ij,kj->ik', a, b)",
        "a.sum(0, keepdim=True) * b.mean()",
        "torch.topk(a, 2).values",
        pytest.param(
            "a.argsort(-1)", marks=pytest.mark.needs_line("7.1")
        ),  # before: CANN's old ops
        "a.nonzero()",
        "a[torch.tensor([2, 0]).to(a.device)]",
        "a.masked_fill(b > 0, 3.0)",
        "torch.nn.functional.layer_norm(a, (5,))",
        "torch.nn.functional.rms_norm(a, (5,))",
        "torch.nn.functional.scaled_dot_product_attention(a[None], b[None], a[None])",
        "torch.baddbmm(a[None], a[None], b[None, :, :].transpose(1, 2)[:, :, :4] @ b[None])",
        "a.pow(2).cumsum(1).flip(0)",
        "(a * 100).round().clamp(-128, 127).to(torch.int8).to(torch.int32)",
        "torch.arange(20, device=a.device).view(4, 5)[1:, ::2].float() / 3",
        "torch.stack([a, b]).permute(2, 0, 1).reshape(5, -1)",
        "a.std() + b.var(1).max()",
        "torch.eye(4, device=a.device) @ a",
        "torch.full((4, 5), 2.5, device=a.device) - a",
        "a.repeat_interleave(2, 0).unique().sum()",
    ],
)
def test_results_are_the_cpus(npu_device, expression: str) -> None:
    import torch

    generator = torch.Generator().manual_seed(1)
    a = torch.randn(4, 5, generator=generator)
    b = torch.randn(4, 5, generator=generator)
    expected = eval(expression, {"torch": torch, "a": a, "b": b})
    names = {"torch": torch, "a": a.to(npu_device), "b": b.to(npu_device)}
    actual = eval(expression, names)
    assert actual.device == npu_device
    torch.testing.assert_close(actual.cpu(), expected)


def test_in_place_and_out_write_the_tensors_own_memory(npu_device) -> None:
    import torch

    a = torch.zeros(4, 5, device=npu_device)
    address = a.data_ptr()
    a.add_(2)
    a[1:3, ::2] = 7
    a[0].copy_(torch.arange(5.0))
    assert a.data_ptr() == address
    assert a.cpu()[0].tolist() == [0, 1, 2, 3, 4]
    assert a.cpu()[1].tolist() == [7, 2, 7, 2, 7]
    out = torch.empty(0, device=npu_device)
    result = torch.add(a, a, out=out)
    assert result is out
    assert torch.equal(out.cpu(), a.cpu() * 2)
    grown = torch.empty(2, 2, device=npu_device)
    with pytest.warns(UserWarning, match="was resized"):
        torch.mul(a, 3, out=grown)
    assert torch.equal(grown.cpu(), a.cpu() * 3)


def test_backward_runs(npu_device) -> None:
    import torch

    layer = torch.nn.Linear(5, 3).to(npu_device)
    layer(torch.ones(2, 5, device=npu_device)).sum().backward()
    assert layer.weight.grad is not None
    assert torch.equal(layer.weight.grad.cpu(), torch.full((3, 5), 2.0))


def test_random_numbers_follow_the_generator(npu_device) -> None:
    import torch

    torch.manual_seed(5)
    first = torch.randn(3, device=npu_device)
    torch.manual_seed(5)
    assert torch.equal(torch.randn(3, device=npu_device), first)
    own = [
        torch.rand(3, generator=torch.Generator("npu").manual_seed(9), device=npu_device)
        for _ in range(2)
    ]
    assert torch.equal(*own)
    state = torch.npu.get_rng_state()
    third = torch.rand(3, device=npu_device)
    assert not torch.equal(torch.rand(3, device=npu_device), third)
    torch.npu.set_rng_state(state)
    assert torch.equal(torch.rand(3, device=npu_device), third)


def test_tensors_of_host_and_device_do_not_mix(npu_device) -> None:
    import torch

    device = torch.ones(2, device=npu_device)
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        device + torch.ones(2)
    assert (device + torch.tensor(1.0)).tolist() == [2, 2]  # a number


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")  # torch_npu's own deepcopy
def test_save_load_deepcopy(npu_device) -> None:
    import torch

    tensor = torch.arange(6.0, device=npu_device).view(2, 3)
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    buffer.seek(0)
    assert torch.equal(torch.load(buffer, weights_only=True), tensor)
    assert torch.equal(copy.deepcopy(tensor), tensor)


@pytest.mark.parametrize(
    "touch",
    [
        "w + 1",
        "w @ turned",
        "w.cpu()",
        "w.clone()",
        "w.to(torch.float32)",
        "w.sum()",
        "scalar.item()",
        "w.fill_(1)",
        "w.copy_(other)",
        "other.copy_(w)",
        "other @ w",
        "torch.ops.npu.npu_format_cast(w, 29)",
        "torch.ops.npu.npu_rms_norm(other, row)",
        "torch.ops.npu.npu_interleave_rope(rope, rope, rope)",
    ],
)
def test_a_kernel_that_touches_released_memory_raises(npu_device, touch: str) -> None:
    import torch

    w = torch.ones(128, 128, dtype=torch.bfloat16, device=npu_device)
    names = {"torch": torch, "other": torch.ones_like(w)}
    names.update(w=w, row=w[0], scalar=w[0, 0], turned=w.t(), rope=w.view(256, 1, 1, 64))
    w.untyped_storage().resize_(0)
    with pytest.raises(StorageReleasedError) as caught:
        eval(touch, names)
    assert "touches released memory" in str(caught.value)
    assert "its storage has 0" in str(caught.value)


def test_torch_itself_refuses_new_views_of_released_memory(npu_device) -> None:
    import torch

    w = torch.ones(8, 8, device=npu_device)
    w.untyped_storage().resize_(0)
    for view in (lambda: w.t(), lambda: w[0]):
        with pytest.raises(RuntimeError, match="out of bounds for storage of size 0"):
            view()


def test_views_and_metadata_of_released_memory_are_free(npu_device) -> None:
    import torch

    weight = torch.ones(4, 4, device=npu_device)
    weight.untyped_storage().resize_(0)
    assert (weight.shape, weight.dtype, weight.device) == ((4, 4), torch.float32, npu_device)
    assert weight.detach().numel() == 16


def test_restoring_the_storage_makes_it_usable_again(npu_device) -> None:
    import torch

    weight = torch.ones(4, 4, device=npu_device)
    storage = weight.untyped_storage()
    storage.resize_(0)
    storage.resize_(64)
    weight.fill_(3)
    assert weight.sum().item() == 48


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"])
def test_8_bit_floats_are_moved_on_the_device(npu_device, name: str) -> None:
    """What a host does with 8-bit weights, scales and caches; bytes say whether it was right."""
    import torch

    kind = getattr(torch, name, None)
    if kind is None:
        pytest.skip(f"torch {torch.__version__} has no {name}")
    raw = torch.arange(24, dtype=torch.uint8).view(4, 6)
    x = raw.view(kind).to(npu_device)
    rows = torch.tensor([2, 0], device=npu_device)
    mask = torch.tensor([True, False, False, True], device=npu_device)
    moved = {
        "there and back": (x, raw),
        "transposed": (x.t().contiguous(), raw.t()),
        "reshaped": (x.t().reshape(-1), raw.t().reshape(-1)),
        "sliced": (x[1:, ::2].clone(), raw[1:, ::2]),
        "indexed": (x[rows], raw[[2, 0]]),
        "column": (x[:, rows], raw[:, [2, 0]]),
        "masked": (x[mask], raw[[0, 3]]),
        "index_select": (x.index_select(0, rows), raw[[2, 0]]),
        "gathered": (x.gather(1, rows.expand(4, 2)), raw[:, [2, 0]]),
        "cat": (torch.cat((x, x), 1), torch.cat((raw, raw), 1)),
        "stack": (torch.stack((x, x)), torch.stack((raw, raw))),
        "expanded": (x[:1].expand(3, 6).contiguous(), raw[:1].expand(3, 6)),
        "permuted": (x.view(2, 2, 6).permute(1, 0, 2).contiguous(),
                     raw.view(2, 2, 6).permute(1, 0, 2)),
        "from bytes": (raw.to(npu_device).view(kind), raw),
    }  # fmt: skip
    for what, (found, wanted) in moved.items():
        assert (found.dtype, found.device) == (kind, npu_device), what
        assert torch.equal(found.cpu().view(torch.uint8), wanted), what
        assert torch.equal(found.view(torch.uint8).cpu(), wanted), what
    assert torch.equal(x, x.clone())
    assert not torch.equal(x[0], x[1])
    torch.testing.assert_close(x.cpu().float(), raw.view(kind).float())

    written = torch.zeros(4, 6, dtype=torch.uint8, device=npu_device).view(kind)
    before = written.data_ptr()
    written[rows] = x[:2]
    assert written.index_copy_(0, rows + 1, x[2:]) is written
    expected = torch.zeros(4, 6, dtype=torch.uint8)
    expected[[2, 0]] = raw[:2]
    expected[[3, 1]] = raw[2:]
    assert written.data_ptr() == before
    assert torch.equal(written.view(torch.uint8).cpu(), expected)
    written[1:2] = x[3:]
    assert torch.equal(written.view(torch.uint8).cpu()[1], raw[3])


def test_8_bit_floats_keep_their_nz_format(npu_device) -> None:
    import torch
    import torch_npu

    weight = torch.randn(64, 96).to(torch.float8_e4m3fn).to(npu_device)
    nz = torch_npu.npu_format_cast(weight, 29)
    assert int(torch_npu.get_npu_format(nz)) == 29
    assert torch.equal(nz.view(torch.uint8).cpu(), weight.view(torch.uint8).cpu())
    odd = torch.randn(64, 48).to(torch.float8_e4m3fn).to(npu_device)
    assert torch_npu.npu_format_cast(odd, 29) is odd  # 48 % 32: not castable
