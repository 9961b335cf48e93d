"""One loader for the catalog's data, and the merge of a user's override file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from functools import cached_property, lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from attrs import field, frozen

from npu_backend.catalog.override import SECTIONS, merged
from npu_backend.catalog.tuning import (
    KernelOrder,
    OrderKey,
    kernel_orders,
    order_key,
    without_times,
)
from npu_backend.catalog.versions import Versions, cann_key
from npu_backend.errors import CatalogError

__all__ = ["Catalog", "Figure", "load_catalog"]


@frozen
class Figure:
    """A figure of the catalog: its value, and the words that say where it comes from."""

    value: Any = field(hash=False)
    source: str

    def __contains__(self, item: object) -> bool:
        return item in self.value


@frozen(eq=False)
class Catalog:
    """The whole catalog. Compared by identity; ``version`` names its contents.

    Args:
        version: Version of the data, part of every plan's fingerprint.
        versions: Lines, packages, CANN releases and chips.
        limits: Limits by op, each figure with its source.
        sources: Full text of each source key.
        models: Bundled model descriptions by name.
        model_notes: What a model forbids, by bundled name.
        schemas: Op schemas by TorchNPU line and by kernel library.
        orders: Measured orders of kernels; the bundled catalog has none.
    """

    version: str
    versions: Versions = field(repr=False)
    limits: Mapping[str, Mapping[str, Any]] = field(repr=False)
    sources: Mapping[str, str] = field(repr=False)
    models: Mapping[str, Mapping[str, Any]] = field(repr=False)
    model_notes: Mapping[str, tuple[Mapping[str, str], ...]] = field(repr=False)
    schemas: Mapping[str, Any] = field(repr=False)
    orders: Mapping[OrderKey, KernelOrder] = field(factory=dict, repr=False)
    _memo: dict[tuple[Any, ...], Figure | None] = field(factory=dict, repr=False, init=False)

    def figure(
        self, op: str, key: str, *, cann: str = "", line: str = "", soc: str = ""
    ) -> Figure | None:
        """Return a figure for a version and chip, or None where nothing is documented.

        A figure with rows ``by_cann`` (or ``by_line``) takes the newest row not newer than the
        version asked for; ``by_soc`` takes the chip's row.

        Raises:
            CatalogError: The catalog has no such op or figure at all.
        """
        memo_key = (op, key, cann, line, soc)
        if memo_key not in self._memo:
            self._memo[memo_key] = self._figure(op, key, cann, line, soc)
        return self._memo[memo_key]

    def value(self, op: str, key: str, *, cann: str = "", line: str = "", soc: str = "") -> Any:
        """Return the bare value of :meth:`figure`, or None where nothing is documented."""
        found = self.figure(op, key, cann=cann, line=line, soc=soc)
        return None if found is None else found.value

    def _figure(self, op: str, key: str, cann: str, line: str, soc: str) -> Figure | None:
        try:
            raw = self.limits[op][key]
        except KeyError as err:
            raise CatalogError(
                f"the catalog has no figure {key!r} for {op}", whom=f"catalog {self.version}"
            ) from err
        source = self.sources.get(raw["source"], raw["source"])
        if "by_cann" in raw:
            return _newest(raw["by_cann"], cann_key, cann, source)
        if "by_line" in raw:
            return _newest(raw["by_line"], self.versions.line_order, line, source)
        if "by_soc" in raw:
            return Figure(raw["by_soc"][soc], source) if soc in raw["by_soc"] else None
        return Figure(raw["value"], source)

    def has_op(self, op: str, line: str) -> bool:
        """Whether a TorchNPU line registers an op such as ``npu::npu_mla_prolog_v3``."""
        return bool(self.schemas_of(line).get(op))

    def schemas_of(self, line: str) -> Mapping[str, Any]:
        """Return the op schemas of a line; of one that an override adds, the newest before it."""
        order = self.versions.line_order
        recorded = [n for n in self.schemas["lines"] if order(n) <= order(line)]
        ops: Mapping[str, Any] = self.schemas["lines"][max(recorded, key=order)]["ops"]
        return ops

    def op_since(self, op: str) -> str | None:
        """Return the first line that registers an op, or None."""
        lines = self.schemas["lines"]
        return next((name for name, row in lines.items() if row["ops"].get(op)), None)

    def notes_for(self, model_type: str) -> tuple[Mapping[str, str], ...]:
        """Return what models of a type forbid for numerics, each with its source."""
        return self._notes_by_type.get(model_type, ())

    @cached_property
    def _notes_by_type(self) -> dict[str, tuple[Mapping[str, str], ...]]:
        return {
            str(self.models[name]["model_type"]): rows for name, rows in self.model_notes.items()
        }

    def kernel_order(
        self, soc: str, cann: str, site: str, shape: tuple[int, int, int], dtype: str
    ) -> KernelOrder | None:
        """Return the measured order of a batched matmul's kernels, or None where none was taken.

        It holds for the very chip family, CANN release, shape and dtype that it was measured with.
        """
        if not self.orders:
            return None
        return self.orders.get(order_key(soc, cann, site, shape, dtype))

    def library_has_op(self, library: str, op: str) -> bool:
        """Whether a kernel library registers an op such as ``npu::mla_preprocess``."""
        return op in self.schemas["libraries"].get(library, {"ops": {}})["ops"]


def _newest(
    rows: Mapping[str, Any], order: Callable[[str], Any], version: str, source: str
) -> Figure | None:
    """Return the row of the newest version up to ``version``, whatever the file's order."""
    limit = order(version)
    known = [since for since in rows if order(since) <= limit]
    return Figure(rows[max(known, key=order)], source) if known else None


