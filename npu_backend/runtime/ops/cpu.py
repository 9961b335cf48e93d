"""The facade on CPU tensors: the references, as ops that torch.compile does not look into.

A reference checks slots by value, which no graph can trace; behind an op of the library
``npu_backend_reference`` it is as opaque as the device's op is, with the same marks on what it
writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from npu_backend.catalog import load_catalog
from npu_backend.errors import SchemaMismatchError
from npu_backend.runtime import reference
from npu_backend.runtime.reference.mlapo import ascend_mla_preprocess
from npu_backend.runtime.reference.numerics import E8M0, MX_BLOCK
from npu_backend.runtime.reference.quant import dtype_of_number

__all__ = ["CpuOps"]

_NAMESPACE = "npu_backend_reference"
_CATALOG = load_catalog()
_LINE = _CATALOG.versions.newest_line


def _schema(name: str, *, returns: str | None = None, library: str | None = None) -> str:
    """Return the newest line's schema, with other results where an op returns what it was given:
    functionalization takes no op that returns its inputs."""
    table = _CATALOG.schemas["libraries"][library] if library else _CATALOG.schemas["lines"][_LINE]
    space = "_C_ascend" if library == "vllm-ascend" else "npu"
    text = str(table["ops"][f"{space}::{name}"][0])
    return text if returns is None else f"{text.rpartition(' -> ')[0]} -> {returns}"


def _kv_rmsnorm_rope_cache(
    kv: torch.Tensor,
    gamma: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    index: torch.Tensor,
    k_cache: torch.Tensor,
    ckv_cache: torch.Tensor,
    epsilon: float,
    cache_mode: str,
) -> None:
    reference.npu_kv_rmsnorm_rope_cache(
        kv, gamma, cos, sin, index, k_cache, ckv_cache, epsilon=epsilon, cache_mode=cache_mode
    )


def _mla_preprocess(*args: Any, **kwargs: Any) -> None:
    reference.mla_preprocess(*args, **kwargs)


def _nothing(*_: Any, **__: Any) -> None:
    """Fake kernel of an op that only writes into what it was given."""


def _transpose_fake(input: torch.Tensor, weight: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    swapped = tuple(kwargs.get("perm_x1") or (0, 1, 2)) == (1, 0, 2)
    turned = tuple(kwargs.get("perm_x2") or (0, 1, 2)) == (0, 2, 1)
    tokens, heads = (0, 1) if swapped else (1, 0)
    width = weight.shape[1] if turned else weight.shape[2]
    return input.new_empty((input.shape[tokens], input.shape[heads], width))


def _rms_norm_fake(
    input: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    kept = (*input.shape[: input.dim() - gamma.dim()], *(1 for _ in gamma.shape))
    return torch.empty_like(input, memory_format=torch.contiguous_format), input.new_empty(
        kept, dtype=torch.float32
    )


def _rope_fake(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _dynamic_quant_fake(input: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = dtype_of_number("npu_dynamic_quant", kwargs.get("dst_type"), torch.int8)
    return (
        torch.empty_like(input, dtype=dtype),
        input.new_empty(input.shape[:-1], dtype=torch.float32),
    )


def _mx_quant_fake(input: torch.Tensor, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    pairs = (*input.shape[:-1], input.shape[-1] // (2 * MX_BLOCK), 2)
    values = torch.empty_like(input, dtype=torch.float8_e4m3fn)
    return values, input.new_empty(pairs, dtype=torch.uint8)


def _prolog_fake(
    token_x: torch.Tensor,
    weight_dq: torch.Tensor,
    weight_uq_qr: torch.Tensor,
    weight_uk: torch.Tensor,
    weight_dkv_kr: torch.Tensor,
    *others: Any,
    query_norm_flag: bool = False,
    weight_quant_mode: int = 0,
    query_quant_mode: int = 0,
    **_: Any,
) -> tuple[torch.Tensor, ...]:
    tokens, (heads, _nope, latent) = token_x.shape[:-1], weight_uk.shape
    rope, rank = weight_dkv_kr.shape[1] - latent, weight_dq.shape[1]
    rows = token_x.numel() // token_x.shape[-1]
    query_dtype = others[4].dtype if query_quant_mode else weight_uk.dtype
    scaled = query_norm_flag and weight_quant_mode > 0
    mx = weight_quant_mode == 3
    scales = (rows, rank // MX_BLOCK if mx else 1)
    new = weight_uk.new_empty
    return (
        new((*tokens, heads, latent), dtype=query_dtype),
        new((*tokens, heads, rope)),
        new((rows, heads, 1) if query_quant_mode else (0,), dtype=torch.float32),
        new((*tokens, rank) if query_norm_flag else (0,), dtype=weight_uq_qr.dtype),
        new(scales if scaled else (0,), dtype=E8M0 if mx else torch.float32),
    )


def _quantize_fake(input: torch.Tensor, *args: Any, **_: Any) -> torch.Tensor:
    return torch.empty_like(input, dtype=dtype_of_number("npu_quantize", args[2], torch.int8))


def _quant_matmul_fake(
    x1: torch.Tensor, x2: torch.Tensor, scale: torch.Tensor, **kwargs: Any
) -> torch.Tensor:
    dtype = dtype_of_number("npu_quant_matmul", kwargs.get("output_dtype"), torch.int8)
    return x1.new_empty((*x1.shape[:-1], x2.shape[-1]), dtype=dtype)


_KV_SCHEMA = (
    "npu_kv_rmsnorm_rope_cache(Tensor kv, Tensor gamma, Tensor cos, Tensor sin, Tensor index, "
    "Tensor(a!) k_cache, Tensor(b!) ckv_cache, float epsilon, str cache_mode) -> ()"
)

_ASCEND_MLAPO = "ascend_" + _schema("mla_preprocess", returns="()", library="vllm-ascend")

_DEFINITIONS: tuple[tuple[str, Callable[..., Any], Callable[..., Any]], ...] = (
    (_schema("npu_transpose_batchmatmul"), reference.npu_transpose_batchmatmul, _transpose_fake),
    (
        _schema("batch_matmul_transpose", library="sgl-kernel-npu"),
        reference.batch_matmul_transpose,
        _nothing,
    ),
    (_schema("npu_mla_prolog_v3"), reference.npu_mla_prolog_v3, _prolog_fake),
    (
        _schema("mla_preprocess", returns="()", library="sgl-kernel-npu"),
        _mla_preprocess,
        _nothing,
    ),
    (_ASCEND_MLAPO, ascend_mla_preprocess, _nothing),
    (_KV_SCHEMA, _kv_rmsnorm_rope_cache, _nothing),
    (_schema("npu_interleave_rope"), reference.npu_interleave_rope, _rope_fake),
    (_schema("npu_rms_norm"), reference.npu_rms_norm, _rms_norm_fake),
    (_schema("npu_dynamic_quant"), reference.npu_dynamic_quant, _dynamic_quant_fake),
    (_schema("npu_dynamic_mx_quant"), reference.npu_dynamic_mx_quant, _mx_quant_fake),
    (_schema("npu_quantize"), reference.npu_quantize, _quantize_fake),
    (_schema("npu_quant_matmul"), reference.npu_quant_matmul, _quant_matmul_fake),
)


def _define() -> Any:
    # torch's Library is not typed.
    make: Any = torch.library.Library
    library = make(_NAMESPACE, "DEF")
    for schema, kernel, fake in _DEFINITIONS:
        name = schema.partition("(")[0]
        library.define(schema)
        library.impl(name, kernel, "CPU")
        library.impl(name, fake, "Meta")
    return library


# torch drops the kernels of a library whose object dies.
_LIBRARY = _define()


class CpuOps:
    """The references, under the ops' own names.

    Args:
        library: Kernel library whose ``mla_preprocess`` is meant.
    """

    name = "cpu reference"

    def __init__(self, library: str = "sgl-kernel-npu") -> None:
        space = getattr(torch.ops, _NAMESPACE)
        self.npu_transpose_batchmatmul = space.npu_transpose_batchmatmul.default
        self.batch_matmul_transpose = space.batch_matmul_transpose.default
        self.npu_mla_prolog_v3 = space.npu_mla_prolog_v3.default
        ascend = library == "vllm-ascend"
        mlapo = space.ascend_mla_preprocess if ascend else space.mla_preprocess
        self.mla_preprocess = mlapo.default
        self._kv_rmsnorm_rope_cache = space.npu_kv_rmsnorm_rope_cache.default
        self.npu_interleave_rope = space.npu_interleave_rope.default
        self.npu_rms_norm = space.npu_rms_norm.default
        self.npu_dynamic_quant = space.npu_dynamic_quant.default
        self.npu_dynamic_mx_quant = space.npu_dynamic_mx_quant.default
        self.npu_quantize = space.npu_quantize.default
        self.npu_quant_matmul = space.npu_quant_matmul.default
        # It may return its input, which an op must not; and it is called while preparing only.
        self.npu_format_cast = reference.npu_format_cast

    def npu_kv_rmsnorm_rope_cache(
        self, *args: torch.Tensor, epsilon: float, cache_mode: str
    ) -> None:
        """Write both caches."""
        self._kv_rmsnorm_rope_cache(*args, epsilon, cache_mode)

    def is_nz(self, tensor: torch.Tensor) -> bool:
        """Return True: a CPU tensor has no format that could be wrong."""
        return True

    def check(self, names: Iterable[str], whom: str) -> None:
        """Check that there is a reference of each op that the catalog knows.

        Raises:
            SchemaMismatchError: There is none.
        """
        known = {f"npu::{schema.partition('(')[0]}" for schema, _, _ in _DEFINITIONS}
        known |= {"npu::npu_kv_rmsnorm_rope_cache_v2", "npu::npu_format_cast"}
        missing = [n for n in names if n.replace("_C_ascend::", "npu::") not in known]
        if absent := [n for n in missing if not torch._C._jit_get_schemas_for_operator(n)]:
            raise SchemaMismatchError(
                f"{', '.join(absent)}: there is no reference of it on the CPU",
                whom=whom,
                why="on CPU tensors the references compute, or ops that a plugin registers itself",
                remedy="bind tensors on a device, or register a CPU kernel of the op",
                code="op.missing",
            )
