"""Memory is torch_npu's own: exact statistics, its own out-of-memory error, real release."""

from __future__ import annotations

import gc

import pytest

MIB = 1 << 20


class Bytes(int):
    """What the allocator holds: exact, or before line 7.1 in blocks of 512 with their slack."""

    exact = True

    def __sub__(self, other: int) -> Bytes:
        return _bytes(int(self) - int(other), self.exact)

    def __eq__(self, other: object) -> bool:
        if self.exact or not isinstance(other, int) or isinstance(other, Bytes):
            return int(self) == other
        return int(self) % 512 == 0 and other <= int(self) <= other + (1024 if other else 0)

    __hash__ = int.__hash__


def _bytes(value: int, exact: bool) -> Bytes:
    found = Bytes(value)
    found.exact = exact
    return found


def requested() -> Bytes:
    import torch

    gc.collect()
    stats = torch.npu.memory_stats()
    exact = "requested_bytes.all.current" in stats
    name = "requested_bytes.all.current" if exact else "allocated_bytes.all.current"
    return _bytes(int(stats[name]), exact)


@pytest.mark.parametrize(
    ("shape", "dtype", "expected"),
    [((4, 5), "float32", 80), ((3,), "bfloat16", 6), ((7, 1001), "int8", 7007), ((0,), "int8", 0)],
)
def test_requested_bytes_are_exact(npu_device, shape, dtype, expected) -> None:
    import torch

    before = requested()
    tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=npu_device)
    assert requested() - before == expected
    del tensor
    assert requested() == before


def test_resizing_a_storage_to_zero_frees_its_bytes_and_leaves_the_tensor(npu_device) -> None:
    import torch

    before = requested()
    weight = torch.zeros(1000, 33, dtype=torch.bfloat16, device=npu_device)
    assert requested() - before == 66000
    weight.untyped_storage().resize_(0)
    assert requested() == before
    assert weight.shape == (1000, 33)
    assert weight.untyped_storage().nbytes() == 0


def test_a_view_keeps_the_storage_and_dropping_it_frees(npu_device) -> None:
    import torch

    before = requested()
    base = torch.zeros(256, 256, device=npu_device)
    view = base[:, :1]
    del base
    assert requested() - before == 256 * 256 * 4
    del view
    assert requested() == before


def test_data_survives_a_round_trip(npu_device) -> None:
    import torch

    data = torch.randn(37, 19)
    assert torch.equal(data.to(npu_device).cpu(), data)
    assert torch.equal(data.to(npu_device).to(torch.bfloat16).cpu(), data.to(torch.bfloat16))


def test_a_cast_to_nz_allocates_the_same_bytes_again(npu_device) -> None:
    import torch
    import torch_npu

    weight = torch.zeros(64, 48, dtype=torch.bfloat16, device=npu_device)
    before = requested()
    cast = torch_npu.npu_format_cast(weight, 29)
    assert requested() - before == 64 * 48 * 2
    assert cast.data_ptr() != weight.data_ptr()


# A single large allocation takes its size and torch_npu's 32 bytes of padding, rounded up to
# 2 MiB blocks: 62 MiB + 32 bytes make 64 MiB.
@pytest.mark.npu(memory=64 * MIB, isolated=True)
def test_an_allocation_that_just_fits_succeeds(npu_device, npu_sim) -> None:
    import torch

    tensor = torch.empty(62 * MIB, dtype=torch.int8, device=npu_device)
    assert npu_sim.used_bytes() == 64 * MIB
    assert torch.npu.mem_get_info() == (0, 64 * MIB)
    assert tensor.untyped_storage().nbytes() == 62 * MIB


@pytest.mark.npu(memory=64 * MIB - 1)
def test_one_byte_short_is_torch_npus_own_out_of_memory_error(npu_device, npu_sim) -> None:
    import torch

    # torch_npu's own text; its own class, which older lines do not give it yet.
    with pytest.raises(RuntimeError, match=r"NPU out of memory\. Tried to allocate") as caught:
        torch.empty(62 * MIB, dtype=torch.int8, device=npu_device)
    if torch.__version__ >= "2.13":
        assert type(caught.value) is torch.OutOfMemoryError
    assert npu_sim.used_bytes() == 0
    # The device lives on.
    assert torch.ones(3, device=npu_device).sum().item() == 3


