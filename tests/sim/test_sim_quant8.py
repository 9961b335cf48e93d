"""fp8 and MXFP8 in the quantizing ops: values, scales, and where they are refused."""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from npu_backend.catalog import load_catalog
from npu_backend.testing.sim import NotSimulatedError, OpRejectedError, TensorSpec, validators

# Test modules are no package, so what stands beside them is loaded by its path.
_SPEC = spec_from_file_location("prolog_numpy", Path(__file__).with_name("prolog_numpy.py"))
expected = module_from_spec(_SPEC)
_SPEC.loader.exec_module(expected)

FP8, E8M0, E8M0_NUMBER = "float8_e4m3fn", "float8_e8m0fnu", 293
on_a5 = pytest.mark.npu(soc="A5")


def rejected(match: str):
    return pytest.raises(OpRejectedError, match=match)


def numbers(tensor) -> np.ndarray:
    return tensor.cpu().float().double().numpy()


def sample(*shape, seed=2):
    """Bf16 rows of very different sizes, a row of zeros among them."""
    import torch

    rng = np.random.default_rng(seed)
    x = rng.normal(0, 1, shape) * 2.0 ** rng.integers(-12, 12, (*shape[:-1], 1))
    x[..., -1, :] = 0
    return torch.from_numpy(x).to(torch.bfloat16)


# --- npu_dynamic_quant ----------------------------------------------------------------------------


@on_a5
@pytest.mark.needs_line("26.0")
@pytest.mark.parametrize("smoothed", [False, True])
def test_dynamic_quant_to_fp8(npu_device, smoothed) -> None:
    import torch
    import torch_npu

    x = sample(2, 7, 48)
    factor = torch.from_numpy(np.random.default_rng(1).uniform(0.5, 2, 48)).to(x.dtype)
    more = {"smooth_scales": factor.to(npu_device)} if smoothed else {}
    out, scale = torch_npu.npu_dynamic_quant(x.to(npu_device), dst_type=torch.float8_e4m3fn, **more)
    assert (out.shape, out.dtype) == ((2, 7, 48), torch.float8_e4m3fn)
    assert (scale.shape, scale.dtype) == ((2, 7), torch.float32)
    values, wanted = expected.rows(numbers(x) * (numbers(factor) if smoothed else 1), FP8)
    np.testing.assert_allclose(numbers(scale), wanted[..., 0], rtol=1e-6)
    assert (numbers(out) == values).mean() > 0.99
    assert not numbers(out)[:, -1].any()
    assert np.abs(numbers(out)).max() == 448


@pytest.mark.needs_line("26.0")
def test_dynamic_quant_to_fp8_is_refused_on_a3(npu_device) -> None:
    import torch
    import torch_npu

    with rejected("dst_type = float8_e4m3fn is not supported, only int8"):
        torch_npu.npu_dynamic_quant(sample(3, 32).to(npu_device), dst_type=torch.float8_e4m3fn)


@pytest.mark.parametrize("soc", ["A2", "A3", "A5", "310P", "910"])
@pytest.mark.parametrize("dst", ["int8", FP8, "float8_e5m2", "uint8"])
def test_dst_types_by_chip(soc, dst) -> None:
    x = TensorSpec((3, 32))
    if dst == "int8" or (soc == "A5" and dst.startswith("float8")):
        validators.npu_dynamic_quant(x, dst_type=dst, soc=soc)
    else:
        with rejected(f"dst_type = {dst} is not supported"):
            validators.npu_dynamic_quant(x, dst_type=dst, soc=soc)


# --- npu_dynamic_mx_quant -------------------------------------------------------------------------


