"""The catalog's figures against literal ones, its loader, and overrides."""

from __future__ import annotations

import json

import pytest

from npu_backend import CatalogError, DeploymentError
from npu_backend.catalog import load_catalog

TBMM = "npu_transpose_batchmatmul"
PROLOG = "npu_mla_prolog_v3"


@pytest.fixture
def catalog():
    return load_catalog()


@pytest.mark.parametrize(
    "cann, bk, multiple",
    [
        ("8.2.RC1", 65536, 128),
        ("8.3.RC1", 65536, 128),
        ("8.5.0", 65536, 128),
        ("9.0.0", 65536, 16),
        ("9.1.0", None, 1),
        ("9.2.0", None, 1),
    ],
)
def test_limits_of_npu_transpose_batchmatmul_by_cann(catalog, cann, bk, multiple):
    assert catalog.value(TBMM, "bk_below", cann=cann) == bk
    assert catalog.value(TBMM, "kn_multiple", cann=cann) == multiple
    for key in ("b_below", "n_below", "k_below"):
        assert catalog.value(TBMM, key, cann=cann) == 65536


def test_limits_of_batch_matmul_transpose_and_mlapo(catalog):
    assert catalog.value("batch_matmul_transpose", "m_max") == 1024
    assert catalog.value("mla_preprocess", "tokens_max") == 1024
    assert catalog.value("mla_preprocess", "hidden_size_min") == 2048
    assert catalog.value("mla_preprocess", "hidden_size_max") == 8192
    for op in ("batch_matmul_transpose", "mla_preprocess"):
        assert catalog.value(op, "soc") == ["A2", "A3"]


@pytest.mark.parametrize(
    "cann, hidden, q_lora, nope",
    [
        ("8.5.0", [7168, 7680], [1536], [128]),
        ("9.0.0", [7168, 7680], [1536], [128]),
        ("9.1.0", [1024, 2048, 3072, 4096, 5120, 6144, 7168, 7680, 8192], [1536, 2048], [128, 192]),
    ],
)
def test_dims_of_mlaprolog_by_cann(catalog, cann, hidden, q_lora, nope):
    assert catalog.value(PROLOG, "hidden_size", cann=cann) == hidden
    assert catalog.value(PROLOG, "q_lora_rank", cann=cann) == q_lora
    assert catalog.value(PROLOG, "qk_nope_head_dim", cann=cann) == nope


@pytest.mark.parametrize(
    "line, chips",
    [
        ("7.2", None),
        ("7.3", ["A3"]),
        ("26.0", ["A3"]),
        ("26.1", ["A2", "A3", "A5"]),
        ("26.2", ["A2", "A3", "A5"]),
    ],
)
def test_chips_of_mlaprolog_by_line(catalog, line, chips):
    assert catalog.value(PROLOG, "soc", line=line) == chips


@pytest.mark.parametrize(
    "op, since",
    [
        ("npu_transpose_batchmatmul", "7.1"),
        ("npu_transpose_quant_batchmatmul", "26.0"),
        ("npu_mla_prolog", "7.0"),
        ("npu_mla_prolog_v2", "7.1"),
        ("npu_mla_prolog_v3", "7.3"),
        ("npu_kv_rmsnorm_rope_cache", "7.0"),
        ("npu_kv_rmsnorm_rope_cache_v2", "7.2"),
        ("npu_interleave_rope", "7.0"),
        ("npu_rms_norm", "7.0"),
        ("npu_dynamic_quant", "7.0"),
        ("npu_dynamic_mx_quant", "26.0"),
        ("npu_quant_matmul", "7.0"),
    ],
)
def test_presence_of_each_op_by_line(catalog, op, since):
    assert catalog.op_since(f"npu::{op}") == since


def test_every_figure_has_a_source_in_words(catalog):
    count = 0
    for op, figures in catalog.limits.items():
        for key, row in figures.items():
            if key == "op":
                continue
            count += 1
            assert row["source"] in catalog.sources, (op, key)
            assert len({"value", "by_cann", "by_line", "by_soc"} & set(row)) == 1, (op, key)
    assert count > 50


@pytest.mark.parametrize(
    "package, line",
    [
        ("2.5.1", "7.0"),
        ("2.6.0", "7.1"),
        ("2.7.1", "7.2"),
        ("2.9.0", "7.3"),
        ("2.8.0.post4", "26.0"),
        ("2.9.0.post6", "26.1"),
        ("2.9.0.post9", "26.2"),
        ("2.13.0", "26.2"),
        ("2.14.0", "26.2"),
    ],
)
def test_lines_follow_the_table_and_not_the_package_number(catalog, package, line):
    assert catalog.versions.line_of(package) == line


@pytest.mark.parametrize(
    "number, family",
    [
        (220, "A2"),
        (225, "A2"),
        (241, "310B"),
        (250, "A3"),
        (256, "A3"),
        (260, "A5"),
        (203, "310P"),
        (100, "910"),
    ],
)
def test_soc_version_numbers_have_disjoint_ranges(catalog, number, family):
    assert catalog.versions.soc_of_version(number).family == family


def test_a_soc_version_number_between_the_ranges_is_an_error(catalog):
    for number in (226, 239, 244, 249, 257, 261):
        with pytest.raises(DeploymentError, match="in no range"):
            catalog.versions.soc_of_version(number)


def test_an_unknown_figure_is_an_error(catalog):
    with pytest.raises(CatalogError, match="no figure 'rows'"):
        catalog.figure(TBMM, "rows")


