"""``plugins --check``: ask every hook on a standard set of layers, and say who wins where, who is
shadowed and by whom, and what is wrong."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any

from npu_backend.api import Backend
from npu_backend.deployment import Deployment
from npu_backend.errors import NpuBackendError, SelectionError
from npu_backend.explain import LayerGroup, format_phases, format_rows, group_layers
from npu_backend.model.records import MlaLayer
from npu_backend.offers import Answer, BmmSpec, Decline, Forbid, Offer, PluginInfo
from npu_backend.planner.readers import Readers
from npu_backend.registry.standing import why_first

__all__ = ["CHECKED", "check_plugins"]

CHECKED: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("glm-5.2", "none", {"role": "decode", "cann": "9.1.0"}),
    ("deepseek-v3", "none", {"role": "decode", "cann": "9.0.0"}),
    ("deepseek-v3", "none", {"role": "decode", "cann": "9.1.0", "attn_tp_size": 2}),
    ("deepseek-v3", "none", {"role": "decode", "cann": "9.1.0", "soc": "A2"}),
    ("deepseek-v3", "none", {"role": "decode", "cann": "9.2.0", "soc": "A5"}),
    ("deepseek-v3.2", "w8a8-dynamic", {"role": "prefill", "cann": "9.1.0"}),
    ("kimi-k2", "w8a8-static", {"role": "decode", "cann": "9.1.0", "max_tokens": 1024}),
    ("kimi-k3", "none", {"role": "null", "cann": "9.2.0"}),
)
"""The standard set: bundled model, quantization, deployment."""

TABLES = ("path", "q_absorb", "v_up")
_HOOK = {"path": "select_preprocess_path"}
_COUNTS = ("offers", "serves", "shadowed", "declines", "forbids", "votes", "failures")


class _Check:
    """Collects what the standard set brings up."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.records = backend.registry.plugins
        self.counts: dict[str, dict[str, int]] = {
            r.info.provider: dict.fromkeys(_COUNTS, 0) for r in self.records if r.hooks
        }
        self.impls: dict[tuple[str, PluginInfo], Offer] = {}

    def row(self, name: str, quant: str, wanted: dict[str, Any]) -> dict[str, Any]:
        """Ask everybody about one model in one deployment, and plan it."""
        from npu_backend.model.read import read_model

        row: dict[str, Any] = {"model": name, "quant": quant, "soc": "A3", **wanted}
        row |= {"winners": [], "shadowed": [], "failures": [], "unplanned": []}
        deployment = Deployment(catalog=self.backend.catalog, **wanted)
        try:
            model = read_model(name, quant=quant, catalog=self.backend.catalog)
            plan = self.backend.plan(model, deployment)
        except SelectionError as err:
            # These plugins do not serve everything; that is no fault of theirs.
            row["unplanned"].append(str(err))
            row["failures"] += self._ask_unplanned(model, deployment)
            row["failures"] += [why for why in err.why if ": plugin.failed: " in why]
            return row
        except NpuBackendError as err:
            row["failures"].append(str(err))
            return row
        for group in group_layers(plan.layers):
            readers = {w.name: w.readers for w in group.first.weights if w.copy_of is None}
            row["failures"] += self._ask(group.title, group.first.layer, deployment, readers)
            # What the planner refuses of an offer: a weight that the layer does not have, say.
            row["failures"] += dict.fromkeys(
                f"{group.title}: {d.provider}: {reason}"
                for d in group.first.declined
                for reason in d.reasons
                if reason.code == "plugin.failed"
                and f"{group.title}: {d.provider}: {reason}" not in row["failures"]
            )
            for table in TABLES:
                row["winners"] += self._winners(group, table)
                row["shadowed"] += self._shadowed(group, table)
        return row

    def _ask_unplanned(self, layers: Iterable[MlaLayer], deployment: Deployment) -> list[str]:
        """Ask each hook about a layer of each kind, weights taken as read by nobody."""
        kinds = {layer.kind: layer for layer in reversed([*layers])}
        found = []
        for layer in reversed([*kinds.values()]):
            readers: Readers = dict.fromkeys(layer.weight_names, ())
            found += self._ask(str(layer), layer, deployment, readers)
        return found

    def _ask(
        self, title: str, layer: MlaLayer, deployment: Deployment, readers: Readers
    ) -> list[str]:
        """Ask each hook, the two sites included where no path uses them; return failures."""
        registry = self.backend.registry
        answers = [*registry.ask_paths(layer, deployment)]
        for site in ("q_absorb", "v_up"):
            answers += registry.ask_bmm(_spec(layer, deployment, site), deployment)
        answers += registry.ask_release(layer, deployment, readers)
        found = []
        for answer in answers:
            self._count(answer)
            if answer.failure is not None:
                found.append(f"{title}: {answer.plugin.provider}: {answer.failure.reason}")
        return list(dict.fromkeys(found))

    def _count(self, answer: Answer) -> None:
        counts = self.counts.setdefault(answer.plugin.provider, dict.fromkeys(_COUNTS, 0))
        counts["failures"] += answer.failure is not None
        for record in answer.records:
            if isinstance(record, Offer):
                counts["offers"] += 1
                self.impls.setdefault((record.impl, answer.plugin), record)
            elif isinstance(record, Decline):
                counts["declines"] += 1
            elif isinstance(record, Forbid):
                counts["forbids"] += 1
            else:
                counts["votes"] += 1

    def _winners(self, group: LayerGroup, table: str) -> list[dict[str, Any]]:
        found = []
        for entry in group.first.table(table):
            if entry.provider in self.counts:
                self.counts[entry.provider]["serves"] += 1
            found.append(
                {
                    "layers": group.title,
                    "table": table,
                    "strategy": entry.strategy,
                    "where": f"{format_phases(entry.phases)}, {format_rows(entry.tokens)}",
                    "provider": entry.provider,
                }
            )
        return found

    def _shadowed(self, group: LayerGroup, table: str) -> list[dict[str, Any]]:
        hook, found = _HOOK.get(table, "select_bmm_kernel"), []
        entries = [e for e in group.first.table(table) if e.offer is not None]
        for unused in group.first.unused:
            if (unused.site or "path") != table or not entries:
                continue
            first = entries[0]
            if unused.provider in self.counts:
                self.counts[unused.provider]["shadowed"] += 1
            found.append(
                {
                    "layers": group.title,
                    "table": table,
                    "strategy": unused.strategy,
                    "provider": unused.provider,
                    "by": [f"{e.strategy} of {e.provider}" for e in entries],
                    "why": why_first(self.records, hook, first.provider, unused.provider),
                }
            )
        return found

    def resolved(self) -> list[dict[str, Any]]:
        """Import every implementation that was offered, where torch is installed."""
        has_torch = find_spec("torch") is not None
        found = []
        for (impl, plugin), offer in self.impls.items():
            row: dict[str, Any] = {"impl": impl, "provider": plugin.provider}
            row |= {"status": "not imported", "why": "torch is not installed"}
            if has_torch:
                row |= _resolve(offer, plugin)
            found.append(row)
        return found


