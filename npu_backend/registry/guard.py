"""Guards around hook implementations: whatever a plugin does, one :class:`Answer` comes of it.

A guard has the whole signature of its hook, so that pluggy passes every argument, and hands on
those that the implementation takes. It is called for each layer of each plan: equal records give
the very same Answer, and what a plugin returns again, the very same tuple or record, is not looked
at again.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

from attrs import evolve

from npu_backend import hookspecs
from npu_backend.offers import (
    REASON_CODES,
    Answer,
    Decline,
    Failure,
    Forbid,
    Keep,
    Offer,
    PluginInfo,
    Record,
    Release,
)
from npu_backend.registry.records import describe, plugin_error
from npu_backend.registry.validate import Implementation

__all__ = ["HOOK_RECORDS", "Guard"]

HOOK_RECORDS: Mapping[str, tuple[type, ...]] = {
    "select_preprocess_path": (Offer, Decline, Forbid),
    "select_bmm_kernel": (Offer, Decline, Forbid),
    "release_weights": (Release, Keep),
}
"""What an implementation of each hook may return."""

MEMO_LIMIT = 4096
"""Answers kept per implementation. A plugin that builds each one anew only loses the memo."""

_FOREIGN = (Exception, SystemExit)
"""What a plugin's code may raise without harm. A KeyboardInterrupt is the user's, and passes."""

_Waiting = Generator[None, list[Answer], Any]


class _NoAnswer(Exception):
    """What was returned is no answer; the text says why."""


class Guard:
    """The guard of one implementation.

    Args:
        implementation: What to call.
        info: Whose it is.
        strict: Whether a failure is raised instead of answered.
    """

    def __init__(self, implementation: Implementation, info: PluginInfo, *, strict: bool) -> None:
        self.info = info
        self.hook = implementation.hook
        self.strict = strict
        self._call = _passing(implementation)
        self._allowed = HOOK_RECORDS[self.hook]
        self._prefixes = tuple({f"{w}." for w in (info.name, info.name.lower(), info.dist)})
        # The value is kept beside the answer: while it lives no other object has its id.
        self._memo: dict[int, tuple[object, Answer]] = {}
        # By value: equal answers are one object, which makes memoising a plan by them cheap.
        self._answers: dict[tuple[Record, ...], Answer] = {}

    def function(self, *, wrapper: bool) -> Callable[..., Any]:
        """Return what pluggy registers in place of the implementation."""
        guarded: Any = self._wrapping() if wrapper else self._answering()
        guarded.__name__ = guarded.__qualname__ = self.hook
        # pluggy takes the argument names from what is wrapped: all of the hook's.
        guarded.__wrapped__ = getattr(hookspecs, self.hook)
        function: Callable[..., Any] = guarded
        return function

    # --- implementations that answer ------------------------------------------------------------

    def _answering(self) -> Callable[..., Answer | None]:
        call, memo = self._call, self._memo

        def answering(*arguments: object) -> Answer | None:
            try:
                value = call(*arguments)
            except _FOREIGN as err:
                return self._failed(f"raised {describe(err)}", err)
            if value is None:
                return None
            known = memo.get(id(value))
            if known is not None:
                return known[1]
            return self._judged(value)

        return answering

    def _judged(self, value: object) -> Answer | None:
        try:
            records = self._records(value)
        except _NoAnswer as err:
            return self._failed(str(err), None)
        except _FOREIGN as err:  # from the value's own code: an iteration, an attribute
            return self._failed(f"returned a {_kind(value)} that raised {describe(err)}", err)
        if not records:
            return None
        if len(self._memo) >= MEMO_LIMIT or len(self._answers) >= MEMO_LIMIT:
            self._memo.clear()
            self._answers.clear()
        answer = self._answers.get(records)
        if answer is None:
            answer = self._answers[records] = Answer(self.info, records)
        # A list may hold something else the next time.
        if type(value) is tuple or type(value) in self._allowed:
            self._memo[id(value)] = (value, answer)
        return answer

    def _records(self, value: object) -> tuple[Record, ...]:
        if type(value) in self._allowed:
            items: tuple[Any, ...] = (value,)
        elif isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray)):
            items = tuple(value)
        else:
            if isinstance(value, types.CoroutineType):
                value.close()  # or Python warns that nobody awaited it
            raise _NoAnswer(
                f"returned a {_kind(value)}; {self._wanted}, a sequence of them, or None"
            )
        for item in items:
            if type(item) not in self._allowed:
                raise _NoAnswer(f"returned a {_kind(item)} among its records; {self._wanted}")
            self._check_codes(item)
        hash(items)  # plans are memoised by it; a list inside a record shows here, not there
        return items

    @property
    def _wanted(self) -> str:
        return f"{self.hook} takes " + ", ".join(kind.__name__ for kind in self._allowed)

    def _check_codes(self, record: Record) -> None:
        if isinstance(record, (Decline, Forbid)):
            for reason in record.reasons:
                if reason.code in REASON_CODES or reason.code.startswith(self._prefixes):
                    continue
                own = " or ".join(sorted(f"{p}NAME" for p in self._prefixes))
                raise _NoAnswer(
                    f"returned the reason code {reason.code!r} for {record.strategy!r}; a code is "
                    f"one of the core's, or {own}"
                )

    # --- implementations that wrap --------------------------------------------------------------

    def _wrapping(self) -> Callable[..., _Waiting]:
        def wrapping(*arguments: object) -> _Waiting:
            started = self._started(arguments)
            try:
                answers = yield
            except BaseException:
                # Another plugin under strict, or the user: not this wrapper's affair.
                if not isinstance(started, Answer):
                    _close(started)
                raise
            if isinstance(started, Answer):
                return [*answers, started]
            return self._finished(started, answers)

        return wrapping

    def _started(self, arguments: tuple[object, ...]) -> _Waiting | Answer:
        """Run a wrapper up to its yield; an Answer means that it failed."""
        try:
            inner: _Waiting = self._call(*arguments)
            next(inner)
        except StopIteration:
            return self._failed("did not yield", None)
        except _FOREIGN as err:
            return self._failed(f"raised {describe(err)}", err)
        return inner

    def _finished(self, inner: _Waiting, answers: Sequence[Answer]) -> list[Answer]:
        """Let the wrapper see the answers; where it fails they are as without it."""
        try:
            inner.send(list(answers))  # a copy: one that changes it and then raises harms nobody
        except StopIteration as stop:
            value = stop.value
        except _FOREIGN as err:
            return [*answers, self._failed(f"raised {describe(err)}", err)]
        else:
            _close(inner)
            return [*answers, self._failed("yielded twice", None)]
        try:
            return self._merged(value, answers)
        except _NoAnswer as err:
            return [*answers, self._failed(str(err), None)]
        except _FOREIGN as err:
            text = f"returned a {_kind(value)} that raised {describe(err)}"
            return [*answers, self._failed(text, err)]

    def _merged(self, value: object, answers: Sequence[Answer]) -> list[Answer]:
        """Check what a wrapper returned, and whose it is.

        What it passes on, whole or in part, keeps its provenance. Everything new is the wrapper's
        own, whatever plugin it names. A failure cannot be hidden.
        """
        if not isinstance(value, (list, tuple)):
            raise _NoAnswer(
                f"returned a {_kind(value)} from its wrapper, which must return the list of "
                "answers that its yield gave, changed or not"
            )
        merged: list[Answer] = []
        for item in value:
            if any(item is answer for answer in answers):
                merged.append(item)
            elif type(item) is not Answer:
                raise _NoAnswer(f"returned a {_kind(item)} among the answers of its wrapper")
            elif item.failure is not None:
                raise _NoAnswer("made up a failure in its wrapper; raise an exception instead")
            elif _passed_on(item, answers):
                merged.append(item)
            else:
                records = self._records(item.records)
                merged.append(evolve(item, plugin=self.info, records=records))
        merged.extend(a for a in answers if a.failure is not None and a not in merged)
        return [a for a in merged if a.records or a.failure is not None]

    # --- failures -------------------------------------------------------------------------------

    def _failed(self, message: str, cause: BaseException | None) -> Answer:
        if self.strict:
            raise plugin_error(
                self.info,
                f"failed in {self.hook}",
                whom=f"the hook {self.hook}",
                why=message,
                remedy="correct the plugin, block it, or let the plan go on without it: strict off",
            ) from cause
        return Answer(self.info, failure=Failure(self.hook, message))


def _passed_on(item: Answer, answers: Sequence[Answer]) -> bool:
    """Whether all records of an answer are that plugin's own, from before the wrapper."""
    own = {id(r) for a in answers if a.plugin == item.plugin for r in a.records}
    return isinstance(item.records, tuple) and all(id(r) in own for r in item.records)


def _passing(implementation: Implementation) -> Callable[..., Any]:
    """Return a callable that takes all arguments of the hook, in order."""
    function, taken = implementation.function, implementation.arguments
    if taken is None:
        return function
    return lambda *given: function(*[given[i] for i in taken])


def _close(inner: _Waiting) -> None:
    # It is being given up: what it says while it goes changes nothing.
    with contextlib.suppress(*_FOREIGN):
        inner.close()


def _kind(value: object) -> str:
    return type(value).__name__
