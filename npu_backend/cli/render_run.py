"""Rich tables of a run: what served, what was freed, and each claim."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape

from npu_backend.cli.device import Device
from npu_backend.cli.render import console, grid, render_group, render_head
from npu_backend.explain import LayerGroup, format_bytes, group_layers
from npu_backend.plan import ModelPlan
from npu_backend.runtime.prove import LayerProof, PathsResult, RunResult

__all__ = ["render_all_paths", "render_run"]


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"


def _verdict(passed: bool, skipped: bool = False) -> str:
    if skipped:
        return "skipped"
    return "[green]holds[/green]" if passed else "[red]FAILED[/red]"


def _steps(out: Console, proof: LayerProof) -> None:
    table = grid("phase", "rows", "path", "q_absorb", "v_up", "error vs fp32", "after = before")
    for step in proof.steps:
        equal = {None: "-", True: "equal", False: "[red]differs[/red]"}[step.equal]
        table.add_row(
            step.phase,
            str(step.rows),
            escape(step.path),
            escape(step.q_absorb or "-"),
            escape(step.v_up or "-"),
            _figure(step.error),
            equal,
        )
    out.print(table)


def _claims(out: Console, proofs: list[LayerProof]) -> None:
    table = grid("claim", "", "of the first layer, or of the first where it failed")
    names = dict.fromkeys(p.name for layer in proofs for p in layer.proofs)
    for name in names:
        each = [(layer, p) for layer in proofs for p in layer.proofs if p.name == name]
        shown = next(((layer, p) for layer, p in each if not p.passed), each[0])
        passed = all(p.passed for _, p in each)
        where = "" if passed else f"layer {shown[0].layer_id}: "
        skipped = all(p.skipped for _, p in each)
        table.add_row(name, _verdict(passed, skipped), escape(where + shown[1].text))
    out.print(table)


def _group(out: Console, group: LayerGroup, proofs: list[LayerProof]) -> None:
    render_group(out, group)
    first = next((p for p in proofs if not p.passed), proofs[0])
    out.print(f"\nsteps of layer {first.layer_id} (tolerance {first.tolerance:.0e})")
    _steps(out, first)
    _claims(out, proofs)
    if len(proofs) > 1:
        errors = [p.error for p in proofs if p.error is not None]
        worst = _figure(max(errors)) if errors else "-"
        passed = sum(p.passed for p in proofs)
        out.print(f"{passed} of {len(proofs)} layers hold; largest error {worst}")
    for text in dict.fromkeys(t for p in proofs for t in (*p.notes, *p.skipped)):
        out.print(f"note: {escape(text)}")


def render_run(plan: ModelPlan, result: RunResult, device: Device) -> None:
    """Print a run."""
    out = console()
    render_head(out, plan)
    because = f": {device.why}" if device.why else ""
    out.print(f"device: {escape(device.title)}{escape(because)}")
    by_id = {proof.layer_id: proof for proof in result.layers}
    for group in group_layers(plan.layers):
        _group(out, group, [by_id[p.layer_id] for p in group.plans])
    freed, planned = result.freed_bytes, result.planned_bytes
    out.print(
        f"\nbytes freed {freed} ({format_bytes(freed)}), planned {planned}: "
        + ("equal" if freed == planned else "[red]not equal[/red]")
    )
    out.print(f"a pass here shows: {escape(device.shows)}")
    out.print(f"it does not show: {escape(device.does_not_show)}")
    verdict = "[green]all proofs hold[/green]" if result.passed else "[red]a proof FAILED[/red]"
    out.print(f"[bold]{verdict}[/bold] ({len(result.layers)} layers)")


def _ids(layers: tuple[int, ...]) -> str:
    return str(layers[0]) if len(layers) == 1 else f"{layers[0]} and {len(layers) - 1} like it"


def render_all_paths(plan: ModelPlan, result: PathsResult, device: Device) -> None:
    """Print every path's error against the fp32 reference, one row a path and kind of layer."""
    out = console()
    render_head(out, plan)
    because = f": {device.why}" if device.why else ""
    out.print(f"device: {escape(device.title)}{escape(because)}")
    table = grid(
        "layer", "path", "phases", "output", "latent", "key", "q_lora", "tolerance", "all proofs"
    )
    for record in result.records:
        layer = _ids(record.layers) + (" (MTP)" if record.is_nextn else "")
        if record.proof is None:
            codes = ", ".join(dict.fromkeys(code for code, _ in record.reasons))
            table.add_row(layer, record.path, f"not legal: {codes}", *["-"] * 5, "")
            continue
        mode = f" ({record.mode})" if record.mode else ""
        figures = (
            record.error,
            record.figure("cache", "latent"),
            record.figure("cache", "key"),
            record.figure("q_lora", "error"),
        )
        table.add_row(
            layer,
            escape(record.path + mode),
            ", ".join(record.phases),
            *map(_figure, figures),
            f"{record.proof.tolerance:.0e}",
            _verdict(record.passed),
        )
    out.print(table)
    out.print("errors are relative to the fp32 reference, on the same weights and inputs a layer")
    for record in result.records:
        for proof in record.proof.failed if record.proof is not None else ():
            out.print(
                f"[red]FAILED[/red] layer {record.layers[0]}, {escape(record.path)}, "
                f"{proof.name}: {escape(proof.text)}"
            )
    out.print(f"a pass here shows: {escape(device.shows)}")
    out.print(f"it does not show: {escape(device.does_not_show)}")
