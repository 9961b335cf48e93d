"""Who reads a weight. The only basis of release and of the policy on copies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from npu_backend.deployment import PROMISE_READERS, Deployment, Phase, Reach
from npu_backend.model.records import MlaLayer
from npu_backend.model.weights import WeightSpec
from npu_backend.offers import SITE_WEIGHTS, Offer
from npu_backend.planner.tables import Served

__all__ = [
    "HOST_MHA",
    "LORA_TARGETS",
    "Readers",
    "add",
    "add_promised",
    "base_readers",
    "counting",
    "host_phases",
    "path_readers",
]

HOST_MHA = "host:mha"
"""A host's own multi-head attention on decompressed keys and values; reads kv_b_proj."""

LORA_TARGETS = ("fused_qkv_a_proj", "q_proj", "kv_a_proj_with_mqa", "q_b_proj", "kv_b_proj")
"""What promised LoRA deltas on q_a, q_b and kv_b are applied to."""

Readers = dict[str, tuple[str, ...]]
"""Reader names by weight, each in the order in which it was found."""

_WANTED_BY_WQ_B = {"w8a8-dynamic": "int8", "mxfp8": "mxfp8", "fp8": "fp8", "hif8": "hif8"}
"""Format of ``q_lora`` that a quantized ``wq_b`` takes as it is; any ``wq_b`` takes floats."""


def host_phases(layer: MlaLayer, deployment: Deployment) -> tuple[Phase, ...]:
    """Return the reachable phases that the host's own code serves for this layer.

    SGLang extends layers without an indexer by MHA; DSA layers extend by absorb everywhere.
    """
    if deployment.host == "sglang" and not layer.has_indexer:
        reach = deployment.reach(is_nextn=layer.is_nextn)
        return tuple(p for p in (Phase.EXTEND,) if p in reach)
    return ()


def add(
    readers: Readers, weights: Mapping[str, WeightSpec], names: Iterable[str], who: str
) -> None:
    """Add a reader to weights; whoever reads a quantized weight reads its scale as well."""
    for name in names:
        for each in (name, f"{name}.scale"):
            if each in weights and who not in readers.get(each, ()):
                readers[each] = (*readers.get(each, ()), who)


def base_readers(
    layer: MlaLayer, deployment: Deployment, weights: Mapping[str, WeightSpec], reach: Reach
) -> Readers:
    """Return the readers that no offer decides: the host, and promises."""
    readers: Readers = {}
    for phase in host_phases(layer, deployment):
        names = ("fused_qkv_a_proj", "q_proj", "kv_a_proj_with_mqa", "q_b_proj", "kv_b_proj")
        add(readers, weights, names, f"{HOST_MHA}@{phase}")
    if Phase.EXTEND in reach and not layer.has_indexer:
        # Whoever the host is, it extends a layer without indexer by MHA.
        add(readers, weights, ("kv_b_proj",), f"{HOST_MHA}@{Phase.EXTEND}")
    add_promised(readers, weights, deployment)
    return readers


def add_promised(
    readers: Readers, weights: Mapping[str, WeightSpec], deployment: Deployment
) -> None:
    """Add the readers that exist only through a promise."""
    for reader, promise in PROMISE_READERS.items():
        if promise in deployment.promises:
            add(readers, weights, LORA_TARGETS if reader == "lora" else weights, reader)


def hands_over_q_lora(offer: Offer, layer: MlaLayer) -> bool:
    """Whether a path gives the indexer a ``q_lora`` that its ``wq_b`` consumes as it is."""
    return offer.q_lora == "float" or (
        offer.q_lora is not None and _WANTED_BY_WQ_B.get(layer.indexer.quant) == offer.q_lora
    )


def path_readers(
    layer: MlaLayer, base: Readers, served: Iterable[Served], weights: Mapping[str, WeightSpec]
) -> Readers:
    """Return the readers with these paths in the table: what serving offers read, the two BMM
    sites whatever kernel will serve them, the indexer, the host and promises."""
    readers: Readers = {}
    for run in sorted(served, key=lambda s: list(Phase).index(s.phase)):
        if run.by is None:
            continue
        offer = run.by.offer
        add(readers, weights, sorted(offer.step_reads), f"{offer.strategy}@{run.phase}")
        for site in sorted(offer.uses):
            add(readers, weights, (SITE_WEIGHTS[site],), f"{site}@{run.phase}")
        if layer.indexer.kind == "own" and not hands_over_q_lora(offer, layer):
            add(readers, weights, ("fused_qkv_a_proj",), f"indexer@{run.phase}")
    for name, who in base.items():
        for reader in who:
            add(readers, weights, (name,), reader)
    return readers


def counting(readers: Iterable[str], deployment: Deployment) -> tuple[str, ...]:
    """Return the readers that keep a weight: all of them, or under ``restore`` all but those that
    exist only through a promise."""
    return tuple(r for r in readers if not (deployment.restore and deployment.is_promised(r)))
