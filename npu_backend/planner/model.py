"""Plan every layer: paths, kernels, fates; and settle the requests over the whole model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from attrs import define, field, frozen

from npu_backend.catalog.versions import suggest
from npu_backend.deployment import Deployment, Request
from npu_backend.errors import DeploymentError, RequestUnmetError
from npu_backend.explain import name_layers
from npu_backend.model.records import MlaLayer, ModelInfo
from npu_backend.model.weights import WeightSpec, loaded_weights
from npu_backend.offers import SITES, Answer, BmmSpec
from npu_backend.plan import DeclineRecord, LayerPlan, ModelPlan, Table, TableEntry, WeightPlan
from npu_backend.planner.answers import BMM_HOOK, PATH_HOOK, sort_answers
from npu_backend.planner.kernels import bmm_readers, bmm_spec, site_cells
from npu_backend.planner.readers import HOST_MHA, base_readers, host_phases, path_readers
from npu_backend.planner.release import fates, prepared_copies
from npu_backend.planner.requests import FUSED, Unmet, active
from npu_backend.planner.site import Decided, Slots, decide
from npu_backend.planner.tables import Cells, cells_of_reach

__all__ = ["Answers", "plan_model"]


class Answers(Protocol):
    """Whoever can be asked the three questions; the registry, or a test's stand-in."""

    def ask_paths(self, layer: MlaLayer, deployment: Deployment) -> tuple[Answer, ...]:
        """Ask ``select_preprocess_path``."""

    def ask_bmm(self, bmm: BmmSpec, deployment: Deployment) -> tuple[Answer, ...]:
        """Ask ``select_bmm_kernel``."""

    def ask_release(
        self, layer: MlaLayer, deployment: Deployment, readers: Mapping[str, tuple[str, ...]]
    ) -> tuple[Answer, ...]:
        """Ask ``release_weights``."""


@frozen
class _PathResult:
    """A path decision with what follows from it for the two sites."""

    decided: Decided
    table: Table
    known: frozenset[str]
    sites: tuple[tuple[str, Cells, BmmSpec], ...]


@define
class _Settled:
    """What the requests of the whole model have met so far."""

    unmet: dict[Request, dict[tuple[str, ...], list[MlaLayer]]] = field(factory=dict)
    met: dict[Request, int] = field(factory=dict)
    known: dict[str, set[str]] = field(factory=dict)

    def record(self, layer: MlaLayer, requests: Sequence[Request], unmet: Iterable[Unmet]) -> None:
        failed = {u.request: u.reasons for u in unmet}
        for request in requests:
            if request in failed:
                groups = self.unmet.setdefault(request, {})
                groups.setdefault(failed[request], []).append(layer)
            else:
                self.met[request] = self.met.get(request, 0) + 1


