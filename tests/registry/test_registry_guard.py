"""Whatever an implementation does, valid records or one failure come of it."""

from __future__ import annotations

import types
import warnings

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_backend import (
    Decline,
    Deployment,
    Forbid,
    Keep,
    MlaLayer,
    Offer,
    Reason,
    Release,
    hookimpl,
)
from npu_backend.errors import PluginError
from npu_backend.offers import REASON_CODES, Answer, BmmSpec, Failure, PluginInfo
from npu_backend.registry import PluginWarning, Registry

OFFER = Offer(strategy="x", impl="vendor:X")
DECLINE = Decline(strategy="x", reasons=Reason("dtype", "float16 only"))
FORBID = Forbid(strategy="x", reasons=[Reason("model.numerics", "NaN on layer 3")])
LAYER = MlaLayer(
    layer_id=0,
    hidden_size=2048,
    num_heads=16,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
)
DEPLOYMENT = Deployment()
BMM = BmmSpec(layer=LAYER, site="v_up", B=16, K=512, N=128)
HOOKS = ("select_preprocess_path", "select_bmm_kernel", "release_weights")


def register(registry, function, hook, name="vendor", dist="vendor-kit", **flags):
    module = types.ModuleType(name)
    module.implementation = hookimpl(function, specname=hook, **flags)
    return registry.register(module, name=name, dist=dist, version="1")


def ask(registry, hook):
    if hook == "release_weights":
        return registry.ask_release(LAYER, DEPLOYMENT, {"w_kc": ()})
    if hook == "select_bmm_kernel":
        return registry.ask_bmm(BMM, DEPLOYMENT)
    return registry.ask_paths(LAYER, DEPLOYMENT)


def answers_to(value, hook="select_bmm_kernel", *, strict=False, raises=None):
    registry = Registry(strict=strict)

    def implementation():
        if raises is not None:
            raise raises
        return value

    register(registry, implementation, hook)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PluginWarning)
        return ask(registry, hook)


# --- what is an answer -----------------------------------------------------------------------


@pytest.mark.parametrize("hook", HOOKS[:2])
@pytest.mark.parametrize("record", [OFFER, DECLINE, FORBID])
def test_one_record_is_a_tuple_of_one(hook, record):
    (answer,) = answers_to(record, hook)
    assert answer == Answer(PluginInfo("vendor", "vendor-kit", "1"), (record,))


def test_votes_are_answers_of_release_weights():
    votes = [Release("w_kc", "nobody reads it"), Keep("w_vc", "somebody might")]
    (answer,) = answers_to(votes, "release_weights")
    assert answer.records == tuple(votes)


@pytest.mark.parametrize("empty", [None, (), []])
def test_no_opinion_is_no_answer(empty):
    assert answers_to(empty) == ()


def test_a_list_that_changes_later_does_not_change_the_answer():
    given_list = [OFFER]
    registry = Registry()
    register(registry, lambda: given_list, "select_bmm_kernel")
    (first,) = ask(registry, "select_bmm_kernel")
    given_list.append(DECLINE)
    (second,) = ask(registry, "select_bmm_kernel")
    assert first.records == (OFFER,)
    assert second.records == (OFFER, DECLINE)


def test_the_same_records_give_the_very_same_answer_and_are_checked_once(monkeypatch):
    records = (OFFER, DECLINE)
    registry = Registry()
    register(registry, lambda: records, "select_bmm_kernel")
    (first,) = ask(registry, "select_bmm_kernel")
    monkeypatch.setattr("npu_backend.registry.guard.Guard._records", None)
    (second,) = ask(registry, "select_bmm_kernel")
    assert first is second


def test_equal_records_built_anew_give_the_very_same_answer():
    registry = Registry()
    register(registry, lambda: [Offer(strategy="x", impl="vendor:X")], "select_bmm_kernel")
    (first,) = ask(registry, "select_bmm_kernel")
    (second,) = ask(registry, "select_bmm_kernel")
    assert first is second


def test_records_built_anew_for_each_layer_do_not_pile_up(monkeypatch):
    monkeypatch.setattr("npu_backend.registry.guard.MEMO_LIMIT", 8)
    numbers = iter(range(100))
    registry = Registry()

    def select_bmm_kernel():
        return Offer(strategy=f"x{next(numbers)}", impl="vendor:X")

    register(registry, select_bmm_kernel, "select_bmm_kernel")
    found = [ask(registry, "select_bmm_kernel")[0].records[0].strategy for _ in range(100)]
    assert found == [f"x{n}" for n in range(100)]


