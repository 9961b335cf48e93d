"""The claims of a proof, each from what was seen and not from what the runtime says of itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from attrs import evolve
from torch.multiprocessing.reductions import StorageWeakRef

from npu_backend.deployment import Phase
from npu_backend.errors import BoundExceededError, WeightReleasedError
from npu_backend.plan import LayerPlan
from npu_backend.runtime.bound import BoundLayer
from npu_backend.runtime.ledger import Ledger
from npu_backend.runtime.prove.execution import Outcome, expected_rows, same_bits
from npu_backend.runtime.prove.mla_fp32 import MlaReference
from npu_backend.runtime.prove.records import Proof, StepRecord
from npu_backend.runtime.prove.scenario import HOST_MHA, Scenario, Step, entry_at
from npu_backend.runtime.prove.tolerance import relative_error, worst_token
from npu_backend.runtime.prove.writer import in_rope_layout, read_slots
from npu_backend.runtime.tombstone import is_tombstone

__all__ = [
    "MemoryWatch",
    "prove_bytes",
    "prove_cache",
    "prove_equality",
    "prove_outputs",
    "prove_padding",
    "prove_q_lora",
    "prove_released",
    "prove_unreachable",
    "step_records",
]

_NO_STEPS = "no step is the plan's own: the host serves every reachable phase"


def step_records(
    plan: LayerPlan, scenario: Scenario, outcome: Outcome, reference: MlaReference
) -> tuple[StepRecord, ...]:
    """Return one record a step with its error against the reference."""
    records = []
    first = scenario.first_asked
    steps = (*scenario.fill, *scenario.steps)
    for step, seen in zip(steps, (*outcome.fill, *outcome.steps), strict=True):
        names = {
            site: None if entry is None else entry.strategy
            for site in ("path", "q_absorb", "v_up")
            for entry in (entry_at(plan.table(site), step.phase, step.rows),)
        }
        error = worst = None
        if step.parts:
            expected = expected_rows(reference.outputs, step, first)
            error, worst = relative_error(seen.out, expected), worst_token(seen.out, expected)
        path = plan_path_uses(plan, step)
        records.append(
            StepRecord(
                phase=step.phase.value,
                rows=step.rows,
                path=names["path"] or "none",
                q_absorb=names["q_absorb"] if "q_absorb" in path else None,
                v_up=names["v_up"],
                error=error,
                worst=worst,
            )
        )
    return tuple(records)


def plan_path_uses(plan: LayerPlan, step: Step) -> frozenset[str]:
    """Return the sites that a step's path uses."""
    entry = entry_at(plan.path, step.phase, step.rows)
    return frozenset() if entry is None or entry.offer is None else entry.offer.uses


def prove_outputs(records: Sequence[StepRecord], bound: float) -> Proof:
    """Every step's output is within the bound of the fp32 reference; one token within twice."""
    compared = [r for r in records if r.error is not None and r.worst is not None]
    if not compared:
        return Proof(name="outputs", passed=True, text=_NO_STEPS, skipped=True)
    error = max(r.error or 0.0 for r in compared)
    worst = max(r.worst or 0.0 for r in compared)
    passed = error <= bound and worst <= 2 * bound
    bad = [
        f"{r.phase} with {r.rows} rows by {r.path} and {r.v_up}: {r.error:.2g}, worst token "
        f"{r.worst:.2g}"
        for r in compared
        if (r.error or 0.0) > bound or (r.worst or 0.0) > 2 * bound
    ]
    text = (
        f"{len(compared)} steps against the fp32 reference: error at most {error:.2g}, of one token "
        f"at most {worst:.2g} (bounds {bound:.0e} and {2 * bound:.0e})"
    )
    if bad:
        text += "; too far: " + "; ".join(bad)
    figures = {"error": error, "worst_token": worst, "bound": bound, "steps": len(compared)}
    return Proof(name="outputs", passed=passed, text=text, figures=figures)


def prove_q_lora(
    scenario: Scenario, outcome: Outcome, reference: MlaReference, bound: float
) -> Proof:
    """The compressed query that a path hands to an indexer is the reference's."""
    first = scenario.first_asked
    steps = zip((*scenario.fill, *scenario.steps), (*outcome.fill, *outcome.steps), strict=True)
    errors = [
        relative_error(seen.q_lora, expected_rows(reference.q_loras, step, first))
        for step, seen in steps
        if seen.q_lora is not None and step.parts and reference.q_loras
    ]
    if not errors:
        text = "no path in use hands a compressed query to an indexer of this layer"
        return Proof(name="q_lora", passed=True, text=text, skipped=True)
    error = max(errors)
    return Proof(
        name="q_lora",
        passed=error <= bound,
        text=f"compressed query of {len(errors)} steps: error at most {error:.2g} "
        f"(bound {bound:.0e})",
        figures={"error": error, "bound": bound, "steps": len(errors)},
    )


