"""Call order, and wrappers: what they may change and what they cannot break."""

from __future__ import annotations

import pytest
from attrs import evolve

from npu_backend import Decline, Keep, Offer, Reason
from npu_backend.errors import PluginError
from npu_backend.offers import Answer, Failure, PluginInfo
from npu_backend.registry import PluginWarning, Registry

OFFER = Offer(strategy="x", impl="vendor:X")
DECLINE = Decline(strategy="x", reasons=Reason("dtype", "float16 only"))


def strategies(answers):
    return [r.strategy for a in answers for r in a.records]


@pytest.fixture
def offering(register):
    def offering(registry, name, **flags):
        offer = Offer(strategy=name, impl="vendor:X")
        register(registry, lambda: offer, "select_bmm_kernel", name=name, dist=name, **flags)

    return offering


@pytest.fixture
def wrapped(register, offering):
    """A registry with the plugins a and b, and a wrapper around them."""

    def wrapped(wrapper, *, strict=False, others=("a", "b")):
        registry = Registry(strict=strict)
        for name in others:
            offering(registry, name)
        register(registry, wrapper, "select_bmm_kernel", name="wrap", dist="wrap", wrapper=True)
        return registry

    return wrapped


def test_tryfirst_and_trylast_mean_what_pluggy_means(ask, offering):
    registry = Registry()
    offering(registry, "first", tryfirst=True)
    offering(registry, "plain-a")
    offering(registry, "plain-b")
    offering(registry, "last", trylast=True)
    wanted = ["first", "plain-b", "plain-a", "last"]
    assert strategies(ask(registry, "select_bmm_kernel")) == wanted
    assert [i.name for i in registry.call_order("select_bmm_kernel")] == wanted
    positions = {r.info.name: r.hooks[0].position for r in registry.plugins}
    assert positions == {"first": 1, "plain-b": 2, "plain-a": 3, "last": 4}
    assert registry.plugins[0].hooks[0].tryfirst
    assert registry.plugins[3].hooks[0].trylast


def test_a_wrapper_sees_the_answers_and_may_change_their_order(ask, wrapped):
    seen = []

    def wrapper(bmm):
        answers = yield
        seen.extend(answers)
        return list(reversed(answers))

    registry = wrapped(wrapper)
    assert strategies(ask(registry, "select_bmm_kernel")) == ["a", "b"]
    assert [type(a) for a in seen] == [Answer, Answer]
    assert [i.name for i in registry.call_order("select_bmm_kernel")] == ["wrap", "b", "a"]
    assert registry.plugins[-1].hooks[0].wrapper


def test_a_wrapper_may_take_answers_out(ask, wrapped):
    def wrapper():
        answers = yield
        return [a for a in answers if a.plugin.name != "b"]

    assert strategies(ask(wrapped(wrapper), "select_bmm_kernel")) == ["a"]


def test_what_a_wrapper_adds_is_its_own_whatever_name_it_writes(ask, wrapped):
    def wrapper():
        answers = yield
        forged = Answer(answers[0].plugin, (Offer(strategy="new", impl="wrap:X"),))
        return [forged, *answers]

    answers = ask(wrapped(wrapper), "select_bmm_kernel")
    assert [(a.plugin.name, a.records[0].strategy) for a in answers] == [
        ("wrap", "new"),
        ("b", "b"),
        ("a", "a"),
    ]


def test_what_a_wrapper_passes_on_in_part_keeps_its_provenance(ask, register):
    registry = Registry()
    register(registry, lambda: (OFFER, DECLINE), "select_bmm_kernel", name="two")

    def wrapper():
        answers = yield
        return [evolve(a, records=a.records[:1]) for a in answers]

    register(registry, wrapper, "select_bmm_kernel", name="wrap", wrapper=True)
    (answer,) = ask(registry, "select_bmm_kernel")
    assert (answer.plugin.name, answer.records) == ("two", (OFFER,))


def test_a_wrapper_cannot_hide_a_failure(ask, register):
    registry = Registry()

    def broken():
        raise RuntimeError("broken")

    def wrapper():
        yield
        return []

    register(registry, broken, "select_bmm_kernel", name="broken")
    register(registry, wrapper, "select_bmm_kernel", name="wrap", wrapper=True)
    with pytest.warns(PluginWarning):
        (answer,) = ask(registry, "select_bmm_kernel")
    assert answer.plugin.name == "broken"