class Impostor(Offer):
    """A subclass might be anything, also mutable."""


def uninitialised():
    return Offer.__new__(Offer)


@pytest.mark.parametrize(
    ("hook", "value", "message"),
    [
        ("select_bmm_kernel", "torch.bmm", "returned a str; select_bmm_kernel takes Offer,"),
        ("select_bmm_kernel", {"strategy": "x"}, "returned a dict; "),
        ("select_bmm_kernel", {OFFER}, "returned a set; "),
        ("select_bmm_kernel", True, "returned a bool; "),
        ("select_bmm_kernel", Offer, "returned a type; "),
        ("select_bmm_kernel", [OFFER, None], "returned a NoneType among its records; "),
        ("select_bmm_kernel", [[OFFER]], "returned a list among its records; "),
        ("select_bmm_kernel", Keep("w_vc", "mine"), "returned a Keep; "),
        ("select_preprocess_path", [Release("w", "y")], "returned a Release among its records; "),
        ("release_weights", OFFER, "returned a Offer; release_weights takes Release, Keep,"),
        ("release_weights", (Keep("a", "b"), DECLINE), "returned a Decline among its records; "),
        ("select_bmm_kernel", Answer(PluginInfo("me"), (OFFER,)), "returned a Answer; "),
        (
            "select_bmm_kernel",
            Impostor(strategy="x", impl="vendor:X"),
            "returned a Impostor; ",
        ),
        (
            "select_bmm_kernel",
            [Impostor(strategy="x", impl="vendor:X")],
            "returned a Impostor among its records; ",
        ),
        ("select_bmm_kernel", uninitialised(), "returned a Offer that raised AttributeError"),
        (
            "select_bmm_kernel",
            Offer(strategy="x", impl="vendor:X", mode=["a", "list"]),
            "returned a Offer that raised TypeError: unhashable",
        ),
    ],
)
def test_a_wrong_type_is_a_failure_that_names_it(hook, value, message):
    (answer,) = answers_to(value, hook)
    assert answer.records == ()
    assert answer.failure.hook == hook
    assert answer.failure.message.startswith(message)
    with pytest.raises(PluginError, match=f"failed in {hook}"):
        answers_to(value, hook, strict=True)


def test_a_coroutine_is_a_failure_and_leaves_no_warning():
    async def coroutine():
        return OFFER

    (answer,) = answers_to(coroutine())
    assert answer.failure.message.startswith("returned a coroutine; ")


class RaisingClass:
    @property
    def __class__(self):
        raise RuntimeError("who knows")


def test_a_value_that_raises_when_its_class_is_asked_for_is_a_failure():
    (answer,) = answers_to(RaisingClass())
    assert answer.failure.message == "returned a RaisingClass that raised RuntimeError: who knows"


@pytest.mark.parametrize("code", ["vendor.too_hot", "vendor-kit.too_hot", *REASON_CODES])
def test_a_reason_code_is_the_cores_or_has_the_plugins_prefix(code):
    (answer,) = answers_to(Decline(strategy="x", reasons=Reason(code, "so it is")))
    assert answer.failure is None


@pytest.mark.parametrize("code", ["dims.nonsense", "vendors.x", "vendor_kit.x", "other.x"])
@pytest.mark.parametrize("kind", [Decline, Forbid])
def test_a_reason_code_of_nobody_is_a_failure(kind, code):
    reasons = [Reason("dtype", "float16 only"), Reason(code, "so it is")]
    (answer,) = answers_to([OFFER, kind(strategy="x", reasons=reasons)])
    assert answer.failure.message == (
        f"returned the reason code {code!r} for 'x'; a code is one of the core's, or "
        "vendor-kit.NAME or vendor.NAME"
    )


def test_a_plugin_whose_name_has_capitals_may_write_its_prefix_small():
    registry = Registry()
    register(
        registry,
        lambda: Decline(strategy="x", reasons=Reason("hot.y", "z")),
        "select_bmm_kernel",
        name="Hot",
    )
    assert ask(registry, "select_bmm_kernel")[0].failure is None


