"""A plan as text for people: layers that agree are told once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from attrs import frozen

from npu_backend.deployment import Deployment, Phase
from npu_backend.mlp.plan import MlpGroup, MlpPlan
from npu_backend.model.records import MlaLayer
from npu_backend.plan import LayerPlan, ModelPlan, Table, TableEntry, Totals, WeightPlan

__all__ = [
    "LayerGroup",
    "explain_layer",
    "explain_model",
    "format_bytes",
    "format_rows",
    "group_layers",
    "mlp_lines",
    "name_layers",
]


@frozen
class LayerGroup:
    """Layers whose plans agree in everything but their ids."""

    plans: tuple[LayerPlan, ...]

    @property
    def first(self) -> LayerPlan:
        """The plan that speaks for the group."""
        return self.plans[0]

    @property
    def title(self) -> str:
        """``layers 0-2, 5`` or ``layer 78 (MTP)``."""
        title = name_layers(plan.layer for plan in self.plans)
        return f"{title} (MTP)" if self.first.layer.is_nextn else title


def name_layers(layers: Iterable[MlaLayer]) -> str:
    """Return ``layer 3``, or ``layers 0-2, 78``."""
    return name_ids(layer.layer_id for layer in layers)


def name_ids(layer_ids: Iterable[int]) -> str:
    """Return ``layer 3``, or ``layers 0-2, 78``."""
    ids = sorted(layer_ids)
    runs: list[list[int]] = []
    for each in ids:
        if runs and each == runs[-1][1] + 1:
            runs[-1][1] = each
        else:
            runs.append([each, each])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return f"layer{'s' if len(ids) > 1 else ''} {text}"


def group_layers(plans: Iterable[LayerPlan]) -> list[LayerGroup]:
    """Put together what agrees, in order of the first layer of each group."""
    groups: dict[object, list[LayerPlan]] = {}
    for plan in plans:
        key = (
            plan.layer.is_nextn,
            plan.layer.kind,
            plan.path,
            plan.q_absorb,
            plan.v_up,
            plan.declined,
            plan.unused,
            plan.weights,
        )
        groups.setdefault(key, []).append(plan)
    return [LayerGroup(tuple(group)) for group in groups.values()]


def format_bytes(count: int) -> str:
    """Return bytes with a binary unit; exact where it is small."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{count} B" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    raise AssertionError("unreachable")


def format_rows(tokens: tuple[int, int | None]) -> str:
    """Return ``rows 1..1024`` or ``rows 1.. (no limit)``."""
    low, high = tokens
    return f"rows {low}.. (no limit)" if high is None else f"rows {low}..{high}"


def format_phases(phases: Iterable[Phase]) -> str:
    """Return phases, joined."""
    return ", ".join(str(p) for p in phases)


def headline(deployment: Deployment) -> str:
    """Return what was planned for, in one line."""
    parts = [
        f"role {deployment.role}",
        str(deployment.soc),
        f"CANN {deployment.cann or deployment.cann_release}",
        f"TorchNPU line {deployment.line}",
        f"attention TP {deployment.attn_tp_size}",
        f"kernels {deployment.kernels}",
    ]
    if deployment.limits_cann != deployment.cann_release:
        parts.insert(3, f"limits of CANN {deployment.limits_cann}")
    if deployment.host:
        parts.append(f"host {deployment.host}")
    if deployment.promises:
        parts.append("promises " + ", ".join(sorted(deployment.promises)))
    if deployment.requests:
        parts.append("requests " + ", ".join(str(r) for r in deployment.requests))
    return ", ".join(parts)


def _entry(entry: TableEntry, with_note: bool = True) -> str:
    mode = f" ({entry.offer.mode})" if with_note and entry.offer and entry.offer.mode else ""
    return (
        f"{entry.strategy}{mode}: {format_phases(entry.phases)}, {format_rows(entry.tokens)}"
        f"  [{entry.provider}]"
    )


def _table(name: str, table: Table, empty: str) -> list[str]:
    if not table:
        return [f"  {name:<9}{empty}"]
    lines = [f"  {name if i == 0 else '':<9}{_entry(entry)}" for i, entry in enumerate(table)]
    return [*lines, *(f"  {'':<9}order: {text}" for text in measured_orders(table))]


def measured_orders(table: Table) -> tuple[str, ...]:
    """Return the sources of the measured orders that a table stands by."""
    return tuple(dict.fromkeys(entry.order for entry in table if entry.order))