# --- overrides -----------------------------------------------------------------------------------


def _write(path, data):
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path


def test_an_override_adds_a_release_nobody_has_seen_yet(tmp_path):
    file = _write(
        tmp_path / "mine.json",
        {
            "versions": {"cann": ["9.0.0", "9.1.0", "9.2.0", "9.3.0"]},
            "limits": {
                "ops": {
                    TBMM: {
                        "bk_below": {
                            "by_cann": {"9.3": 131072},
                            "source": "release notes of CANN 9.3",
                        }
                    }
                }
            },
        },
    )
    mine = load_catalog(file)
    assert mine.value(TBMM, "bk_below", cann="9.3.0") == 131072
    assert mine.value(TBMM, "bk_below", cann="9.2.0") is None
    figure = mine.figure(TBMM, "bk_below", cann="9.3.0")
    assert figure is not None
    assert figure.source == "release notes of CANN 9.3"
    assert mine.version != load_catalog().version
    assert load_catalog(file).version == mine.version


def test_rows_of_an_override_may_stand_in_any_order(tmp_path):
    file = _write(
        tmp_path / "mine.json",
        {"limits": {"ops": {TBMM: {"bk_below": {"by_cann": {"8.4": 1000}, "source": "s"}}}}},
    )
    mine = load_catalog(file)
    assert mine.value(TBMM, "bk_below", cann="8.3.RC1") == 65536
    assert mine.value(TBMM, "bk_below", cann="9.0.0") == 1000
    assert mine.value(TBMM, "bk_below", cann="9.1.0") is None


@pytest.mark.parametrize(
    "data, words",
    [
        ("", "cannot be read"),
        ("[]", "not a JSON object"),
        ({"limit": {}}, "did you mean 'limits'"),
        ({"limits": {"ops": {"npu_transpose_batchmatmull": {}}}}, f"did you mean '{TBMM}'"),
        ({"limits": {"ops": {TBMM: {"bk_limit": {"value": 1, "source": "s"}}}}}, "bk_limit"),
        ({"limits": {"ops": {TBMM: {"bk_below": {"value": 1}}}}}, "names no source"),
        ({"limits": {"ops": {TBMM: {"bk_below": {"value": "many", "source": "s"}}}}}, "'many'"),
        ({"limits": {"ops": {TBMM: {"soc": {"value": None, "source": "s"}}}}}, "not a list"),
        ({"limits": {"ops": {TBMM: {"bk_below": {"source": "s"}}}}}, "not exactly one"),
        ({"limits": {"ops": {TBMM: {"bk_below": {"by_cann": {"x": 1}, "source": "s"}}}}}, "'x'"),
        ({"limits": {"ops": None}}, "not an object"),
        ({"limits": {"sources": None}}, "not an object"),
        ({"versions": {"cann": ["nine"]}}, "'nine'"),
        ({"versions": {"lines": {"26.2": None}}}, "not an object"),
        ({"versions": {"lines": {"27.0": {"packages": ["3.0.0"]}}}}, "not in versions.cann"),
        ({"versions": {"socs": None}}, "not an object"),
        ({"models": {"models": None}}, "not an object"),
        ({"models": {"notes": {"glm-9": []}}}, "glm-9"),
        ({"models": {"notes": {"kimi-k3": [{}]}}}, "strategy"),
        ({"limits": []}, "not an object"),
        ({"limits": {"ops": {TBMM: []}}}, "not an object"),
        ({"versions": 3}, "not an object"),
    ],
)
def test_a_bad_override_is_an_error_that_names_the_file(tmp_path, data, words):
    file = _write(tmp_path / "mine.json", data)
    with pytest.raises(CatalogError) as caught:
        load_catalog(file)
    assert words in str(caught.value)
    assert "mine.json" in str(caught.value)


def test_a_plain_value_replaces_rows_by_version_and_null_lifts_a_limit(tmp_path):
    for value in (None, 100000):
        file = _write(
            tmp_path / "mine.json",
            {"limits": {"ops": {TBMM: {"bk_below": {"value": value, "source": "measured"}}}}},
        )
        mine = load_catalog(file)
        assert mine.value(TBMM, "bk_below", cann="8.5.0") == value
        assert mine.value(TBMM, "bk_below", cann="9.2.0") == value


def test_a_package_or_a_line_can_be_added(tmp_path):
    file = _write(
        tmp_path / "mine.json",
        {
            "versions": {
                "cann": ["9.3.0"],
                "lines": {
                    "26.2": {"packages": ["2.99.0"]},
                    "27.0": {"cann": "9.3.0", "packages": ["3.0.0"]},
                },
            }
        },
    )
    versions = load_catalog(file).versions
    assert versions.line_of("2.99.0") == "26.2"
    assert versions.line_of("2.13.0") == "26.2"
    assert versions.line_of("3.0.0") == "27.0"
    assert versions.newest_cann == "9.3.0"
    # A line nobody recorded has the ops of the newest one before it.
    assert load_catalog(file).has_op("npu::npu_mla_prolog_v3", "27.0")


def test_every_problem_of_an_override_is_told_at_once(tmp_path):
    file = _write(
        tmp_path / "mine.json",
        {
            "limits": {"ops": {"nope": {}, TBMM: {"nope": {}, "bk_below": {"value": 1}}}},
            "model": {},
        },
    )
    with pytest.raises(CatalogError) as caught:
        load_catalog(file)
    assert len(caught.value.why) == 4