# --- what is raised ---------------------------------------------------------------------------


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("two\n  lines"), "raised ValueError: two lines"),
        (ValueError(), "raised ValueError"),
        (StopIteration("odd"), "raised StopIteration: odd"),
        (SystemExit(3), "raised SystemExit: 3"),
        (Unprintable(), "raised Unprintable: (its text cannot be shown)"),
        (KeyError("<object at 0x7f00deadbeef>"), "raised KeyError: '<object at 0x...>'"),
        (ValueError("x" * 9000), "raised ValueError: " + "x" * 500 + "..."),
    ],
)
def test_an_exception_is_a_failure_on_one_line_without_addresses(error, message):
    (answer,) = answers_to(None, raises=error)
    assert answer.failure == Failure("select_bmm_kernel", message)
    with pytest.raises(PluginError) as caught:
        answers_to(None, raises=error, strict=True)
    assert caught.value.__cause__ is error
    assert caught.value.what == "vendor (vendor-kit 1) failed in select_bmm_kernel"


@pytest.mark.parametrize("strict", [False, True])
def test_an_interrupt_in_a_hook_is_the_users(strict):
    with pytest.raises(KeyboardInterrupt):
        answers_to(None, raises=KeyboardInterrupt(), strict=strict)


def test_a_plugin_cannot_change_the_readers_that_others_see():
    registry = Registry()
    readers = {"w_kc": ("q_absorb@decode",)}

    def kind(readers):
        return Keep("w_kc", ", ".join(readers["w_kc"]))

    def evil(readers):
        readers["w_kc"] = ()

    register(registry, kind, "release_weights", name="kind")
    register(registry, evil, "release_weights", name="evil")
    with pytest.warns(PluginWarning):
        failed, answer = registry.ask_release(LAYER, DEPLOYMENT, readers)
    assert failed.failure.message.startswith("raised TypeError")
    assert answer.records == (Keep("w_kc", "q_absorb@decode"),)
    assert readers == {"w_kc": ("q_absorb@decode",)}


# --- property: arbitrary junk -----------------------------------------------------------------


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
def test_junk_gives_valid_records_or_one_failure_and_never_raises(value, hook):
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
def test_junk_from_a_wrapper_gives_valid_answers_and_never_raises(value, hook, early):
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


# --- order and wrappers -----------------------------------------------------------------------


def strategies(answers):
    return [r.strategy for a in answers for r in a.records]


def offering(registry, name, **flags):
    offer = Offer(strategy=name, impl="vendor:X")
    register(registry, lambda: offer, "select_bmm_kernel", name=name, dist=name, **flags)


def test_tryfirst_and_trylast_mean_what_pluggy_means():
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


def wrapped(wrapper, *, strict=False, others=("a", "b")):
    registry = Registry(strict=strict)
    for name in others:
        offering(registry, name)
    register(registry, wrapper, "select_bmm_kernel", name="wrap", dist="wrap", wrapper=True)
    return registry


def test_a_wrapper_sees_the_answers_and_may_change_their_order():
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


def test_a_wrapper_may_take_answers_out():
    def wrapper():
        answers = yield
        return [a for a in answers if a.plugin.name != "b"]

    assert strategies(ask(wrapped(wrapper), "select_bmm_kernel")) == ["a"]


def test_what_a_wrapper_adds_is_its_own_whatever_name_it_writes():
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


def test_what_a_wrapper_passes_on_in_part_keeps_its_provenance():
    registry = Registry()
    register(registry, lambda: (OFFER, DECLINE), "select_bmm_kernel", name="two")

    def wrapper():
        answers = yield
        return [evolve(a, records=a.records[:1]) for a in answers]

    register(registry, wrapper, "select_bmm_kernel", name="wrap", wrapper=True)
    (answer,) = ask(registry, "select_bmm_kernel")
    assert (answer.plugin.name, answer.records) == ("two", (OFFER,))


def test_a_wrapper_cannot_hide_a_failure():
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
    if BMM is None:
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
def test_a_wrapper_that_fails_leaves_the_answers_as_without_it(wrapper, message):
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
def test_under_strict_a_wrapper_that_fails_is_an_error(wrapper, message):
    with pytest.raises(PluginError, match=r"^wrap \(wrap 1\) failed in") as caught:
        ask(wrapped(wrapper, strict=True), "select_bmm_kernel")
    assert caught.value.why[0].startswith(message)


def test_a_wrapper_cannot_swallow_anothers_error_under_strict_and_is_closed():
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


def test_wrappers_nest_and_a_failing_one_does_not_hide_the_other():
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
