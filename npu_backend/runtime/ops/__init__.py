"""The facade: the one place that calls an op of torch_npu or of a kernel library.

Paths and kernels call ``weights.ops.NAME(...)``. On CPU tensors the references compute; on a device
the real ops do, with the arguments that the *installed* TorchNPU line takes. That an op is there
and has the schema that the catalog holds for the line is checked once, when a layer is bound; a
call checks nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch

from npu_backend.deployment import Deployment
from npu_backend.errors import PlanMismatchError

__all__ = ["FORMAT_ND", "FORMAT_NZ", "Ops", "ops_for"]

FORMAT_ND = 2
"""aclFormat ``ACL_FORMAT_ND``."""
FORMAT_NZ = 29
"""aclFormat ``ACL_FORMAT_FRACTAL_NZ``."""


class Ops(Protocol):
    """What an implementation may call, by the op's own name.

    Parameters are those of the newest known TorchNPU line; shapes, dtypes and limits are the op's,
    see :mod:`npu_backend.runtime.reference`. Dtype arguments are ``torch.dtype`` on every line.
    """

    name: str

    def check(self, names: Iterable[str], whom: str) -> None:
        """Check that ops (``npu::npu_rms_norm``) are there with the schema that the catalog holds.

        Raises:
            SchemaMismatchError: One is absent or differs.
        """

    def npu_transpose_batchmatmul(
        self,
        input: torch.Tensor,
        weight: torch.Tensor,
        *,
        perm_x1: Sequence[int] | None = None,
        perm_x2: Sequence[int] | None = None,
        perm_y: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Return ``(tokens, heads, N)``."""

    def batch_matmul_transpose(
        self, tensor_a: torch.Tensor, tensor_b: torch.Tensor, tensor_c: torch.Tensor
    ) -> None:
        """Write ``(tokens, heads, N)`` into ``tensor_c``."""

    def npu_mla_prolog_v3(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        """Return five tensors and write both caches."""

    def mla_preprocess(self, *args: Any, **kwargs: Any) -> None:
        """Write the four tensors given as ``q_out0, kv_cache_out0, q_out1, kv_cache_out1``, and
        vllm-ascend's op ``inner_out`` too; arguments are those of the chosen library's op."""

    def npu_kv_rmsnorm_rope_cache(
        self,
        kv: torch.Tensor,
        gamma: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        index: torch.Tensor,
        k_cache: torch.Tensor,
        ckv_cache: torch.Tensor,
        *,
        epsilon: float,
        cache_mode: str,
    ) -> None:
        """Write both caches; the same on lines that have ``_v2`` and on those that do not."""

    def npu_interleave_rope(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        """Return ``x`` rotated, in half layout."""

    def npu_rms_norm(
        self, input: torch.Tensor, gamma: torch.Tensor, epsilon: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the normed input and the reciprocal deviation."""

    def npu_dynamic_quant(
        self,
        input: torch.Tensor,
        *,
        smooth_scales: torch.Tensor | None = None,
        dst_type: torch.dtype | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return int8 or e4m3 values and one fp32 scale a row."""

    def npu_dynamic_mx_quant(
        self, input: torch.Tensor, *, dst_type: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return e4m3 values and e8m0 scales in pairs, ``(..., K / 64, 2)``, as uint8."""

    def npu_quantize(
        self,
        input: torch.Tensor,
        scales: torch.Tensor,
        zero_points: torch.Tensor | None,
        dtype: torch.dtype,
        axis: int = 1,
        div_mode: bool = True,
    ) -> torch.Tensor:
        """Return the input quantized by given scales."""

    def npu_quant_matmul(
        self,
        x1: torch.Tensor,
        x2: torch.Tensor,
        scale: torch.Tensor,
        *,
        pertoken_scale: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        output_dtype: torch.dtype | None = None,
        pertoken_scale_dtype: int | None = None,
        scale_dtype: int | None = None,
        group_sizes: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Return the 8-bit product with its scales multiplied in."""

    def is_nz(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is in FRACTAL_NZ; always where there are no formats (CPU)."""

    def npu_format_cast(self, input: torch.Tensor, acl_format: int) -> torch.Tensor:
        """Return the tensor in a format; it may be the input itself. Only while preparing."""


def ops_for(device: torch.device, deployment: Deployment) -> Ops:
    """Return the backend for tensors on a device.

    Raises:
        PlanMismatchError: Neither CPU nor NPU.
        DeploymentError: The installed torch-npu is not in the catalog.
    """
    if device.type == "cpu":
        from npu_backend.runtime.ops.cpu import CpuOps

        return CpuOps(deployment.kernels.name)
    if device.type == "npu":
        from npu_backend.runtime.ops.device import DeviceOps

        return DeviceOps.installed(deployment)
    raise PlanMismatchError(
        f"there is no backend for tensors on {device}",
        whom="the weights given to bind()",
        why="ops run on an NPU, or by reference on the CPU",
        remedy="move the weights to one of the two",
    )
