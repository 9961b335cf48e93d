"""Allow list, block list and strictness, by environment and by argument."""

from __future__ import annotations

import sys

import pytest

from npu_backend.errors import PluginError
from npu_backend.offers import Status

CASES = [
    # environment, arguments, active beside nothing else
    ({}, {}, {"absorb", "mlapo", "mlaprolog", "role_release", "transpose_bmm", "works"}),
    ({"NPU_BACKEND_PLUGINS": "absorb, works"}, {}, {"absorb", "works"}),
    ({"NPU_BACKEND_PLUGINS": "absorb"}, {"enable": ["works"]}, {"works"}),
    ({"NPU_BACKEND_PLUGINS": ""}, {"enable": ()}, set()),
    ({"NPU_BACKEND_PLUGINS": "npu-backend"}, {"disable": "mlapo,mlaprolog"}, {"absorb"}),
    ({"NPU_BACKEND_PLUGINS": "npu_backend"}, {}, {"absorb"}),
    ({"NPU_BACKEND_PLUGINS": "npu-backend/absorb works/works"}, {}, {"absorb", "works"}),
    ({"NPU_BACKEND_DISABLE": "npu-backend"}, {}, {"works"}),
    ({"NPU_BACKEND_DISABLE": "npu-backend"}, {"disable": ["works"]}, set()),
    ({"NPU_BACKEND_DISABLE": "works"}, {"enable": ["works"]}, set()),
    ({}, {"third_party": False, "enable": ["absorb", "works"]}, {"absorb"}),
]


@pytest.mark.parametrize(("environ", "arguments", "active"), CASES)
def test_lists_combine_as_documented(environ, arguments, active, load):
    registry = load("works", environ=environ, **arguments)
    found = {r.info.name for r in registry.plugins if r.status is Status.ACTIVE}
    if active == {"absorb"} and "third_party" not in arguments:
        assert "absorb" in found
        assert "works" not in found
    else:
        assert found == active
    assert len(registry.plugins) == 6, "what is blocked stays on record"


@pytest.mark.parametrize(
    ("environ", "arguments", "reason"),
    [
        ({"NPU_BACKEND_DISABLE": "works"}, {}, "blocked by 'works' in NPU_BACKEND_DISABLE"),
        ({}, {"disable": ["works/works"]}, "blocked by 'works/works' in the argument disable"),
        (
            {"NPU_BACKEND_PLUGINS": "absorb"},
            {},
            "not in the allow list of NPU_BACKEND_PLUGINS",
        ),
        ({}, {"enable": ["absorb"]}, "not in the allow list of the argument enable"),
        ({}, {"third_party": False}, "third-party plugins are off"),
    ],
)
def test_a_plugin_that_may_not_load_says_why_and_is_not_imported(
    environ, arguments, reason, load, record_of
):
    registry = load("works", environ=environ, **arguments)
    record = record_of(registry, "works/works")
    assert (record.status, record.reason) == (Status.BLOCKED, reason)
    assert "fake_works" not in sys.modules


@pytest.mark.parametrize(
    ("environ", "arguments", "source"),
    [
        ({"NPU_BACKEND_PLUGINS": "absorbb"}, {}, "NPU_BACKEND_PLUGINS"),
        ({"NPU_BACKEND_DISABLE": "absorbb"}, {}, "NPU_BACKEND_DISABLE"),
        ({}, {"enable": ["absorbb"]}, "the argument enable"),
        ({}, {"disable": "absorbb"}, "the argument disable"),
    ],
)
def test_an_unknown_name_is_an_error_with_a_suggestion(environ, arguments, source, load):
    with pytest.raises(PluginError) as caught:
        load("works", environ=environ, **arguments)
    error = caught.value
    assert error.what == "'absorbb' is no plugin; did you mean 'absorb'?"
    assert error.whom == source
    assert "npu-backend/absorb" in error.why[0]
    assert "works/works" in error.why[0]
    assert "fake_works" not in sys.modules, "names are checked before anything is imported"


def test_a_full_name_is_compared_with_full_names(load):
    with pytest.raises(PluginError, match="did you mean 'npu-backend/mlapo'"):
        load("works", disable=["npu-backend/mlappo"])
    with pytest.raises(PluginError, match="'works/absorb' is no plugin"):
        load("works", disable=["works/absorb"])


@pytest.mark.parametrize("word", ["1", "true", "Yes", " on "])
def test_strict_by_environment(word, load):
    with pytest.raises(PluginError, match="cannot be imported"):
        load("import_error", environ={"NPU_BACKEND_STRICT": word})


@pytest.mark.parametrize("word", ["", "0", "false", "No", "off"])
def test_not_strict_by_environment(word, load):
    assert load("works", environ={"NPU_BACKEND_STRICT": word}).strict is False


def test_a_strictness_that_is_neither_is_an_error(load):
    with pytest.raises(PluginError, match="'maybe' is neither true nor false") as caught:
        load("works", environ={"NPU_BACKEND_STRICT": "maybe"})
    assert caught.value.whom == "the environment variable NPU_BACKEND_STRICT"


def test_strict_as_argument_wins(load):
    assert load("works", environ={"NPU_BACKEND_STRICT": "1"}, strict=False).strict is False
    assert load("works", environ={"NPU_BACKEND_STRICT": "0"}, strict=True).strict is True


def test_the_process_environment_is_read_when_loading(load, monkeypatch, record_of):
    monkeypatch.setenv("NPU_BACKEND_DISABLE", "works")
    registry = load("works", environ=None)
    assert record_of(registry, "works/works").status is Status.BLOCKED
