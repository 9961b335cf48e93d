"""The fate of each weight: released only if voted for, vetoed by none, and read by nobody."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from attrs import evolve

from npu_backend.deployment import Deployment
from npu_backend.model.weights import WeightSpec
from npu_backend.offers import Answer, Keep, PluginInfo, Reason, Release
from npu_backend.plan import DeclineRecord, WeightPlan
from npu_backend.planner.answers import RELEASE_HOOK
from npu_backend.planner.readers import Readers, counting
from npu_backend.planner.tables import Served

__all__ = ["fates", "prepared_copies"]

_PROMISE_CODES = {
    "update": "promise.weight_update",
    "export": "promise.export",
    "lora": "promise.lora",
    # A draft model lives on the weight's own storage; peers read it.
    "draft": "weight.aliased",
    "peers": "weight.read",
}


def _read_reason(readers: Iterable[str], deployment: Deployment) -> str:
    who = tuple(readers)
    promised = [r for r in who if deployment.is_promised(r)]
    if promised and len(promised) == len(who):
        code = _PROMISE_CODES.get(promised[0], "promise.role_switch")
    else:
        code = "weight.read"
    return f"{code}: read by {', '.join(who)}"


def fates(
    weights: Mapping[str, WeightSpec],
    readers: Readers,
    answers: Iterable[Answer],
    deployment: Deployment,
) -> tuple[list[WeightPlan], list[DeclineRecord]]:
    """Return each loaded weight's fate, and refusals of answers that are no votes.

    (a) some plugin votes Release, (b) none votes Keep, (c) nobody reads it; (d), that no living
    tensor shares its storage, is known when the layer is bound.
    """
    votes: dict[str, list[tuple[str, Release | Keep]]] = {}
    declined = []
    for answer in answers:
        provider = answer.plugin.provider
        if answer.failure is not None:
            declined.append(
                DeclineRecord(
                    RELEASE_HOOK, None, answer.plugin.name, provider, (answer.failure.reason,)
                )
            )
        for record in answer.records:
            if isinstance(record, Release | Keep):
                if record.weight in weights:
                    votes.setdefault(record.weight, []).append((provider, record))
                    continue
                message = (
                    f"{RELEASE_HOOK}: votes on {record.weight!r}, which is no loaded weight of the "
                    f"layer (it has {', '.join(weights)})"
                )
                declined.append(
                    DeclineRecord(
                        RELEASE_HOOK,
                        None,
                        answer.plugin.name,
                        provider,
                        (Reason("plugin.failed", message),),
                    )
                )
    rows = []
    for name, spec in weights.items():
        who = readers.get(name, ())
        alive = counting(who, deployment)
        keeps = [f"{p}: {v.why}" for p, v in votes.get(name, ()) if isinstance(v, Keep)]
        releases = [f"{p}: {v.why}" for p, v in votes.get(name, ()) if isinstance(v, Release)]
        if alive:
            action, reasons = "keep", [_read_reason(alive, deployment), *keeps]
        elif keeps:
            action, reasons = "keep", keeps
        elif not releases:
            action, reasons = "keep", ["no plugin votes to release it"]
        elif who:
            action = "restore"
            reasons = [*releases, _read_reason(who, deployment) + ", brought back before that"]
        else:
            action, reasons = "release", releases
        rows.append(WeightPlan(name, spec.dtype, spec.bytes, action, tuple(reasons), who))
    return rows, declined


def prepared_copies(
    weights: Mapping[str, WeightSpec], served: Iterable[tuple[str | None, Served]]
) -> list[WeightPlan]:
    """Return the copies that serving strategies make, each with who reads it.

    Args:
        weights: The loaded weights.
        served: Pairs of site (None for a path) and who serves.
    """
    owners: dict[str, tuple[PluginInfo, str]] = {}
    rows: dict[str, WeightPlan] = {}
    for site, run in served:
        if run.by is None:
            continue
        reader = f"{site or run.by.strategy}@{run.phase}"
        for name, size in run.by.offer.copies:
            spec, copy = weights[name], f"{run.by.strategy}.{name}"
            if owners.setdefault(copy, (run.by.plugin, name))[0] != run.by.plugin:
                # A namesake of another plugin keeps its own copy.
                copy = f"{run.by.plugin.dist}/{copy}"
            made = f"made by {run.by.plugin.provider} while preparing"
            bytes_ = spec.bytes if size is None else size
            row = rows.get(copy) or WeightPlan(copy, spec.dtype, bytes_, "keep", (made,), (), name)
            if reader not in row.readers:
                row = evolve(row, readers=(*row.readers, reader))
            rows[copy] = row
    return list(rows.values())