def raises_before():
    raise RuntimeError("before")
    yield


def raises_after():
    answers = yield
    answers.clear()
    raise RuntimeError("after")


def never_yields():
    if OFFER is None:
        yield
    return []


def yields_twice():
    yield
    yield
    return []


def ignores_its_end():
    answers = yield
    try:
        yield answers
    except GeneratorExit:
        yield answers


def returns_nothing():
    yield


def returns_text():
    yield
    return "torch.bmm"


def returns_records():
    yield
    return [OFFER]


def returns_a_vote():
    answers = yield
    return [*answers, Answer(PluginInfo("wrap"), (Keep("w", "y"),))]


def makes_up_a_failure():
    answers = yield
    return [*answers, Answer(answers[0].plugin, failure=Failure("select_bmm_kernel", "ha"))]


FAULTS = [
    (raises_before, "raised RuntimeError: before"),
    (raises_after, "raised RuntimeError: after"),
    (never_yields, "did not yield"),
    (yields_twice, "yielded twice"),
    (ignores_its_end, "yielded twice"),
    (returns_nothing, "returned a NoneType from its wrapper, which must return the list of"),
    (returns_text, "returned a str from its wrapper, "),
    (returns_records, "returned a Offer among the answers of its wrapper"),
    (returns_a_vote, "returned a Keep among its records; select_bmm_kernel takes Offer,"),
    (makes_up_a_failure, "made up a failure in its wrapper; raise an exception instead"),
]


@pytest.mark.parametrize(("wrapper", "message"), FAULTS)
def test_a_wrapper_that_fails_leaves_the_answers_as_without_it(
    wrapper, message, ask, offering, wrapped
):
    registry = wrapped(wrapper)
    without = Registry()
    for name in ("a", "b"):
        offering(without, name)
    with pytest.warns(PluginWarning, match=r"^wrap \(wrap 1\) failed in select_bmm_kernel"):
        *answers, failed = ask(registry, "select_bmm_kernel")
    assert tuple(answers) == ask(without, "select_bmm_kernel")
    assert failed.plugin.name == "wrap"
    assert failed.failure.message.startswith(message)


@pytest.mark.parametrize(("wrapper", "message"), FAULTS)
def test_under_strict_a_wrapper_that_fails_is_an_error(wrapper, message, ask, wrapped):
    with pytest.raises(PluginError, match=r"^wrap \(wrap 1\) failed in") as caught:
        ask(wrapped(wrapper, strict=True), "select_bmm_kernel")
    assert caught.value.why[0].startswith(message)


def test_a_wrapper_cannot_swallow_anothers_error_under_strict_and_is_closed(ask, register, wrapped):
    closed = []

    def wrapper():
        try:
            answers = yield
        except Exception:
            return []
        finally:
            closed.append(True)
        return answers

    registry = wrapped(wrapper, strict=True, others=())

    def broken():
        raise RuntimeError("broken")

    register(registry, broken, "select_bmm_kernel", name="broken")
    with pytest.raises(PluginError, match=r"^broken "):
        ask(registry, "select_bmm_kernel")
    assert closed == [True]


def test_wrappers_nest_and_a_failing_one_does_not_hide_the_other(ask, register, wrapped):
    registry = wrapped(raises_after)

    def outer():
        answers = yield
        return [a for a in answers if a.plugin.name != "a"]

    register(registry, outer, "select_bmm_kernel", name="outer", wrapper=True, tryfirst=True)
    with pytest.warns(PluginWarning):
        answers = ask(registry, "select_bmm_kernel")
    assert [a.plugin.name for a in answers] == ["b", "wrap"]
    assert [i.name for i in registry.call_order("select_bmm_kernel")][:2] == ["outer", "wrap"]


def test_nobody_but_the_registry_calls_hooks():
    public = {name for name in vars(Registry) if not name.startswith("_")}
    assert public == {
        "ask_bmm",
        "ask_paths",
        "ask_release",
        "call_order",
        "load",
        "plugins",
        "register",
    }
