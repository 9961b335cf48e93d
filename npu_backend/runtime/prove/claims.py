"""The claims about outputs and caches, against the reference and against the steps before."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import evolve

from npu_backend.plan import LayerPlan
from npu_backend.runtime.prove.execution import Outcome, expected_rows, raw_bytes, same_bits
from npu_backend.runtime.prove.mla_fp32 import MlaReference
from npu_backend.runtime.prove.records import Proof, StepRecord
from npu_backend.runtime.prove.scenario import Scenario, Step, entry_at
from npu_backend.runtime.prove.tolerance import relative_error, worst_token
from npu_backend.runtime.prove.writer import in_rope_layout, read_slots

__all__ = [
    "prove_cache",
    "prove_equality",
    "prove_outputs",
    "prove_padding",
    "prove_q_lora",
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
        path = _sites_used(plan, step)
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


def _sites_used(plan: LayerPlan, step: Step) -> frozenset[str]:
    """Return the sites that a step's path uses."""
    entry = entry_at(plan.path, step.phase, step.rows)
    return frozenset() if entry is None or entry.offer is None else entry.offer.uses


def prove_outputs(records: Sequence[StepRecord], bound: float) -> Proof:
    """Every step's output is within the bound of the fp32 reference; one token within twice, also
    where it is the whole step: over few heads, errors of one token do not average out."""
    compared = [r for r in records if r.error is not None and r.worst is not None]
    if not compared:
        return Proof(name="outputs", passed=True, text=_NO_STEPS, skipped=True)
    error = max((r.error or 0.0 for r in compared if r.rows > 1), default=0.0)
    worst = max(r.worst or 0.0 for r in compared)
    passed = error <= bound and worst <= 2 * bound
    bad = [
        f"{r.phase} with {r.rows} rows by {r.path} and {r.v_up}: {r.error:.2g}, worst token "
        f"{r.worst:.2g}"
        for r in compared
        if (r.rows > 1 and (r.error or 0.0) > bound) or (r.worst or 0.0) > 2 * bound
    ]
    text = (
        f"{len(compared)} steps against the fp32 reference: error at most {error:.2g} of several "
        f"rows, of one token at most {worst:.2g} (bounds {bound:.0e} and {2 * bound:.0e})"
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
    """Every token's slot holds the reference's latent and rotated key, in the layer's layout, and
    no other slot beside the padding holds anything."""
    layout = scenario.layout
    errors: dict[str, float] = {}
    free = torch.ones(scenario.num_blocks * layout.block_size, dtype=torch.bool)
    free[: scenario.pad_blocks * layout.block_size] = False
    tokens = written = 0
    for index, track in enumerate(scenario.tracks):
        reached = _reached(scenario, index)
        tokens += reached
        written += reached if scenario.fill else reached - track.history
        slots = track.slots(0, reached, layout.block_size)
        free[slots] = False
        latent, key = outcome.rows.read(outcome.k_nope, outcome.k_rope, slots)
        for name, seen, expected in (
            ("latent", latent, reference.latents[index][:reached]),
            ("key", key, in_rope_layout(reference.keys[index][:reached], layout)),
        ):
            if expected.numel():
                found = relative_error(seen, expected)
                errors[name] = max(errors.get(name, 0.0), found)
    if not tokens:
        return Proof(name="cache", passed=True, text=_NO_STEPS, skipped=True)
    others = torch.nonzero(free).reshape(-1)
    caches = (outcome.k_nope, outcome.k_rope)
    strayed = sum(
        int(raw_bytes(read_slots(c, others, layout)).ne(0).any(-1).sum())
        for c in caches
        if c.numel()
    )
    told = ", ".join(f"{name} {error:.2g}" for name, error in errors.items())
    text = (
        f"{tokens} tokens, {written} of them written by steps, in {layout}: error at most {told} "
        f"(bound {bound:.0e})"
    )
    if strayed:
        text += f"; {strayed} rows were written outside every sequence"
    return Proof(
        name="cache",
        passed=max(errors.values()) <= bound and not strayed,
        text=text,
        figures={
            **errors,
            "bound": bound,
            "tokens": tokens,
            "written": written,
            "strayed": strayed,
        },
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
