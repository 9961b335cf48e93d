"""What the documents say is what the code does."""

from __future__ import annotations

import ast
import inspect
import re
import stat
from pathlib import Path

import pytest

import npu_backend
from npu_backend import errors, hookspecs
from npu_backend.offers import REASON_CODES

ROOT = Path(__file__).parents[2]
DOCS = {
    path.name: path.read_text("utf-8") for path in [*ROOT.glob("docs/*.md"), ROOT / "README.md"]
}
TESTS = "\n".join(p.read_text("utf-8") for p in ROOT.glob("tests/**/test_*.py"))
SOURCES = [*ROOT.glob("npu_backend/**/*.py"), *ROOT.glob("plugins/npu_backend_builtin/**/*.py")]
HOOKS = ("select_preprocess_path", "select_bmm_kernel", "release_weights")


@pytest.mark.parametrize("hook", HOOKS)
def test_each_hook_is_documented_with_its_exact_signature(hook):
    parameters = ", ".join(inspect.signature(getattr(hookspecs, hook)).parameters)
    assert f"### {hook}({parameters})" in DOCS["plugins.md"]


@pytest.mark.parametrize("code", REASON_CODES)
def test_each_reason_code_is_documented_with_its_meaning(code):
    assert f"| `{code}` | {REASON_CODES[code]} |" in DOCS["reasons.md"]


def test_reasons_md_knows_no_other_code():
    assert re.findall(r"^\| `([^`]+)` ", DOCS["reasons.md"], re.M) == list(REASON_CODES)


@pytest.mark.parametrize("name", [n for n in errors.__all__ if n != "NpuBackendError"])
def test_each_error_class_is_seen_in_a_test(name):
    assert re.search(rf"\b{name}\b", TESTS)


def test_every_field_of_an_offer_is_documented():
    for attribute in npu_backend.Offer.__attrs_attrs__:
        assert f"| `{attribute.name}` |" in DOCS["plugins.md"], attribute.name


@pytest.mark.parametrize("name", sorted(DOCS))
def test_python_blocks_of_the_documents_parse(name):
    for block in re.findall(r"```python\n(.*?)```", DOCS[name], re.S):
        ast.parse(block)


def test_links_between_documents_lead_somewhere():
    for name, text in DOCS.items():
        folder = ROOT if name == "README.md" else ROOT / "docs"
        for target in re.findall(r"\]\(([^)#:]+)\)", text):
            assert (folder / target).exists(), (name, target)


def test_the_first_example_of_the_plugin_guide_is_a_plugin_that_decides(tmp_path, monkeypatch):
    example = re.findall(r"```python\n(.*?)```", DOCS["plugins.md"], re.S)[0]
    (tmp_path / "acme_example.py").write_text(example)
    monkeypatch.syspath_prepend(str(tmp_path))
    import acme_example

    backend = npu_backend.load(third_party=False)
    backend.registry.register(acme_example, name="acme", dist="acme-npu", version="1.0")
    layers = npu_backend.read_model("kimi-k2", layers="0")
    plan = backend.plan(layers, npu_backend.Deployment(role="decode", soc="A3", cann="9.1.0"))
    assert plan.layers[0].v_up[0].strategy == "acme_bmm"
    plan = backend.plan(layers, npu_backend.Deployment(role="decode", soc="A2", cann="9.1.0"))
    assert plan.layers[0].v_up[0].strategy != "acme_bmm"


def test_ci_runs_the_test_command_of_the_readme():
    command = re.search(r"^python3 -m venv \.venv-tox.*$", DOCS["README.md"], re.M)
    assert command
    script = (ROOT / ".ci/run").read_text()
    assert command[0] in script
    assert (ROOT / ".ci/run").stat().st_mode & stat.S_IXUSR


def test_every_public_name_is_there_and_the_design_s_names_are_public():
    for name in npu_backend.__all__:
        assert getattr(npu_backend, name) is not None
    for name in (
        "load read_model hookimpl Deployment Phase Role Soc MlaLayer BmmSpec Envelope Offer "
        "Decline Forbid Release Keep Reason Answer LayerPlan ModelPlan"
    ).split():
        assert name in npu_backend.__all__, name
    with pytest.raises(AttributeError):
        npu_backend.nonsense


def test_nothing_swallows_an_exception_without_a_word():
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ExceptHandler):
                body = [n for n in node.body if not isinstance(n, ast.Expr)]
                assert not all(isinstance(n, ast.Pass) for n in node.body), (path, node.lineno)
                assert node.type is not None, (path, node.lineno, body)
