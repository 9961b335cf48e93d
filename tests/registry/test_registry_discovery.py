"""What is found, in which order, and what happens where metadata is missing."""

from __future__ import annotations

import itertools
from importlib.metadata import Distribution, distributions
from pathlib import Path

import pytest

from npu_backend.errors import PluginError
from npu_backend.offers import Status
from npu_backend.registry import BUILTIN_ORDER, PluginWarning, Registry

BUILTINS = ["absorb", "mlapo", "mlaprolog", "role_release", "transpose_bmm"]


def names(registry):
    return [record.info.name for record in registry.plugins]


def test_the_fixed_order_of_built_ins_is_that_of_the_design():
    assert list(BUILTIN_ORDER) == BUILTINS


@pytest.mark.parametrize(
    "order", list(itertools.permutations(["works", "an_object", "duplicate_name"]))
)
def test_built_ins_come_first_then_third_parties_sorted_whatever_the_path_is(order, load):
    registry = load(*order)
    assert names(registry)[:5] == BUILTINS
    assert [f"{r.info.dist}/{r.info.name}" for r in registry.plugins[5:]] == [
        "an-object/an_object",
        "another-works/works",
        "works/works",
    ]


def test_the_last_registered_is_asked_first(load):
    registry = load("works", "an_object")
    asked = [i.name for i in registry.call_order("select_bmm_kernel")]
    assert asked == ["works", "an_object", "transpose_bmm"]
    assert [i.name for i in registry.call_order("select_preprocess_path")] == [
        "mlaprolog",
        "mlapo",
        "absorb",
    ]


def test_the_core_is_first_even_where_a_third_party_is_before_it_on_the_path(load):
    registry = load("works", "core", core=False)
    assert names(registry) == [*BUILTINS, "works"]


def test_other_entry_points_of_the_core_come_after_the_fixed_ones(load, tmp_path):
    info = tmp_path / "npu_backend-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: npu-backend\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[npu_backend.plugins]\naaa = fake_works\nmlapo = fake_builtin.mlapo\n"
    )
    registry = load(str(tmp_path), "works", "core", core=False)
    active = [r.info.name for r in registry.plugins if r.status is Status.ACTIVE]
    assert active == ["mlapo", "aaa"], "works is the same module as aaa, the other core is shadowed"


def test_without_the_core_the_error_says_how_to_install_it(load):
    with pytest.raises(PluginError, match="npu-backend is not installed") as caught:
        load("works", core=False)
    assert "pip install -e ." in caught.value.remedy
    assert caught.value.whom == "the built-in plugins"


def test_a_core_without_entry_points_is_an_error_too(load, tmp_path):
    info = tmp_path / "npu_backend-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: npu-backend\nVersion: 1.0\n")
    with pytest.raises(PluginError, match="declares no entry point in the group"):
        load(str(tmp_path), core=False)


def test_distribution_names_are_canonical(load, tmp_path, record_of):
    info = tmp_path / "Vendor.BMM_Kit-3.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: Vendor.BMM_Kit\nVersion: 3\n")
    (info / "entry_points.txt").write_text("[npu_backend.plugins]\nVendor = fake_works\n")
    registry = load("works", str(tmp_path), disable=["vendor_bmm-kit", "works"])
    assert record_of(registry, "vendor-bmm-kit/Vendor").status is Status.BLOCKED


def test_a_distribution_without_the_group_hides_an_older_one_with_it(load, tmp_path):
    info = tmp_path / "works-2.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: works\nVersion: 2.0\n")
    registry = load(str(tmp_path), "works")
    (record,) = [r for r in registry.plugins if r.info.dist == "works"]
    assert record.status is Status.SHADOWED
    assert record.reason.startswith("works 2.0 in ")


class Nameless(Distribution):
    """Metadata as a broken install leaves it."""

    def __init__(self, entry_points):
        self.text = entry_points

    def read_text(self, filename):
        if filename == "entry_points.txt":
            return self.text
        return None

    def locate_file(self, path):
        return path


def test_a_distribution_without_a_name_is_a_failed_plugin(load):
    nameless = Nameless("[npu_backend.plugins]\nlost = fake_works\n")
    with pytest.warns(PluginWarning, match="has no Name"):
        registry = _load_with(load, nameless)
    (record,) = [r for r in registry.plugins if r.info.name == "lost"]
    assert (record.status, record.info.dist) == (Status.FAILED, "unknown")


def test_a_distribution_whose_metadata_cannot_be_read_is_a_failed_plugin(load):
    class Unreadable(Nameless):
        @property
        def metadata(self):
            raise OSError("disk error")

    with pytest.warns(PluginWarning, match="has no Name"):
        registry = _load_with(load, Unreadable("[npu_backend.plugins]\nlost = fake_works\n"))
    (record,) = [r for r in registry.plugins if r.info.name == "lost"]
    assert record.info.version == "unknown"


@pytest.mark.filterwarnings("ignore:Implicit None:DeprecationWarning")
def test_metadata_in_a_folder_without_a_name_is_a_failed_plugin(load, tmp_path):
    (tmp_path / ".dist-info").mkdir()
    (tmp_path / ".dist-info" / "entry_points.txt").write_text(
        "[npu_backend.plugins]\nlost = fake_works\n"
    )
    with pytest.warns(PluginWarning, match="has no Name"):
        registry = load(str(tmp_path))
    assert [r.info.dist for r in registry.plugins if r.info.name == "lost"] == ["unknown"]


def test_entry_points_in_an_unknown_encoding_are_nobodys(load, tmp_path):
    (tmp_path / "odd-1.0.dist-info").mkdir()
    (tmp_path / "odd-1.0.dist-info" / "entry_points.txt").write_bytes(b"[npu\xff\xfe]\n")
    assert names(load(str(tmp_path))) == BUILTINS


def test_entry_points_that_cannot_be_parsed_are_a_failed_plugin(load):
    class Unparsable(Nameless):
        @property
        def entry_points(self):
            raise ValueError("line 3 is no entry point")

    with pytest.warns(PluginWarning, match="line 3 is no entry point"):
        registry = _load_with(load, Unparsable("[npu_backend.plugins]\n???"))
    assert Status.FAILED in {r.status for r in registry.plugins}


def _load_with(load, extra):
    core = Path(__file__).parent / "dists" / "core"
    load()  # puts the core on sys.path
    return Registry.load(distributions=[*distributions(path=[str(core)]), extra], environ={})


def test_without_arguments_what_is_on_the_path_is_found(load):
    load("works")  # puts both on sys.path, before whatever is installed
    registry = Registry.load(environ={}, enable=["npu-backend", "works"])
    active = [r.info.name for r in registry.plugins if r.status is Status.ACTIVE]
    assert active == [*BUILTINS, "works"]


def test_records_say_all_of_a_plugin_as_plain_data(load):
    registry = load("works")
    assert registry.plugins[-1].to_dict() == {
        "name": "works",
        "dist": "works",
        "version": "1.0",
        "entry_point": "works = fake_works",
        "status": "active",
        "reason": "",
        "hooks": [
            {
                "hook": "select_bmm_kernel",
                "position": 1,
                "tryfirst": False,
                "trylast": False,
                "wrapper": False,
            }
        ],
    }
