"""The file of ``npu-backend bmm --tune``: a catalog override that holds measured orders."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from npu_backend.catalog import load_catalog
from npu_backend.catalog.tuning import row_key
from npu_backend.cli.device import Device
from npu_backend.errors import CatalogError, DeploymentError
from npu_backend.planner import BmmPlan

__all__ = ["tuned_row", "write_row"]


def tuned_row(plan: BmmPlan, device: Device, measured: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the order of a matmul's kernels as the catalog's section ``tuning`` has it.

    Args:
        plan: The matmul.
        device: Where it was measured; its chip must be the one that was planned for.
        measured: Timings in JSON form.

    Raises:
        DeploymentError: The device is another chip, or has another CANN.
    """
    from npu_backend.runtime.measure import overall_order, tuned_ranges

    deployment, spec = plan.deployment, plan.spec
    _check_place(plan, device)
    by_rows: dict[int, dict[str, float]] = {}
    for timing in measured:
        by_rows.setdefault(timing["rows"], {})[timing["strategy"]] = timing["microseconds"]
    counts = ", ".join(str(rows) for rows in sorted(by_rows))
    honest = "" if device.kind == "npu" else "; not an NPU's speed"
    return {
        "soc": deployment.soc.family,
        "cann": deployment.cann_release,
        "site": spec.site,
        "B": spec.B,
        "K": spec.K,
        "N": spec.N,
        "dtype": spec.dtype,
        "order": list(overall_order(by_rows)),
        "rows": [
            {"tokens": list(tokens), "order": list(order)}
            for tokens, order in tuned_ranges(by_rows)
        ],
        "source": f"npu-backend bmm --tune on {device.title}, rows {counts}{honest}",
        "measured": {
            "unit": "microseconds",
            "rows": {str(rows): times for rows, times in sorted(by_rows.items())},
        },
    }


def _check_place(plan: BmmPlan, device: Device) -> None:
    if device.kind != "npu":
        return
    versions, deployment = plan.deployment.catalog.versions, plan.deployment
    problems = []
    if device.soc and versions.soc(device.soc).family != deployment.soc.family:
        problems.append(f"the device is {device.soc}, the plan is for {deployment.soc}")
    if device.cann and versions.known_cann(device.cann)[0] != deployment.cann_release:
        problems.append(f"the device has CANN {device.cann}, the plan is for {deployment.cann}")
    if problems:
        raise DeploymentError(
            "an order is written only for the place where it was measured",
            whom="npu-backend bmm --tune",
            why=problems,
            remedy="leave --soc and --cann out, or measure on such a device",
        )


def write_row(path: Path, row: dict[str, Any]) -> None:
    """Put a row into an override file, in place of one for the same matmul; keep the rest.

    The file is replaced only once it has been read back as a catalog, so that a failure leaves the
    one before.

    Raises:
        CatalogError: The file that is there is no override, or the folder cannot be written.
    """
    over: dict[str, Any] = {}
    if path.exists():
        load_catalog(path)  # tells everything that is wrong with it
        over = json.loads(path.read_text("utf-8"))
    rows = [r for r in over.get("tuning", {}).get("bmm", []) if row_key(r) != row_key(row)]
    rows = sorted([*rows, row], key=lambda r: json.dumps(row_key(r), default=str))
    over = {**over, "tuning": {"bmm": rows}}
    text = json.dumps(over, indent=1) + "\n"
    try:
        with tempfile.NamedTemporaryFile(
            "w", dir=path.parent, suffix=".json", delete=False, encoding="utf-8"
        ) as file:
            file.write(text)
    except OSError as err:
        raise CatalogError(
            f"{path} cannot be written",
            whom="npu-backend bmm --tune",
            why=f"{type(err).__name__}: {err}",
            remedy="name a file in a folder that exists and can be written",
        ) from err
    temporary = Path(file.name)
    try:
        load_catalog(temporary)
        # A temporary file is its owner's alone; an override may be anybody's.
        temporary.chmod(0o644)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
