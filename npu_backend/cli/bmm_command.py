"""``npu-backend bmm``: one batched matmul: its table, every refusal, and what a device measures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from npu_backend.api import load
from npu_backend.catalog import Catalog
from npu_backend.catalog.peers import load_peers
from npu_backend.catalog.versions import suggest
from npu_backend.cli.device import DEVICES, Device, open_device, warn_of_other_versions
from npu_backend.cli.options import SEED, plugin_options
from npu_backend.cli.output import print_json, print_warning
from npu_backend.deployment import Deployment
from npu_backend.errors import NpuBackendError
from npu_backend.offers import SITES, Reason
from npu_backend.plan import SCHEMA
from npu_backend.planner import BmmPlan, matmul

__all__ = ["command"]

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
MEASURED_ROWS = (1, 16, 128, 1024, 2048)
"""Row counts that are measured where none is named: both sides of the one bound on rows, 1024."""
COMPARED_ROWS = (1, 1024, 1025, 65536)
"""Row counts at which other engines' choices are shown where none is named."""


@click.command(name="bmm")
@click.option("--heads", "B", required=True, type=click.IntRange(1), help="Local heads, B.")
@click.option("--k", "K", required=True, type=click.IntRange(1), help="Depth, K.")
@click.option("--n", "N", required=True, type=click.IntRange(1), help="Width, N.")
@click.option(
    "--dtype",
    default="bf16",
    show_default=True,
    type=click.Choice([*DTYPES, *DTYPES.values()]),
    help="Dtype of activation and weight.",
)
@click.option(
    "--site",
    default="v_up",
    show_default=True,
    type=click.Choice(SITES),
    help="Whose layouts: at q_absorb the activation is a slice and the weight strided.",
)
@click.option(
    "--weight-layout",
    type=click.Choice(["strided", "contiguous"]),
    help="Layout of the weight as loaded [default: the site's].",
)
@click.option(
    "--weight-format",
    default="nd",
    show_default=True,
    type=click.Choice(["nd", "nz"]),
    help="Format of the weight as loaded.",
)
@click.option("--soc", metavar="NAME", help="Chip [default: A3; --measure on an NPU: its own].")
@click.option("--cann", metavar="VERSION", help="CANN release [default: newest known].")
@click.option("--torch-npu", metavar="VERSION", help="torch-npu package or TorchNPU line.")
@click.option(
    "--kernels",
    default="sgl-kernel-npu",
    show_default=True,
    metavar="NAME[==VERSION]",
    help="Library of the ops torch_npu lacks: sgl-kernel-npu, vllm-ascend, none.",
)
@click.option("--model", metavar="NAME", help="Bundled model whose notes apply, such as kimi-k3.")
@click.option(
    "--tokens",
    multiple=True,
    type=click.IntRange(1),
    help="Row count to tell, measure or tune; repeatable.",
)
@click.option("--batch-invariant", is_flag=True, help="One strategy for all row counts.")
@click.option("--peers", is_flag=True, help="Show what other engines choose for the same matmul.")
@click.option("--measure", "measured", is_flag=True, help="Time the legal ones on the device.")
@click.option(
    "--tune",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Measure, and write the order into a catalog override for --catalog FILE.",
)
@click.option(
    "--device",
    "device_choice",
    type=click.Choice(DEVICES),
    default="auto",
    show_default=True,
    help="Where to measure; auto takes an NPU, else the simulated one, else the CPU.",
)
@click.option("--blocks", default=30, show_default=True, type=click.IntRange(3), help="Per kernel.")
@click.option(
    "--seconds",
    default=10.0,
    show_default=True,
    type=click.FloatRange(0),
    help="Time for the blocks of one row count.",
)
@click.option("--seed", default=0, show_default=True, type=SEED, help="Seed of what is multiplied.")
@plugin_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(**options: Any) -> int:
    """Tell which kernels may multiply (M, B, K) x (B, K, N), which rows each serves, and why not.

    Heads, K and N are those of one rank. Each refusal names its figure and the figure's source.
    """
    wanted = options["measured"] or options["tune"] is not None
    backend = load(
        enable=options["enable"] or None,
        disable=options["disable"],
        strict=options["strict"] or None,
        third_party=not options["no_third_party"],
        catalog=options["catalog"],
    )
    device = _device(options, backend.catalog) if wanted else None
    deployment = Deployment(
        catalog=backend.catalog,
        soc=_soc(options, device),
        cann=options["cann"] or (device.cann if device else None),
        torch_npu=options["torch_npu"] or (device.torch_npu if device else None),
        kernels=options["kernels"],
        batch_invariant=options["batch_invariant"],
    )
    spec = matmul(
        options["site"],
        options["B"],
        options["K"],
        options["N"],
        dtype=DTYPES.get(options["dtype"], options["dtype"]),
        weight_layout=options["weight_layout"],
        weight_format=options["weight_format"],
        model_type=_model_type(options["model"], backend.catalog),
    )
    plan = backend.plan_bmm(spec, deployment)
    for text in plan.deployment.warnings:
        print_warning(text)
    data: dict[str, Any] = {"schema": SCHEMA, **plan.to_dict()}
    rows = tuple(dict.fromkeys(options["tokens"]))
    data["tokens"] = [_at(plan, each) for each in rows]
    if options["peers"]:
        data["peers"] = _peers(plan, rows or COMPARED_ROWS)
    if device is not None:
        data["device"] = device.to_dict()
        data["measured"] = _measured(plan, device, rows or MEASURED_ROWS, options)
        if options["tune"] is not None:
            data["tuned"] = _tune(plan, device, data["measured"], options)
    if options["as_json"]:
        print_json(data)
    else:
        from npu_backend.cli.render_bmm import render_bmm

        render_bmm(plan, data, device)
    return 0


