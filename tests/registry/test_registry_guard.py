"""Whatever an implementation returns or raises, valid records or one failure come of it."""

from __future__ import annotations

import pytest

from npu_backend import Decline, Forbid, Keep, Offer, Reason, Release
from npu_backend.errors import PluginError
from npu_backend.offers import REASON_CODES, Answer, Failure, PluginInfo
from npu_backend.registry import PluginWarning, Registry

OFFER = Offer(strategy="x", impl="vendor:X")
DECLINE = Decline(strategy="x", reasons=Reason("dtype", "float16 only"))
FORBID = Forbid(strategy="x", reasons=[Reason("model.numerics", "NaN on layer 3")])
HOOKS = ("select_preprocess_path", "select_bmm_kernel", "release_weights")


# --- what is an answer -----------------------------------------------------------------------


@pytest.mark.parametrize("hook", HOOKS[:2])
@pytest.mark.parametrize("record", [OFFER, DECLINE, FORBID])
def test_one_record_is_a_tuple_of_one(hook, record, answers_to):
    (answer,) = answers_to(record, hook)
    assert answer == Answer(PluginInfo("vendor", "vendor-kit", "1"), (record,))


def test_votes_are_answers_of_release_weights(answers_to):
    votes = [Release("w_kc", "nobody reads it"), Keep("w_vc", "somebody might")]
    (answer,) = answers_to(votes, "release_weights")
    assert answer.records == tuple(votes)


@pytest.mark.parametrize("empty", [None, (), []])
def test_no_opinion_is_no_answer(empty, answers_to):
    assert answers_to(empty) == ()


def test_a_list_that_changes_later_does_not_change_the_answer(ask, register):
    given_list = [OFFER]
    registry = Registry()
    register(registry, lambda: given_list, "select_bmm_kernel")
    (first,) = ask(registry, "select_bmm_kernel")
    given_list.append(DECLINE)
    (second,) = ask(registry, "select_bmm_kernel")
    assert first.records == (OFFER,)
    assert second.records == (OFFER, DECLINE)


def test_the_same_records_give_the_very_same_answer_and_are_checked_once(
    monkeypatch, ask, register
):
    records = (OFFER, DECLINE)
    registry = Registry()
    register(registry, lambda: records, "select_bmm_kernel")
    (first,) = ask(registry, "select_bmm_kernel")
    monkeypatch.setattr("npu_backend.registry.guard.Guard._records", None)
    (second,) = ask(registry, "select_bmm_kernel")
    assert first is second


def test_equal_records_built_anew_give_the_very_same_answer(ask, register):
    registry = Registry()
    register(registry, lambda: [Offer(strategy="x", impl="vendor:X")], "select_bmm_kernel")
    (first,) = ask(registry, "select_bmm_kernel")
    (second,) = ask(registry, "select_bmm_kernel")
    assert first is second


def test_records_built_anew_for_each_layer_do_not_pile_up(monkeypatch, ask, register):
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
def test_a_wrong_type_is_a_failure_that_names_it(hook, value, message, answers_to):
    (answer,) = answers_to(value, hook)
    assert answer.records == ()
    assert answer.failure.hook == hook
    assert answer.failure.message.startswith(message)
    with pytest.raises(PluginError, match=f"failed in {hook}"):
        answers_to(value, hook, strict=True)


def test_a_coroutine_is_a_failure_and_leaves_no_warning(answers_to):
    async def coroutine():
        return OFFER

    (answer,) = answers_to(coroutine())
    assert answer.failure.message.startswith("returned a coroutine; ")


class RaisingClass:
    @property
    def __class__(self):
        raise RuntimeError("who knows")


def test_a_value_that_raises_when_its_class_is_asked_for_is_a_failure(answers_to):
    (answer,) = answers_to(RaisingClass())
    assert answer.failure.message == "returned a RaisingClass that raised RuntimeError: who knows"


@pytest.mark.parametrize("code", ["vendor.too_hot", "vendor-kit.too_hot", *REASON_CODES])
def test_a_reason_code_is_the_cores_or_has_the_plugins_prefix(code, answers_to):
    (answer,) = answers_to(Decline(strategy="x", reasons=Reason(code, "so it is")))
    assert answer.failure is None


@pytest.mark.parametrize("code", ["dims.nonsense", "vendors.x", "vendor_kit.x", "other.x"])
@pytest.mark.parametrize("kind", [Decline, Forbid])
def test_a_reason_code_of_nobody_is_a_failure(kind, code, answers_to):
    reasons = [Reason("dtype", "float16 only"), Reason(code, "so it is")]
    (answer,) = answers_to([OFFER, kind(strategy="x", reasons=reasons)])
    assert answer.failure.message == (
        f"returned the reason code {code!r} for 'x'; a code is one of the core's, or "
        "vendor-kit.NAME or vendor.NAME"
    )


def test_a_plugin_whose_name_has_capitals_may_write_its_prefix_small(ask, register):
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
def test_an_exception_is_a_failure_on_one_line_without_addresses(error, message, answers_to):
    (answer,) = answers_to(None, raises=error)
    assert answer.failure == Failure("select_bmm_kernel", message)
    with pytest.raises(PluginError) as caught:
        answers_to(None, raises=error, strict=True)
    assert caught.value.__cause__ is error
    assert caught.value.what == "vendor (vendor-kit 1) failed in select_bmm_kernel"


@pytest.mark.parametrize("strict", [False, True])
def test_an_interrupt_in_a_hook_is_the_users(strict, answers_to):
    with pytest.raises(KeyboardInterrupt):
        answers_to(None, raises=KeyboardInterrupt(), strict=strict)


def test_a_plugin_cannot_change_the_readers_that_others_see(layer, deployment, register):
    registry = Registry()
    readers = {"w_kc": ("q_absorb@decode",)}

    def kind(readers):
        return Keep("w_kc", ", ".join(readers["w_kc"]))

    def evil(readers):
        readers["w_kc"] = ()

    register(registry, kind, "release_weights", name="kind")
    register(registry, evil, "release_weights", name="evil")
    with pytest.warns(PluginWarning):
        failed, answer = registry.ask_release(layer, deployment, readers)
    assert failed.failure.message.startswith("raised TypeError")
    assert answer.records == (Keep("w_kc", "q_absorb@decode"),)
    assert readers == {"w_kc": ("q_absorb@decode",)}
