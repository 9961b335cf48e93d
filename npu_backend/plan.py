"""The frozen result: who serves what, which weights may die, and why.

Router and releaser both read these records; nothing else decides. The JSON form (schema 1) is the
machine interface; equal inputs give equal bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from attrs import evolve, field, frozen

from npu_backend.deployment import Deployment, Phase, Reach
from npu_backend.model.records import KvLayout, MlaLayer, ModelInfo
from npu_backend.offers import Offer, PluginInfo, Reason

if TYPE_CHECKING:
    from npu_backend.mlp.plan import MlpPlan

__all__ = [
    "ACTIONS",
    "SCHEMA",
    "DeclineRecord",
    "LayerPlan",
    "ModelPlan",
    "TableEntry",
    "Totals",
    "UnusedRecord",
    "WeightPlan",
]

SCHEMA = 1
ACTIONS = ("release", "restore", "keep")


@frozen(cache_hash=True)
class TableEntry:
    """One row of a dispatch table: the phases and rows that a strategy in fact serves.

    Args:
        strategy: Name of the strategy, or ``host:mha`` where the host's own code serves.
        provider: ``NAME (DIST VERSION)``.
        phases: Phases served, in phase order.
        tokens: First and last row count served, None where unbounded.
        offer: The offer behind it; None where the host serves.
        plugin: Who offered it; None where the host serves.
        order: Source of the measured order that it stands by; empty: the call order.
    """

    strategy: str
    provider: str
    phases: tuple[Phase, ...]
    tokens: tuple[int, int | None]
    offer: Offer | None = field(default=None, repr=False)
    plugin: PluginInfo | None = field(default=None, repr=False)
    order: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "strategy": self.strategy,
            "provider": self.provider,
            "phases": [p.value for p in self.phases],
            "tokens": list(self.tokens),
            **({"order": self.order} if self.order else {}),
        }


@frozen(cache_hash=True)
class DeclineRecord:
    """A refusal that stands in the plan, whoever it came from."""

    hook: str
    site: str | None
    strategy: str
    provider: str
    reasons: tuple[Reason, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "hook": self.hook,
            "site": self.site,
            "strategy": self.strategy,
            "provider": self.provider,
            "reasons": [r.to_dict() for r in self.reasons],
        }


@frozen(cache_hash=True)
class UnusedRecord:
    """A legal offer that serves nothing, since others cover all of it first."""

    hook: str
    site: str | None
    strategy: str
    provider: str

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "hook": self.hook,
            "site": self.site,
            "strategy": self.strategy,
            "provider": self.provider,
        }


@frozen(cache_hash=True)
class WeightPlan:
    """One weight's fate.

    Args:
        name: Its name; a prepared copy is ``STRATEGY.NAME``.
        dtype: Name of the dtype as torch has it.
        bytes: Bytes on one rank.
        action: ``release``, ``restore`` (released, with a way back) or ``keep``.
        reasons: Why, each as ``code: sentence`` or ``provider: sentence``.
        readers: Who reads it, in the vocabulary of readers.
        copy_of: The loaded weight that a prepared copy was made of, else None.
    """

    name: str
    dtype: str
    bytes: int
    action: str
    reasons: tuple[str, ...] = ()
    readers: tuple[str, ...] = ()
    copy_of: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "name": self.name,
            "dtype": self.dtype,
            "bytes": self.bytes,
            "action": self.action,
            "reasons": list(self.reasons),
            "readers": list(self.readers),
        }


@frozen
class Totals:
    """Bytes per rank, summed over layers.

    Args:
        loaded: The weights MLA holds after load (no o_proj, norms, indexer).
        prepared: The copies that strategies make.
        release: Loaded weights that go.
        restore: Loaded weights that go with a way back.
        duplicate: Loaded weights kept beside a prepared copy of them.
    """

    loaded: int = 0
    prepared: int = 0
    release: int = 0
    restore: int = 0
    duplicate: int = 0

    @property
    def resident_after(self) -> int:
        """What stays: loaded + prepared - release - restore."""
        return self.loaded + self.prepared - self.release - self.restore

    @classmethod
    def of(cls, weights: Iterable[WeightPlan]) -> Totals:
        """Sum up weights of any number of layers, layer by layer."""
        rows = tuple(weights)
        loaded = [w for w in rows if w.copy_of is None]
        copied = {w.copy_of for w in rows if w.copy_of is not None}
        return cls(
            loaded=sum(w.bytes for w in loaded),
            prepared=sum(w.bytes for w in rows if w.copy_of is not None),
            release=sum(w.bytes for w in loaded if w.action == "release"),
            restore=sum(w.bytes for w in loaded if w.action == "restore"),
            duplicate=sum(w.bytes for w in loaded if w.action == "keep" and w.name in copied),
        )

    def __add__(self, other: Totals) -> Totals:
        return Totals(
            self.loaded + other.loaded,
            self.prepared + other.prepared,
            self.release + other.release,
            self.restore + other.restore,
            self.duplicate + other.duplicate,
        )

    def to_dict(self) -> dict[str, int]:
        """Return the JSON form."""
        return {
            "loaded": self.loaded,
            "prepared": self.prepared,
            "release": self.release,
            "restore": self.restore,
            "duplicate": self.duplicate,
            "resident_after": self.resident_after,
        }


Table = tuple[TableEntry, ...]


@frozen(kw_only=True)
class LayerPlan:
    """Everything decided for one layer.

    Args:
        layer: The layer's description.
        deployment: What it was planned for.
        reach: Reachable phases with their row bounds.
        path: Who preprocesses, entry by entry.
        q_absorb: Who multiplies with ``w_kc``; empty where no path in use needs it.
        v_up: Who multiplies with ``w_vc``; empty where the host serves everything.
        declined: Every refusal.
        unused: Legal offers that serve nothing.
        weights: Loaded weights, then prepared copies.
    """

    layer: MlaLayer
    deployment: Deployment = field(repr=False)
    reach: Reach
    path: Table
    q_absorb: Table
    v_up: Table
    declined: tuple[DeclineRecord, ...] = field(default=(), repr=False)
    unused: tuple[UnusedRecord, ...] = field(default=(), repr=False)
    weights: tuple[WeightPlan, ...] = field(default=(), repr=False)

    @property
    def layer_id(self) -> int:
        """The layer's id."""
        return self.layer.layer_id

    @property
    def kv_layout(self) -> KvLayout:
        """The one KV layout of the layer."""
        return self.layer.kv_layout

    def table(self, site: str) -> Table:
        """Return the table of ``path``, ``q_absorb`` or ``v_up``."""
        return {"path": self.path, "q_absorb": self.q_absorb, "v_up": self.v_up}[site]

    def weight(self, name: str) -> WeightPlan:
        """Return a weight's row by name."""
        for row in self.weights:
            if row.name == name:
                return row
        known = ", ".join(w.name for w in self.weights)
        raise KeyError(f"layer {self.layer_id} has no weight {name!r}; it has {known}")

    def released(self) -> tuple[WeightPlan, ...]:
        """Return the weights that go, with or without a way back."""
        return tuple(w for w in self.weights if w.action != "keep")

    @cached_property
    def totals(self) -> Totals:
        """Bytes of this layer."""
        return Totals.of(self.weights)

    def evolve(self, **changes: Any) -> LayerPlan:
        """Return an amended copy."""
        return evolve(self, **changes)

    def explain(self) -> str:
        """Return the plan of this layer as text for people."""
        from npu_backend.explain import explain_layer

        return explain_layer(self)

    def decisions(self, *, with_id: bool = True) -> dict[str, Any]:
        """Return what the fingerprint covers: decisions, no reasons."""
        return {
            "layer_id": self.layer_id if with_id else None,
            "is_nextn": self.layer.is_nextn,
            "kv_layout": self.kv_layout.to_dict(),
            "path": [e.to_dict() for e in self.path],
            "q_absorb": [e.to_dict() for e in self.q_absorb],
            "v_up": [e.to_dict() for e in self.v_up],
            "weights": [[w.name, w.dtype, w.bytes, w.action] for w in self.weights],
        }

    @property
    def fingerprint(self) -> str:
        """Fingerprint of this layer alone; after ``bind()`` the ranks compare it."""
        return _digest(
            {
                "catalog": self.deployment.catalog.version,
                "soc": self.deployment.soc.family,
                "layer": self.decisions(),
            }
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "layer_id": self.layer_id,
            "is_nextn": self.layer.is_nextn,
            # The sizes are the layer's and no decision, but whoever shares the cache needs them.
            "kv_layout": {
                **self.kv_layout.to_dict(),
                "kv_lora_rank": self.layer.kv_lora_rank,
                "qk_rope_head_dim": self.layer.qk_rope_head_dim,
            },
            "path": [e.to_dict() for e in self.path],
            "q_absorb": [e.to_dict() for e in self.q_absorb],
            "v_up": [e.to_dict() for e in self.v_up],
            "declined": [d.to_dict() for d in self.declined],
            "unused": [u.to_dict() for u in self.unused],
            "weights": [w.to_dict() for w in self.weights],
        }


