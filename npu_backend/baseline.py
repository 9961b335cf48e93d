"""What SGLang and vLLM-Ascend free by themselves, as data, to compare a plan with.

Each baseline is a reading of an engine's own rules, applied to the layers and the deployment of a
plan; nothing of it decides anything. Sources stand beside each rule set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from attrs import frozen

from npu_backend.catalog.versions import suggest
from npu_backend.deployment import Deployment, Phase, Role
from npu_backend.errors import DeploymentError
from npu_backend.model.records import MlaLayer
from npu_backend.model.weights import loaded_weights
from npu_backend.plan import LayerPlan, ModelPlan
from npu_backend.planner.readers import Readers, add_promised

__all__ = ["BASELINES", "Baseline", "BaselineLayer", "EngineRules", "baseline_of", "dead_bytes"]

QKV_A, Q_B, Q, KV_B = "fused_qkv_a_proj", "q_b_proj", "q_proj", "kv_b_proj"
W_KC = "w_kc"
PREPROCESSED = (Phase.DECODE, Phase.TARGET_VERIFY, Phase.DRAFT_EXTEND, Phase.IDLE)
"""Phases in which SGLang's preprocess object serves: all but extend."""
VLLM_ROWS = 1024
"""vLLM-Ascend releases up to this ``max_num_batched_tokens``, and fuses up to as many rows."""


@frozen
class Held:
    """What an engine does with one layer.

    Args:
        path: The path that it runs decode-like phases by.
        frees: Loaded weights that it frees.
        copies: Loaded weights of which it keeps a prepared copy.
        reads: Originals that its own reachable steps read, with who reads them.
    """

    path: str
    frees: tuple[str, ...] = ()
    copies: tuple[str, ...] = ()
    reads: Mapping[str, tuple[str, ...]] = {}


@frozen
class EngineRules:
    """An engine at one version.

    Args:
        name: As ``--baseline`` takes it.
        source: Where its rules were read.
        assumes: What is assumed of how it is started.
        layer: Its rules: ``(layer, deployment, reachable phases) -> Held``.
    """

    name: str
    source: str
    assumes: str
    layer: Callable[[MlaLayer, Deployment, frozenset[Phase]], Held]


@frozen
class BaselineLayer:
    """One layer under an engine's rules, bytes per rank.

    Args:
        layer_id: The layer.
        path: The path that it runs.
        freed: Bytes by weight that it frees.
        prepared: Bytes of its prepared copies.
        resident_after: Loaded, and prepared, without freed.
        unsafe: Freed weights that a reachable step reads, with the readers.
    """

    layer_id: int
    path: str
    freed: Mapping[str, int]
    prepared: int
    resident_after: int
    unsafe: Mapping[str, tuple[str, ...]]

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "layer_id": self.layer_id,
            "path": self.path,
            "freed": dict(self.freed),
            "prepared": self.prepared,
            "resident_after": self.resident_after,
            "unsafe": {name: list(who) for name, who in self.unsafe.items()},
        }


@frozen
class Baseline:
    """A whole plan's layers under an engine's rules."""

    rules: EngineRules
    layers: tuple[BaselineLayer, ...]

    @property
    def freed(self) -> int:
        """Bytes freed on a rank."""
        return sum(sum(layer.freed.values()) for layer in self.layers)

    @property
    def prepared(self) -> int:
        """Bytes of prepared copies on a rank."""
        return sum(layer.prepared for layer in self.layers)

    @property
    def resident_after(self) -> int:
        """Bytes that stay on a rank."""
        return sum(layer.resident_after for layer in self.layers)

    def freed_by_weight(self) -> dict[str, int]:
        """Return bytes freed by weight, over all layers."""
        found: dict[str, int] = {}
        for layer in self.layers:
            for name, size in layer.freed.items():
                found[name] = found.get(name, 0) + size
        return found

    def unsafe(self) -> dict[str, tuple[tuple[int, ...], tuple[str, ...]]]:
        """Return freed weights that reachable steps read: layers and readers by weight."""
        found: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {}
        for layer in self.layers:
            for name, who in layer.unsafe.items():
                layers, readers = found.get(name, ((), ()))
                merged = tuple(dict.fromkeys((*readers, *who)))
                found[name] = ((*layers, layer.layer_id), merged)
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "name": self.rules.name,
            "source": self.rules.source,
            "assumes": self.rules.assumes,
            "totals": {
                "freed": self.freed,
                "prepared": self.prepared,
                "resident_after": self.resident_after,
            },
            "layers": [layer.to_dict() for layer in self.layers],
        }


