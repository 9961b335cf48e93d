"""The options record, from the API, from host arguments, and beside the variables of old."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import warnings
from types import SimpleNamespace

import pytest

from npu_backend import AttnTpOptions, Deployment, DeploymentError, load, read_model
from npu_backend.mlp import environment
from npu_backend.mlp.environment import OldVariableWarning, old_variables
from npu_backend.mlp.rules import RULES

SHARED = "SGLANG_K3_SHARED_EXPERTS_ATTN_TP"
DENSE = "SGLANG_K3_DENSE_MLP_ATTN_TP"


@pytest.fixture(autouse=True)
def _nothing_told_yet(monkeypatch):
    monkeypatch.setattr(environment, "_told", set())


def rule_of(call):
    with pytest.raises(DeploymentError) as caught:
        call()
    error = caught.value
    rule = error.why[0].removeprefix("rule ").partition(":")[0]
    assert error.whom
    assert error.remedy
    assert error.why[0] == f"rule {rule}: {RULES[rule]}"
    return rule, error


def test_everything_is_off_unless_said():
    options = AttnTpOptions()
    assert options.to_dict() == {
        "enable_shared_experts_attn_tp": False,
        "enable_dense_mlp_attn_tp": False,
        "shared_experts_tp_size": None,
    }
    assert options == AttnTpOptions(enable_dense_mlp_attn_tp=False)
    assert hash(options) == hash(AttnTpOptions(enable_dense_mlp_attn_tp=False))


@pytest.mark.parametrize(
    "arguments, rule",
    [
        ({"enable_shared_experts_attn_tp": 1}, "option.bool"),
        ({"enable_dense_mlp_attn_tp": "true"}, "option.bool"),
        ({"shared_experts_tp_size": 0}, "option.size"),
        ({"shared_experts_tp_size": -4}, "option.size"),
        ({"shared_experts_tp_size": True}, "option.size"),
        ({"shared_experts_tp_size": 2.0}, "option.size"),
        ({"shared_experts_tp_size": "4"}, "option.size"),
    ],
)
def test_a_wrong_value_names_the_rule(arguments, rule):
    assert rule_of(lambda: AttnTpOptions(**arguments))[0] == rule
    assert rule_of(lambda: AttnTpOptions.from_host_args(arguments))[0] == rule


def test_no_option_has_a_model_s_name():
    assert not [name for name in AttnTpOptions().to_dict() if "k3" in name or "kimi" in name]


# --- host arguments ------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [dict, SimpleNamespace, argparse.Namespace])
def test_host_arguments_are_read_whatever_they_are(make):
    args = make(
        model="/models/x",
        enable_dense_mlp_attn_tp=True,
        enable_shared_experts_attn_tp=False,
        shared_experts_tp_size=8,
    )
    options = AttnTpOptions.from_host_args(args, environ={})
    assert options == AttnTpOptions(enable_dense_mlp_attn_tp=True, shared_experts_tp_size=8)


def test_a_host_without_the_options_has_them_off():
    assert AttnTpOptions.from_host_args(SimpleNamespace(tp_size=4), environ={}) == AttnTpOptions()
    assert AttnTpOptions.from_host_args({}, environ={}) == AttnTpOptions()


@pytest.mark.parametrize(
    "name, meant",
    [
        ("k3_shared_experts_attn_tp", "enable_shared_experts_attn_tp"),
        ("enable_k3_dense_mlp_attn_tp", "enable_dense_mlp_attn_tp"),
        ("k3_shared_experts_tp_size", "shared_experts_tp_size"),
    ],
)
@pytest.mark.parametrize("make", [dict, SimpleNamespace])
def test_a_k3_name_in_host_arguments_is_refused_with_the_right_one(make, name, meant):
    rule, error = rule_of(lambda: AttnTpOptions.from_host_args(make(**{name: True})))
    assert rule == "option.name"
    assert f"did you mean {meant}?" in error.what


# --- the variables of old ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "variable, option",
    [(SHARED, "enable_shared_experts_attn_tp"), (DENSE, "enable_dense_mlp_attn_tp")],
)
@pytest.mark.parametrize("value", ["1", "true", "0", "nonsense"])
def test_a_variable_warns_names_the_option_and_changes_nothing(variable, option, value):
    with pytest.warns(OldVariableWarning) as caught:
        options = AttnTpOptions.from_host_args({}, environ={variable: value})
    assert options == AttnTpOptions()
    (text,) = [str(w.message) for w in caught]
    assert text.startswith(f"{variable}={value} was not applied: the option {option} ")
    assert f"--{option.replace('_', '-')}" in text


def test_the_warning_comes_once_a_variable():
    environ = {SHARED: "1", DENSE: "1"}
    with pytest.warns(OldVariableWarning) as caught:
        AttnTpOptions.from_host_args({}, environ=environ)
    assert len(caught) == 2
    with warnings.catch_warnings(record=True) as again:
        warnings.simplefilter("always")
        AttnTpOptions.from_host_args({}, environ=environ)
        AttnTpOptions.from_host_args({"enable_dense_mlp_attn_tp": True}, environ=environ)
    assert again == []


@pytest.mark.parametrize("value", ["", " "])
def test_an_empty_variable_is_not_set(value):
    assert old_variables(AttnTpOptions(enable_dense_mlp_attn_tp=True), {DENSE: value}) == {}


@pytest.mark.parametrize(
    "environ, options",
    [
        ({SHARED: "1"}, {"enable_shared_experts_attn_tp": False}),
        ({SHARED: "false"}, {"enable_shared_experts_attn_tp": True}),
        ({DENSE: "True"}, {"enable_dense_mlp_attn_tp": False}),
        ({DENSE: "0"}, {"enable_dense_mlp_attn_tp": True}),
        ({SHARED: "1"}, {"shared_experts_tp_size": 1}),
        ({SHARED: "0"}, {"shared_experts_tp_size": 4}),
        ({SHARED: "1"}, {"shared_experts_tp_size": 1, "enable_shared_experts_attn_tp": True}),
    ],
)
def test_a_variable_and_its_option_that_contradict_are_an_error(environ, options):
    rule, error = rule_of(lambda: old_variables(AttnTpOptions(**options), environ))
    assert rule == "variable.contradicts"
    assert next(iter(environ)) in error.what
    assert rule_of(lambda: AttnTpOptions.from_host_args(options, environ=environ))[0] == rule


@pytest.mark.parametrize(
    "environ, options",
    [
        ({SHARED: "1"}, {"enable_shared_experts_attn_tp": True}),
        ({DENSE: "0"}, {"enable_dense_mlp_attn_tp": False}),
        ({DENSE: "1"}, {"enable_shared_experts_attn_tp": False}),
        ({SHARED: "1"}, {"shared_experts_tp_size": 4}),
        ({DENSE: "nonsense"}, {"enable_dense_mlp_attn_tp": True}),
    ],
)
def test_what_does_not_contradict_only_warns(environ, options):
    assert list(old_variables(AttnTpOptions(**options), environ)) == list(environ)


def test_planning_warns_too(monkeypatch):
    monkeypatch.setenv(DENSE, "1")
    backend = load(third_party=False)
    layers = read_model("kimi-k3", layers="3")
    with pytest.warns(OldVariableWarning, match="was not applied"):
        plan = backend.plan(layers, Deployment(role="decode", attn_tp_size=16))
    assert plan.mlp is None


def test_the_command_line_warns_once_on_stderr_also_under_json():
    done = subprocess.run(
        [sys.executable, "-m", "npu_backend", "plan", "kimi-k3", "--layers", "3", "--json"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, DENSE: "1"},
    )
    assert done.stderr.count(f"warning: {DENSE}=1 was not applied") == 1
    assert '"mlp"' not in done.stdout
