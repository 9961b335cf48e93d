"""The entry-point group names the plugin API: another major one is refused before anything runs."""

from __future__ import annotations

import sys
import types

import pytest

from npu_backend import Offer
from npu_backend.errors import PluginError
from npu_backend.hookspecs import hookimpl
from npu_backend.offers import Status
from npu_backend.registry import ENTRY_POINT_GROUP, PLUGIN_API, PluginWarning, Registry
from npu_backend.registry.standing import ties, why_first


def test_the_group_of_this_api_is_the_one_that_is_documented():
    assert (PLUGIN_API, ENTRY_POINT_GROUP) == (1, "npu_backend.plugins")


def test_a_plugin_for_another_api_is_refused_by_name_and_not_imported(load, record_of):
    with pytest.warns(PluginWarning) as caught:
        registry = load("another_api")
    record = record_of(registry, "another-api/future")
    assert record.status is Status.FAILED
    assert record.reason.startswith("is built for plugin API 2: this npu-backend has plugin API 1")
    assert "fake_another_api" not in sys.modules
    text = next(str(w.message) for w in caught if "future" in str(w.message))
    assert text.startswith(
        'future (another-api 1.0, entry point "future = fake_another_api") is built for plugin API'
    )
    assert "do:  install a release of another-api" in text


def test_a_group_that_names_no_api_is_told(load, record_of):
    with pytest.warns(PluginWarning):
        registry = load("another_api")
    record = record_of(registry, "another-api/nightly")
    assert record.status is Status.FAILED
    assert "the group npu_backend.plugins.nightly names none" in record.reason


def test_under_strict_another_api_is_an_error(load):
    with pytest.raises(PluginError, match="is built for"):
        load("another_api", strict=True)


def test_a_blocked_plugin_of_another_api_is_blocked_and_nobody_is_warned(load, record_of):
    registry = load("another_api", disable=["another-api"])
    assert record_of(registry, "another-api/future").status is Status.BLOCKED


def test_a_distribution_for_two_apis_has_the_plugin_of_this_one(load, record_of, ask):
    registry = load("both_apis")
    assert record_of(registry, "both-apis/both").status is Status.ACTIVE
    (first, *_) = ask(registry, "select_bmm_kernel")
    assert [r.strategy for r in first.records] == ["both_bmm"]


def _registry(*vendors):
    registry = Registry()
    for name, flags in vendors:
        module = types.ModuleType(name)
        module.implementation = hookimpl(
            lambda: Offer(strategy="x", impl="x:y"), specname="select_bmm_kernel", **flags
        )
        registry.register(module, name=name, dist=f"{name}-npu", version="1")
    return registry


HOOK = "select_bmm_kernel"


def _who(name):
    return f"{name} ({name}-npu 1)"


def test_between_equals_the_names_decide_and_that_is_a_tie():
    registry = _registry(("a", {}), ("b", {}), ("c", {"trylast": True}))
    (tie,) = ties(registry.plugins, [HOOK])
    assert [p.name for p in tie.plugins] == ["b", "a"]
    assert tie.plugins == registry.call_order(HOOK)[:2]
    assert "last by distribution" in why_first(registry.plugins, HOOK, _who("b"), _who("a"))
    assert why_first(registry.plugins, HOOK, _who("a"), _who("c")) == "the other is marked trylast"


def test_flags_and_built_ins_are_no_tie(load):
    registry = _registry(("a", {"tryfirst": True}), ("b", {}))
    assert ties(registry.plugins, [HOOK]) == ()
    assert why_first(registry.plugins, HOOK, _who("a"), _who("b")) == "it is marked tryfirst"
    registry = load("works")
    assert ties(registry.plugins, [HOOK]) == ()
    assert (
        why_first(registry.plugins, HOOK, "works (works 1.0)", "transpose_bmm (npu-backend 1.0)")
        == "third parties are asked before built-ins"
    )


def test_what_covers_other_rows_is_not_said_to_be_asked_first():
    registry = _registry(("a", {}), ("b", {}))
    why = why_first(registry.plugins, HOOK, _who("a"), _who("b"))
    assert why == "what is asked before it does not cover these rows"
