"""Stand-in modules for packages that SGLang imports and that cannot be here.

``triton``, ``torchvision``, ``sgl_kernel_npu`` and ``acl`` exist only as far as the import and the
code under test need: every module and every name is listed in ``NAMES``. What is not listed is
absent, and what is listed but is not computed raises :class:`NotStoodInError` when it is called.

Two things compute. ``fused_split_qk_norm`` splits and norms by its name, in plain torch and the
simulated ``npu_rms_norm``, so it rounds where that op rounds; the real kernel's rounding is not
known. ``acl.rt.get_device_info`` answers the one question that SGLang asks about the architecture,
from the simulated chip. ``sgl_kernel_npu.norm.fused_rope_qk_mqa`` is left out on purpose: SGLang
then takes its own plain RoPE, so that none of ours is in what it computes.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["NAMES", "NotStoodInError", "install"]


class NotStoodInError(RuntimeError):
    """A stand-in was asked to compute something that it only has a name for."""


class _Kernel:
    """What a triton decorator makes of a function: known by name, never launched."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getitem__(self, grid: object) -> Any:
        raise NotStoodInError(f"triton kernel {self._name} was launched; no stand-in computes it")

    def __call__(self, *args: object, **kwargs: object) -> Any:
        raise NotStoodInError(f"triton kernel {self._name} was called; no stand-in computes it")


def _decorator(*args: Any, **kwargs: Any) -> Any:
    """``@decorator`` and ``@decorator(...)`` alike."""
    if len(args) == 1 and not kwargs and (callable(args[0]) or isinstance(args[0], _Kernel)):
        return _Kernel(getattr(args[0], "__qualname__", repr(args[0])))
    return _decorator


class _Config:
    """``triton.Config``: holds what it is given."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args, self.kwargs = args, kwargs


class _Constexpr:
    """``constexpr``: holds a value for a kernel that is never launched."""

    def __init__(self, value: object) -> None:
        self.value = value


def _refusing(name: str) -> Callable[..., Any]:
    def refuse(*args: object, **kwargs: object) -> Any:
        raise NotStoodInError(f"{name} was called; no stand-in computes it")

    return refuse


def _marker(name: str) -> type:
    """A class to be named in annotations and isinstance; making one of it raises."""

    def refuse(self: Any, *args: object, **kwargs: object) -> None:
        raise NotStoodInError(f"{name} was made; no stand-in is one")

    return type(name.rpartition(".")[2], (), {"__init__": refuse})


def _fused_split_qk_norm(
    fused: torch.Tensor,
    q_a_layernorm: Any,
    kv_a_layernorm: Any,
    q_lora_rank: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split ``(tokens, q_lora + latent + rope)``; norm the first two parts.

    Returns:
        ``(tokens, q_lora)``, ``(tokens, 1, latent)``, ``(tokens, 1, rope)``.
    """
    widths = [q_lora_rank, kv_lora_rank, qk_rope_head_dim]
    query, latent, key = (part.contiguous() for part in fused.split(widths, dim=-1))
    normed_query = torch.ops.npu.npu_rms_norm(query, q_a_layernorm.weight, eps)[0]
    normed_latent = torch.ops.npu.npu_rms_norm(latent, kv_a_layernorm.weight, eps)[0]
    return normed_query, normed_latent.unsqueeze(1), key.unsqueeze(1)


_ARCHITECTURE = 601  # the attribute that SGLang asks for
_ARCH35 = 3510


def _device_info(device: int, attribute: int) -> tuple[int, int]:
    """``acl.rt.get_device_info``: (value, 0), for the NPU architecture only."""
    from npu_backend.testing import sim

    running = sim.current()
    if running is None or attribute != _ARCHITECTURE:
        raise NotStoodInError(f"acl.rt.get_device_info({device}, {attribute}) is not simulated")
    return (_ARCH35 if running.settings.family == "A5" else 2201, 0)


