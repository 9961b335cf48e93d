"""Each fault that a distribution can have stays that distribution's own affair."""

from __future__ import annotations

import sys
import warnings

import pytest

from npu_backend.errors import PluginError
from npu_backend.offers import Status
from npu_backend.registry import PluginWarning

LOAD_FAULTS = {
    # folder: (dist/name, entry point, status, words of the reason)
    "import_error": (
        "import-error/import_error",
        "import_error = fake_import_error",
        "cannot be imported: ModuleNotFoundError: No module named 'a_module_that_nobody_has'",
    ),
    "system_exit": (
        "system-exit/system_exit",
        "system_exit = fake_system_exit",
        "cannot be imported: SystemExit: no device here",
    ),
    "bad_signature": (
        "bad-signature/bad_signature",
        "bad_signature = fake_bad_signature",
        "argument 'deploymnet' is unknown; did you mean 'deployment'?",
    ),
    "half_registered": (
        "half-registered/half_registered",
        "half_registered = fake_half_registered",
        "no hook is called 'release_weight'; did you mean 'release_weights'?",
    ),
    "no_hooks": (
        "no-hooks/no_hooks",
        "no_hooks = fake_no_hooks",
        "select_bmm_kernel is there, but carries no @hookimpl",
    ),
    "a_class": (
        "a-class/a_class",
        "a_class = fake_a_class:Plugin",
        "is a class: an entry point names a module or an object, and Plugin is neither",
    ),
    "unreadable": ("unreadable/unreadable", "unreadable = not a module!", "cannot be imported"),
}


def strategies(answers):
    return [record.strategy for answer in answers for record in answer.records]


def everyone_else_works(registry, layer, bmm, deployment):
    assert strategies(registry.ask_bmm(bmm, deployment)) == ["works_bmm", "torch.bmm"]
    assert strategies(registry.ask_paths(layer, deployment)) == ["mlapo", "absorb"]
    (votes,) = registry.ask_release(layer, deployment, {"w_kc": (), "w_vc": ("v_up@decode",)})
    assert [vote.weight for vote in votes.records] == ["w_kc"]


@pytest.mark.parametrize("folder", LOAD_FAULTS)
def test_a_plugin_that_cannot_load_is_recorded_and_all_others_work(
    folder, load, record_of, layer, bmm, deployment
):
    full, entry_point, reason = LOAD_FAULTS[folder]
    with pytest.warns(PluginWarning) as caught:
        registry = load("works", folder)

    everyone_else_works(registry, layer, bmm, deployment)
    record = record_of(registry, full)
    assert record.status is Status.FAILED
    assert reason in record.reason
    assert record.hooks == ()
    assert record.info.entry_point == entry_point
    assert [str(w.message).splitlines()[0].partition(" ")[0] for w in caught] == [
        record.info.name
    ], "exactly one warning, and it begins with who"
    dist, name = full.split("/")
    assert str(caught[0].message).startswith(f'{name} ({dist} 1.0, entry point "{entry_point}") ')
    assert "  why: " in str(caught[0].message)
    assert "  do:  " in str(caught[0].message)


@pytest.mark.parametrize("folder", LOAD_FAULTS)
def test_under_strict_a_plugin_that_cannot_load_is_an_error(folder, load):
    full, entry_point, reason = LOAD_FAULTS[folder]
    with pytest.raises(PluginError) as caught:
        load("works", folder, strict=True)
    dist, name = full.split("/")
    error = caught.value
    assert error.what.startswith(f'{name} ({dist} 1.0, entry point "{entry_point}") ')
    assert error.whom
    assert error.remedy
    assert any(part in str(error) for part in (reason, reason.partition(": ")[2]))


def test_under_strict_the_error_is_raised_from_what_the_import_raised(load):
    with pytest.raises(PluginError) as caught:
        load("import_error", strict=True)
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_all_faults_at_once_leave_every_good_plugin_working(load, layer, bmm, deployment):
    with pytest.warns(PluginWarning) as caught:
        registry = load("works", *LOAD_FAULTS, "blocked", disable="blocked")
    assert len(caught) == len(LOAD_FAULTS)
    everyone_else_works(registry, layer, bmm, deployment)
    statuses = [record.status for record in registry.plugins]
    assert statuses.count(Status.FAILED) == len(LOAD_FAULTS)
    assert statuses.count(Status.BLOCKED) == 1
    assert statuses.count(Status.ACTIVE) == 6


def test_no_hook_of_a_half_registered_plugin_is_live(load, bmm, deployment):
    with pytest.warns(PluginWarning):
        registry = load("half_registered")
    assert "half_bmm" not in strategies(registry.ask_bmm(bmm, deployment))
    assert [info.name for info in registry.call_order("select_bmm_kernel")] == ["transpose_bmm"]


def test_all_reasons_against_a_signature_are_told_at_once(load, record_of):
    with pytest.warns(PluginWarning):
        registry = load("bad_signature")
    reason = record_of(registry, "bad-signature/bad_signature").reason
    assert "'deploymnet' is unknown" in reason
    assert "'retries' is unknown" in reason
    assert "select_bmm_kernel has the arguments bmm, deployment" in reason