class _Planner:
    """One run. Memoises on the answers, never by skipping hooks."""

    def __init__(
        self, deployment: Deployment, answers: Answers, plugins: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        self.deployment = deployment
        self.answers = answers
        self.not_asked = tuple(
            f"plugin {p['name']} ({p['dist']} {p['version']}) is {p['status']} and was not asked"
            for p in plugins
            if p["status"] != "active"
        )
        self.slots: Slots = ()
        self.settled = _Settled()
        self._weights: dict[MlaLayer, dict[str, WeightSpec]] = {}
        self._paths: dict[Any, _PathResult] = {}
        self._kernels: dict[Any, tuple[Decided, frozenset[str]]] = {}
        self._fates: dict[Any, tuple[tuple[WeightPlan, ...], tuple[DeclineRecord, ...]]] = {}

    def weights(self, layer: MlaLayer) -> dict[str, WeightSpec]:
        kind = layer.kind
        if kind not in self._weights:
            specs = loaded_weights(layer, self.deployment.attn_tp_size)
            self._weights[kind] = {spec.name: spec for spec in specs}
        return self._weights[kind]

    def plan(self, layer: MlaLayer) -> LayerPlan:
        deployment = self.deployment
        reach = deployment.reach(is_nextn=layer.is_nextn)
        if not reach:
            raise DeploymentError(
                "no phase of the layer is reachable",
                whom=str(layer),
                why=(
                    f"the deployment reaches {', '.join(deployment.to_dict()['phases']) or 'none'}",
                    "MTP layers run no target_verify, other layers no draft_extend",
                ),
                remedy="name other phases, or leave the layer out of the plan",
                code="phase",
            )
        # Heads that do not divide are the user's to mend, and no plugin's fault.
        self.weights(layer)
        path = self._path(layer)
        self._settle(layer, "path", path.known, path.decided)
        tables: dict[str, Table] = dict.fromkeys(SITES, ())
        declined, unused = list(path.decided.declined), list(path.decided.unused)
        readers = path.decided.readers
        served = [(None, s) for s in path.decided.served]
        parts: list[Decided] = []
        for site, cells, spec in path.sites:
            decided = self._kernel(layer, site, cells, spec, path, readers)
            tables[site] = decided.table
            declined += decided.declined
            unused += decided.unused
            readers = decided.readers
            parts.append(decided)
            served += [(site, s) for s in decided.served]  # type: ignore[misc]
        votes = self.answers.ask_release(layer, deployment, readers)
        key = (
            layer.kind,
            tuple(sorted(readers.items())),
            votes,
            path.decided.table,
            *tables.values(),
        )
        if key not in self._fates:
            weights = self.weights(layer)
            rows, refused = fates(weights, readers, votes, deployment)
            self._fates[key] = ((*rows, *prepared_copies(weights, served)), tuple(refused))
        weight_rows, refused_votes = self._fates[key]
        return LayerPlan(
            layer=layer,
            deployment=deployment,
            reach=reach,
            path=path.table,
            q_absorb=tables["q_absorb"],
            v_up=tables["v_up"],
            declined=(*declined, *refused_votes),
            unused=tuple(unused),
            weights=weight_rows,
        )

    def _host_entries(self, layer: MlaLayer) -> tuple[TableEntry, ...]:
        reach = self.deployment.reach(is_nextn=layer.is_nextn)
        return tuple(
            TableEntry(
                HOST_MHA, f"host ({self.deployment.host} unknown)", (phase,), (1, reach[phase])
            )
            for phase in host_phases(layer, self.deployment)
        )

    def _path(self, layer: MlaLayer) -> _PathResult:
        answers = self.answers.ask_paths(layer, self.deployment)
        key = (layer.kind, answers)
        if key in self._paths:
            return self._paths[key]
        deployment, weights = self.deployment, self.weights(layer)
        reach = deployment.reach(is_nextn=layer.is_nextn)
        cells = cells_of_reach(reach, without=host_phases(layer, deployment))
        base = base_readers(layer, deployment, weights, reach)
        sorted_ = sort_answers(
            answers,
            hook=PATH_HOOK,
            site=None,
            layer=layer,
            weights=weights,
            catalog=deployment.catalog,
        )
        decided = decide(
            hook=PATH_HOOK,
            site=None,
            sorted_=sorted_,
            cells=cells,
            requests=active(deployment, layer, "path"),
            readers_of=lambda served: path_readers(layer, base, served, weights),
            deployment=deployment,
        )
        sites = []
        for site in SITES:
            if found := site_cells(decided.served, site):
                sites.append((site, found, bmm_spec(layer.kind, deployment, site, found)))
        table = (*self._host_entries(layer), *decided.table)
        self._paths[key] = _PathResult(decided, table, sorted_.known, tuple(sites))
        return self._paths[key]

    def _kernel(
        self,
        layer: MlaLayer,
        site: str,
        cells: Cells,
        spec: BmmSpec,
        path: _PathResult,
        readers: Mapping[str, tuple[str, ...]],
    ) -> Decided:
        answers = self.answers.ask_bmm(spec.for_layer(layer), self.deployment)
        key = (spec, answers, self.slots, tuple(sorted(readers.items())))
        if key not in self._kernels:
            weights = self.weights(layer)
            sorted_ = sort_answers(
                answers,
                hook=BMM_HOOK,
                site=site,
                layer=layer,
                weights=weights,
                catalog=self.deployment.catalog,
            )
            decided = decide(
                hook=BMM_HOOK,
                site=site,
                sorted_=sorted_,
                cells=cells,
                requests=active(self.deployment, layer, site),
                readers_of=bmm_readers(site, dict(readers), weights),
                deployment=self.deployment,
                slots=self.slots,
                shape=spec.shape,
                order=self.deployment.kernel_order(site, spec.shape, spec.dtype),
            )
            self._kernels[key] = (decided, sorted_.known)
        decided, known = self._kernels[key]
        self._settle(layer, site, known, decided)
        if self.deployment.graph_capture:
            held = dict(self.slots)
            for candidate in decided.serving:
                if candidate.offer.capture_slot:
                    held.setdefault(candidate.offer.capture_slot, spec.shape)
            self.slots = tuple(sorted(held.items()))
        return decided

    def _settle(self, layer: MlaLayer, kind: str, known: frozenset[str], decided: Decided) -> None:
        self.settled.known.setdefault(kind, set()).update(known)
        self.settled.record(layer, active(self.deployment, layer, kind), decided.unmet)
        # An unmet request is told first: it is what the user asked, and the likelier cause.
        if decided.uncovered is not None and not decided.unmet:
            where = f"{layer}, {'path' if kind == 'path' else 'batched matmul ' + kind}"
            raise decided.uncovered.error(where, self.not_asked)


def _check_requests(settled: _Settled, deployment: Deployment) -> None:
    for request in deployment.requests:
        known = settled.known.get(request.kind, set())
        groups = settled.unmet.get(request, {})
        met = settled.met.get(request, 0)
        fused = request.kind == "path" and request.name == FUSED
        if not met and not groups:
            scope = "MTP layer" if request.nextn else "main layer"
            place = "" if request.kind == "path" else f" with the batched matmul {request.kind}"
            raise RequestUnmetError(
                f"the request {request} binds no planned layer",
                whom=f"request {request}",
                why=f"no {scope}{place} is planned",
                remedy="drop the request, or plan such a layer",
                code="request.unmet",
            )
        if not fused and request.name not in known:
            raise RequestUnmetError(
                f"no plugin knows the strategy {request.name!r}{suggest(request.name, known)}",
                whom=f"request {request}",
                why=f"strategies offered or declined here: {', '.join(sorted(known)) or 'none'}",
                remedy="correct the name, or install the plugin that offers it",
                code="request.unmet",
            )
        if groups and not (fused and met):
            why = [
                f"{name_layers(layers)}: {reason}"
                for reasons, layers in groups.items()
                for reason in dict.fromkeys(reasons)
            ]
            raise RequestUnmetError(
                f"the request {request} cannot be met",
                whom=", ".join(name_layers(layers) for layers in groups.values()),
                why=why,
                remedy="drop the request, or change what the reasons name",
                code="request.unmet",
            )


def plan_model(
    layers: Iterable[MlaLayer],
    deployment: Deployment,
    answers: Answers,
    *,
    model: ModelInfo | None = None,
    plugins: Sequence[Mapping[str, Any]] = (),
) -> ModelPlan:
    """Decide everything for the given layers.

    Args:
        layers: The layers, in layer order.
        deployment: What is planned for.
        answers: Whoever is asked.
        model: What is known of the model, for the record.
        plugins: Every plugin with its status, for the record.

    Raises:
        DeploymentError: A layer has no reachable phase.
        ModelError: Heads do not divide.
        SelectionError: Something reachable has no legal strategy.
        RequestUnmetError: A request cannot be met.
    """
    ordered = tuple(layers)
    if not ordered:
        raise DeploymentError(
            "there is no layer to plan",
            whom=f"model {model.name if model else '?'}",
            why="the selection of layers is empty, or the model has no MLA layer",
            remedy="name at least one layer",
        )
    count = Counter(layer.layer_id for layer in ordered)
    if twice := [str(layer_id) for layer_id, times in count.items() if times > 1]:
        raise DeploymentError(
            f"layer ids {', '.join(twice)} are given more than once",
            whom=f"model {model.name if model else '?'}",
            why="a layer has one plan, and its id names it",
            remedy="give each layer once, with an id of its own",
        )
    planner = _Planner(deployment, answers, plugins)
    plans = tuple(planner.plan(layer) for layer in ordered)
    _check_requests(planner.settled, deployment)
    return ModelPlan(
        model=model or ModelInfo(name="layers", model_type=ordered[0].model_type),
        deployment=deployment,
        layers=plans,
        plugins=tuple(plugins),
        warnings=deployment.warnings,
    )
