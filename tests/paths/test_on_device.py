"""Every legal path of the bundled models' layers, on the simulated NPU against the fp32 reference.

Ranks and head dims are the models' own, heads are few. Extend by absorb fills the one cache that
decode-like phases of the asked path continue; outputs, both caches, the compressed query, bytes and
equality after the release are proved in each. The kernels are the simulation's, which share no
formula with the references that the same proofs run on elsewhere. Every op, mode and cache on a
smaller layer, for the matrix of torch_npu packages: test_modes_on_device.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from attrs import evolve

import npu_backend
from npu_backend import MlaLayer
from npu_backend.catalog import load_catalog

QUANTS = {
    "A3": ("none", "w8a8-static", "w8a8-dynamic"),
    "A5": ("mxfp8", "fp8"),
}
"""What only A5 has runs there; the rest is the same on both."""
PATHS = ("mlaprolog", "mlapo", "absorb")
CATALOG = load_catalog()


def _kinds(quants: tuple[str, ...]) -> Iterator[tuple[str, MlaLayer]]:
    """Each distinct layer of the bundled models with a quantization, and where it is from."""
    seen = set()
    for model in sorted(CATALOG.models):
        for quant in quants:
            for layer in npu_backend.read_model(model, quant=quant):
                if quant != "none" and layer.is_nextn:
                    continue  # stays float, and is there already
                heads = 4 if layer.indexer.kind == "own" else 2
                kind = evolve(layer, num_heads=heads, layer_id=1, model_type="", prefix="")
                if kind not in seen:
                    seen.add(kind)
                    yield f"{model} {quant}", kind


def _cases(soc: str) -> Iterator[pytest.param]:
    names: dict[str, int] = {}
    for name, layer in _kinds(QUANTS[soc]):
        names[name] = names.get(name, 0) + 1
        for path in PATHS:
            yield pytest.param(layer, path, id=f"{name} {names[name]} {path}")


@pytest.mark.npu(soc="A3")
@pytest.mark.parametrize(("layer", "path"), list(_cases("A3")))
def test_on_a3(npu_device, internal_formats, prove_path, layer, path):
    prove_path(layer, path, "A3")


@pytest.mark.npu(soc="A5")
@pytest.mark.parametrize(("layer", "path"), list(_cases("A5")))
def test_on_a5(npu_device, internal_formats, prove_path, layer, path):
    prove_path(layer, path, "A5")