# --- SGLang ---------------------------------------------------------------------------------------


def _sglang_mode(layer: MlaLayer) -> int | None:
    """Return weight_quant_mode as its preprocess object resolves it."""
    pair = (layer.quant_of(QKV_A), layer.quant_of(Q_B))
    if pair[0] == "none" and pair[1].startswith("w8a8"):
        return 1
    known = {("none", "none"): 0, ("w8a8-dynamic",) * 2: 2, ("mxfp8",) * 2: 3}
    return known.get(pair)


def _modelslim(layer: MlaLayer) -> bool:
    return layer.quant_of(QKV_A) in ("w8a8-static", "w8a8-dynamic")


def _ignore_names_kv_b(layer: MlaLayer) -> bool:
    """Whether some string of the ignore list names kv_b_proj: so it does where a quantized model of
    another tool than ModelSlim leaves kv_b_proj float."""
    return (
        layer.quant_of(QKV_A) != "none" and not _modelslim(layer) and layer.quant_of(KV_B) == "none"
    )


def _sglang(
    layer: MlaLayer, deployment: Deployment, reach: frozenset[Phase], *, merged: bool
) -> Held:
    a5, mode = deployment.soc.family == "A5", _sglang_mode(layer)
    slim, indexed = _modelslim(layer), layer.has_indexer
    by_prolog = (a5 or (mode == 2 and not merged)) and indexed
    prolog = by_prolog or (_ignore_names_kv_b(layer) and not slim)
    if layer.q_lora_rank is None:
        path = "absorb"
    elif merged and slim and not (a5 and indexed):
        path = "mlapo"
    elif prolog:
        path = "mlaprolog"
    else:
        path = "mlapo" if slim else "absorb"
    reads = _extended(layer, reach)
    if path == "absorb" or not reach & set(PREPROCESSED):
        return Held(path, reads=reads)
    copies = [QKV_A, Q_B, W_KC]
    if path == "mlaprolog" and mode == 1:
        # The op takes the parameter itself.
        copies.remove(Q_B)
    if path == "mlapo" or mode in (2, 3):
        copies += [f"{QKV_A}.scale", f"{Q_B}.scale"]
    frees = []
    if deployment.role is not Role.NULL and mode != 2:
        frees.append(QKV_A)
    if deployment.role is Role.DECODE and path == "mlaprolog" and mode != 2:
        frees.append(W_KC)
    if layer.indexer.kind == "own" and (
        path == "mlapo" or (mode != 0 and not _takes(layer.indexer.quant, mode))
    ):
        reads = {**reads, QKV_A: (*reads.get(QKV_A, ()), "indexer")}
    return Held(path, tuple(frees), tuple(copies), reads)


def _takes(quant: str, mode: int | None) -> bool:
    return {1: "w8a8-dynamic", 2: "w8a8-dynamic", 3: "mxfp8"}.get(mode or 0) == quant


def _extended(layer: MlaLayer, reach: frozenset[Phase]) -> dict[str, tuple[str, ...]]:
    """Return what extend reads: w_kc on DSA layers only, the others extend by MHA."""
    if Phase.EXTEND not in reach:
        return {}
    names = (QKV_A, Q_B, W_KC) if layer.has_indexer else (QKV_A, Q_B, KV_B)
    return dict.fromkeys(names, ("extend",))


# --- vLLM-Ascend ----------------------------------------------------------------------------------


