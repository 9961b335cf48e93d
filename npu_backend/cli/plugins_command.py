"""``npu-backend plugins``: who is there, what became of each, and who is asked first."""

from __future__ import annotations

from typing import Any

import click

from npu_backend.api import Backend, load
from npu_backend.cli.options import plugin_options
from npu_backend.cli.output import print_json
from npu_backend.deployment import Deployment
from npu_backend.errors import NpuBackendError
from npu_backend.explain import format_phases, format_rows, group_layers
from npu_backend.offers import Status
from npu_backend.plan import SCHEMA

__all__ = ["command"]

CHECKED = (
    ("glm-5.2", "none", {"role": "decode", "cann": "9.1.0"}),
    ("deepseek-v3", "none", {"role": "decode", "cann": "9.0.0"}),
    ("deepseek-v3.2", "w8a8-dynamic", {"role": "prefill", "cann": "9.1.0"}),
    ("kimi-k2", "w8a8-static", {"role": "decode", "cann": "9.1.0", "max_tokens": 1024}),
    ("kimi-k3", "none", {"role": "null", "cann": "9.2.0"}),
)
"""The standard set that ``--check`` asks every hook on: bundled model, quantization, deployment."""


@click.command(name="plugins")
@plugin_options
@click.option("--check", is_flag=True, help="Ask every hook on a standard set; say who would win.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(check: bool, as_json: bool, **options: Any) -> int:
    """List every plugin with distribution, version, status, hooks and call order.

    With --check, exits 1 if a plugin failed to load or failed inside a hook.
    """
    backend = load(
        enable=options["enable"] or None,
        disable=options["disable"],
        strict=options["strict"] or None,
        third_party=not options["no_third_party"],
        catalog=options["catalog"],
    )
    data: dict[str, Any] = {
        "schema": SCHEMA,
        "plugins": [record.to_dict() for record in backend.registry.plugins],
        "call_order": {
            hook: [info.provider for info in backend.registry.call_order(hook)]
            for hook in ("select_preprocess_path", "select_bmm_kernel", "release_weights")
        },
    }
    if check:
        data["check"] = _check(backend)
    if as_json:
        print_json(data)
    else:
        from npu_backend.cli.render import render_plugins

        render_plugins(data)
    failed = any(r.status is Status.FAILED for r in backend.registry.plugins)
    return int(check and (failed or any(c["failures"] for c in data["check"])))


def _check(backend: Backend) -> list[dict[str, Any]]:
    from npu_backend.model.read import read_model

    results = []
    for name, quant, wanted in CHECKED:
        row: dict[str, Any] = {
            "model": name,
            "quant": quant,
            **wanted,
            "winners": [],
            "failures": [],
        }
        try:
            model = read_model(name, quant=quant, catalog=backend.catalog)
            plan = backend.plan(model, Deployment(catalog=backend.catalog, **wanted))
        except NpuBackendError as err:
            row["failures"].append(str(err))
        else:
            for group in group_layers(plan.layers):
                for site in ("path", "q_absorb", "v_up"):
                    row["winners"] += [
                        {
                            "layers": group.title,
                            "table": site,
                            "strategy": e.strategy,
                            "where": f"{format_phases(e.phases)}, {format_rows(e.tokens)}",
                            "provider": e.provider,
                        }
                        for e in group.first.table(site)
                    ]
                row["failures"] += [
                    f"{group.title}: {d.provider}: {reason}"
                    for d in group.first.declined
                    for reason in d.reasons
                    if reason.code == "plugin.failed"
                ]
        results.append(row)
    return results