@pytest.mark.parametrize(
    ("folder", "message"),
    [
        ("raises_in_hook", "raised RuntimeError: no kernel for B=128"),
        (
            "wrong_type",
            "returned a str; select_bmm_kernel takes Offer, Decline, Forbid, a sequence of them, "
            "or None",
        ),
    ],
)
def test_a_plugin_that_fails_in_a_hook_answers_with_a_failure_and_the_next_one_serves(
    folder, message, load, record_of, bmm, deployment
):
    registry = load("works", folder)
    with pytest.warns(PluginWarning, match="failed in select_bmm_kernel") as caught:
        answers = registry.ask_bmm(bmm, deployment)
    assert len(caught) == 1
    again = registry.ask_bmm(bmm, deployment)  # warnings are errors here: one a plugin is enough
    assert str(caught[0].message).startswith(f"{folder} ({folder.replace('_', '-')} 1.0, entry ")
    assert answers == again

    (failed,) = [a for a in answers if a.failure is not None]
    assert failed.plugin.provider == f"{folder} ({folder.replace('_', '-')} 1.0)"
    assert failed.records == ()
    assert failed.failure.hook == "select_bmm_kernel"
    assert failed.failure.message == message
    assert failed.failure.reason.code == "plugin.failed"
    assert strategies(answers) == ["works_bmm", "torch.bmm"]
    full = f"{folder.replace('_', '-')}/{folder}"
    assert record_of(registry, full).status is Status.ACTIVE


@pytest.mark.parametrize("folder", ["raises_in_hook", "wrong_type"])
def test_under_strict_a_failing_hook_is_an_error(folder, load, bmm, deployment):
    registry = load("works", folder, strict=True)
    with pytest.raises(PluginError, match=r"failed in select_bmm_kernel") as caught:
        registry.ask_bmm(bmm, deployment)
    assert caught.value.what.startswith(f"{folder} (")
    cause = caught.value.__cause__
    assert isinstance(cause, RuntimeError) == (folder == "raises_in_hook")


def test_two_distributions_with_one_name_are_both_active_and_each_says_so(
    load, record_of, bmm, deployment
):
    registry = load("works", "duplicate_name")
    one, two = record_of(registry, "works/works"), record_of(registry, "another-works/works")
    assert one.status is two.status is Status.ACTIVE
    assert one.reason == "another-works/works has the same name; both are asked"
    assert two.reason == "works/works has the same name; both are asked"
    assert strategies(registry.ask_bmm(bmm, deployment)) == [
        "works_bmm",
        "another_bmm",
        "torch.bmm",
    ]


def test_a_blocked_plugin_is_never_imported(load, record_of):
    registry = load("works", "blocked", disable=["to_block"])
    assert "fake_blocked" not in sys.modules
    record = record_of(registry, "blocked/to_block")
    assert record.status is Status.BLOCKED
    assert record.reason == "blocked by 'to_block' in the argument disable"


def test_of_a_distribution_found_twice_the_first_counts_and_the_other_is_shadowed(
    load, record_of, bmm, deployment
):
    registry = load("works", "shadowed")
    shadowed = [r for r in registry.plugins if r.status is Status.SHADOWED]
    assert [(r.info.name, r.info.dist, r.info.version) for r in shadowed] == [
        ("gone", "works", "0.9"),
        ("works", "works", "0.9"),
    ]
    assert all("works 1.0 in " in r.reason and "is first" in r.reason for r in shadowed)
    assert strategies(registry.ask_bmm(bmm, deployment)) == ["works_bmm", "torch.bmm"]


def test_the_same_folder_twice_on_the_path_is_one_distribution(load):
    registry = load("works", "works")
    assert [r.info.name for r in registry.plugins if r.info.dist == "works"] == ["works"]


def test_of_two_entry_points_for_one_module_the_second_is_shadowed(
    load, record_of, bmm, deployment
):
    registry = load("same_module")
    assert record_of(registry, "same-module/first").status is Status.ACTIVE
    second = record_of(registry, "same-module/second")
    assert second.status is Status.SHADOWED
    assert second.reason == (
        'it is the same object as first (same-module 1.0, entry point "first = fake_same")'
    )
    assert strategies(registry.ask_bmm(bmm, deployment)) == ["same_bmm", "torch.bmm"]


def test_of_a_name_that_one_distribution_declares_twice_the_second_is_shadowed(load):
    registry = load("twice_declared")
    found = [r for r in registry.plugins if r.info.dist == "twice-declared"]
    assert [(r.info.entry_point, r.status) for r in found] == [
        ("twice = fake_twice_a", Status.ACTIVE),
        ("twice = fake_twice_b", Status.SHADOWED),
    ]
    assert "declares the name twice" in found[1].reason


def test_an_entry_point_may_name_an_object(load, bmm, deployment):
    registry = load("an_object")
    assert strategies(registry.ask_bmm(bmm, deployment)) == ["object_bmm", "torch.bmm"]


def test_an_interrupt_while_a_plugin_is_imported_is_the_users(load, monkeypatch):
    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr("importlib.metadata.EntryPoint.load", interrupted)
    with pytest.raises(KeyboardInterrupt):
        load("works")


def test_no_warning_comes_of_good_plugins(load, layer, bmm, deployment):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        everyone_else_works(load("works"), layer, bmm, deployment)