NAMES: dict[str, dict[str, Any]] = {
    "triton": {
        "__version__": "3.4.0",
        "jit": _decorator,
        "autotune": _decorator,
        "heuristics": _decorator,
        "Config": _Config,
        "cdiv": _refusing("triton.cdiv"),
        "next_power_of_2": _refusing("triton.next_power_of_2"),
    },
    "triton.language": {
        "constexpr": _Constexpr,
        "tensor": _marker("triton.language.tensor"),
        **{name: name for name in ("int1", "int8", "int32", "int64", "uint8", "uint32", "uint64")},
        **{name: name for name in ("float16", "bfloat16", "float32", "float64")},
        "dtype": _marker("triton.language.dtype"),
    },
    "triton.language.core": {"_aggregate": _decorator},
    "triton.language.extra": {},
    "triton.language.extra.libdevice": {},
    "triton.experimental": {},
    "triton.experimental.gluon": {"jit": _decorator},
    "triton.experimental.gluon.language": {"constexpr": _Constexpr},
    "triton.tools": {},
    "triton.tools.tensor_descriptor": {
        "TensorDescriptor": _marker("triton.tools.tensor_descriptor.TensorDescriptor")
    },
    "torchvision": {"__version__": "0.0.0"},
    "torchvision.transforms": {},
    "torchvision.transforms.functional": {
        "InterpolationMode": _marker("torchvision.transforms.functional.InterpolationMode")
    },
    "sgl_kernel_npu": {},
    "sgl_kernel_npu.norm": {},
    "sgl_kernel_npu.norm.fused_split_qk_norm": {"fused_split_qk_norm": _fused_split_qk_norm},
    "sgl_kernel_npu.norm.gemma_rmsnorm": {"npu_gemma_rms_norm": _refusing("npu_gemma_rms_norm")},
    "sgl_kernel_npu.kvcacheio": {
        name: _refusing(f"sgl_kernel_npu.kvcacheio.{name}")
        for name in ("TransferDirection", "transfer_kv_dim_exchange", "transfer_mamba_state")
    },
    "sgl_kernel_npu.attention": {},
    "sgl_kernel_npu.attention.sinks_attention": {
        name: _refusing(f"sgl_kernel_npu.attention.sinks_attention.{name}")
        for name in ("attention_sinks_prefill_triton", "attention_sinks_triton")
    },
    "torchair": {"get_npu_backend": lambda compiler_config=None: "eager"},
    "torchair.ge_concrete_graph": {},
    "torchair.ge_concrete_graph.ge_converter": {},
    "torchair.ge_concrete_graph.ge_converter.experimental": {},
    "torchair.ge_concrete_graph.ge_converter.experimental.patch_for_hcom_allreduce": {},
    "torchair.configs": {},
    "torchair.configs.compiler_config": {
        "CompilerConfig": lambda: types.SimpleNamespace(
            mode=None, debug=types.SimpleNamespace(), experimental_config=types.SimpleNamespace()
        )
    },
    "acl": {"rt": types.SimpleNamespace(get_device_info=_device_info)},
}
NAMES["torchvision.transforms"]["InterpolationMode"] = NAMES["torchvision.transforms.functional"][
    "InterpolationMode"
]


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in NAMES:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def exec_module(self, module: types.ModuleType) -> None:
        vars(module).update(NAMES[module.__name__])


def install() -> None:
    """Put the stand-ins behind ``import``; again does nothing.

    Must run after torch's compiler is imported: it asks whether there is a triton, and would take
    this one. A real package of these names is never hidden.

    Raises:
        RuntimeError: One of the packages is installed.
    """
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    for name in [n for n in sys.modules if n.partition(".")[0] == "torchair"]:
        # torch_npu puts a lazy module there, whose compiled part needs CANN.
        del sys.modules[name]
    roots = {name.partition(".")[0] for name in NAMES}
    real = sorted(root for root in roots if importlib.util.find_spec(root) is not None)
    if real:
        raise RuntimeError(
            f"{', '.join(real)} is installed here; these tests stand in for it and must not hide it"
        )
    sys.meta_path.append(_Finder())
