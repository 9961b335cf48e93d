"""The facade on a device: the real ops, with the arguments of the installed TorchNPU line."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import metadata
from typing import Any

import torch

from npu_backend.catalog import Catalog
from npu_backend.deployment import Deployment
from npu_backend.errors import PrepareError, SchemaMismatchError
from npu_backend.runtime.ops import FORMAT_NZ
from npu_backend.runtime.ops.schemas import check_schemas, installed_schemas

__all__ = ["LIBRARY_NAMESPACES", "DeviceOps"]

LIBRARY_NAMESPACES = {"sgl-kernel-npu": "npu", "vllm-ascend": "_C_ascend", "none": "npu"}
"""Where a kernel library registers its ops; the two libraries' ops are not interchangeable."""

_KV_V2 = "npu::npu_kv_rmsnorm_rope_cache_v2"


def _overload(op: str) -> Callable[..., Any]:
    """Return an op's default overload, which is cheaper to call than the packet.

    An absent op becomes a function that says so: whether it is needed is known when a layer that
    uses it is bound, and checked there.
    """
    space, _, name = op.partition("::")
    if installed_schemas(op):
        overload: Callable[..., Any] = getattr(getattr(torch.ops, space), name).default
        return overload

    def absent(*_: Any, **__: Any) -> Any:
        raise SchemaMismatchError(
            f"{op} is not installed",
            whom="a call through the facade",
            why="the implementation that calls it did not name it in its ops",
            remedy="install the package that registers it",
            code="op.missing",
        )

    return absent


class DeviceOps:
    """The ops of the installed packages.

    Args:
        catalog: The schemas to check against.
        line: The installed TorchNPU line.
        library: Kernel library that supplies what torch_npu lacks.
    """

    name = "npu"

    def __init__(self, catalog: Catalog, line: str, library: str) -> None:
        self.catalog, self.line, self.library = catalog, line, library
        space = LIBRARY_NAMESPACES[library]
        self.npu_transpose_batchmatmul = _overload("npu::npu_transpose_batchmatmul")
        self.batch_matmul_transpose = _overload(f"{space}::batch_matmul_transpose")
        self.npu_mla_prolog_v3 = _overload("npu::npu_mla_prolog_v3")
        self.mla_preprocess = _overload(f"{space}::mla_preprocess")
        self.npu_interleave_rope = _overload("npu::npu_interleave_rope")
        self.npu_rms_norm = _overload("npu::npu_rms_norm")
        self.npu_dynamic_quant = _overload("npu::npu_dynamic_quant")
        self.npu_dynamic_mx_quant = _overload("npu::npu_dynamic_mx_quant")
        self.npu_quantize = _overload("npu::npu_quantize")
        self.npu_quant_matmul = _overload("npu::npu_quant_matmul")
        self._format_cast = _overload("npu::npu_format_cast")
        self._get_format = _overload("npu::get_npu_format")
        # The first version writes its caches though its schema does not say so, so a compiler may
        # drop a call whose results are not used; the second (line 7.2) marks them.
        self._kv = _overload(_KV_V2 if self.has(_KV_V2) else "npu::npu_kv_rmsnorm_rope_cache")

    @classmethod
    def installed(cls, deployment: Deployment) -> DeviceOps:
        """Return the facade for the installed torch-npu and the deployment's kernel library.

        Raises:
            DeploymentError: The installed package is not in the catalog's table.
            SchemaMismatchError: No torch-npu is installed.
        """
        try:
            version = metadata.version("torch-npu")
        except metadata.PackageNotFoundError as err:
            raise SchemaMismatchError(
                "torch-npu is not installed",
                whom="the ops of the device",
                why="the weights are on an NPU, and its ops are torch_npu's",
                remedy="install torch-npu in a version of the catalog's table",
                code="op.missing",
            ) from err
        line = deployment.catalog.versions.line_of(version)
        return cls(deployment.catalog, line, deployment.kernels.name)

    def npu_format_cast(self, input: torch.Tensor, acl_format: int) -> torch.Tensor:
        """Return the tensor in a format. Only while preparing: the result is looked at.

        Raises:
            PrepareError: The result is in another format; lines up to 7.3 do so with a warning only
                where internal formats are not allowed.
        """
        cast = self._format_cast(input, acl_format)
        found = int(self._get_format(cast))
        if found != acl_format:
            raise PrepareError(
                f"a cast to format {acl_format} came back in format {found}",
                whom=f"a weight of shape {tuple(input.shape)}, {input.dtype}",
                why="torch_npu keeps such a weight as it is where internal formats are not allowed",
                remedy="let the host set torch.npu.config.allow_internal_format = True before it "
                "prepares layers",
                code="format.nz",
            )
        return cast  # type: ignore[no-any-return]

    def is_nz(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is in FRACTAL_NZ."""
        return int(self._get_format(tensor)) == FORMAT_NZ

    def has(self, op: str) -> bool:
        """Whether the catalog knows an op on the installed line."""
        return self.catalog.has_op(op, self.line)

    def check(self, names: Iterable[str], whom: str) -> None:
        """Check ops against the catalog's schemas for the installed line.

        Raises:
            SchemaMismatchError: One is absent or differs.
        """
        asked = [
            _KV_V2 if n == "npu::npu_kv_rmsnorm_rope_cache" and self.has(_KV_V2) else n
            for n in names
        ]
        check_schemas(asked, catalog=self.catalog, line=self.line, library=self.library, whom=whom)

    def npu_kv_rmsnorm_rope_cache(
        self, *args: torch.Tensor, epsilon: float, cache_mode: str
    ) -> None:
        """Write both caches."""
        self._kv(*args, epsilon=epsilon, cache_mode=cache_mode)
