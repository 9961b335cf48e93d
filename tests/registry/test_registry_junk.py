"""Arbitrary junk, from implementations and from wrappers."""

from __future__ import annotations

import warnings

from hypothesis import given, settings
from hypothesis import strategies as st

from npu_backend import Decline, Forbid, Keep, Offer, Reason, Release
from npu_backend.offers import Answer, PluginInfo
from npu_backend.registry import PluginWarning, Registry

OFFER = Offer(strategy="x", impl="vendor:X")
DECLINE = Decline(strategy="x", reasons=Reason("dtype", "float16 only"))
FORBID = Forbid(strategy="x", reasons=[Reason("model.numerics", "NaN on layer 3")])
HOOKS = ("select_preprocess_path", "select_bmm_kernel", "release_weights")


def uninitialised():
    return Offer.__new__(Offer)


class RaisingSequence(list):
    def __iter__(self):
        raise RuntimeError("not today")


RECORDS = st.sampled_from([OFFER, DECLINE, FORBID, Release("w", "y"), Keep("w", "y")])
# Built anew each time, for some of these cannot even be shown.
ODD = st.sampled_from([object, lambda: Offer, uninitialised, lambda: RaisingSequence([OFFER])]).map(
    lambda make: make()
)
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary(), RECORDS, ODD
)
JUNK = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.text(max_size=3), inner, max_size=3),
        st.lists(inner, max_size=3).map(iter),
    ),
    max_leaves=8,
)
ALLOWED = {
    hook: (Release, Keep) if "release" in hook else (Offer, Decline, Forbid) for hook in HOOKS
}


def only_valid(answers, hook):
    for answer in answers:
        assert type(answer) is Answer
        assert bool(answer.records) != (answer.failure is not None)
        assert all(type(record) in ALLOWED[hook] for record in answer.records)
        hash(answer)


@settings(max_examples=400, deadline=None)
@given(value=JUNK, hook=st.sampled_from(HOOKS))
def test_junk_gives_valid_records_or_one_failure_and_never_raises(value, hook, ask, register):
    registry = Registry()
    good = Keep("w", "good") if hook == "release_weights" else OFFER
    register(registry, lambda: good, hook, name="good")
    register(registry, lambda: value, hook, name="junk")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PluginWarning)
        answers = ask(registry, hook)
    only_valid(answers, hook)
    assert [a.records for a in answers if a.plugin.name == "good"] == [(good,)]
    assert len(answers) <= 2


@settings(max_examples=400, deadline=None)
@given(value=JUNK, hook=st.sampled_from(HOOKS), early=st.booleans())
def test_junk_from_a_wrapper_gives_valid_answers_and_never_raises(
    value, hook, early, ask, register
):
    registry = Registry()
    good = Keep("w", "good") if hook == "release_weights" else OFFER
    register(registry, lambda: good, hook, name="good")

    def wrapper():
        if early:
            yield value
            return None
        answers = yield
        return [*answers, Answer(PluginInfo("good"), value)] if isinstance(value, tuple) else value

    register(registry, wrapper, hook, name="junk", wrapper=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PluginWarning)
        answers = ask(registry, hook)
    only_valid(answers, hook)
