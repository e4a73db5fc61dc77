"""The workflow of GitHub Actions runs what is in this repository."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from tools.pin import load_ports

ROOT = Path(__file__).resolve().parents[2]
WORKFLOW = ROOT / ".github/workflows/ci.yml"


def load() -> dict[Any, Any]:
    return yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))


def commands() -> list[tuple[str, str]]:
    """(job, command) of each step that runs one."""
    return [
        (name, line.strip())
        for name, job in load()["jobs"].items()
        for step in job["steps"]
        for line in step.get("run", "").splitlines()
        if line.strip()
    ]


def targets() -> set[str]:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    heads = re.findall(r"^([a-z][a-z -]*):(?!=)", text, re.MULTILINE)
    return {name for head in heads for name in head.split()}


@pytest.mark.parametrize(("job", "command"), commands())
def test_each_command_is_a_script_of_ci_or_a_make_target(
    job: str, command: str
) -> None:
    words = shlex.split(command)
    if words[0] == "make":
        wanted = [word for word in words[1:] if "=" not in word]
        assert wanted
        assert set(wanted) <= targets(), f"{job}: {command}"
        return
    script = ROOT / words[0]
    assert words[0].startswith("ci/"), f"{job}: {command}"
    assert script.is_file(), f"{job}: {command}"
    assert os.access(script, os.X_OK), f"{job}: {command}"


def test_every_script_of_ci_is_run() -> None:
    run = {shlex.split(command)[0] for _, command in commands()}
    assert {f"ci/{path.name}" for path in (ROOT / "ci").iterdir()} <= run


def test_scripts_of_ci_call_make_targets_that_exist() -> None:
    for path in (ROOT / "ci").iterdir():
        text = path.read_text(encoding="utf-8")
        called = re.findall(r"\bmake ([a-z][a-z-]*)", re.sub(r"#.*", "", text))
        assert called, path
        assert set(called) <= targets(), path


def test_jobs_are_bounded_may_only_read_and_wait_for_jobs_that_exist() -> None:
    workflow = load()
    assert workflow["permissions"] == {"contents": "read"}
    jobs = workflow["jobs"]
    for name, job in jobs.items():
        assert job["timeout-minutes"] <= 360, name
        assert set(job.get("needs", [])) <= set(jobs), name
        for step in job["steps"]:
            assert re.fullmatch(
                r"actions/[a-z-]+@v\d+", step.get("uses", "actions/x@v1")
            )


def test_every_release_of_the_ports_is_tested() -> None:
    job = load()["jobs"]["port"]
    assert set(job["strategy"]["matrix"]["release"]) == set(
        load_ports(ROOT / "ports.pin")
    )
    runs = [step["run"] for step in job["steps"] if "run" in step]
    assert runs == ["ci/port ${{ matrix.release }}"]


def test_upstreams_main_is_tried_on_a_schedule() -> None:
    workflow = load()
    # YAML 1.1 reads the key `on` as true.
    assert workflow[True]["schedule"][0]["cron"]
    job = workflow["jobs"]["upstream-main"]
    assert "schedule" in job["if"]
    repositories = [step.get("with", {}).get("repository") for step in job["steps"]]
    assert "vllm-project/vllm" in repositories