@pytest.mark.npu(memory=64 * MIB - 1)
def test_releasing_a_weight_makes_room_for_the_next(npu_device) -> None:
    import torch

    weight = torch.empty(40 * MIB, dtype=torch.int8, device=npu_device)
    with pytest.raises(RuntimeError, match="NPU out of memory"):
        torch.empty(40 * MIB, dtype=torch.int8, device=npu_device)
    weight.untyped_storage().resize_(0)
    assert torch.empty(40 * MIB, dtype=torch.int8, device=npu_device).numel() == 40 * MIB


def test_expandable_segments_use_physical_blocks(run_python, torch_npu_installed) -> None:
    done = run_python(
        "from npu_backend.testing import sim\n"
        "s = sim.start(memory=100 << 20)\n"
        "import torch, gc\n"
        "a = torch.arange(20 << 20, dtype=torch.int32, device='npu')\n"
        "print(a[-1].item() == (20 << 20) - 1, s.used_bytes() >= 80 << 20)\n"
        "try:\n"
        "    torch.empty(40 << 20, dtype=torch.int8, device='npu')\n"
        "except RuntimeError as err:\n"
        "    print('NPU out of memory' in str(err))\n"
        "del a; gc.collect(); torch.npu.empty_cache()\n"
        "print(s.used_bytes(), torch.ones(2, device='npu').sum().item())\n",
        PYTORCH_NPU_ALLOC_CONF="expandable_segments:True",
    )
    lines = done.stdout.splitlines()
    assert lines[0] == "True True", done.stderr
    assert lines[-2] == "True"
    assert lines[-1].endswith(" 2.0")


@pytest.mark.npu(devices=2)
def test_each_device_has_a_capacity_of_its_own(npu_sim) -> None:
    import torch

    tensor = torch.empty(10 * MIB, dtype=torch.int8, device="npu:1")
    assert npu_sim.used_bytes(1) >= tensor.numel()
    assert npu_sim.used_bytes(0) < tensor.numel()
    with pytest.raises(RuntimeError, match="npu:0 and npu:1"):
        torch.ones(2, device="npu:0") + torch.ones(2, device="npu:1")
    assert torch.equal(torch.ones(2, device="npu:0").to("npu:1").cpu(), torch.ones(2))


def test_a_copy_from_memory_that_is_not_the_devices_fails(npu_sim) -> None:
    import ctypes

    buffer = ctypes.create_string_buffer(64)
    main = npu_sim._main
    main.aclrtMemcpy.argtypes = [ctypes.c_void_p, ctypes.c_size_t] * 2 + [ctypes.c_int]
    main.aclGetRecentErrMsg.restype = ctypes.c_char_p
    host = ctypes.addressof(buffer)
    assert main.aclrtMemcpy(host, 64, host + 32, 32, 2) != 0  # device to host
    assert b"are not live device memory" in main.aclGetRecentErrMsg()
    assert main.aclrtMemcpy(host, 8, host + 32, 32, 0) != 0  # more than the room
    assert b"32 bytes into room for 8" in main.aclGetRecentErrMsg()
    assert main.aclrtMemcpy(host, 64, host + 32, 32, 0) == 0


@pytest.mark.npu(isolated=True)
def test_what_is_not_simulated_fails_by_name(npu_sim, npu_device) -> None:
    import torch

    with pytest.raises(RuntimeError, match=r"not simulated|not in libopapi"):
        torch.ops.npu.npu_swiglu(torch.ones(2, 4, device=npu_device))
    first, second = (torch.npu.Event(enable_timing=True) for _ in range(2))
    first.record()
    second.record()
    torch.npu.synchronize()
    assert second.query()
    with pytest.raises(RuntimeError, match="aclrtEventElapsedTime"):
        first.elapsed_time(second)
    assert npu_sim.refused_calls() > 0