def padded_mx(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Values and bytes of (..., K): blocks filled up with zeros, an odd count with a zero byte."""
    length = x.shape[-1]
    fill = [(0, 0)] * (x.ndim - 1)
    values, k = expected.mx(np.pad(x, [*fill, (0, -length % 32)]))
    codes = np.pad(k + 127, [*fill, (0, k.shape[-1] % 2)])
    return values[..., :length], codes.reshape(*codes.shape[:-1], -1, 2)


@on_a5
@pytest.mark.needs_line("26.0")
@pytest.mark.parametrize("width", [32, 63, 64, 65, 96, 128, 160])
def test_mx_blocks_share_a_power_of_two(npu_device, width) -> None:
    import torch
    import torch_npu

    x = sample(3, 4, width)
    out, scale = torch_npu.npu_dynamic_mx_quant(x.to(npu_device), dst_type=torch.float8_e4m3fn)
    values, codes = padded_mx(numbers(x))
    assert (out.shape, out.dtype) == ((3, 4, width), torch.float8_e4m3fn)
    assert (scale.shape, scale.dtype) == ((3, 4, -(-width // 64), 2), torch.uint8)
    np.testing.assert_array_equal(numbers(scale), codes)
    np.testing.assert_array_equal(numbers(out), values)


@on_a5
@pytest.mark.needs_line("26.0")
def test_mx_blocks_at_the_edges(npu_device) -> None:
    """Just below, at and above a power of two; 448 and what saturates; zeros; the smallest bf16."""
    import torch
    import torch_npu

    edges = [255.0, 256.0, 257.0, 448.0, 480.0, 496.0, 511.0, 512.0, 0.0, 2.0**-126, 3e38]
    x = torch.zeros(len(edges), 32, dtype=torch.bfloat16)
    x[:, 5] = torch.tensor(edges)
    out, scale = torch_npu.npu_dynamic_mx_quant(x.to(npu_device), dst_type=torch.float8_e4m3fn)
    values, codes = padded_mx(numbers(x))
    np.testing.assert_array_equal(numbers(scale), codes)
    np.testing.assert_array_equal(numbers(out), values)
    # 480 would be 480 / 2**0: more than the largest number, so it saturates.
    assert numbers(out)[4, 5] == 448
    assert codes[3, 0, 0] == 127
    assert codes[8, 0, 0] == 0


@on_a5
@pytest.mark.needs_line("26.0")
def test_mx_quant_along_another_axis(npu_device) -> None:
    import torch
    import torch_npu

    x = sample(96, 6)
    out, scale = torch_npu.npu_dynamic_mx_quant(
        x.to(npu_device), axis=0, dst_type=torch.float8_e4m3fn
    )
    values, codes = padded_mx(numbers(x).T)
    np.testing.assert_array_equal(numbers(out), values.T)
    assert scale.shape == (2, 6, 2)
    np.testing.assert_array_equal(numbers(scale), codes.transpose(1, 0, 2))


@given(st.integers(-64, 1200))
def test_mx_block_sizes_are_multiples_of_32_up_to_1024(size) -> None:
    x = TensorSpec((4, 64))
    if 0 < size <= 1024 and size % 32 == 0:
        validators.npu_dynamic_mx_quant(x, block_size=size)
    else:
        with rejected(f"block_size {size}"):
            validators.npu_dynamic_mx_quant(x, block_size=size)


# --- npu_quant_matmul -----------------------------------------------------------------------------


def fp8_operands(m=5, k=96, n=64):
    rng = np.random.default_rng(6)
    x, x_scale = expected.rows(rng.normal(0, 1, (m, k)), FP8)
    w, w_scale = expected.rows(rng.normal(0, 1, (n, k)), FP8)
    return x, x_scale[:, 0], w, w_scale[:, 0]


def fp8(array):
    import torch

    return torch.from_numpy(array).to(torch.float8_e4m3fn)


def fp32(array):
    import torch

    return torch.from_numpy(np.asarray(array, dtype=np.float32))


@on_a5
@pytest.mark.needs_line("26.0")
@pytest.mark.parametrize("kind", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("turned", [True, False])
@pytest.mark.parametrize("biased", [False, True])
def test_fp8_product(npu_device, kind, turned, biased) -> None:
    import torch
    import torch_npu

    x, x_scale, w, w_scale = fp8_operands()
    bias = np.random.default_rng(8).normal(0, 1000, 64).astype(np.float32)
    weight = fp8(w).to(npu_device).t() if turned else fp8(np.ascontiguousarray(w.T)).to(npu_device)
    out = torch_npu.npu_quant_matmul(
        fp8(x).to(npu_device), weight, fp32(w_scale).to(npu_device),
        pertoken_scale=fp32(x_scale).to(npu_device), output_dtype=getattr(torch, kind),
        bias=torch.from_numpy(bias).to(npu_device) if biased else None,
    )  # fmt: skip
    wanted = (x @ w.T + (bias if biased else 0)) * x_scale[:, None] * w_scale
    assert (out.shape, out.dtype) == ((5, 64), getattr(torch, kind))
    np.testing.assert_allclose(numbers(out), wanted, rtol=5e-3, atol=5e-3)


@on_a5
@pytest.mark.needs_line("26.0")
def test_fp8_product_with_one_scale(npu_device) -> None:
    import torch
    import torch_npu

    x, _, w, _ = fp8_operands()
    out = torch_npu.npu_quant_matmul(
        fp8(x).to(npu_device), fp8(w).to(npu_device).t(), torch.tensor([0.5], device=npu_device),
        pertoken_scale=torch.tensor([0.25], device=npu_device), output_dtype=torch.float32,
    )  # fmt: skip
    np.testing.assert_allclose(numbers(out), x @ w.T / 8, rtol=1e-6)


def mx_operands(m=5, k=160, n=64):
    """x (m, k), w (n, k), their exponents padded to pairs, and the exact product."""
    rng = np.random.default_rng(7)
    x, xk = expected.mx(rng.normal(0, 1, (m, k)) * 2.0 ** rng.integers(-9, 9, (m, 1)))
    w, wk = expected.mx(rng.normal(0, 1, (n, k)) * 2.0 ** rng.integers(-9, 9, (n, 1)))
    wanted = expected.mx_undo(x, xk) @ expected.mx_undo(w, wk).T

    def pairs(exponents):
        fill = [(0, 0), (0, exponents.shape[-1] % 2)]
        return np.pad(exponents + 127, fill).astype(np.uint8).reshape(len(exponents), -1, 2)

    return x, pairs(xk), w, pairs(wk), wanted


@on_a5
@pytest.mark.needs_line("26.1")
@pytest.mark.parametrize("width", [32, 64, 160])
@pytest.mark.parametrize("as_bytes", [True, False])
@pytest.mark.parametrize("turned", [True, False])
def test_mx_product(npu_device, width, as_bytes, turned) -> None:
    import torch
    import torch_npu

    x, x_codes, w, w_codes, wanted = mx_operands(k=width)
    x_scale, w_scale = (torch.from_numpy(c).to(npu_device) for c in (x_codes, w_codes))
    weight = fp8(w).to(npu_device).t()
    w_scale = w_scale.transpose(0, 1)
    if not turned:
        # A view of one pair counts as contiguous, and its strides still say it is transposed.
        w_scale = torch.from_numpy(w_codes.transpose(1, 0, 2).copy()).to(npu_device)
        weight = weight.contiguous()
    if as_bytes:
        named = {"scale_dtype": E8M0_NUMBER, "pertoken_scale_dtype": E8M0_NUMBER}
    else:
        named, kind = {}, torch.float8_e8m0fnu
        x_scale, w_scale = x_scale.view(kind), w_scale.view(kind)
    out = torch_npu.npu_quant_matmul(
        fp8(x).to(npu_device), weight, w_scale, pertoken_scale=x_scale,
        output_dtype=torch.bfloat16, group_sizes=[1, 1, 32], **named,
    )  # fmt: skip
    assert (out.shape, out.dtype) == ((5, 64), torch.bfloat16)
    error = np.linalg.norm(numbers(out) - wanted) / np.linalg.norm(wanted)
    assert error < 4e-3


@on_a5
@pytest.mark.needs_line("26.1")
def test_what_the_mx_quant_gives_the_product_takes(npu_device) -> None:
    """Bytes in pairs, (rows, K / 64, 2): of the weight as a transposed view, as the op wants it."""
    import torch
    import torch_npu

    x, w = sample(6, 160), sample(64, 160, seed=3)
    xq, xs = torch_npu.npu_dynamic_mx_quant(x.to(npu_device), dst_type=torch.float8_e4m3fn)
    wq, ws = torch_npu.npu_dynamic_mx_quant(w.to(npu_device), dst_type=torch.float8_e4m3fn)
    out = torch_npu.npu_quant_matmul(
        xq, wq.t(), ws.transpose(0, 1), pertoken_scale=xs, scale_dtype=torch_npu.float8_e8m0fnu,
        pertoken_scale_dtype=torch_npu.float8_e8m0fnu, output_dtype=torch.float32,
        group_sizes=[1, 1, 32],
    )  # fmt: skip
    wanted = numbers(x) @ numbers(w).T
    error = np.linalg.norm(numbers(out) - wanted) / np.linalg.norm(wanted)
    assert error < 0.05  # two operands of 3 bits of mantissa: each at most 2**-4 off


@on_a5
@pytest.mark.needs_line("26.1")
def test_mx_refusals_of_the_op(npu_device) -> None:
    import torch
    import torch_npu

    x, x_codes, w, w_codes, _ = mx_operands()
    x_scale, w_scale = (torch.from_numpy(c).to(npu_device) for c in (x_codes, w_codes))

    def call(weight, scale, **options):
        return torch_npu.npu_quant_matmul(
            fp8(x).to(npu_device), weight, scale,
            **{"pertoken_scale": x_scale, "output_dtype": torch.bfloat16,
               "scale_dtype": E8M0_NUMBER, "pertoken_scale_dtype": E8M0_NUMBER, **options},
        )  # fmt: skip

    view, turned = fp8(w).to(npu_device).t(), w_scale.transpose(0, 1)
    call(view, turned, group_sizes=[1, 1, 32])
    with rejected("x2 and scale must both be transposed or neither"):
        call(view, turned.contiguous(), group_sizes=[1, 1, 32])
    with rejected("x2 and scale must both be transposed or neither"):
        call(view.contiguous(), turned, group_sizes=[1, 1, 32])
    for size in (31, 33, 64, 128):
        with rejected(r"group_sizes = .* must be \[1, 1, 32\]"):
            call(view, turned, group_sizes=[1, 1, size])
    with rejected("a scale that is called e8m0 is float32, must be a byte"):
        call(view, turned.float(), group_sizes=[1, 1, 32])
    ones = {"scale_dtype": None, "pertoken_scale_dtype": None}
    ones["pertoken_scale"] = torch.ones(5, 2, device=npu_device)
    with pytest.raises(NotSimulatedError, match=r"group_sizes \[1, 128, 128\]"):
        call(view, torch.ones(2, 1, device=npu_device), group_sizes=[1, 128, 128], **ones)


def mx_specs(m=5, k=160, n=64, **changes):
    pairs = -(-k // 64)
    given_ = {
        "x1": TensorSpec((m, k), FP8),
        "x2": TensorSpec((k, n), FP8),
        "scale": TensorSpec((pairs, n, 2), E8M0),
        "pertoken_scale": TensorSpec((m, pairs, 2), E8M0),
        "output_dtype": "bfloat16",
        "group_sizes": [1, 1, 32],
        "soc": "A5",
    }
    return {**given_, **changes}


@given(st.sampled_from([31, 32, 33, 63, 64, 65, 127, 128, 129, 1536]), st.sampled_from([-1, 0, 1]))
def test_mx_scales_come_in_pairs_of_blocks(k, off) -> None:
    pairs = -(-k // 64)
    specs = mx_specs(k=k, scale=TensorSpec((pairs + off, 64, 2), E8M0))
    if off == 0:
        validators.npu_quant_matmul(**specs)
    else:
        with rejected("scale should have shape"):
            validators.npu_quant_matmul(**specs)
        with rejected("pertoken_scale should have shape"):
            wrong = TensorSpec((5, pairs + off, 2), E8M0)
            validators.npu_quant_matmul(**mx_specs(k=k, pertoken_scale=wrong))


@pytest.mark.parametrize("soc", ["A2", "A3", "A5", "310P"])
def test_operands_by_chip(soc) -> None:
    int8 = {
        "x1": TensorSpec((5, 64), "int8"),
        "x2": TensorSpec((64, 32), "int8"),
        "scale": TensorSpec((32,), "float32"),
        "soc": soc,
    }
    validators.npu_quant_matmul(**int8)
    plain = {**int8, "x1": TensorSpec((5, 64), FP8), "x2": TensorSpec((64, 32), FP8)}
    plain |= {"output_dtype": "bfloat16", "pertoken_scale": TensorSpec((5,), "float32")}
    if soc == "A5":
        validators.npu_quant_matmul(**plain)
        validators.npu_quant_matmul(**mx_specs(soc=soc))
        return
    for specs in (plain, mx_specs(soc=soc)):
        with rejected(f"x1 supports dtype int8, but is {FP8}"):
            validators.npu_quant_matmul(**specs)
    with rejected(f"e8m0 scales are not supported on {soc}, only on A5"):
        scales = {n: TensorSpec((1, 32, 2), E8M0) for n in ("scale", "pertoken_scale")}
        validators.npu_quant_matmul(**{**int8, **scales})


def test_what_an_fp8_product_takes() -> None:
    good = mx_specs(
        scale=TensorSpec((64,), "float32"), pertoken_scale=TensorSpec((5,), "float32"),
        group_sizes=None,
    )  # fmt: skip
    for changes in (
        {},
        {"scale": TensorSpec((1,), "float32")},
        {"pertoken_scale": TensorSpec((1,), "float32")},
        {"bias": TensorSpec((64,), "float32")},
    ):
        validators.npu_quant_matmul(**{**good, **changes})
    bad = {
        "output_dtype of an fp8 product = int8": {"output_dtype": "int8"},
        "bias of an fp8 product supports dtype float32": {"bias": TensorSpec((64,), "bfloat16")},
        "scale of an fp8 product supports dtype": {"scale": TensorSpec((64,), "bfloat16")},
        "not a pair": {"x2": TensorSpec((160, 64), "int8")},
        "scale of shape": {"scale": TensorSpec((63,), "float32")},
        "pertoken_scale should have shape": {"pertoken_scale": TensorSpec((4,), "float32")},
        "a bias is not supported with one scale": {
            "pertoken_scale": TensorSpec((1,), "float32"),
            "bias": TensorSpec((64,), "float32"),
        },
    }
    for match, changes in bad.items():
        with rejected(match):
            validators.npu_quant_matmul(**{**good, **changes})
    with rejected("pertoken_scale is needed with an e8m0 scale"):
        validators.npu_quant_matmul(**mx_specs(pertoken_scale=None))
    with rejected("pertoken_scale supports dtype float8_e8m0fnu"):
        validators.npu_quant_matmul(**mx_specs(pertoken_scale=TensorSpec((5, 3, 2), "uint8")))


@on_a5
@pytest.mark.needs_line("26.1")
def test_shapes_and_dtypes_are_those_of_torch_npus_own_fake_kernels(npu_device) -> None:
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    x, x_codes, w, w_codes, _ = mx_operands()
    number = 24  # torch.float8_e4m3fn
    scales = [torch.from_numpy(c) for c in (x_codes, w_codes)]
    calls = [
        ("npu_dynamic_quant", (sample(3, 4, 32),), {"dst_type": number}),
        ("npu_dynamic_mx_quant", (sample(3, 4, 96),), {"dst_type": number}),
        ("npu_dynamic_mx_quant", (sample(96, 5),), {"dst_type": number, "axis": 0}),
        (
            "npu_quant_matmul",
            (fp8(x), fp8(w).t(), scales[1].transpose(0, 1)),
            {"pertoken_scale": scales[0], "output_dtype": 15, "group_sizes": [1, 1, 32],
             "scale_dtype": E8M0_NUMBER, "pertoken_scale_dtype": E8M0_NUMBER},
        ),
        (
            "npu_quant_matmul",
            (fp8(x), fp8(w).t(), torch.ones(64)),
            {"pertoken_scale": torch.ones(5), "output_dtype": 15},
        ),
    ]  # fmt: skip

    def describe(out):
        out = out if isinstance(out, tuple | list) else [out]
        return [(tuple(t.shape), t.dtype) for t in out]

    for name, args, kwargs in calls:
        op = getattr(torch.ops.npu, name)

        def on_device(value, change=lambda t: t):
            return change(value.to(npu_device)) if isinstance(value, torch.Tensor) else value

        real = describe(op(*map(on_device, args), **{k: on_device(v) for k, v in kwargs.items()}))
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fakes = [on_device(a, mode.from_tensor) for a in args]
            named = {k: on_device(v, mode.from_tensor) for k, v in kwargs.items()}
            assert describe(op(*fakes, **named)) == real, name


def test_the_limits_are_figures_with_a_source() -> None:
    figure = load_catalog().figure
    for op, key, value in (
        ("npu_dynamic_mx_quant", "soc", ["A5"]),
        ("npu_dynamic_mx_quant", "scale_dtype", "uint8"),
        ("npu_quant_matmul", "mx_soc", ["A5"]),
        ("npu_quant_matmul", "mx_group_sizes", [1, 1, 32]),
    ):
        found = figure(op, key)
        assert found is not None
        assert found.value == value
        assert len(found.source) > 30
    for soc, fp8_there in (("A2", False), ("A3", False), ("A5", True)):
        found = figure("npu_quant_matmul", "dtypes", soc=soc)
        assert found is not None
        assert (FP8 in found.value) is fp8_there


# --- casts ----------------------------------------------------------------------------------------


@pytest.mark.npu(soc="A3")
def test_a_chip_without_8_bit_floats_does_not_cast_to_them(npu_device) -> None:
    import torch

    floats = torch.ones(4, 64, device=npu_device)
    with rejected("A3 has no 8-bit floats"):
        floats.to(torch.float8_e4m3fn)
    # A checkpoint's bytes still move; to compute with them is what the chip cannot.
    coded = torch.ones(4, 64).to(torch.float8_e4m3fn).to(npu_device)
    assert coded.clone().dtype == torch.float8_e4m3fn
    with rejected("A3 has no 8-bit floats"):
        coded.float()


@on_a5
@pytest.mark.needs_line("26.0")
def test_a5_casts_to_8_bit_floats_and_back(npu_device) -> None:
    import torch

    floats = torch.tensor([[0.5, -2.0, 448.0]], device=npu_device)
    assert floats.to(torch.float8_e4m3fn).float().tolist() == [[0.5, -2.0, 448.0]]
