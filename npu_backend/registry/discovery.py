"""Which entry points there are, in which order, and which of them another one hides.

Discovery imports nothing; :meth:`Candidate.load` does, one at a time. pluggy's own loader is not
used: it stops at the first broken plugin and lets names that occur twice win silently.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution, EntryPoint, PathDistribution, distributions

from attrs import evolve, field, frozen
from packaging.utils import canonicalize_name

from npu_backend.errors import PluginError
from npu_backend.offers import PluginInfo
from npu_backend.registry.records import describe, plugin_error

__all__ = [
    "BUILTIN_ORDER",
    "CORE_DISTRIBUTION",
    "ENTRY_POINT_GROUP",
    "PLUGIN_API",
    "Candidate",
    "discover",
]

PLUGIN_API = 1
"""Major version of what plugins are written against: hooks, records, and what an ``impl`` is given.

The entry-point group names it, so that a plugin for another one is known before any of its code
runs: ``npu_backend.plugins`` (or ``npu_backend.plugins.v1``) is 1, ``npu_backend.plugins.v2`` is 2.
What is only added does not change it: a plugin that needs an addition requires that npu-backend.
"""
_GROUP = "npu_backend.plugins"
ENTRY_POINT_GROUP = _GROUP if PLUGIN_API == 1 else f"{_GROUP}.v{PLUGIN_API}"
CORE_DISTRIBUTION = "npu-backend"
BUILTIN_ORDER = ("absorb", "mlapo", "mlaprolog", "role_release", "transpose_bmm")
"""Built-ins in order of registration; pluggy calls the last registered first."""


@frozen
class Candidate:
    """One entry point, not imported yet.

    Args:
        info: Who it is.
        entry_point: What to import; None where not even that could be read.
        hidden: Why another one stands in its place, or empty.
        broken: Why it cannot be loaded whatever its module does, or empty.
        other_api: What is said in place of the plugin's API, where it is not this one, or empty.
    """

    info: PluginInfo
    entry_point: EntryPoint | None = field(default=None, repr=False)
    hidden: str = ""
    broken: str = ""
    other_api: str = ""

    @property
    def is_builtin(self) -> bool:
        """Whether it comes with this project."""
        return self.info.dist == CORE_DISTRIBUTION

    def load(self) -> object:
        """Import what the entry point names: the one place where a plugin's code first runs.

        Raises:
            PluginError: Whatever its import raised, ``SystemExit`` included.
        """
        if self.other_api:
            raise plugin_error(
                self.info,
                f"is built for {self.other_api}",
                whom="the loading of plugins",
                why=f"this npu-backend has plugin API {PLUGIN_API}; nothing of the plugin was run",
                remedy=f"install a release of {self.info.dist} that declares its entry point in "
                f"the group {ENTRY_POINT_GROUP}, or the npu-backend that it was built for",
            )
        if self.broken or self.entry_point is None:
            raise plugin_error(
                self.info,
                "cannot be found",
                whom="the loading of plugins",
                why=self.broken,
                remedy="install the distribution again",
            )
        try:
            return self.entry_point.load()
        except (Exception, SystemExit) as err:
            raise plugin_error(
                self.info,
                "cannot be imported",
                whom="the loading of plugins",
                why=describe(err),
                remedy=f"import {self.entry_point.value.partition(':')[0]} by hand to see where it "
                f"fails; correct or update {self.info.dist}, or block it with "
                f"NPU_BACKEND_DISABLE={self.info.name}",
            ) from err


def discover(found: Iterable[Distribution] | None = None) -> tuple[Candidate, ...]:
    """Return every entry point of the group in order of registration.

    Built-ins come first in their fixed order, then third parties by canonical distribution name
    and entry-point name. Of a distribution that is on the path twice the first one counts, as it
    does for imports.

    Args:
        found: Distributions in path order; default: those on ``sys.path``.

    Raises:
        PluginError: ``npu-backend`` itself is not installed, or declares no plugin.
    """
    first: dict[str, Distribution] = {}
    candidates: list[Candidate] = []
    for dist in distributions() if found is None else found:
        key = _key(dist)
        winner = first.setdefault(key, dist) if key else dist
        text = _entry_point_text(dist)
        if text is None or _GROUP not in text:
            continue  # metadata of what is no plugin is never parsed: it is most of the time spent
        if winner is not dist and _place(winner) == _place(dist):
            continue  # the same folder, twice on the path
        hidden = "" if winner is dist else f"{key} {_version(winner)} in {_place(winner)} is first"
        candidates.extend(_candidates(dist, key, hidden))
    builtins = [c for c in candidates if c.is_builtin and not c.hidden]
    if not builtins:
        raise PluginError(
            "npu-backend is not installed"
            if CORE_DISTRIBUTION not in first
            else f"npu-backend declares no entry point in the group {ENTRY_POINT_GROUP}",
            whom="the built-in plugins",
            why="built-in plugins are found as everyone's are: by an entry point of an installed "
            "distribution",
            remedy="run pip install -e . in the source tree, or pip install npu-backend",
        )
    return _ordered(candidates)


def _ordered(candidates: Iterable[Candidate]) -> tuple[Candidate, ...]:
    def place(candidate: Candidate) -> tuple[bool, bool, int, str, str]:
        info = candidate.info
        rank = len(BUILTIN_ORDER)
        if candidate.is_builtin and info.name in BUILTIN_ORDER:
            rank = BUILTIN_ORDER.index(info.name)
        return (not candidate.is_builtin, bool(candidate.hidden), rank, info.dist, info.name)

    ordered: list[Candidate] = []
    taken: dict[tuple[str, str], str] = {}
    for candidate in sorted(candidates, key=place):  # stable: the file's order decides at last
        info = candidate.info
        before = taken.get((info.dist, info.name))
        if before is not None and not candidate.hidden:
            why = f'the distribution declares the name twice, "{before}" is first'
            candidate = evolve(candidate, hidden=why)
        elif not candidate.hidden:
            taken[info.dist, info.name] = info.entry_point
        ordered.append(candidate)
    return tuple(ordered)


def _candidates(dist: Distribution, key: str, hidden: str) -> Iterator[Candidate]:
    version = _version(dist)
    try:
        found = [(e, api) for e in dist.entry_points if (api := _api(e.group)) is not None]
    except Exception as err:  # noqa: BLE001 - foreign metadata: it becomes this plugin's record
        info = PluginInfo(key or "unknown", key or "unknown", version)
        yield Candidate(info, broken=f"entry_points.txt cannot be read: {describe(err)}")
        return
    fitting = {entry.name for entry, other_api in found if not other_api}
    for entry, other_api in found:
        if other_api and entry.name in fitting:
            continue  # it is built for this API as well, and that one counts
        info = PluginInfo(entry.name, key or "unknown", version, f"{entry.name} = {entry.value}")
        broken = "" if key else f"the metadata in {_place(dist)} has no Name"
        yield Candidate(info, entry, hidden=hidden, broken=broken, other_api=other_api)


def _api(group: str) -> str | None:
    """Return None for a group that is none of ours, an empty string for this API's, and for any
    other what it names."""
    base, _, rest = group.partition(f"{_GROUP}.")
    if group == _GROUP:
        number = "1"
    elif base or not rest:
        return None
    else:
        match = re.fullmatch(r"v(\d+)", rest)
        if match is None:
            return f"an unknown plugin API (the group {group} names none)"
        number = match[1]
    return "" if int(number) == PLUGIN_API else f"plugin API {int(number)}"


def _key(dist: Distribution) -> str:
    """Return the canonical name, from the folder's name where there is one.

    ``Distribution.name`` parses METADATA, which for a large environment costs more than all else
    that is done while planning. ``_normalized_name`` is what importlib.metadata itself tells
    distributions apart by; where it is missing, the public way is taken.
    """
    name: object = None
    if isinstance(dist, PathDistribution):
        try:
            name = getattr(dist, "_normalized_name", None)
        except Exception:  # noqa: BLE001 - neither the folder nor METADATA gives a name
            return ""
    name = name or _metadata(dist, "Name")
    return str(canonicalize_name(name)) if isinstance(name, str) else ""


def _version(dist: Distribution) -> str:
    return _metadata(dist, "Version") or "unknown"


def _metadata(dist: Distribution, key: str) -> str | None:
    """Return a field, or None: asked for one that is missing, newer Pythons warn or raise."""
    try:
        fields = dist.metadata
        value: object = fields[key] if key in fields else None  # noqa: SIM401 - 3.10 has no get
    except Exception:  # noqa: BLE001 - metadata that cannot be read is as good as none
        return None
    return value if isinstance(value, str) else None


def _entry_point_text(dist: Distribution) -> str | None:
    try:
        return dist.read_text("entry_points.txt")
    except UnicodeDecodeError:
        # Not ours to judge unless it names the group, and that cannot be read.
        return None


def _place(dist: Distribution) -> str:
    return os.path.realpath(str(dist.locate_file("")))
