"""TorchNPU lines, packages, CANN releases and chips.

Capability follows the TorchNPU *line*, never the package number: 2.8.0.post4 has ops that 2.9.0
lacks. So a package is looked up, and one that is not in the table is an error.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any

from attrs import field, frozen

from npu_backend.errors import CatalogError, DeploymentError

__all__ = ["SocRecord", "Versions", "cann_key", "suggest"]

_CANN = re.compile(r"^\s*(\d+)\.(\d+)(?:[.\-+].*)?\s*$")


def suggest(word: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean X?"`` for the nearest known word, or an empty string."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""


def cann_key(version: str) -> tuple[int, int]:
    """Return (major, minor) of a CANN version; limits never change inside a minor release.

    Raises:
        DeploymentError: The text is no CANN version.
    """
    match = _CANN.match(version)
    if match is None:
        raise DeploymentError(
            f"{version!r} is not a CANN version",
            whom="the CANN version of the deployment",
            why="a CANN version starts with two numbers, as in 8.2.RC1 or 9.1.0",
            remedy="give the version that the device's toolkit reports",
            code="library.version",
        )
    return int(match[1]), int(match[2])


@frozen
class SocRecord:
    """One chip: its family, and the runtime's name where one was given."""

    family: str
    name: str | None = None


@frozen
class Versions:
    """The tables of lines, packages, CANN releases and chips."""

    source: str
    cann: tuple[str, ...]
    lines: Mapping[str, Mapping[str, Any]] = field(repr=False, hash=False)
    socs: Mapping[str, Mapping[str, Any]] = field(repr=False, hash=False)

    @property
    def newest_cann(self) -> str:
        return self.cann[-1]

    @property
    def newest_line(self) -> str:
        return list(self.lines)[-1]

    def line_order(self, line: str) -> int:
        """Return the position of a line, oldest first, for comparisons."""
        return list(self.lines).index(line)

    def line_of(self, torch_npu: str) -> str:
        """Return the line of a package version such as ``2.9.0.post2``, or of a line itself.

        Raises:
            DeploymentError: The package is not in the table.
        """
        text = torch_npu.strip()
        if text in self.lines:
            return text
        packages = {p: line for line, row in self.lines.items() for p in row["packages"]}
        if text in packages:
            return packages[text]
        public = text.partition("+")[0]  # a local version such as +git1234 is a build of the same
        if public in packages:
            return packages[public]
        known = [*self.lines, *packages]
        raise DeploymentError(
            f"torch-npu {torch_npu} is not in the table of packages{suggest(text, known)}",
            whom="the TorchNPU line of the deployment",
            why=(
                "capability follows the line, and package numbers do not order lines",
                f"known lines: {', '.join(self.lines)}",
            ),
            remedy="name the line with --torch-npu LINE, or add the package with --catalog FILE",
            code="library.version",
        )

    def paired_cann(self, line: str) -> str:
        """Return the CANN release that a line is paired with."""
        return str(self.lines[line]["cann"])

    def line_for_cann(self, cann: str) -> str:
        """Return the line paired with a CANN release, or the nearest older one."""
        key = cann_key(cann)
        fitting = [n for n, row in self.lines.items() if cann_key(row["cann"]) <= key]
        if not fitting:
            raise self._too_old(cann)
        return fitting[-1]

    def known_cann(self, cann: str) -> tuple[str, str | None]:
        """Return the newest known release not newer than ``cann``, and a warning or None.

        Raises:
            DeploymentError: The version is older than everything known.
        """
        key = cann_key(cann)
        fitting = [c for c in self.cann if cann_key(c) <= key]
        if not fitting:
            raise self._too_old(cann)
        known = fitting[-1]
        if cann_key(known) == key:
            return known, None
        kind = "newer than" if known == self.newest_cann else "not in"
        return known, f"CANN {cann} is {kind} the catalog ({', '.join(self.cann)})"

    def _too_old(self, cann: str) -> DeploymentError:
        return DeploymentError(
            f"CANN {cann} is older than the catalog",
            whom="the CANN version of the deployment",
            why=f"known releases: {', '.join(self.cann)}",
            remedy="use a newer CANN, or describe this one with --catalog FILE",
            code="library.version",
        )

    def soc(self, name: str) -> SocRecord:
        """Return the chip of a family name (``A3``) or a runtime name (``Ascend910_9391``).

        Plain ``Ascend910B`` is the first generation, not A2; 9363 is A3.

        Raises:
            DeploymentError: The chip is not in the table.
        """
        text = name.strip()
        for family, row in self.socs.items():
            if text.lower() == family.lower():
                return SocRecord(family)
            for known in row["names"]:
                if text.lower() == known.lower():
                    return SocRecord(family, known)
        for family, row in self.socs.items():
            for prefix in row.get("prefixes", ()):
                if text.lower().startswith(prefix.lower()):
                    return SocRecord(family, text)
        known_names = [*self.socs, *(n for row in self.socs.values() for n in row["names"])]
        raise DeploymentError(
            f"chip {name!r} is not known{suggest(text, known_names)}",
            whom="the SoC of the deployment",
            why=f"known families: {', '.join(self.socs)}",
            remedy="give a family, or the name that aclrtGetSocName returns",
            code="soc.unsupported",
        )

    def soc_of_version(self, number: int) -> SocRecord:
        """Return the chip family of ``torch_npu.npu.get_soc_version()``'s number.

        The ranges are disjoint although 240..243 lies between A2's and A3's.
        """
        for family, row in self.socs.items():
            low, high = row["versions"]
            if low <= number <= high:
                return SocRecord(family)
        raise DeploymentError(
            f"SoC version number {number} is not known",
            whom="the SoC of the device",
            why="the number is in no range of the catalog",
            remedy="name the chip with --soc",
            code="soc.unsupported",
        )

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Versions:
        """Build the tables from their JSON form.

        Raises:
            CatalogError: A part is missing.
        """
        try:
            return cls(
                source=data["source"],
                cann=tuple(data["cann"]),
                lines=data["lines"],
                socs=data["socs"],
            )
        except (KeyError, TypeError) as err:
            raise CatalogError(
                "the version tables are incomplete", whom="catalog versions", why=str(err)
            ) from err
