"""Rich tables for people. Decides nothing; every word comes from the records."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from npu_backend.compare import Comparison
from npu_backend.explain import (
    LayerGroup,
    format_bytes,
    format_phases,
    format_rows,
    group_layers,
    headline,
    measured_orders,
    mlp_lines,
)
from npu_backend.plan import ModelPlan

__all__ = [
    "console",
    "grid",
    "render_comparison",
    "render_doctor",
    "render_group",
    "render_head",
    "render_plan",
    "render_plugins",
]

_ACTION_STYLE = {"release": "green", "restore": "cyan", "keep": ""}
_PIPE_WIDTH = 160


def console() -> Console:
    """Return a console; into a pipe it does not fold at 80 columns."""
    return Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False)


def grid(*columns: str) -> RichTable:
    """Return a table without lines."""
    table = RichTable(box=None, pad_edge=False)
    for column in columns:
        justify = "right" if column in ("bytes",) else "left"
        table.add_column(escape(column), justify=justify, overflow="fold")  # type: ignore[arg-type]
    return table


def render_group(out: Console, group: LayerGroup) -> None:
    """Print what was decided for layers that agree."""
    plan, count = group.first, len(group.plans)
    out.print(f"\n[bold]{escape(group.title)}[/bold]  KV {escape(str(plan.kv_layout))}")
    who = grid("", "strategy", "phases", "rows", "provider")
    for site in ("path", "q_absorb", "v_up"):
        for index, entry in enumerate(plan.table(site)):
            mode = f" ({entry.offer.mode})" if entry.offer and entry.offer.mode else ""
            who.add_row(
                site if index == 0 else "",
                escape(entry.strategy + mode),
                format_phases(entry.phases),
                format_rows(entry.tokens).removeprefix("rows "),
                escape(entry.provider),
            )
        for text in measured_orders(plan.table(site)):
            who.add_row("", escape(f"order: {text}"), "", "", "")
        if not plan.table(site):
            who.add_row(site, "-", "no path that serves needs it", "", "")
    out.print(who)
    if plan.declined or plan.unused:
        why = grid("not used", "by", "why")
        for refusal in plan.declined:
            name = refusal.strategy + (f" at {refusal.site}" if refusal.site else "")
            for index, reason in enumerate(refusal.reasons):
                why.add_row(
                    escape(name) if index == 0 else "",
                    escape(refusal.provider) if index == 0 else "",
                    escape(str(reason)),
                )
        for unused in plan.unused:
            name = unused.strategy + (f" at {unused.site}" if unused.site else "")
            first = dict.fromkeys(e.provider for e in plan.table(unused.site or "path"))
            told = f"legal; first is {', '.join(first)}"
            why.add_row(escape(name), escape(unused.provider), escape(told))
        out.print(why)
    weights = grid("weight", "bytes", "action", "why")
    for row in plan.weights:
        size = format_bytes(row.bytes) + (f" x {count}" if count > 1 else "")
        style = _ACTION_STYLE[row.action]
        action = f"[{style}]{row.action}[/{style}]" if style else row.action
        weights.add_row(escape(row.name), size, action, escape("; ".join(row.reasons)))
    out.print(weights)


def render_plan(plan: ModelPlan) -> None:
    """Print a plan."""
    out = console()
    render_head(out, plan)
    for group in group_layers(plan.layers):
        render_group(out, group)
    totals = grid("bytes per rank, all planned layers", "", "bytes")
    for name, value in plan.totals.to_dict().items():
        totals.add_row(name, format_bytes(value), str(value))
    out.print("")
    out.print(totals)
    if plan.mlp is not None:
        out.print("")
        for line in mlp_lines(plan.mlp):
            out.print(escape(line))


def render_head(out: Console, plan: ModelPlan) -> None:
    """Print what was planned for, and what the description leaves open."""
    out.print(f"[bold]{escape(plan.model.name)}[/bold]: {escape(headline(plan.deployment))}")
    out.print(f"fingerprint {plan.fingerprint}")
    for text in plan.model.assumed:
        out.print(f"assumed: {escape(text)}")
    if plan.model.unverified:
        out.print(f"unverified in the description: {escape(', '.join(plan.model.unverified))}")


def render_comparison(comparison: Comparison, a: str, b: str) -> None:
    """Print a comparison."""
    out = console()
    verdict = "equal" if comparison.equal else "different"
    out.print(f"[bold]{verdict}[/bold]: a = {escape(a)}, b = {escape(b)}")
    if comparison.pair:
        if comparison.kv_agree:
            out.print("KV layouts agree: the two workers can share a cache")
        else:
            out.print("[red]KV layouts do not agree[/red]: the two workers cannot share a cache")
            for reason in comparison.kv_reasons:
                out.print(f"  {escape(reason)}")
    # Layers that differ in the same way are told once.
    groups: dict[tuple[str, str, str, tuple[str, ...]], list[int | None]] = {}
    for d in comparison.differences:
        groups.setdefault((d.what, _short(d.a), _short(d.b), d.why), []).append(d.layer_id)
    if groups:
        table = grid("where", "what", "a", "b", "why")
        for (what, left, right, why), ids_ in groups.items():
            known = [i for i in ids_ if i is not None]
            where = (
                f"layers {known[0]}-{known[-1]} ({len(known)})"
                if len(known) > 1
                else (f"layer {known[0]}" if known else "plan")
            )
            table.add_row(where, escape(what), escape(left), escape(right), escape("\n".join(why)))
        out.print(table)


def _short(value: Any) -> str:
    if (
        isinstance(value, list)
        and value
        and isinstance(value[0], Mapping)
        and "strategy" in value[0]
    ):
        return "\n".join(
            f"{e['strategy']} [{', '.join(e['phases'])}] {e['tokens'][0]}..{e['tokens'][1] or ''}"
            for e in value
        )
    if isinstance(value, Mapping):
        return ", ".join(f"{k}={v}" for k, v in value.items())
    if isinstance(value, list):
        return "\n".join(map(str, value)) or "-"
    return "-" if value is None else str(value)


def render_plugins(data: Mapping[str, Any]) -> None:
    """Print the plugins, the call order, and the check."""
    out = console()
    table = grid("plugin", "distribution", "version", "status", "hooks", "why")
    for p in data["plugins"]:
        hooks = ", ".join(
            " ".join([h["hook"], *(flag for flag in ("tryfirst", "trylast", "wrapper") if h[flag])])
            for h in p["hooks"]
        )
        table.add_row(
            escape(p["name"]),
            escape(p["dist"]),
            escape(p["version"]),
            p["status"],
            escape(hooks),
            escape(p.get("reason") or ""),
        )
    out.print(table)
    out.print("\n[bold]call order[/bold] (asked first to last)")
    for hook, order in data["call_order"].items():
        out.print(f"  {hook}: {escape(' > '.join(order)) or 'nobody'}")
    for tie in data["ties"]:
        out.print(f"  tie in {tie['hook']}: {escape(' > '.join(tie['plugins']))}: {tie['by']}")
    for row in data.get("check", ()):
        tp = f", attention TP {row['attn_tp_size']}" if "attn_tp_size" in row else ""
        rows = f", at most {row['max_tokens']} rows" if "max_tokens" in row else ""
        out.print(
            f"\n[bold]{row['model']}[/bold] {row['quant']}, role {row['role']}, {row['soc']}, "
            f"CANN {row['cann']}{tp}{rows}"
        )
        wins = grid("layers", "table", "winner", "where", "provider")
        for w in row["winners"]:
            wins.add_row(
                *(escape(w[k]) for k in ("layers", "table", "strategy", "where", "provider"))
            )
        out.print(wins)
        if row["shadowed"]:
            shadowed = grid("layers", "table", "shadowed", "provider", "by", "why")
            for s in row["shadowed"]:
                shadowed.add_row(
                    *(escape(s[k]) for k in ("layers", "table", "strategy", "provider")),
                    escape(", ".join(s["by"])),
                    escape(s["why"]),
                )
            out.print(shadowed)
        for unplanned in row["unplanned"]:
            out.print(f"not planned with these plugins: {escape(unplanned)}")
        for failure in row["failures"]:
            out.print(f"[red]failed[/red] {escape(failure)}")
    if "summary" in data:
        _render_summary(out, data["summary"])


def _render_summary(out: Console, summary: Mapping[str, Any]) -> None:
    """Print what each plugin came to over the standard set, and its implementations."""
    out.print("\n[bold]over the standard set[/bold] (per kind of layer and table)")
    columns = ("offers", "serves", "shadowed", "declines", "forbids", "votes", "failures")
    counts = grid("plugin", *columns)
    for row in summary["plugins"]:
        counts.add_row(escape(row["provider"]), *(str(row[c]) for c in columns))
    out.print(counts)
    impls = grid("implementation", "provider", "status", "why")
    for row in summary["impls"]:
        impls.add_row(*(escape(row[k]) for k in ("impl", "provider", "status", "why")))
    out.print(impls)


def render_doctor(data: Mapping[str, Any]) -> None:
    """Print what the machine has."""
    out = console()
    table = grid("what", "found")
    for key in (
        "npu_backend",
        "python",
        "machine",
        "torch",
        "torch_npu",
        "line",
        "line_note",
        "npu_device_nodes",
        "c_compiler",
        "catalog",
        "newest_cann",
    ):
        value = data[key]
        if key == "line_note" and value is None:
            continue
        table.add_row(
            key, escape(", ".join(value) if isinstance(value, list) else str(value or "none"))
        )
    out.print(table)
    out.print("\n[bold]what that allows[/bold]")
    for text in data["allows"]:
        out.print(f"  {escape(text)}")
