"""Tables of ``npu-backend bmm`` for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape

from npu_backend.cli.device import Device
from npu_backend.cli.render import console, grid
from npu_backend.explain import format_phases, format_rows, headline, measured_orders
from npu_backend.planner import BmmPlan

__all__ = ["render_bmm"]


def render_bmm(plan: BmmPlan, data: Mapping[str, Any], device: Device | None) -> None:
    """Print the table, the refusals, and whatever else was asked."""
    out, spec = console(), plan.spec
    out.print(
        f"[bold]{spec.site}[/bold] (M, {spec.B}, {spec.K}) x ({spec.B}, {spec.K}, {spec.N}), "
        f"{spec.dtype}, weight {spec.weight_layout} {spec.weight_format.upper()}, "
        f"activation {spec.input_layout}"
    )
    out.print(escape(headline(plan.deployment)))
    _table(out, plan)
    _verdicts(out, plan)
    for row in data["tokens"]:
        _at(out, row)
    if "peers" in data:
        _peers(out, data["peers"])
    if device is not None:
        _measured(out, data, device)


def _rows(tokens: tuple[int, int | None]) -> str:
    return format_rows(tokens).removeprefix("rows ")


def _table(out: Console, plan: BmmPlan) -> None:
    table = grid("rows", "strategy", "phases", "provider")
    for entry in sorted(plan.table, key=lambda e: e.tokens[0]):
        table.add_row(
            _rows(entry.tokens),
            escape(entry.strategy),
            format_phases(entry.phases),
            escape(entry.provider),
        )
    out.print("")
    out.print(table)
    for text in measured_orders(plan.table):
        out.print(f"order: {escape(text)}")


def _verdicts(out: Console, plan: BmmPlan) -> None:
    table = grid("strategy", "", "rows", "what it asks, or why not")
    for verdict in plan.verdicts:
        candidate = verdict.candidate
        if candidate is None:
            for index, reason in enumerate(verdict.reasons):
                name = escape(verdict.strategy) if index == 0 else ""
                table.add_row(
                    name, "[red]refused[/red]" if index == 0 else "", "", escape(str(reason))
                )
            continue
        offer = candidate.offer
        asks = [str(limit) for limit in offer.limits]
        if offer.copies_input:
            asks.append("copies the activation once a step")
        if offer.envelope.contiguous and plan.spec.weight_layout == "strided":
            asks.append("the weight is made contiguous at prepare time")
        if offer.capture_slot:
            asks.append("under graph capture one shape of the process may use it")
        table.add_row(
            escape(verdict.strategy),
            "[green]serves[/green]" if verdict.serves else "legal",
            _rows(offer.envelope.tokens),
            escape("; ".join(asks)),
        )
    out.print("")
    out.print(table)


def _at(out: Console, row: Mapping[str, Any]) -> None:
    out.print(f"\n[bold]{row['tokens']} rows[/bold]: {escape(row['serves'])} serves")
    table = grid("strategy", "", "why not")
    for each in row["strategies"]:
        reasons = "; ".join(f"{r['code']}: {r['message']}" for r in each["reasons"])
        table.add_row(
            escape(each["strategy"]),
            "legal" if each["legal"] else "[red]refused[/red]",
            escape(reasons),
        )
    out.print(table)


def _peers(out: Console, rows: list[Mapping[str, Any]]) -> None:
    out.print("\n[bold]what other engines choose[/bold] (read from their code)")
    table = grid("engine", "attention", "phase", "rows", "its choice", "", "here", "why not")
    for row in rows:
        table.add_row(
            escape(row["peer"]),
            row["attention"],
            row["phase"],
            str(row["tokens"]),
            escape(row["strategy"]),
            "legal" if row["legal"] else "[red]rejected[/red]",
            escape(row["ours"]),
            escape("; ".join(r["code"] for r in row["reasons"])),
        )
    out.print(table)


def _measured(out: Console, data: Mapping[str, Any], device: Device) -> None:
    because = f": {device.why}" if device.why else ""
    out.print(f"\n[bold]measured[/bold] on {escape(device.title + because)}")
    table = grid("rows", "strategy", "microseconds", "blocks", "error vs fp32")
    before = None
    for row in data["measured"]:
        table.add_row(
            str(row["rows"]) if row["rows"] != before else "",
            escape(row["strategy"]),
            f"{row['microseconds']:.1f}",
            str(row["blocks"]),
            f"{row['error_vs_fp32']:.1e}",
        )
        before = row["rows"]
    out.print(table)
    if device.kind != "npu":
        out.print("these are times of stand-ins; they say nothing of an NPU's speed or numerics")
    if "tuned" in data:
        tuned = data["tuned"]
        out.print(f"\nwritten to {escape(tuned['file'])}:")
        for part in tuned["row"]["rows"]:
            low, high = part["tokens"]
            out.print(f"  {_rows((low, high))}: {escape(' > '.join(part['order']))}")
        out.print(f"  over all rows: {escape(' > '.join(tuned['row']['order']))}")
        out.print(f"use it with --catalog {escape(tuned['file'])}")
