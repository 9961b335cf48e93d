"""The layouts of every MLP of a model, and the bytes that the options save."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Any

from attrs import evolve, field, frozen

from npu_backend.errors import DeploymentError
from npu_backend.mlp.layout import MlpShardLayout, mlp_shard_layout
from npu_backend.mlp.options import DENSE_FLAG, SHARED_FLAG, SHARED_SIZE, AttnTpOptions
from npu_backend.mlp.parallel import MlpParallel
from npu_backend.model.mlp import MlpLayer

__all__ = ["MlpGroup", "MlpPlan", "plan_mlp"]


@frozen(kw_only=True)
class MlpGroup:
    """MLPs that agree in everything but their ids.

    Args:
        layer_ids: Their ids, in order.
        layout: Their layout.
        default_bytes: Bytes per rank of one of them with every option off; None where that layout
            is impossible.
    """

    layer_ids: tuple[int, ...]
    layout: MlpShardLayout
    default_bytes: int | None

    @property
    def bytes_per_rank(self) -> int:
        """Bytes per rank of all of them."""
        return self.layout.bytes_per_rank * len(self.layer_ids)

    @property
    def bytes_saved(self) -> int | None:
        """Bytes per rank that the options save over all of them; negative where they cost, None
        where there is nothing to compare with."""
        if self.default_bytes is None:
            return None
        return (self.default_bytes - self.layout.bytes_per_rank) * len(self.layer_ids)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form; bytes are those of one MLP."""
        saved = self.bytes_saved
        return {
            "layer_ids": list(self.layer_ids),
            "is_nextn": self.layout.layer.is_nextn,
            **self.layout.to_dict(),
            "bytes_saved": None if saved is None else saved // len(self.layer_ids),
        }


@frozen(kw_only=True)
class MlpPlan:
    """The layouts of a model's MLPs.

    Args:
        options: What was chosen.
        parallel: How the model is served.
        groups: The MLPs, those that agree together.
        warnings: Options that do nothing here.
        assumed: What was assumed of the MLPs because files were absent.
    """

    options: AttnTpOptions
    parallel: MlpParallel
    groups: tuple[MlpGroup, ...]
    warnings: tuple[str, ...] = ()
    assumed: tuple[str, ...] = field(default=(), repr=False)

    @cached_property
    def bytes_per_rank(self) -> int:
        """Bytes per rank of all MLPs of the plan."""
        return sum(group.bytes_per_rank for group in self.groups)

    @cached_property
    def bytes_saved(self) -> int | None:
        """Bytes per rank that the options save over all MLPs; None where one cannot be compared."""
        saved = [group.bytes_saved for group in self.groups]
        return None if None in saved else sum(s for s in saved if s is not None)

    def decisions(self) -> list[dict[str, Any]]:
        """Return what the fingerprint covers: layouts, no ranks and no words."""
        return [group.to_dict() for group in self.groups]

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form, the key ``mlp`` of a plan."""
        return {
            "options": self.options.to_dict(),
            "parallel": self.parallel.to_dict(),
            "layouts": self.decisions(),
            "totals": {"bytes_per_rank": self.bytes_per_rank, "bytes_saved": self.bytes_saved},
            "warnings": list(self.warnings),
            "assumed": list(self.assumed),
        }


def _default_bytes(layer: MlpLayer, parallel: MlpParallel) -> int | None:
    try:
        return mlp_shard_layout(layer, AttnTpOptions(), parallel).bytes_per_rank
    except DeploymentError:
        # The options make possible what full TP does not: there is nothing to compare with.
        return None


def _without_effect(
    layers: Iterable[MlpLayer], options: AttnTpOptions, warnings: dict[str, None]
) -> None:
    kinds = {layer.kind for layer in layers}
    if "dense" not in kinds and options.enable_dense_mlp_attn_tp:
        warnings[f"{DENSE_FLAG} does nothing: no dense MLP is known of the model"] = None
    if "shared_experts" not in kinds:
        for name in (SHARED_FLAG, SHARED_SIZE):
            if getattr(options, name):
                warnings[f"{name} does nothing: no shared experts are known of the model"] = None


def plan_mlp(layers: Iterable[MlpLayer], options: AttnTpOptions, parallel: MlpParallel) -> MlpPlan:
    """Decide the layout of every MLP of a model. Pure.

    Args:
        layers: What :func:`npu_backend.read_mlp_layers` returned, or records a host built.
        options: What the user chose.
        parallel: How the model is served.

    Raises:
        DeploymentError: A combination is impossible; the first reason names the rule.
    """
    found = tuple(layers)
    kinds: dict[MlpLayer, list[int]] = {}
    for layer in found:
        kinds.setdefault(evolve(layer, layer_id=0, prefix=""), []).append(layer.layer_id)
    groups, warnings = [], dict[str, None]()
    _without_effect(found, options, warnings)
    for kind, ids in kinds.items():
        first = evolve(kind, layer_id=ids[0])
        layout = mlp_shard_layout(first, options, parallel)
        warnings.update(dict.fromkeys(layout.warnings))
        groups.append(
            MlpGroup(
                layer_ids=tuple(ids), layout=layout, default_bytes=_default_bytes(first, parallel)
            )
        )
    return MlpPlan(
        options=options,
        parallel=parallel,
        groups=tuple(groups),
        warnings=tuple(warnings),
        assumed=tuple(getattr(layers, "assumed", ())),
    )
