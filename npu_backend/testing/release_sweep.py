"""Release the attention of whole models at full size on a simulated NPU, and read its allocator.

Every layer of a configuration is loaded with seeded weights, prepared and released, one layer in
memory at a time. Bytes freed and bytes resident afterwards, as the allocator of the real torch_npu
counts them, stand beside the plan's, and beside what another engine frees by its own rules. No step
is run: numerics are ``npu-backend run``'s.

    python -m npu_backend.testing.release_sweep
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attrs import asdict, frozen

from npu_backend.api import Backend, load
from npu_backend.baseline import baseline_of, dead_bytes
from npu_backend.deployment import Deployment
from npu_backend.errors import NpuBackendError
from npu_backend.hbm import kv_tokens
from npu_backend.model.read import read_model

if TYPE_CHECKING:
    import torch

    from npu_backend.plan import ModelPlan

__all__ = ["CONFIGURATIONS", "Configuration", "Measured", "measure", "plan_of", "report"]

BASELINE = "sglang-0.5.23"
HBM, FRACTION = 64 * 2**30, 0.8


@frozen
class Configuration:
    """A model as one rank of a decode worker holds it.

    Args:
        model: Bundled name.
        quant: Quantization of the projections.
        soc: Chip family.
        attn_tp_size: Attention-TP size.
        max_tokens: Row bound of every phase, or None.
    """

    model: str
    quant: str
    soc: str
    attn_tp_size: int
    max_tokens: int | None = None


_KINDS: tuple[tuple[str, str, str, int | None], ...] = (
    ("glm-5.2", "mxfp8", "A5", None),
    ("deepseek-v3.2", "w8a8-dynamic", "A3", None),
    ("deepseek-v3.2", "none", "A3", None),
    ("kimi-k2", "w8a8-static", "A3", 1024),
)
CONFIGURATIONS = tuple(
    Configuration(model, quant, soc, tp, rows)
    for model, quant, soc, rows in _KINDS
    for tp in (1, 16)
)


@frozen
class Measured:
    """What the plan says of a configuration, and what the device's allocator says.

    Args:
        layers: Layers released.
        statistic: The allocator's figure.
        planned: Bytes that the plan frees.
        freed: By how much the allocator fell at releases.
        resident_planned: Bytes of weights and copies that the plan leaves.
        resident: Bytes that the allocator held for them afterwards.
        dead: Bytes that nobody reads and that stayed.
        theirs_freed: Bytes that the other engine frees.
        theirs_resident: Bytes that it leaves.
        tokens_gained: KV tokens that the release makes room for, of 64 GiB x 0.8 with nothing else
            loaded.
    """

    layers: int
    statistic: str
    planned: int
    freed: int
    resident_planned: int
    resident: int
    dead: int
    theirs_freed: int
    theirs_resident: int
    tokens_gained: int

    @property
    def agrees(self) -> bool:
        """Whether plan and allocator agree to the byte, and nothing dead stayed."""
        return (self.planned, self.resident_planned, 0) == (self.freed, self.resident, self.dead)


def plan_of(
    configuration: Configuration, backend: Backend, layers: Sequence[int] | None = None
) -> ModelPlan:
    """Plan a configuration, or some of its layers, for the installed line."""
    found = read_model(configuration.model, quant=configuration.quant, catalog=backend.catalog)
    deployment = Deployment(
        catalog=backend.catalog,
        role="decode",
        soc=configuration.soc,
        attn_tp_size=configuration.attn_tp_size,
        max_tokens=configuration.max_tokens,
    )
    chosen = [x for x in found.layers if layers is None or x.layer_id in layers]
    return backend.plan(chosen, deployment, model=found.info)


def _held(device: torch.device) -> tuple[str, int]:
    from npu_backend.runtime.ledger import read_allocator

    gc.collect()
    reading = read_allocator(device)
    if reading is None:
        raise NpuBackendError(
            "there is no allocator to read",
            whom=str(device),
            why="the CPU keeps no account",
            remedy="run on an NPU, simulated or not",
        )
    return reading.statistic, reading.bytes


def measure(plan: ModelPlan, device: torch.device) -> Measured:
    """Load, prepare and release every layer of a plan on a device, one at a time.

    Args:
        plan: The plan.
        device: A simulated NPU, or a real one.

    Raises:
        NpuBackendError: A layer cannot be bound, prepared or released.
    """
    from npu_backend.runtime import bind
    from npu_backend.runtime.prove.seeded import LayerWeights, seeded_weights

    freed = resident = dead = 0
    planned = resident_planned = 0
    statistic = ""
    made: dict[Any, LayerWeights] = {}
    for layer in plan.layers:
        # Layers of a kind have the same bytes; on the device each has its own.
        if layer.layer.kind not in made:
            made = {layer.layer.kind: seeded_weights(layer.layer, plan.deployment.attn_tp_size)}
        statistic, empty = _held(device)
        weights = made[layer.layer.kind].to(device)
        norms = sum(weights[n].nbytes for n in made[layer.layer.kind].gammas)
        bound = bind(layer, weights)
        bound.prepare()
        _, before = _held(device)
        bound.release()
        _, after = _held(device)
        freed += before - after
        resident += after - empty - norms
        planned += layer.totals.release + layer.totals.restore
        resident_planned += layer.totals.resident_after
        dead += dead_bytes([bound.plan])
        del bound, weights
    theirs = baseline_of(plan, BASELINE)
    return Measured(
        layers=len(plan.layers),
        statistic=statistic,
        planned=planned,
        freed=freed,
        resident_planned=resident_planned,
        resident=resident,
        dead=dead,
        theirs_freed=theirs.freed,
        theirs_resident=theirs.resident_after,
        tokens_gained=kv_tokens(plan, HBM, FRACTION).gained,
    )


def _ratio(ours: int, theirs: int) -> str:
    return f"{ours / theirs:.2f}" if theirs else "-"


def report(results: Mapping[Configuration, Measured]) -> str:
    """Return a Markdown table of what was measured."""
    head = (
        "configuration, role decode",
        "layers",
        "freed by the allocator",
        "planned",
        "resident by the allocator",
        "planned",
        f"freed ÷ {BASELINE}",
        f"resident ÷ {BASELINE}",
        "dead left",
        "KV tokens gained",
    )
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for asked, found in results.items():
        bound = "" if asked.max_tokens is None else f", rows ≤ {asked.max_tokens}"
        cells = (
            f"{asked.model} {asked.quant}, {asked.soc}, attention-TP {asked.attn_tp_size}{bound}",
            found.layers,
            found.freed,
            found.planned,
            found.resident,
            found.resident_planned,
            _ratio(found.freed, found.theirs_freed),
            _ratio(found.resident, found.theirs_resident),
            found.dead,
            found.tokens_gained,
        )
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def _here(number: int, layers: Sequence[int] | None) -> Measured:
    """Measure a configuration on a simulated NPU of this process: one process has one chip."""
    from npu_backend.testing import sim

    asked = CONFIGURATIONS[number]
    sim.start(soc=asked.soc)
    import torch

    plan = plan_of(asked, load(third_party=False), layers)
    return measure(plan, torch.device("npu", 0))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure every configuration, each in a process of its own; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m npu_backend.testing.release_sweep")
    parser.add_argument("--layers", type=lambda t: [int(i) for i in t.split(",")], default=None)
    parser.add_argument("--configuration", type=int, choices=range(len(CONFIGURATIONS)))
    parser.add_argument("--json", action="store_true", help="one line of a single configuration")
    options = parser.parse_args(argv)
    if options.json and options.configuration is not None:
        print(json.dumps(asdict(_here(options.configuration, options.layers))))
        return 0
    numbers = (
        range(len(CONFIGURATIONS)) if options.configuration is None else [options.configuration]
    )
    more = [] if options.layers is None else ["--layers", ",".join(map(str, options.layers))]
    results = {}
    for number in numbers:
        command = [sys.executable, "-m", "npu_backend.testing.release_sweep", "--json"]
        done = subprocess.run(
            [*command, "--configuration", str(number), *more],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        results[CONFIGURATIONS[number]] = Measured(**json.loads(done.stdout.splitlines()[-1]))
    print(report(results))
    return 0 if all(found.agrees for found in results.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
