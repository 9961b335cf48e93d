"""A user's override of the catalog: what it may say, and how it is merged.

Its form is the bundled data's. A figure that gives ``value`` replaces one that had rows by version,
and the other way round; rows of the same kind are merged, so that a release nobody has seen yet is
one row. Lists of versions and names are added to. A null limit lifts it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from npu_backend.catalog.tuning import merged_tuning
from npu_backend.catalog.versions import cann_key, suggest
from npu_backend.errors import CatalogError, DeploymentError

__all__ = ["SECTIONS", "merged"]

SECTIONS = ("limits", "versions", "models", "tuning")
SELECTORS = ("value", "by_cann", "by_line", "by_soc")
"""How a figure is looked up; each has exactly one."""
_NOTE = ("strategy", "code", "message", "source")


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, int | float) or value is None:
        return "a number or null"
    if isinstance(value, str):
        return "text"
    return "a list" if isinstance(value, list) else "an object"


class _Checked:
    """Collects every problem of an override, so that all are told at once."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def object(self, value: Any, where: str) -> dict[str, Any]:
        if isinstance(value, dict):
            return value
        self.problems.append(f"{where} is not an object")
        return {}

    def texts(self, value: Any, where: str) -> list[str]:
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return value
        self.problems.append(f"{where} is not a list of texts")
        return []

    def known(self, name: str, names: Any, where: str) -> bool:
        if name in names:
            return True
        self.problems.append(f"unknown {where} {name!r}{suggest(name, names)}")
        return False


def _samples(figure: Mapping[str, Any]) -> list[Any]:
    values = [figure["value"]] if "value" in figure else []
    for rows in SELECTORS[1:]:
        values += figure.get(rows, {}).values()
    return values


def _figure(base: Mapping[str, Any], over: Any, name: str, check: _Checked) -> dict[str, Any]:
    row = check.object(over, f"figure {name}")
    given = [s for s in SELECTORS if s in row]
    if not row:
        return dict(base)
    if not isinstance(row.get("source"), str) or not row["source"]:
        check.problems.append(f"figure {name} names no source")
    if len(given) != 1:
        check.problems.append(f"figure {name} gives not exactly one of {', '.join(SELECTORS)}")
        return dict(base)
    for key in row:
        check.known(key, (*SELECTORS, "source"), f"part of figure {name}")
    (selector,) = given
    wanted = {_kind(sample) for sample in _samples(base)}
    values = row[selector]
    rows = {"value": values} if selector == "value" else check.object(values, f"{name}.{selector}")
    for since, value in rows.items():
        if _kind(value) not in wanted:
            told = " or ".join(sorted(wanted))
            check.problems.append(f"figure {name}, {since}: {value!r} is not {told}")
        elif selector == "by_cann":
            try:
                cann_key(since)
            except DeploymentError as err:
                check.problems.append(f"figure {name}: {err.what}")
    if selector in base and selector != "value":
        return {**base, selector: {**base[selector], **rows}, "source": row.get("source")}
    return {selector: values, "source": row.get("source"), **_op_name(base)}


def _op_name(base: Mapping[str, Any]) -> dict[str, Any]:
    return {"op": base["op"]} if "op" in base else {}


def _limits(base: Mapping[str, Any], over: Any, check: _Checked) -> dict[str, Any]:
    section = check.object(over, "section 'limits'")
    result = {**base, "ops": dict(base["ops"])}
    for key in section:
        check.known(key, ("version", "sources", "ops"), "part of section 'limits'")
    if "version" in section:
        result["version"] = str(section["version"])
    if "sources" in section:
        result["sources"] = {**base["sources"], **check.object(section["sources"], "sources")}
    for op, figures in check.object(section.get("ops", {}), "limits.ops").items():
        if check.known(op, base["ops"], "op"):
            changed = dict(base["ops"][op])
            for key, figure in check.object(figures, f"the figures of {op!r}").items():
                known = [k for k in base["ops"][op] if k != "op"]
                if check.known(key, known, f"figure {op}."):
                    changed[key] = _figure(base["ops"][op][key], figure, f"{op}.{key}", check)
            result["ops"][op] = changed
    return result


