"""npu-backend: decide, once and with reasons, how MLA attention runs on Ascend NPUs.

For every MLA attention layer of a served model: which preprocess path runs, which weights may be
released, and which kernel does the batched matmul. Importing this module loads no torch and no
plugin; names are resolved when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from npu_backend.api import Backend, load
    from npu_backend.deployment import Deployment, KernelLibrary, Phase, Request, Role, Soc
    from npu_backend.errors import (
        BoundExceededError,
        CatalogError,
        DeploymentError,
        ModelError,
        NotExecutedError,
        NpuBackendError,
        PlanMismatchError,
        PluginError,
        PrepareError,
        RequestUnmetError,
        SchemaMismatchError,
        SelectionError,
        WeightReleasedError,
    )
    from npu_backend.hookspecs import hookimpl
    from npu_backend.mlp.layout import MlpCommunication, MlpShardLayout, mlp_shard_layout
    from npu_backend.mlp.options import AttnTpOptions
    from npu_backend.mlp.parallel import MlpParallel
    from npu_backend.mlp.plan import MlpPlan, plan_mlp
    from npu_backend.model.mlp import MlpLayer
    from npu_backend.model.read import read_model
    from npu_backend.model.read_mlp import read_mlp_layers
    from npu_backend.model.records import Indexer, KvLayout, MlaLayer
    from npu_backend.offers import (
        Answer,
        BmmSpec,
        Decline,
        Envelope,
        Forbid,
        Keep,
        Offer,
        Reason,
        Release,
    )
    from npu_backend.plan import LayerPlan, ModelPlan

_HOME = {
    "npu_backend.api": ("Backend", "load"),
    "npu_backend.deployment": ("Deployment", "KernelLibrary", "Phase", "Request", "Role", "Soc"),
    "npu_backend.errors": (
        "BoundExceededError",
        "CatalogError",
        "DeploymentError",
        "ModelError",
        "NotExecutedError",
        "NpuBackendError",
        "PlanMismatchError",
        "PluginError",
        "PrepareError",
        "RequestUnmetError",
        "SchemaMismatchError",
        "SelectionError",
        "WeightReleasedError",
    ),
    "npu_backend.hookspecs": ("hookimpl",),
    "npu_backend.mlp.layout": ("MlpCommunication", "MlpShardLayout", "mlp_shard_layout"),
    "npu_backend.mlp.options": ("AttnTpOptions",),
    "npu_backend.mlp.parallel": ("MlpParallel",),
    "npu_backend.mlp.plan": ("MlpPlan", "plan_mlp"),
    "npu_backend.model.mlp": ("MlpLayer",),
    "npu_backend.model.read": ("read_model",),
    "npu_backend.model.read_mlp": ("read_mlp_layers",),
    "npu_backend.model.records": ("Indexer", "KvLayout", "MlaLayer"),
    "npu_backend.offers": (
        "Answer",
        "BmmSpec",
        "Decline",
        "Envelope",
        "Forbid",
        "Keep",
        "Offer",
        "Reason",
        "Release",
    ),
    "npu_backend.plan": ("LayerPlan", "ModelPlan"),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "Answer",
    "AttnTpOptions",
    "Backend",
    "BmmSpec",
    "BoundExceededError",
    "CatalogError",
    "Decline",
    "Deployment",
    "DeploymentError",
    "Envelope",
    "Forbid",
    "Indexer",
    "Keep",
    "KernelLibrary",
    "KvLayout",
    "LayerPlan",
    "MlaLayer",
    "MlpCommunication",
    "MlpLayer",
    "MlpParallel",
    "MlpPlan",
    "MlpShardLayout",
    "ModelError",
    "ModelPlan",
    "NotExecutedError",
    "NpuBackendError",
    "Offer",
    "Phase",
    "PlanMismatchError",
    "PluginError",
    "PrepareError",
    "Reason",
    "Release",
    "Request",
    "RequestUnmetError",
    "Role",
    "SchemaMismatchError",
    "SelectionError",
    "Soc",
    "WeightReleasedError",
    "hookimpl",
    "load",
    "mlp_shard_layout",
    "plan_mlp",
    "read_mlp_layers",
    "read_model",
]


def __getattr__(name: str) -> Any:
    try:
        module = _MODULE_OF[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    value = getattr(import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