def _spec(layer: MlaLayer, deployment: Deployment, site: str) -> BmmSpec:
    """Return a site's matmul in every phase that the layer can reach."""
    from npu_backend.planner.kernels import bmm_spec
    from npu_backend.planner.tables import cells_of_reach

    cells = cells_of_reach(deployment.reach(is_nextn=layer.is_nextn))
    return bmm_spec(layer, deployment, site, cells)


def _resolve(offer: Offer, plugin: PluginInfo) -> dict[str, str]:
    from npu_backend.runtime.impl import resolve

    try:
        resolve(offer, plugin)
    except NpuBackendError as err:
        return {"status": "failed", "why": f"{err.what}: {'; '.join(err.why)}"}
    return {"status": "ok", "why": ""}


def check_plugins(
    backend: Backend, models: Iterable[tuple[str, str, dict[str, Any]]] = CHECKED
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Ask every hook on the standard set.

    Returns:
        One row a model: winners, shadowed offers with by whom and why, failures, and under
        ``unplanned`` why these plugins serve less than the model needs; and the summary: counts
        by provider, and what became of each implementation.
    """
    check = _Check(backend)
    rows = [check.row(*model) for model in models]
    counts = [{"provider": who, **counts} for who, counts in check.counts.items()]
    return rows, {"plugins": counts, "impls": check.resolved()}