def _versions(base: Mapping[str, Any], over: Any, check: _Checked) -> dict[str, Any]:
    section = check.object(over, "section 'versions'")
    result = {**base, "lines": dict(base["lines"]), "socs": dict(base["socs"])}
    for key in section:
        check.known(key, base, "part of section 'versions'")
    releases = dict.fromkeys(
        [*base["cann"], *check.texts(section.get("cann", []), "versions.cann")]
    )
    for release in releases:
        try:
            cann_key(release)
        except DeploymentError as err:
            check.problems.append(f"versions.cann: {err.what}")
            return result
    result["cann"] = sorted(releases, key=cann_key)
    for name, row in check.object(section.get("lines", {}), "versions.lines").items():
        where = f"versions.lines.{name}"
        known = dict(base["lines"].get(name, {"cann": None, "packages": []}))
        row = check.object(row, where)
        known["cann"] = row.get("cann", known["cann"])
        known["packages"] = [*known["packages"], *check.texts(row.get("packages", []), where)]
        if known["cann"] not in result["cann"]:
            check.problems.append(f"{where}: its CANN {known['cann']!r} is not in versions.cann")
        result["lines"][name] = known
    for name, row in check.object(section.get("socs", {}), "versions.socs").items():
        where = f"versions.socs.{name}"
        known = dict(base["socs"].get(name, {"names": [], "versions": [0, -1]}))
        row = check.object(row, where)
        for key in ("names", "prefixes"):
            if key in row:
                known[key] = [*known.get(key, []), *check.texts(row[key], f"{where}.{key}")]
        result["socs"][name] = known
    return result


def _models(base: Mapping[str, Any], over: Any, check: _Checked) -> dict[str, Any]:
    section = check.object(over, "section 'models'")
    for key in section:
        check.known(key, ("models", "notes", "source"), "part of section 'models'")
    models = dict(base["models"])
    for name, config in check.object(section.get("models", {}), "models.models").items():
        config = check.object(config, f"models.models.{name}")
        models[name] = {**models.get(name, {"model_type": name}), **config}
    notes = dict(base["notes"])
    for name, rows in check.object(section.get("notes", {}), "models.notes").items():
        if not check.known(name, models, "model in notes"):
            continue
        good = isinstance(rows, list) and all(
            isinstance(row, dict) and all(isinstance(row.get(k), str) for k in _NOTE)
            for row in rows
        )
        if good:
            notes[name] = rows
        else:
            check.problems.append(f"models.notes.{name} is not a list of {', '.join(_NOTE)}")
    return {**base, "models": models, "notes": notes}


def merged(
    bundled: Mapping[str, Mapping[str, Any]], over: Any, where: str
) -> dict[str, dict[str, Any]]:
    """Return the sections with an override merged over them.

    Args:
        bundled: The bundled sections by name.
        over: What the file holds.
        where: Which file, for the error.

    Raises:
        CatalogError: The override names something unknown, or has another form; every problem is
            told.
    """
    check = _Checked()
    if not isinstance(over, dict):
        raise CatalogError(
            "the override is not a JSON object",
            whom=where,
            why=f"it is {_kind(over)}",
            remedy="give an object with any of the sections " + ", ".join(SECTIONS),
        )
    for name in over:
        check.known(name, SECTIONS, "section")
    merge = {"limits": _limits, "versions": _versions, "models": _models}
    result = {name: merge[name](bundled[name], over.get(name, {}), check) for name in merge}
    result["tuning"] = merged_tuning(
        bundled["tuning"], over.get("tuning", {}), result["versions"]["socs"], check.problems
    )
    if check.problems:
        raise CatalogError(
            "the catalog override cannot be used",
            whom=where,
            why=check.problems,
            remedy="correct the file; its form is the bundled catalog's, with a source a figure",
        )
    return result
