"""The one line that each rank logs, and the command that predicts it. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterable

from npu_backend.deployment import Deployment, Phase
from npu_backend.model.records import KvLayout
from npu_backend.plan import LayerPlan, ModelPlan

__all__ = ["cli_options", "paths_by_layers", "plan_line"]


def _ranges(ids: Iterable[int]) -> str:
    runs: list[list[int]] = []
    for i in sorted(ids):
        if runs and i == runs[-1][1] + 1:
            runs[-1][1] = i
        else:
            runs.append([i, i])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _told(plan: LayerPlan) -> str:
    return "; ".join(
        f"{entry.strategy} in {','.join(map(str, entry.phases))}"
        + ("" if entry.tokens == (1, None) else f" rows {entry.tokens[0]}..{entry.tokens[1] or ''}")
        for entry in plan.path
    )


def paths_by_layers(plans: Iterable[LayerPlan]) -> str:
    """Return who serves what, layers that agree told once."""
    groups: dict[str, list[int]] = {}
    for plan in plans:
        groups.setdefault(_told(plan), []).append(plan.layer_id)
    return " | ".join(f"layers {_ranges(ids)}: {told}" for told, ids in groups.items())


def plan_line(plan: ModelPlan) -> str:
    """Return paths by layer group, bytes that go, and the fingerprint, in one line."""
    totals = plan.totals
    back = f" (+{totals.restore} restorable)" if totals.restore else ""
    return (
        f"{len(plan.layers)} layers, {paths_by_layers(plan.layers)}; "
        f"freed {totals.release}{back} bytes; fingerprint {plan.fingerprint}"
    )


def _graph(deployment: Deployment) -> list[str]:
    flags = {
        "--graph-capture": deployment.graph_capture,
        "--batch-invariant": deployment.batch_invariant,
        "--restore": deployment.restore,
    }
    return [flag for flag, there in flags.items() if there]


def cli_options(plan: ModelPlan) -> list[str]:
    """Return the options with which ``npu-backend plan MODEL`` decides the same."""
    deployment = plan.deployment
    found = ["--host", "sglang", "--role", deployment.role.value]
    found += ["--tp-size", str(deployment.tp_size), "--attn-tp-size", str(deployment.attn_tp_size)]
    found += ["--soc", deployment.soc.name or deployment.soc.family]
    for flag, value in (
        ("--cann", deployment.cann),
        ("--torch-npu", deployment.torch_npu),
        ("--kernels", str(deployment.kernels)),
    ):
        found += [] if value is None else [flag, value]
    for phase, rows in deployment.max_tokens:
        found += ["--max-tokens", f"{Phase(phase).value}={rows}"]
    for request in deployment.requests:
        found += ["--request", str(request)]
    found += [f"--{name.replace('_', '-')}" for name in sorted(deployment.promises)]
    found += _graph(deployment)
    if plan.layers:
        found += _layout(plan.layers[0].kv_layout)
        found += ["--dtype", plan.layers[0].layer.dtype]
        found += ["--layers", _ranges(p.layer_id for p in plan.layers)]
    return found


def _layout(layout: KvLayout) -> list[str]:
    found = ["--block-size", str(layout.block_size), "--kv-dtype", layout.dtype]
    found += ["--cache-mode", layout.cache_mode]
    return found if layout.rope == "none" else [*found, "--rope-layout", layout.rope]