def _vllm(layer: MlaLayer, deployment: Deployment, reach: frozenset[Phase]) -> Held:
    consumer = deployment.role is Role.DECODE and Phase.EXTEND not in reach
    both = Phase.EXTEND in reach and deployment.role is not Role.PREFILL
    bounds = list(deployment.reach(is_nextn=layer.is_nextn).values())
    few = all(bound is not None and bound <= VLLM_ROWS for bound in bounds)
    kinds = {layer.quant_of(QKV_A), layer.quant_of(Q_B)}
    static, mx = kinds == {"w8a8-static"}, kinds == {"mxfp8"}
    queries = Q_B if layer.q_lora_rank is not None else Q
    reads = _extended(layer, reach)
    if layer.q_lora_rank is None:
        return Held("absorb", reads=reads)
    copies: tuple[str, ...] = (QKV_A, queries, f"{QKV_A}.scale", f"{queries}.scale")
    if not layer.has_indexer:
        fused = consumer and (static or mx)
        frees: tuple[str, ...] = (QKV_A, queries) if fused and few else ()
        return Held("mlapo" if fused else "absorb", frees, copies if fused else (), reads)
    if consumer and (kinds == {"none"} or mx):
        path = "mlaprolog"
    else:
        path = "mlapo" if static else "absorb"
    frees = (KV_B,)
    if path == "mlapo" and few and (consumer or both):
        frees = (KV_B, QKV_A, queries)
    return Held(path, frees, copies if path != "absorb" else (), reads)


BASELINES: Mapping[str, EngineRules] = {
    rules.name: rules
    for rules in (
        EngineRules(
            "sglang-0.5.23",
            "read from the 0.5.23 wheel: hardware_backend/npu, mla_preprocess and "
            "deepseek_v2_attention_mla_npu",
            "SGLANG_NPU_USE_MLAPO=1; quantized by another tool than ModelSlim, the ignore list "
            "names a float kv_b_proj",
            lambda layer, deployment, reach: _sglang(layer, deployment, reach, merged=False),
        ),
        EngineRules(
            "sglang-38807",
            "sgl-project/sglang#38807 as merged, September 2026",
            "SGLANG_NPU_USE_MLAPO=1; quantized by another tool than ModelSlim, the ignore list "
            "names a float kv_b_proj",
            lambda layer, deployment, reach: _sglang(layer, deployment, reach, merged=True),
        ),
        EngineRules(
            "vllm-ascend",
            "vllm-project/vllm-ascend at commit 182b75ea, August 2026: mla_v1 and sfa_v1",
            "enable_mlapo; max_num_batched_tokens is the largest row bound of a reachable phase; a "
            "decode worker that extends is kv_both",
            _vllm,
        ),
    )
}


def _layer(plan: LayerPlan, rules: EngineRules) -> BaselineLayer:
    layer, deployment = plan.layer, plan.deployment
    held = rules.layer(layer, deployment, frozenset(plan.reach))
    specs = {spec.name: spec for spec in loaded_weights(layer, deployment.attn_tp_size)}
    loaded = {name: spec.bytes for name, spec in specs.items()}
    freed = {name: loaded[name] for name in held.frees if name in loaded}
    prepared = sum(loaded.get(name, 0) for name in held.copies)
    promised: Readers = {}
    add_promised(promised, specs, deployment)
    unsafe = {
        name: readers
        for name in freed
        if (readers := (*held.reads.get(name, ()), *promised.get(name, ())))
    }
    resident = sum(loaded.values()) + prepared - sum(freed.values())
    return BaselineLayer(plan.layer_id, held.path, freed, prepared, resident, unsafe)


def baseline_of(plan: ModelPlan, name: str) -> Baseline:
    """Return what an engine does with the layers of a plan, by its own rules.

    Args:
        plan: The plan whose layers and deployment are meant.
        name: ``sglang-0.5.23``, ``sglang-38807`` or ``vllm-ascend``.

    Raises:
        DeploymentError: There is no such baseline.
    """
    rules = BASELINES.get(name)
    if rules is None:
        raise DeploymentError(
            f"{name!r} is not a baseline{suggest(name, BASELINES)}",
            whom="--baseline",
            why="the baselines are " + ", ".join(BASELINES),
            remedy="name one of them",
        )
    return Baseline(rules, tuple(_layer(layer, rules) for layer in plan.layers))


def dead_bytes(plans: Iterable[LayerPlan]) -> int:
    """Return the bytes of loaded weights that nobody reads and that the plans keep all the same."""
    return sum(
        row.bytes
        for plan in plans
        for row in plan.weights
        if row.copy_of is None and row.action == "keep" and not row.readers
    )