def _weight(row: WeightPlan, count: int) -> list[str]:
    size = format_bytes(row.bytes) + (f" x {count}" if count > 1 else "")
    first = f"    {row.action:<8}{row.name:<32}{size}"
    return [first, *(f"      {reason}" for reason in row.reasons)]


def layer_lines(plan: LayerPlan, count: int = 1) -> list[str]:
    """Return the lines that tell one layer's plan."""
    lines = _table("path", plan.path, "nobody")
    lines += _table("q_absorb", plan.q_absorb, "not needed by the paths that serve")
    lines += _table("v_up", plan.v_up, "not needed by the paths that serve")
    lines.append(f"  {'KV':<9}{plan.kv_layout}")
    if plan.declined:
        lines.append("  declined")
        for refusal in plan.declined:
            site = f" at {refusal.site}" if refusal.site else ""
            lines.append(f"    {refusal.strategy}{site}  [{refusal.provider}]")
            lines += [f"      {reason}" for reason in refusal.reasons]
    if plan.unused:
        lines.append("  unused (legal, but others cover it first)")
        lines += [
            f"    {u.strategy}{f' at {u.site}' if u.site else ''}  [{u.provider}]"
            for u in plan.unused
        ]
    lines.append("  weights")
    for row in plan.weights:
        lines += _weight(row, count)
    return lines


def explain_layer(plan: LayerPlan) -> str:
    """Return one layer's plan as text."""
    title = LayerGroup((plan,)).title
    return "\n".join([f"{title}: {headline(plan.deployment)}", *layer_lines(plan)])


def totals_lines(totals: Totals) -> list[str]:
    """Return the totals, a line each."""
    return [
        f"  {name:<15}{format_bytes(value):>12}  ({value} B)"
        for name, value in totals.to_dict().items()
    ]


def _saved(saved: int | None) -> str:
    if saved is None:
        return "-"
    return f"{'-' if saved < 0 else ''}{format_bytes(abs(saved))}"


def _mlp_row(group: MlpGroup) -> tuple[str, ...]:
    layout, count = group.layout, len(group.layer_ids)
    one, saved = layout.bytes_per_rank, group.bytes_saved
    times = f" x {count}" if count > 1 else ""
    return (
        name_ids(group.layer_ids) + (" (MTP)" if layout.layer.is_nextn else ""),
        layout.layer.kind,
        f"{layout.group} ({layout.size})",
        f"{layout.local_intermediate_size} of {layout.layer.intermediate_size}",
        str(layout.communication),
        f"{one} B{times}",
        _saved(saved) if saved is None else f"{saved} B",
    )


def mlp_lines(mlp: MlpPlan) -> list[str]:
    """Return the lines that tell the layouts of a model's MLPs."""
    chosen = [f"{k}={v}" for k, v in mlp.options.to_dict().items() if v not in (None, False)]
    lines = [f"MLP layouts: {mlp.parallel}", f"options: {', '.join(chosen) or 'none'}"]
    lines += [f"assumed: {text}" for text in mlp.assumed]
    head = ("", "kind", "group (ranks)", "intermediate", "communication", "bytes per rank", "saved")
    rows = [head, *(_mlp_row(group) for group in mlp.groups)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        lines.append("  ".join(cells).rstrip())
    total = f"all MLPs: {format_bytes(mlp.bytes_per_rank)} per rank ({mlp.bytes_per_rank} B)"
    if mlp.bytes_saved is None:
        total += "; full TP is impossible for some, so there is nothing to compare with"
    else:
        total += f"; saved {_saved(mlp.bytes_saved)} ({mlp.bytes_saved} B) against no option"
    return [*lines, total]


def explain_model(plan: ModelPlan) -> str:
    """Return a model's plan as text."""
    lines = [f"{plan.model.name}: {headline(plan.deployment)}", f"fingerprint {plan.fingerprint}"]
    lines += [f"assumed: {text}" for text in plan.model.assumed]
    if plan.model.unverified:
        lines.append(f"unverified in the description: {', '.join(plan.model.unverified)}")
    lines += [f"warning: {text}" for text in plan.warnings]
    groups: Sequence[LayerGroup] = group_layers(plan.layers)
    for group in groups:
        lines += ["", group.title, *layer_lines(group.first, len(group.plans))]
    lines += ["", "bytes per rank, all planned layers", *totals_lines(plan.totals)]
    if plan.mlp is not None:
        lines += ["", *mlp_lines(plan.mlp)]
    return "\n".join(lines)