def _read(name: str) -> dict[str, Any]:
    text = files("npu_backend.catalog").joinpath("data").joinpath(name).read_text("utf-8")
    data: dict[str, Any] = json.loads(text)
    return data


def _load(override: Path | None) -> Catalog:
    limits, versions, models = _read("limits.json"), _read("versions.json"), _read("models.json")
    tuning: dict[str, Any] = {"bmm": []}
    version = str(limits["version"])
    if override is not None:
        where = f"catalog override {override}"
        try:
            text = override.read_text("utf-8")
            over = json.loads(text)
        except (OSError, ValueError, RecursionError) as err:
            raise CatalogError(
                "the catalog override cannot be read",
                whom=where,
                why=f"{type(err).__name__}: {err}",
                remedy="give a JSON file with any of the sections " + ", ".join(SECTIONS),
            ) from err
        bundled = {"limits": limits, "versions": versions, "models": models, "tuning": tuning}
        sections = merged(bundled, over, where)
        limits, versions, models, tuning = (sections[name] for name in SECTIONS)
        if limits["version"] == version:
            # The figures differ from the bundled ones, so the version must too: it stands in
            # every fingerprint, and two ranks with different overrides must not agree.
            canonical = json.dumps(without_times(over), sort_keys=True, separators=(",", ":"))
            version += "+" + hashlib.sha256(canonical.encode()).hexdigest()[:12]
        else:
            version = str(limits["version"])
    return Catalog(
        version=version,
        versions=Versions.from_data(versions),
        limits=limits["ops"],
        sources=limits["sources"],
        models=models["models"],
        model_notes={name: tuple(rows) for name, rows in models["notes"].items()},
        schemas=_read("schemas.json"),
        orders=kernel_orders(tuning),
    )


@lru_cache(maxsize=8)
def _cached(override: Path | None) -> Catalog:
    return _load(override)


def load_catalog(override: str | Path | None = None) -> Catalog:
    """Return the bundled catalog, with a user's override file merged over it.

    Args:
        override: JSON file with any of the sections ``limits``, ``versions``, ``models``,
            ``tuning``; each figure must name its source. A null limit lifts it.

    Raises:
        CatalogError: The file cannot be read, or names an op or figure that does not exist.
    """
    if override is not None and not isinstance(override, str | Path):
        raise CatalogError(
            f"{override!r:.80} names no file",
            whom="the catalog's override",
            why=f"it is a {type(override).__name__}",
            remedy="give the path of a JSON file, or None",
        )
    # The bundled catalog is a constant and cached; a user's file may change between two calls.
    return _cached(None) if override is None else _load(Path(override))