def _digest(data: Any) -> str:
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return "sha256:" + hashlib.sha256(text.encode("ascii")).hexdigest()


@frozen(kw_only=True)
class ModelPlan:
    """The plan of every MLA layer of a model, or of those that were asked for.

    Args:
        model: What is known of the model.
        deployment: What it was planned for.
        layers: One plan a layer, in layer order.
        plugins: Every plugin with its status, in registration order.
        warnings: What a reader must know, such as a CANN newer than the catalog.
        mlp: Layouts of the MLPs, where they were asked for.
    """

    model: ModelInfo
    deployment: Deployment = field(repr=False)
    layers: tuple[LayerPlan, ...]
    plugins: tuple[Mapping[str, Any], ...] = field(default=(), repr=False)
    warnings: tuple[str, ...] = ()
    mlp: MlpPlan | None = None

    def __iter__(self) -> Iterator[LayerPlan]:
        return iter(self.layers)

    def layer(self, layer_id: int) -> LayerPlan:
        """Return the plan of a layer by its id."""
        for plan in self.layers:
            if plan.layer_id == layer_id:
                return plan
        known = ", ".join(str(p.layer_id) for p in self.layers)
        raise KeyError(f"layer {layer_id} is not planned; planned are {known}")

    @cached_property
    def totals(self) -> Totals:
        """Bytes per rank over all planned layers."""
        return sum((plan.totals for plan in self.layers), Totals())

    @cached_property
    def fingerprint(self) -> str:
        """Digest of the decisions, the catalog's version and the SoC family; nothing of this
        machine, rank, host or time."""
        told: dict[tuple[int, ...], str] = {}
        digests = []
        for plan in self.layers:
            # Layers of one kind share their tables and weights; each is written out once.
            key = (
                *(id(t) for t in (plan.path, plan.q_absorb, plan.v_up, plan.weights)),
                id(plan.layer.kind),
            )
            if key not in told:
                told[key] = _digest(plan.decisions(with_id=False))
            digests.append([plan.layer_id, told[key]])
        covered: dict[str, Any] = {
            "catalog": self.deployment.catalog.version,
            "soc": self.deployment.soc.family,
            "layers": digests,
        }
        if self.mlp is not None:
            covered["mlp"] = self.mlp.decisions()
        return _digest(covered)

    def explain(self) -> str:
        """Return the plan as text for people: layers that agree are told once."""
        from npu_backend.explain import explain_model

        return explain_model(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form, schema 1."""
        return {
            "schema": SCHEMA,
            "model": self.model.to_dict(),
            "deployment": self.deployment.to_dict(),
            "fingerprint": self.fingerprint,
            "plugins": [dict(p) for p in self.plugins],
            "layers": [plan.to_dict() for plan in self.layers],
            "totals": {"bytes": self.totals.to_dict()},
            "warnings": list(self.warnings),
            # Only where it was asked for: other plans keep their bytes.
            **({} if self.mlp is None else {"mlp": self.mlp.to_dict()}),
        }

    def to_json(self) -> str:
        """Return the JSON text; equal plans give equal bytes."""
        return json.dumps(self.to_dict(), indent=1, ensure_ascii=True)
