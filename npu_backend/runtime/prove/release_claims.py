"""The claims about a release: bytes, and what happens to whoever reads afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from npu_backend.deployment import Phase
from npu_backend.errors import BoundExceededError, WeightReleasedError
from npu_backend.plan import LayerPlan
from npu_backend.runtime.bound import BoundLayer
from npu_backend.runtime.ledger import Ledger, allocator_slack
from npu_backend.runtime.prove.memory import MemoryWatch
from npu_backend.runtime.prove.records import Proof
from npu_backend.runtime.prove.scenario import HOST_MHA

__all__ = ["prove_again", "prove_bytes", "prove_released", "prove_unreachable"]


def prove_bytes(plan: LayerPlan, amended: LayerPlan, ledger: Ledger, watch: MemoryWatch) -> Proof:
    """The bytes that went are those that the plan says, weight by weight.

    Args:
        plan: The plan as it was made. Binding may turn a release into a keep; on weights of a
            proof's own making, which share nothing, that is a finding too.
        amended: The plan after binding and release.
        ledger: What the runtime says of itself; compared, not believed.
        watch: What was seen.
    """
    planned = {row.name: row.bytes for row in plan.released()}
    freed = watch.freed()
    statistic, fell = watch.allocator()
    wrong = [
        f"{name}: planned {planned.get(name, 0)}, freed {freed.get(name, 0)}"
        for name in dict.fromkeys([*planned, *freed])
        if planned.get(name, 0) != freed.get(name, 0)
    ]
    kept = sorted(set(planned) - {row.name for row in amended.released()})
    wrong += [f"{name} was kept: {amended.weight(name).reasons[0]}" for name in kept]
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
        if not 0 <= fell - total <= allocator_slack(statistic, len(planned)):
            wrong.append(f"{statistic} fell by {fell}, planned are {total}")
    text = f"{gone} bytes freed of {total} planned, by {seen}"
    if wrong:
        text += "; wrong: " + "; ".join(wrong)
    return Proof(name="bytes", passed=not wrong, text=text, figures=figures)


def prove_again(ledger: Ledger, first: int, back: int) -> Proof:
    """Claim ``again``: what steps brought back goes a second time, to the byte.

    Args:
        ledger: The account after the second release.
        first: Bytes that the first release freed.
        back: Bytes that steps brought back in between.
    """
    passed = ledger.agrees and ledger.freed == first
    text = f"steps brought {back} bytes back; released again, {ledger.freed} bytes are freed"
    if not passed:
        text += f", first {first}; wrong: {ledger.difference()}"
    figures = {"first": first, "brought_back": back, "freed": ledger.freed}
    return Proof(name="again", passed=passed, text=text, figures=figures)


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
