"""What a plan frees beside what the engines free, and the KV tokens that it buys."""

from __future__ import annotations

from typing import Any

import click
from attrs import frozen
from rich.markup import escape

from npu_backend.baseline import BASELINES, Baseline, baseline_of, dead_bytes
from npu_backend.cli.options import F, apply_options
from npu_backend.explain import format_bytes
from npu_backend.hbm import KvBudget, kv_tokens, parse_bytes
from npu_backend.plan import ModelPlan

__all__ = ["Memory", "memory_options", "memory_view", "render_memory"]


def memory_options(function: F) -> F:
    """Add the options that compare memory."""
    return apply_options(
        [
            click.option(
                "--baseline",
                "baselines",
                multiple=True,
                metavar="|".join(BASELINES),
                help="Show what this engine frees by itself beside the plan; repeatable.",
            ),
            click.option("--hbm", metavar="SIZE", help="Memory of the device, such as 64GiB."),
            click.option(
                "--mem-fraction",
                type=float,
                default=0.8,
                show_default=True,
                help="With --hbm: part of it for weights and KV cache.",
            ),
            click.option(
                "--loaded-bytes",
                metavar="SIZE",
                help="With --hbm: all weights of a rank [default: the planned attention's].",
            ),
        ],
        function,
    )


@frozen
class Memory:
    """What was asked for of a plan's memory.

    Args:
        baselines: Engines to compare with.
        budget: KV tokens, or None where no memory was given.
        dead: Bytes of loaded weights that stay though nobody reads them.
    """

    baselines: tuple[Baseline, ...]
    budget: KvBudget | None
    dead: int

    def to_dict(self) -> dict[str, Any]:
        """Return the keys that stand beside the plan's in JSON; none where nothing was asked."""
        found: dict[str, Any] = {}
        if self.baselines:
            found["baselines"] = [b.to_dict() for b in self.baselines]
            found["dead_after"] = self.dead
        if self.budget is not None:
            found["kv"] = self.budget.to_dict()
            for shown, told in zip(self.baselines, found.get("baselines", ()), strict=True):
                told["kv_tokens"] = self.budget.tokens(shown.prepared - shown.freed)
        return found


def memory_view(plan: ModelPlan, options: dict[str, Any]) -> Memory:
    """Return what the options ask for.

    Raises:
        DeploymentError: A baseline is unknown, or a size is none.
    """
    baselines = tuple(baseline_of(plan, name) for name in options["baselines"])
    budget = None
    if options["hbm"] is not None:
        loaded = options["loaded_bytes"]
        budget = kv_tokens(
            plan,
            parse_bytes(options["hbm"], "--hbm"),
            options["mem_fraction"],
            None if loaded is None else parse_bytes(loaded, "--loaded-bytes"),
        )
    return Memory(baselines, budget, dead_bytes(plan))


def _ratio(one: int, other: int) -> str:
    return f"{one / other:.2f}" if other else "-"


def render_memory(plan: ModelPlan, memory: Memory) -> None:
    """Print both columns, what a baseline frees too early, and the tokens gained."""
    from npu_backend.cli.render import console, grid

    out, totals = console(), plan.totals
    gone = totals.release + totals.restore
    if memory.baselines:
        out.print("")
        table = grid("bytes per rank", "this plan", *(b.rules.name for b in memory.baselines))
        by_weight = [b.freed_by_weight() for b in memory.baselines]
        ours: dict[str, int] = {}
        for layer in plan.layers:
            for row in layer.released():
                ours[row.name] = ours.get(row.name, 0) + row.bytes
        names = dict.fromkeys([*ours, *(name for found in by_weight for name in found)])
        for name in names:
            cells = [ours.get(name, 0), *(found.get(name, 0) for found in by_weight)]
            table.add_row(f"  {escape(name)}", *(format_bytes(c) if c else "-" for c in cells))
        theirs = [b.freed for b in memory.baselines]
        table.add_row("freed", *map(format_bytes, (gone, *theirs)))
        stay = [b.resident_after for b in memory.baselines]
        table.add_row("resident after", *map(format_bytes, (totals.resident_after, *stay)))
        table.add_row("freed / theirs", "", *(_ratio(gone, n) for n in theirs))
        table.add_row("resident / theirs", "", *(_ratio(totals.resident_after, n) for n in stay))
        out.print(table)
        out.print(f"dead and kept by this plan: {memory.dead} bytes")
        for shown in memory.baselines:
            paths = ", ".join(dict.fromkeys(layer.path for layer in shown.layers))
            out.print(f"{shown.rules.name}: paths {paths}; assumed {escape(shown.rules.assumes)}")
            out.print(f"  read: {escape(shown.rules.source)}")
            for name, (layers, readers) in shown.unsafe().items():
                out.print(
                    f"  [red]frees {escape(name)} of {len(layers)} layers, which reachable steps "
                    f"still read[/red]: {', '.join(readers)}"
                )
    if (budget := memory.budget) is not None:
        out.print("")
        what = "given" if budget.loaded_given else "of the planned attention alone"
        out.print(
            f"KV cache: {format_bytes(budget.memory)} x {budget.fraction:g}, "
            f"{format_bytes(budget.loaded)} of weights ({what}), {budget.per_token} bytes a token"
        )
        out.print(
            f"  {budget.planned} tokens; {budget.without} without the release; "
            f"{budget.gained} gained in role {plan.deployment.role}"
        )
        for shown in memory.baselines:
            tokens = budget.tokens(shown.prepared - shown.freed)
            out.print(f"  {tokens} tokens by {shown.rules.name}")