def _device(options: dict[str, Any], catalog: Catalog) -> Device:
    if options["weight_format"] == "nz":
        raise NpuBackendError(
            "a FRACTAL_NZ weight is planned, but not measured",
            whom="npu-backend bmm --weight-format nz",
            why="no path of this project hands a batched matmul such a weight",
            remedy="measure with --weight-format nd",
            code="format.nz",
        )
    return open_device(
        options["device_choice"],
        soc=options["soc"] or "A3",
        cann=options["cann"],
        catalog=catalog,
    )


def _soc(options: dict[str, Any], device: Device | None) -> str:
    own = device.soc if device is not None and device.kind == "npu" else None
    return str(options["soc"] or own or "A3")


def _model_type(name: str | None, catalog: Catalog) -> str:
    if name is None:
        return ""
    if name not in catalog.models:
        raise NpuBackendError(
            f"{name!r} is no bundled model{suggest(name, catalog.models)}",
            whom="--model",
            why="the bundled models are " + ", ".join(catalog.models),
            remedy="name one of them, or describe yours with --catalog FILE",
        )
    return str(catalog.models[name]["model_type"])


def _at(plan: BmmPlan, rows: int) -> dict[str, Any]:
    """Return who multiplies so many rows, and why each of the others may not."""
    entry = plan.entry(rows)
    return {
        "tokens": rows,
        "serves": entry.strategy,
        "provider": entry.provider,
        "strategies": [
            {
                "strategy": v.strategy,
                "provider": v.provider,
                "legal": not v.refusals(rows),
                "reasons": [r.to_dict() for r in v.refusals(rows)],
            }
            for v in plan.verdicts
        ],
    }


def _peers(plan: BmmPlan, rows: tuple[int, ...]) -> list[dict[str, Any]]:
    """Return what each known engine chooses, and whether that is legal here."""
    spec, found = plan.spec, []
    verdicts = {v.strategy: v for v in reversed(plan.verdicts)}
    for peer in load_peers():
        for attention in ("mla", "dsa"):
            for phase in ("extend", "decode"):
                for each in rows:
                    chosen = peer.choice(
                        attention=attention,
                        site=spec.site,
                        B=spec.B,
                        K=spec.K,
                        N=spec.N,
                        tokens=each,
                        soc=plan.deployment.soc.family,
                        phase=phase,
                    )
                    if chosen is None or chosen not in verdicts:
                        continue
                    reasons = list(verdicts[chosen].refusals(each))
                    offer = verdicts[chosen].candidate
                    if offer is not None and (
                        offer.offer.envelope.contiguous and spec.weight_layout == "strided"
                    ):
                        reasons.append(
                            Reason(
                                "layout.contiguous",
                                f"{chosen} ignores strides, and the weight is not made contiguous",
                            )
                        )
                    found.append(
                        {
                            "peer": peer.title,
                            "source": peer.source,
                            "attention": attention,
                            "phase": phase,
                            "tokens": each,
                            "strategy": chosen,
                            "legal": not reasons,
                            "reasons": [r.to_dict() for r in reasons],
                            "ours": plan.entry(each).strategy,
                        }
                    )
    return found


def _measured(
    plan: BmmPlan, device: Device, rows: tuple[int, ...], options: dict[str, Any]
) -> list[dict[str, Any]]:
    from npu_backend.runtime.measure import measure

    warn_of_other_versions(device, plan.deployment, options["cann"])
    found: list[dict[str, Any]] = []
    for each in rows:
        timings = measure(
            plan,
            each,
            device=device.torch_device,
            seed=options["seed"],
            blocks=options["blocks"],
            seconds=options["seconds"],
        )
        found += [timing.to_dict() for timing in timings]
    return found


def _tune(
    plan: BmmPlan, device: Device, measured: list[dict[str, Any]], options: dict[str, Any]
) -> dict[str, Any]:
    """Write the measured order; return the row as it stands in the file."""
    from npu_backend.cli.tune_file import tuned_row, write_row

    row = tuned_row(plan, device, measured)
    path: Path = options["tune"]
    write_row(path, row)
    if device.kind != "npu":
        print_warning(
            f"the order in {path} was measured on the {device.title}, "
            "which says nothing of an NPU's speed"
        )
    return {"file": str(path), "row": row}
