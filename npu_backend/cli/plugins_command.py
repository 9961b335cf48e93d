"""``npu-backend plugins``: who is there, what became of each, and who is asked first."""

from __future__ import annotations

from typing import Any

import click

from npu_backend.api import load
from npu_backend.cli.options import plugin_options
from npu_backend.cli.output import print_json
from npu_backend.offers import Status
from npu_backend.plan import SCHEMA
from npu_backend.registry import PLUGIN_API
from npu_backend.registry.standing import ties

__all__ = ["command"]


@click.command(name="plugins")
@plugin_options
@click.option("--check", is_flag=True, help="Ask every hook on a standard set; say who would win.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(check: bool, as_json: bool, **options: Any) -> int:
    """List every plugin with distribution, version, status, hooks and call order.

    With --check, every hook is asked on a standard set of models; the answer is who would win
    where, who is shadowed and by whom, and, where torch is installed, whether each implementation
    can be had. Exits 1 if a plugin failed to load, failed inside a hook, or has no implementation;
    a model that the chosen plugins cannot serve is told and is no failure.
    """
    backend = load(
        enable=options["enable"] or None,
        disable=options["disable"],
        strict=options["strict"] or None,
        third_party=not options["no_third_party"],
        catalog=options["catalog"],
    )
    hooks = ("select_preprocess_path", "select_bmm_kernel", "release_weights")
    data: dict[str, Any] = {
        "schema": SCHEMA,
        "api": PLUGIN_API,
        "plugins": [record.to_dict() for record in backend.registry.plugins],
        "call_order": {
            hook: [info.provider for info in backend.registry.call_order(hook)] for hook in hooks
        },
        "ties": [tie.to_dict() for tie in ties(backend.registry.plugins, hooks)],
    }
    failed = any(r.status is Status.FAILED for r in backend.registry.plugins)
    if check:
        from npu_backend.cli.plugin_check import check_plugins

        data["check"], data["summary"] = check_plugins(backend)
        failed |= any(row["failures"] for row in data["check"])
        failed |= any(row["status"] == "failed" for row in data["summary"]["impls"])
    if as_json:
        print_json(data)
    else:
        from npu_backend.cli.render import render_plugins

        render_plugins(data)
    return int(check and failed)
