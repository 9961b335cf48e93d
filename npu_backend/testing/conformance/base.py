"""What the suites share: the plugin, its claims, and the places where its tests run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import pytest
from attrs import frozen

from npu_backend.catalog import load_catalog
from npu_backend.deployment import Deployment
from npu_backend.errors import NpuBackendError
from npu_backend.offers import Offer, Record
from npu_backend.testing.conformance.places import (
    DEVICES,
    Place,
    everywhere,
    home_of,
    opened,
    others_of,
    parameter,
)
from npu_backend.testing.conformance.subject import Subject

__all__ = ["Case", "Conformance", "at_every_place"]

F = TypeVar("F", bound=Callable[..., Any])
Case = Any
"""What a suite asks about: a batched matmul, or a layer. Hashable, and its text names a test."""

_MARK = "_npu_backend_every_place"


def at_every_place(function: F) -> F:
    """Mark a test that runs on a simulated NPU of every chip and CANN that is offered."""
    setattr(function, _MARK, True)
    return function


@frozen
class _Survey:
    """What a plugin offers, asked once for a suite.

    Args:
        subject: The plugin.
        answers: By case and (chip family, CANN): what the plugin says.
        strategy: The one strategy that is under test.
    """

    subject: Subject
    answers: Mapping[tuple[Case, tuple[str, str]], tuple[Record, ...]]
    strategy: str

    def offer(self, case: Case, place: tuple[str, str]) -> Offer | None:
        """Return the offer for a case at a place, or None where it is refused."""
        for record in self.answers[case, place]:
            if isinstance(record, Offer) and record.strategy == self.strategy:
                return record
        return None

    def offered(self, case: Case) -> tuple[tuple[str, str], ...]:
        """Return where a case is offered, in the order of :func:`everywhere`."""
        return tuple(p for c, p in self.answers if c == case and self.offer(c, p))


_SUBJECTS: dict[type, Subject] = {}
_SURVEYS: dict[type, _Survey] = {}


class Conformance:
    """Base of the suites; subclass one of those, not this.

    Attributes:
        plugin: The module or object that holds the hooks. Required.
        name: Its entry point's name; default: the installed one's, else the module's.
        dist: Its distribution's name; likewise.
        strategy: Name of the strategy under test; needed where the plugin offers several.
        socs: Chip families on which it is claimed, such as ``("A3",)``: offered there and nowhere
            else. Default: wherever the hooks offer it.
        canns: CANN releases, likewise.
        deployment: More options of the deployment, such as ``{"kernels": "none"}``.
        devices: Where to run: ``cpu``, ``sim``, and ``npu`` where there is a real one.
        without: Built-in plugins that are left out beside it.
    """

    plugin: ClassVar[Any] = None
    name: ClassVar[str | None] = None
    dist: ClassVar[str | None] = None
    strategy: ClassVar[str | None] = None
    socs: ClassVar[Sequence[str] | None] = None
    canns: ClassVar[Sequence[str] | None] = None
    deployment: ClassVar[Mapping[str, Any]] = {}
    devices: ClassVar[Sequence[str]] = DEVICES
    without: ClassVar[Sequence[str]] = ()

    # --- what a suite defines -------------------------------------------------------------------

    @classmethod
    def cases(cls) -> tuple[Case, ...]:
        """Return what is asked about."""
        raise NotImplementedError

    @classmethod
    def ask(cls, subject: Subject, case: Case, deployment: Deployment) -> tuple[Record, ...]:
        """Return what the plugin says of a case."""
        raise NotImplementedError

    @classmethod
    def options(cls) -> dict[str, Any]:
        """Return the deployment's options beside chip and versions."""
        return {"role": "null", **cls.deployment}

    # --- asking ---------------------------------------------------------------------------------

    @classmethod
    def subject(cls) -> Subject:
        """Return the plugin in a registry of its own."""
        if cls not in _SUBJECTS:
            _SUBJECTS[cls] = Subject.of(
                cls.plugin, name=cls.name, dist=cls.dist, without=cls.without
            )
        return _SUBJECTS[cls]

    @classmethod
    def survey(cls) -> _Survey:
        """Ask for every case on every chip and CANN of the catalog.

        Raises:
            NpuBackendError: The plugin fails, or what is under test is not clear.
        """
        if cls not in _SURVEYS:
            _SURVEYS[cls] = _asked(cls)
        return _SURVEYS[cls]

    @classmethod
    def claimed(cls, place: tuple[str, str]) -> bool:
        """Whether ``socs`` and ``canns`` claim a place; what is not said is claimed."""
        family, cann = place
        return (cls.socs is None or family in cls.socs) and (cls.canns is None or cann in cls.canns)

    def plan_options(self, place: Place) -> Deployment:
        """Return the deployment of a place."""
        return place.deployment(**self.options())

    # --- pytest ---------------------------------------------------------------------------------

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Give each test its cases and places."""
        names = metafunc.fixturenames
        if "place" not in names and "case" not in names:
            return
        try:
            survey = self.survey()
            found = self._parameters(survey, metafunc.function, with_place="place" in names)
        except Exception:  # noqa: BLE001 - told by test_claims, and by a test that cannot run
            found = []
        if "place" in names:
            # Nothing offered is no pass: test_claims fails, and here stands a test that says so.
            metafunc.parametrize(
                ("place", "case"), found or [pytest.param(None, None, id="nothing-offered")]
            )
        else:
            metafunc.parametrize("case", found or [pytest.param(None, id="nothing-offered")])

    def _parameters(self, survey: _Survey, function: Any, *, with_place: bool) -> list[Any]:
        if not with_place:
            return [pytest.param(case, id=str(case)) for case in self.cases()]
        found = []
        for case in self.cases():
            offered = [p for p in survey.offered(case) if self.claimed(p)]
            if getattr(function, _MARK, False):
                places = others_of(offered) if "sim" in self.devices else ()
            else:
                places = home_of(offered, self.devices)
            found += [parameter(place, case, id=f"{place}-{case}") for place in places]
        return found

    @pytest.fixture
    def at(self, request: pytest.FixtureRequest, place: Place | None) -> Place:
        """The place of a test, its device up."""
        if place is None:
            survey = self.survey()  # raises what is wrong with the plugin
            pytest.fail(
                f"{survey.subject.info} offers {survey.strategy} nowhere that is claimed: nothing "
                "can be shown"
            )
        here = opened(place, request)
        if place.device == "npu":
            case = request.getfixturevalue("case")
            if self.survey().offer(case, (here.soc, here.cann)) is None:
                pytest.skip(f"not offered on this device: {here.soc}, CANN {here.cann}")
        return here

    def test_claims(self) -> None:
        """Offered where it is claimed and refused everywhere else, by every case."""
        survey, wrong = self.survey(), []
        for case in self.cases():
            offered = survey.offered(case)
            claims = [p for p in everywhere() if self.claimed(p)]
            explicit = self.socs is not None or self.canns is not None
            if not offered:
                wrong.append(f"{case} is offered nowhere")
            wrong += [f"{case} is offered on {_told(p)}, which is not claimed" for p in offered
                      if not self.claimed(p)]  # fmt: skip
            wrong += [f"{case} is claimed on {_told(p)} and refused: {self._why(case, p)}"
                      for p in claims if explicit and p not in offered]  # fmt: skip
        if unknown := self._unknown_claims():
            wrong += unknown
        if wrong:
            pytest.fail(_list(f"{survey.subject.info}: {survey.strategy}", wrong))

    def _unknown_claims(self) -> list[str]:
        versions = load_catalog().versions
        said = (("socs", self.socs, tuple(versions.socs)), ("canns", self.canns, versions.cann))
        return [
            f"{name} names {value!r}; known are {', '.join(known)}"
            for name, values, known in said
            for value in values or ()
            if value not in known
        ]

    def _why(self, case: Case, place: tuple[str, str]) -> str:
        refusals = [r for r in self.survey().answers[case, place] if hasattr(r, "reasons")]
        return "; ".join(str(why) for r in refusals for why in r.reasons) or "no opinion"

    def test_answers_are_stable(self) -> None:
        """The same question has the same answer: asked again, and by a fresh process's rules."""
        survey = self.survey()
        wrong = [
            f"{case} on {_told(place)}"
            for (case, place), before in survey.answers.items()
            if self.ask(survey.subject, case, _deployment(type(self), place)) != before
        ]
        if wrong:
            pytest.fail(_list("the hooks answer differently when asked again", wrong))


