"""``npu-backend plan``: decide, and say why. Imports no torch."""

from __future__ import annotations

from typing import Any

import click

from npu_backend.cli.memory import memory_options, memory_view, render_memory
from npu_backend.cli.options import mlp_options, model_and_deployment_options, plan_from
from npu_backend.cli.output import print_json, print_warning

__all__ = ["command"]


@click.command(name="plan")
@model_and_deployment_options
@mlp_options
@memory_options
def command(**options: Any) -> int:
    """Decide for MODEL which path runs, which weights may go, and which kernel multiplies.

    MODEL is a bundled name, a config.json, or a model directory.
    """
    planned = plan_from(options)
    for text in planned.plan.warnings:
        print_warning(text)
    memory = memory_view(planned.plan, options)
    if options["as_json"]:
        if more := memory.to_dict():
            print_json({**planned.plan.to_dict(), **more})
        else:
            click.echo(planned.plan.to_json())
    else:
        from npu_backend.cli.render import render_plan

        render_plan(planned.plan)
        render_memory(planned.plan, memory)
        if planned.plan.deployment.host == "sglang":
            from npu_backend.hosts.sglang.log import plan_line

            click.echo(f"SGLang logs: {plan_line(planned.plan)}")
    return 0
