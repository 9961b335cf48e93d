"""``npu-backend run``: plan, build real layers, run, release, run again, and prove it."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from npu_backend.catalog import load_catalog
from npu_backend.cli.device import DEVICES, Device, open_device, warn_of_other_versions
from npu_backend.cli.options import SEED, Planned, model_and_deployment_options, plan_from
from npu_backend.cli.output import print_json, print_warning
from npu_backend.plan import SCHEMA

__all__ = ["command"]

SHOW_AFTER = 2.0
"""Seconds of work after which a bar is shown."""


class _Bar:
    """A progress bar on stderr that appears only for work that lasts, and only to people."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._bar: Progress | None = None
        self._console = Console(stderr=True)

    def __enter__(self) -> _Bar:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, done: int, total: int, proof: Any) -> None:
        if not self._console.is_terminal or time.monotonic() - self._started < SHOW_AFTER:
            return
        if self._bar is None:
            self._bar = Progress(
                TextColumn("layers proved"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                console=self._console,
                transient=True,
            )
            self._bar.add_task("layers", total=total)
            self._bar.start()
        self._bar.update(self._bar.task_ids[0], completed=done)


def _all_paths(planned: Planned, device: Device, seed: int, as_json: bool) -> int:
    from npu_backend.runtime.prove import prove_all_paths

    with _Bar() as bar:
        result = prove_all_paths(
            planned.plan,
            planned.backend.plan,
            device=device.torch_device,
            seed=seed,
            progress=bar,
        )
    if as_json:
        print_json(
            {
                "schema": SCHEMA,
                "passed": result.passed,
                "device": device.to_dict(),
                "all_paths": result.to_dict(),
            }
        )
    else:
        from npu_backend.cli.render_run import render_all_paths

        render_all_paths(planned.plan, result, device)
    return 0 if result.passed else 1


@click.command(name="run")
@model_and_deployment_options
@click.option(
    "--device",
    "device_choice",
    type=click.Choice(DEVICES),
    default="auto",
    show_default=True,
    help="Where to run; auto takes an NPU, else the simulated one, else the CPU.",
)
@click.option("--seed", default=0, show_default=True, type=SEED, help="Seed of weights and inputs.")
@click.option(
    "--all-paths",
    is_flag=True,
    help="Run every legal path on one layer of each kind, and show their errors in one table.",
)
def command(device_choice: str, seed: int, all_paths: bool, **options: Any) -> int:
    """Plan MODEL, run its layers before and after the release, and prove what the plan says.

    Exits 1 if any proof fails.
    """
    catalog = load_catalog(options["catalog"])
    device = open_device(device_choice, soc=options["soc"], cann=options["cann"], catalog=catalog)
    planned = plan_from(options, torch_npu=device.torch_npu, cann=device.cann)
    for text in planned.plan.warnings:
        print_warning(text)
    warn_of_other_versions(device, planned.plan.deployment, options["cann"])

    if all_paths:
        return _all_paths(planned, device, seed, options["as_json"])
    from npu_backend.runtime.prove import prove_model

    with _Bar() as bar:
        result = prove_model(planned.plan, device=device.torch_device, seed=seed, progress=bar)
    if options["as_json"]:
        print_json(
            {
                "schema": SCHEMA,
                "passed": result.passed,
                "device": device.to_dict(),
                "plan": planned.plan.to_dict(),
                "run": result.to_dict(),
            }
        )
    else:
        from npu_backend.cli.render_run import render_run

        render_run(planned.plan, result, device)
    return 0 if result.passed else 1
