"""Measured orders of kernels: what ``npu-backend bmm --tune`` writes and later plans use.

The bundled catalog holds none, since nothing here was measured on an NPU. A user's override may, in
the section ``tuning``::

    {"tuning": {"bmm": [{
        "soc": "A3", "cann": "9.0.0", "site": "v_up", "B": 128, "K": 512, "N": 128,
        "dtype": "bfloat16",
        "order": ["torch.bmm", "npu_transpose_batchmatmul[0,1,2]"],
        "rows": [{"tokens": [1, 64], "order": ["npu_transpose_batchmatmul[0,1,2]"]},
                 {"tokens": [65, null], "order": ["torch.bmm"]}],
        "source": "who measured what, and where",
        "measured": {}
    }]}}

``order`` holds for all rows, ``rows`` for ranges of them. A name is a strategy's, or
``DIST/STRATEGY`` where two distributions use one name. ``measured`` is for people: it plays no part
in the catalog's version, so that two measurements with one outcome give one fingerprint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from attrs import frozen

from npu_backend.catalog.versions import cann_key
from npu_backend.errors import DeploymentError

__all__ = [
    "KernelOrder",
    "OrderKey",
    "kernel_orders",
    "merged_tuning",
    "order_key",
    "row_key",
    "without_times",
]

_KEY = ("soc", "cann", "site", "B", "K", "N", "dtype")
_PARTS = (*_KEY, "order", "rows", "source", "measured")

OrderKey = tuple[Any, ...]
Range = tuple[int, "int | None"]


@frozen
class KernelOrder:
    """The measured order of one batched matmul's kernels.

    Args:
        order: Fastest first, over all rows; the one that counts under batch invariance.
        rows: Orders by row range, ascending; rows of no range have ``order``.
        source: Who measured it, on what.
    """

    order: tuple[str, ...]
    rows: tuple[tuple[Range, tuple[str, ...]], ...]
    source: str


def order_key(soc: str, cann: str, site: str, shape: tuple[int, int, int], dtype: str) -> OrderKey:
    """Return what a measured order is looked up by; a CANN release by its numbers."""
    return (soc, cann_key(cann), site, *shape, dtype)


def kernel_orders(section: Mapping[str, Any]) -> dict[OrderKey, KernelOrder]:
    """Return the orders of a checked section."""
    return {
        row_key(row): KernelOrder(
            order=tuple(row["order"]),
            rows=tuple(
                ((part["tokens"][0], part["tokens"][1]), tuple(part["order"]))
                for part in row.get("rows", ())
            ),
            source=row["source"],
        )
        for row in section["bmm"]
    }


def row_key(row: Mapping[str, Any]) -> OrderKey:
    """Return what a row of the section is looked up by."""
    return order_key(
        row["soc"], row["cann"], row["site"], (row["B"], row["K"], row["N"]), row["dtype"]
    )


def without_times(over: Any) -> Any:
    """Return an override without what was measured: that part is for people only."""
    tuning = over.get("tuning") if isinstance(over, dict) else None
    if not isinstance(tuning, dict) or not isinstance(tuning.get("bmm"), list):
        return over
    rows = [
        {k: v for k, v in row.items() if k != "measured"} if isinstance(row, dict) else row
        for row in tuning["bmm"]
    ]
    return {**over, "tuning": {**tuning, "bmm": rows}}


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _names(value: Any, where: str, tell: Callable[[str], None]) -> None:
    if not isinstance(value, list) or not value or not all(isinstance(v, str) for v in value):
        tell(f"{where} is not a list of strategies")
    elif len(set(value)) != len(value):
        tell(f"{where} names a strategy twice")


def _ranges(rows: Any, where: str, tell: Callable[[str], None]) -> None:
    if not isinstance(rows, list) or not all(isinstance(r, dict) for r in rows):
        tell(f"{where} is not a list of objects")
        return
    last: int | None = 0
    for row in rows:
        for part in row:
            if part not in ("tokens", "order"):
                tell(f"{where} has the unknown part {part!r}")
        _names(row.get("order"), f"{where}, order", tell)
        tokens = row.get("tokens")
        good = (
            isinstance(tokens, list)
            and len(tokens) == 2
            and _is_int(tokens[0])
            and (tokens[1] is None or (_is_int(tokens[1]) and tokens[1] >= tokens[0]))
        )
        if not good:
            tell(f"{where}: {tokens!r} is not a row range such as [1, 64] or [65, null]")
            return
        if last is None or tokens[0] <= last:
            tell(f"{where}: the range {tokens} does not follow the one before it")
            return
        last = tokens[1]


def _row_problems(row: Mapping[str, Any], where: str, socs: Iterable[str]) -> list[str]:
    found: list[str] = []
    for part in row:
        if part not in _PARTS:
            found.append(f"{where} has the unknown part {part!r}")
    for part in ("site", "dtype", "source"):
        if not isinstance(row.get(part), str) or not row[part]:
            found.append(f"{where} names no {part}")
    if row.get("site") not in ("q_absorb", "v_up"):
        found.append(f"{where}: its site is not q_absorb or v_up")
    if row.get("soc") not in set(socs):
        found.append(f"{where}: {row.get('soc')!r} is no chip family")
    found += [f"{where}: {p} is not a size" for p in ("B", "K", "N") if not _is_int(row.get(p))]
    try:
        cann_key(row.get("cann") if isinstance(row.get("cann"), str) else "none")  # type: ignore[arg-type]
    except DeploymentError as err:
        found.append(f"{where}: {err.what}")
    _names(row.get("order"), f"{where}, order", found.append)
    _ranges(row.get("rows", []), f"{where}, rows", found.append)
    return found


def merged_tuning(
    base: Mapping[str, Any], over: Any, socs: Iterable[str], problems: list[str]
) -> dict[str, Any]:
    """Return the section with an override merged over it; rows of one key are replaced.

    Args:
        base: The section so far.
        over: What the override says.
        socs: Known chip families.
        problems: Takes every problem.
    """
    if not isinstance(over, dict) or not isinstance(over.get("bmm", []), list):
        problems.append("section 'tuning' is not an object with a list 'bmm'")
        return dict(base)
    problems += [f"unknown part of section 'tuning' {k!r}" for k in over if k != "bmm"]
    found = {row_key(row): row for row in base["bmm"]}
    seen: set[OrderKey] = set()
    for index, row in enumerate(over.get("bmm", [])):
        where = f"tuning.bmm[{index}]"
        if not isinstance(row, dict):
            problems.append(f"{where} is not an object")
            continue
        wrong = _row_problems(row, where, socs)
        problems += wrong
        if not wrong:
            key = row_key(row)
            if key in seen:
                problems.append(f"{where} orders the same matmul a second time")
            seen.add(key)
            found[key] = row
    return {"bmm": list(found.values())}