def prove_cache(
    scenario: Scenario, outcome: Outcome, reference: MlaReference, bound: float
) -> Proof:
    """Every token's slot holds the reference's latent and rotated key, in the layer's layout."""
    layout = scenario.layout
    errors: dict[str, float] = {}
    tokens = 0
    for index, track in enumerate(scenario.tracks):
        reached = _reached(scenario, index)
        if not reached:
            continue
        tokens += reached
        slots = track.slots(0, reached, layout.block_size)
        for name, cache, expected in (
            ("latent", outcome.k_nope, reference.latents[index][:reached]),
            ("key", outcome.k_rope, in_rope_layout(reference.keys[index][:reached], layout)),
        ):
            if expected.shape[-1]:
                found = relative_error(read_slots(cache, slots, layout), expected)
                errors[name] = max(errors.get(name, 0.0), found)
    if not tokens:
        return Proof(name="cache", passed=True, text=_NO_STEPS, skipped=True)
    told = ", ".join(f"{name} {error:.2g}" for name, error in errors.items())
    return Proof(
        name="cache",
        passed=max(errors.values()) <= bound,
        text=f"{tokens} tokens in {layout}: error at most {told} (bound {bound:.0e})",
        figures={**errors, "bound": bound, "tokens": tokens},
    )


def _reached(scenario: Scenario, index: int) -> int:
    """Return how many tokens of a sequence are in the cache at the end."""
    ends = [p.start + p.count for s in scenario.steps for p in s.parts if p.track == index]
    return max([scenario.tracks[index].history, *ends])


def prove_padding(scenario: Scenario, outcome: Outcome) -> Proof:
    """Steps of padded rows write into the padding's blocks alone."""
    padded = [
        seen for step, seen in zip(scenario.steps, outcome.steps, strict=True) if not step.parts
    ]
    if not padded:
        text = "no step of padded rows is reachable"
        return Proof(name="padding", passed=True, text=text, skipped=True)
    strayed = sum(seen.strayed for seen in padded)
    where = "wrote outside their own slots" if strayed else "left every sequence's slots alone"
    return Proof(
        name="padding",
        passed=not strayed,
        text=f"{strayed or len(padded)} of {len(padded)} idle steps {where}",
        figures={"steps": len(padded), "strayed": strayed},
    )


def prove_equality(
    records: Sequence[StepRecord], before: Outcome, after: Outcome
) -> tuple[Proof, tuple[StepRecord, ...]]:
    """Outputs, queries and both caches after the release are those before it, bit by bit."""
    marked, bad, compared = [], [], 0
    pairs = zip(records, (*before.fill, *before.steps), (*after.fill, *after.steps), strict=True)
    for record, old, new in pairs:
        fresh = new.tensors()
        differ = [n for n, t in old.tensors().items() if not same_bits(t, fresh[n])]
        compared += len(fresh)
        marked.append(evolve(record, equal=not differ))
        bad += [f"{n} of {record.phase} with {record.rows} rows" for n in differ]
    for name in ("k_nope", "k_rope"):
        compared += 1
        if not same_bits(getattr(before, name), getattr(after, name)):
            bad.append(f"cache {name}")
    if not marked:
        return Proof(name="equality", passed=True, text=_NO_STEPS, skipped=True), ()
    text = (
        f"{len(bad)} of {compared} tensors differ after the release: {', '.join(bad)}"
        if bad
        else f"{compared} tensors of {len(marked)} steps are bit by bit the same after the release"
    )
    figures = {"tensors": compared, "different": len(bad)}
    return Proof(name="equality", passed=not bad, text=text, figures=figures), tuple(marked)


class MemoryWatch:
    """Sees which storages die, and on a device by how much its allocator falls.

    Keeps no storage alive. Independent of the runtime's own ledger.
    """

    def __init__(self, given: Mapping[str, torch.Tensor], device: torch.device) -> None:
        self._given = given
        self._device = device
        self._before = {n: t.untyped_storage().nbytes() for n, t in given.items()}
        self._references = {n: StorageWeakRef(t.untyped_storage()) for n, t in given.items()}
        self._statistic, self._allocated = _allocated(device)

    def freed(self) -> dict[str, int]:
        """Return the bytes of each weight's storage that are gone; only weights that lost any."""
        found = {name: self._lost(name) for name in self._given}
        return {name: size for name, size in found.items() if size}

    def _lost(self, name: str) -> int:
        if self._references[name].expired():
            return self._before[name]
        tensor = self._given[name]
        # A tombstone has no storage to ask; its old one still lives, so nothing was freed.
        left = self._before[name] if is_tombstone(tensor) else tensor.untyped_storage().nbytes()
        return self._before[name] - left

    def allocator(self) -> tuple[str | None, int | None]:
        """Return the allocator's figure and by how much it fell; None on the CPU."""
        if self._allocated is None:
            return None, None
        return self._statistic, self._allocated - int(_allocated(self._device)[1] or 0)


