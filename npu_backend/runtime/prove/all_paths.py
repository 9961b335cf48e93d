"""Every legal path of a model's layers, each run by itself against the fp32 reference."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from attrs import evolve, field, frozen

from npu_backend.deployment import Deployment
from npu_backend.errors import NotExecutedError, SchemaMismatchError, SelectionError
from npu_backend.model.records import MlaLayer
from npu_backend.plan import LayerPlan, ModelPlan
from npu_backend.runtime.prove.engine import DEFAULT_ROWS, prove_layer
from npu_backend.runtime.prove.records import LayerProof
from npu_backend.runtime.prove.scenario import HOST_MHA, ROW_CAP

__all__ = ["PathRecord", "PathsResult", "prove_all_paths"]

Planner = Callable[[Sequence[MlaLayer], Deployment], ModelPlan]
"""Plans layers for a deployment; a backend's ``plan``."""


@frozen(kw_only=True)
class PathRecord:
    """One path on one kind of layer.

    Args:
        layers: Ids of the layers that are alike; the first one was run.
        is_nextn: MTP layers.
        path: The strategy.
        mode: Its offer's mode, such as ``weight_quant_mode=3``.
        proof: What was run and found; None where the path is not legal.
        reasons: ``(code, message)`` why it is not legal.
    """

    layers: tuple[int, ...]
    is_nextn: bool
    path: str
    mode: str = ""
    proof: LayerProof | None = None
    reasons: tuple[tuple[str, str], ...] = ()

    @property
    def passed(self) -> bool:
        """Whether nothing failed; a path that is not legal cannot fail."""
        return self.proof is None or self.proof.passed

    @property
    def phases(self) -> tuple[str, ...]:
        """Phases in which this path served a step with tokens, in order."""
        return tuple(dict.fromkeys(s.phase for s in self._steps()))

    @property
    def error(self) -> float | None:
        """Largest relative error of an output of a step that this path served."""
        errors = [s.error for s in self._steps() if s.error is not None]
        return max(errors) if errors else None

    def figure(self, claim: str, name: str) -> float | None:
        """Return a figure of a claim, such as the cache's ``latent``; None where there is none."""
        for proof in self.proof.proofs if self.proof is not None else ():
            if proof.name == claim and name in proof.figures:
                return float(proof.figures[name])
        return None

    def _steps(self) -> list[Any]:
        steps = self.proof.steps if self.proof is not None else ()
        return [s for s in steps if s.path == self.path and s.error is not None]

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "layers": list(self.layers),
            "is_nextn": self.is_nextn,
            "path": self.path,
            "mode": self.mode or None,
            "legal": self.proof is not None,
            "passed": self.passed,
            "phases": list(self.phases),
            "error": self.error,
            "latent_error": self.figure("cache", "latent"),
            "key_error": self.figure("cache", "key"),
            "q_lora_error": self.figure("q_lora", "error"),
            "tolerance": self.proof.tolerance if self.proof is not None else None,
            "reasons": [{"code": c, "message": m} for c, m in self.reasons],
            "proof": self.proof.to_dict() if self.proof is not None else None,
        }


@frozen(kw_only=True)
class PathsResult:
    """Every path on every kind of layer.

    Args:
        device: Where it ran.
        seed: Of weights and inputs.
        records: One a path and kind of layer.
    """

    device: str
    seed: int
    records: tuple[PathRecord, ...] = field(default=())

    @property
    def passed(self) -> bool:
        """Whether every legal path holds, and there is one."""
        ran = [r for r in self.records if r.proof is not None]
        return bool(ran) and all(r.passed for r in ran)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "device": self.device,
            "seed": self.seed,
            "records": [r.to_dict() for r in self.records],
        }


def _kinds(plan: ModelPlan) -> list[list[LayerPlan]]:
    groups: dict[tuple[bool, MlaLayer], list[LayerPlan]] = {}
    for layer in plan.layers:
        groups.setdefault((layer.layer.is_nextn, layer.layer.kind), []).append(layer)
    return list(groups.values())


def _names(plan: LayerPlan) -> list[str]:
    """Return every path that anybody offered or declined, in call order of what serves first."""
    names = [e.strategy for e in plan.path if e.strategy != HOST_MHA]
    names += [u.strategy for u in plan.unused if u.site is None]
    names += [
        d.strategy
        for d in plan.declined
        if d.site is None and d.hook == "select_preprocess_path" and d.strategy != HOST_MHA
    ]
    return list(dict.fromkeys(names))


def _reasons(plan: LayerPlan, name: str) -> tuple[tuple[str, str], ...]:
    return tuple(
        (r.code, r.message)
        for d in plan.declined
        if d.site is None and d.strategy == name
        for r in d.reasons
        if r.code != "policy.duplicate"
    )


def _requesting(deployment: Deployment, name: str, is_nextn: bool) -> Deployment:
    kept = [str(r) for r in deployment.requests if not str(r).startswith("path=")]
    return evolve(deployment, requests=[*kept, f"path={name}{'@nextn' if is_nextn else ''}"])


def prove_all_paths(
    plan: ModelPlan,
    planner: Planner,
    *,
    device: torch.device | str = "cpu",
    seed: int = 0,
    rows: Sequence[int] = DEFAULT_ROWS,
    row_cap: int = ROW_CAP,
    progress: Callable[[int, int, LayerProof | None], None] | None = None,
) -> PathsResult:
    """Run each legal path on the first layer of each kind, as :func:`prove_layer` does.

    The weights, the inputs and the reference of a layer are the same for each of its paths, and so
    is its KV layout, so errors can be compared. Where extend is reachable, absorb fills the cache
    that a fused path continues.

    Args:
        plan: The plan whose layers and deployment are meant; its own path requests do not count.
        planner: Plans one layer with a request.
        device: Where to run.
        seed: Of weights and inputs.
        rows: Row counts of every phase.
        row_cap: Boundaries above this are named and not run.
        progress: Called at the start and after each path.

    Raises:
        NpuBackendError: A layer is of a kind that is planned but not executed yet.
    """
    wanted = [(group, name) for group in _kinds(plan) for name in _names(group[0])]
    if progress is not None:
        progress(0, len(wanted), None)
    records = []
    for done, (group, name) in enumerate(wanted, 1):
        record = _record(group, name, planner, device, seed, rows, row_cap)
        records.append(record)
        if progress is not None:
            progress(done, len(wanted), record.proof)
    return PathsResult(device=str(torch.device(device)), seed=seed, records=tuple(records))


def _record(
    group: Sequence[LayerPlan],
    name: str,
    planner: Planner,
    device: torch.device | str,
    seed: int,
    rows: Iterable[int],
    row_cap: int,
) -> PathRecord:
    first = group[0]
    record = PathRecord(
        layers=tuple(p.layer_id for p in group), is_nextn=first.layer.is_nextn, path=name
    )
    if reasons := _reasons(first, name):
        return evolve(record, reasons=reasons)
    try:
        asked = planner(
            [first.layer], _requesting(first.deployment, name, first.layer.is_nextn)
        ).layers[0]
    except SelectionError as err:
        return evolve(record, reasons=((err.code or "request.unmet", str(err)),))
    offers = [e.offer for e in asked.path if e.strategy == name and e.offer is not None]
    try:
        proof = prove_layer(asked, device=device, seed=seed, rows=tuple(rows), row_cap=row_cap)
    except (NotExecutedError, SchemaMismatchError) as err:
        # Legal, and nothing that a proof could be wrong about.
        return evolve(record, reasons=((err.code or "quant.mode", str(err)),))
    return evolve(record, mode=offers[0].mode if offers else "", proof=proof)