def _told(place: tuple[str, str]) -> str:
    return f"{place[0]} with CANN {place[1]}"


def _list(title: str, lines: Iterable[str], limit: int = 12) -> str:
    rows = list(lines)
    left = [f"and {len(rows) - limit} more"] if len(rows) > limit else []
    return "\n  ".join([title, *rows[:limit], *left])


def _deployment(suite: type[Conformance], place: tuple[str, str]) -> Deployment:
    return Place("cpu", *place).deployment(**suite.options())


def _asked(suite: type[Conformance]) -> _Survey:
    subject = suite.subject()
    if not suite.cases():
        raise NpuBackendError(
            f"{suite.__name__} has no case",
            whom=f"the conformance suite of {subject.info}",
            why="nothing is said of what it serves",
            remedy="set `shapes` of a kernel's suite, `layers` of a path's",
        )
    answers = {
        (case, place): suite.ask(subject, case, _deployment(suite, place))
        for case in suite.cases()
        for place in everywhere()
    }
    spoken = dict.fromkeys(
        r.strategy for records in answers.values() for r in records if isinstance(r, Offer)
    )
    strategy = suite.strategy or next(iter(spoken), None)
    if strategy is None or (suite.strategy is None and len(spoken) > 1):
        raise NpuBackendError(
            f"{suite.__name__} does not say which strategy it tests",
            whom=f"the conformance suite of {subject.info}",
            why=f"the plugin offers {', '.join(spoken) or 'nothing'} for these cases",
            remedy="set `strategy`, and cases that the plugin serves",
        )
    return _Survey(subject, answers, strategy)