def _allocated(device: torch.device) -> tuple[str | None, int | None]:
    if device.type == "cpu":
        return None, None
    module: Any = getattr(torch, device.type)
    module.synchronize(device)
    statistics = module.memory_stats(device)
    for name in ("requested_bytes.all.current", "allocated_bytes.all.current"):
        if name in statistics:
            return name, int(statistics[name])
    return "memory_allocated", int(module.memory_allocated(device))


def prove_bytes(plan: LayerPlan, ledger: Ledger, watch: MemoryWatch) -> Proof:
    """The bytes that went are those that the plan says, weight by weight."""
    planned = {row.name: row.bytes for row in plan.released()}
    freed = watch.freed()
    statistic, fell = watch.allocator()
    wrong = [
        f"{name}: planned {planned.get(name, 0)}, freed {freed.get(name, 0)}"
        for name in dict.fromkeys([*planned, *freed])
        if planned.get(name, 0) != freed.get(name, 0)
    ]
    total, gone = sum(planned.values()), sum(freed.values())
    if (ledger.planned, ledger.freed) != (total, gone):
        wrong.append(
            f"the ledger says {ledger.freed} freed of {ledger.planned} planned, seen are {gone} of "
            f"{total}"
        )
    figures: dict[str, Any] = {"planned": total, "freed": gone, "weights": freed}
    seen = "storages seen to die"
    if fell is not None:
        figures |= {"allocator": statistic, "allocator_freed": fell}
        seen += f" and by {statistic}"
        # Older lines have no exact figure; theirs carries block slack of up to 512 bytes a weight.
        slack = 0 if statistic == "requested_bytes.all.current" else 512 * max(len(planned), 1)
        if abs(fell - total) > slack:
            wrong.append(f"{statistic} fell by {fell}, planned are {total}")
    text = f"{gone} bytes freed of {total} planned, by {seen}"
    if wrong:
        text += "; wrong: " + "; ".join(wrong)
    return Proof(name="bytes", passed=not wrong, text=text, figures=figures)


def prove_released(plan: LayerPlan, given: Mapping[str, torch.Tensor]) -> Proof:
    """Reading a released weight raises WeightReleasedError with layer and weight."""
    names = [row.name for row in plan.released()]
    if not names:
        text = "nothing is released in this plan"
        return Proof(name="released", passed=True, text=text, skipped=True)
    wrong = []
    for name in names:
        try:
            given[name].sum()
        except WeightReleasedError as err:
            if (err.layer, err.weight) != (plan.layer_id, name):
                wrong.append(f"{name}: the error names layer {err.layer}, weight {err.weight}")
        except Exception as err:  # noqa: BLE001 - whatever else comes is the finding
            wrong.append(f"{name}: {type(err).__name__}: {err}")
        else:
            wrong.append(f"{name}: was read without an error")
    text = f"reading {', '.join(names)} raises WeightReleasedError"
    if wrong:
        text = "reading a released weight: " + "; ".join(wrong)
    return Proof(name="released", passed=not wrong, text=text, figures={"weights": len(names)})


def prove_unreachable(layer: BoundLayer) -> Proof:
    """A step in a phase that the plan does not reach raises: WeightReleasedError where something
    was released, else BoundExceededError."""
    plan = layer.plan
    served_by_host = {p for e in plan.path if e.strategy == HOST_MHA for p in e.phases}
    phases = [p for p in Phase if p not in plan.reach and p not in served_by_host]
    if not phases:
        text = "every phase is reachable"
        return Proof(name="unreachable", passed=True, text=text, skipped=True)
    expected = WeightReleasedError if plan.released() else BoundExceededError
    dtype = getattr(torch, plan.layer.dtype)
    hidden = torch.zeros(1, plan.layer.hidden_size, dtype=dtype, device=layer.device)
    zero = torch.zeros(1, dtype=torch.int64, device=layer.device)
    wrong = []
    for phase in phases:
        try:
            layer.preprocess(hidden, zero, zero, phase=phase)
        except expected:
            continue
        except Exception as err:  # noqa: BLE001 - whatever else comes is the finding
            wrong.append(f"{phase}: {type(err).__name__}: {err}")
        else:
            wrong.append(f"{phase}: ran without an error")
    named = ", ".join(map(str, phases))
    text = f"a step in {named} raises {expected.__name__}"
    if wrong:
        text = f"a step in an unreachable phase should raise {expected.__name__}: " + "; ".join(
            wrong
        )
    return Proof(name="unreachable", passed=not wrong, text=text, figures={"phases": len(phases)})
