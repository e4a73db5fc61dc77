"""`test`: which stages run, what counts as a failure, and that none can hang."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import tomlkit
from click.testing import CliRunner

from tools import test as verb
from tools.errors import WorkshopError
from tools.layout import Layout
from tools.supervise import session_members, supervise
from tools.test import (
    STAGES,
    Result,
    Stage,
    Task,
    choose,
    each_tasks,
    run_stage,
    run_stages,
    summary,
    upstream_tasks,
)


def stage(name: str, layout: Layout, *scripts: str, is_built: bool = False) -> Stage:
    tasks = [
        Task(f"{name}-{at}", (sys.executable, "-c", script), 20, layout.root)
        for at, script in enumerate(scripts)
    ]
    return Stage(name, f"The {name}", lambda _: tasks, is_built)


@pytest.fixture(autouse=True)
def _fast_pytest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(tmp_path)


def names(stages: list[Stage]) -> list[str]:
    return [stage.name for stage in stages]


def test_stages_and_their_order() -> None:
    everything = ["lint", "tools", "check", "build", "upstream", "e2e"]
    assert names(choose((), fast=False, each=False)) == everything
    assert names(choose((), fast=True, each=False)) == ["lint", "tools", "check"]
    assert names(choose((), fast=False, each=True)) == [
        *everything[:-1],
        "each",
        "e2e",
    ]
    assert names(choose(("gpu",), fast=False, each=False)) == ["gpu"]
    assert names(choose(("e2e", "lint"), fast=False, each=False)) == ["lint", "e2e"]


def test_ci_has_a_script_for_each_stage() -> None:
    folder = Path(__file__).resolve().parents[2] / "ci"
    # `each` is a verb of its own, too, and CI has no GPU.
    for name in {stage.name for stage in STAGES} - {"each", "gpu"}:
        path = folder / name
        assert os.access(path, os.X_OK)
        assert f"--stage {name}'" in path.read_text()


def test_a_failing_stage_fails_the_run_but_later_ones_still_run(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = (
        stage("one", layout, "print('fine')"),
        stage("two", layout, "raise SystemExit(3)", "print('second task')"),
        stage("three", layout, "print('also fine')"),
    )
    results = run_stages(layout, made)
    assert [result.ok for result in results] == [True, False, True]
    assert results[1].problems == ["two-0: exit status 3; build/reports/two-0.log"]
    assert "second task" in (layout.reports / "two-1.log").read_text()
    monkeypatch.setattr(verb, "STAGES", made)
    failed = CliRunner().invoke(verb.command, obj=layout)
    assert failed.exit_code == 1
    assert "FAILED: two" in failed.output
    monkeypatch.setattr(verb, "STAGES", made[:1])
    assert CliRunner().invoke(verb.command, obj=layout).exit_code == 0


def test_the_exit_status_reaches_the_shell(
    bare: Layout, run_tools: Callable[..., object]
) -> None:
    # The checkout has no folder that ruff could look at but this one.
    (bare.root / "tools").mkdir(exist_ok=True)
    (bare.root / "tools" / "bad.py").write_text("import os, sys\n")
    done = run_tools(bare, "test", "--stage", "lint")
    assert done.returncode == 1
    assert "F401" in done.stdout
    assert "FAILED: lint" in done.stdout
    (bare.root / "tools" / "bad.py").write_text("x = 1\n")
    assert run_tools(bare, "test", "--stage", "lint").returncode == 0


def test_without_a_build_what_needs_it_is_not_run(layout: Layout) -> None:
    results = run_stages(
        layout,
        (
            stage("build", layout, "raise SystemExit(1)", is_built=True),
            stage("later", layout, "raise SystemExit('ran')", is_built=True),
            stage("free", layout, "pass"),
        ),
    )
    assert results[1].problems == ["not run: build failed"]
    assert results[2].ok


def test_counts_come_from_pytest(layout: Layout) -> None:
    tests = layout.root / "test_it.py"
    tests.write_text(
        "import pytest\n\ndef test_a(): pass\n\ndef test_b(): assert 0\n\n"
        "@pytest.mark.skip\ndef test_c(): pass\n"
    )
    command = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(tests))
    task = Task("it", command, 60, layout.root, pytest=True)
    made = Stage("it", "", lambda _: [task])
    result = run_stage(layout, made)
    assert (result.passed, result.failed, result.skipped) == (1, 1, 1)
    assert not result.ok
    assert "1 failed, 1 passed, 1 skipped" in (layout.reports / "it.log").read_text()
    # -k may leave a process without a test; without it that is a mistake.
    assert run_stage(layout, made, "nothing").ok
    tests.write_text("")
    assert "found no test" in run_stage(layout, made).problems[0]


@pytest.mark.parametrize(("passed", "code"), [(0, 1), (1, 0)])
def test_a_word_that_matches_no_test_at_all_is_an_error(
    layout: Layout, monkeypatch: pytest.MonkeyPatch, passed: int, code: int
) -> None:
    done = [Result("tools"), Result("upstream", passed=passed)]
    monkeypatch.setattr(verb, "run_stages", lambda *_: done)
    ran = CliRunner().invoke(verb.command, ["-k", "nothing"], obj=layout)
    assert ran.exit_code == code
    if code:
        assert isinstance(ran.exception, WorkshopError)
        assert "-k 'nothing' matches no test" in ran.exception.what
        assert "tools, upstream" in ran.exception.why


def side_by_side(layout: Layout, *scripts: str) -> Stage:
    tasks = stage("both", layout, *scripts).tasks(layout)
    return Stage("both", "", lambda _: tasks, parallel=True)


def test_tasks_side_by_side(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    # Each waits for the other's file: in turn neither would end.
    wait = (
        "import pathlib, time\n"
        "pathlib.Path('at-{}').touch()\n"
        "while not pathlib.Path('at-{}').exists(): time.sleep(0.01)\n"
    )
    result = run_stage(
        layout, side_by_side(layout, wait.format(0, 1), wait.format(1, 0))
    )
    assert result.problems == []


def test_what_fails_beside_others_is_shown(
    layout: Layout, capfd: pytest.CaptureFixture[str]
) -> None:
    made = side_by_side(layout, "raise SystemExit('broken')", "print('all is well')")
    result = run_stage(layout, made)
    assert result.problems == ["both-0: exit status 1; build/reports/both-0.log"]
    shown = "".join(capfd.readouterr())
    assert "broken" in shown
    assert "all is well" not in shown
    assert "all is well" in (layout.reports / "both-1.log").read_text()


def test_an_interrupt_ends_what_runs_side_by_side(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(verb, "as_completed", interrupt)
    start = time.monotonic()
    slow = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    with pytest.raises(KeyboardInterrupt):
        run_stage(layout, side_by_side(layout, slow, slow, slow))
    assert time.monotonic() - start < 20
    for log in layout.reports.glob("both-*.log"):
        for pid in re.findall(r"^\d+$", log.read_text(), re.M):
            assert not list(session_members(int(pid)))


def test_a_hung_process_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    script = (
        "import os, signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "child = [sys.executable, '-c', 'import time; time.sleep(60)']\n"
        "subprocess.Popen(child, process_group=0)\n"
        "print(os.getpid(), flush=True)\n"
        "time.sleep(60)\n"
    )
    start = time.monotonic()
    outcome = supervise(
        [sys.executable, "-c", script], tmp_path / "log", timeout=5, grace=0.5
    )
    assert outcome.timed_out
    assert time.monotonic() - start < 30
    session, said = (tmp_path / "log").read_text().splitlines()
    assert not list(session_members(int(session)))
    assert said.startswith("Still running after")


def test_a_young_process_that_ignores_the_interrupt_is_not_waited_for(
    tmp_path: Path,
) -> None:
    script = (
        "import signal, time\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "print('on', flush=True)\n"
        "time.sleep(120)\n"
    )
    log, stop = tmp_path / "log", threading.Event()

    def stop_when_on() -> None:
        while not (log.exists() and b"on" in log.read_bytes()):
            time.sleep(0.01)
        stop.set()

    threading.Thread(target=stop_when_on, daemon=True).start()
    start = time.monotonic()
    outcome = supervise([sys.executable, "-c", script], log, timeout=60, stop=stop)
    assert outcome.code == -signal.SIGKILL
    assert not outcome.timed_out
    assert time.monotonic() - start < 30


def test_in_the_background_interrupts_are_heeded_as_well() -> None:
    child = "import signal; print(signal.getsignal(signal.SIGINT))"
    code = (
        "import subprocess, sys\n"
        "from tools import cli\n"
        f"run = [sys.executable, '-c', {child!r}]\n"
        "cli.cli = lambda **_: subprocess.run(run).returncode\n"
        "cli.main()\n"
    )
    # As a shell without job control starts a job in the background.
    script = 'trap "" INT; exec "$0" -c "$1"'
    done = subprocess.run(
        ["/bin/sh", "-c", script, sys.executable, code],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "default_int_handler" in done.stdout


def test_nothing_is_run_after_the_stop(tmp_path: Path) -> None:
    stop = threading.Event()
    stop.set()
    # To start it would fail.
    missing = [str(tmp_path / "missing")]
    outcome = supervise(missing, tmp_path / "log", timeout=60, stop=stop)
    assert outcome.code == -signal.SIGINT
    with pytest.raises(WorkshopError, match="missing cannot be run"):
        supervise(missing, tmp_path / "log", timeout=60)


def test_time_up_lets_a_process_clean_up(tmp_path: Path) -> None:
    # A busy machine may need more than a second to start it.
    script = (
        "import time\n"
        "try:\n    print('up', flush=True)\n    time.sleep(60)\n"
        "except KeyboardInterrupt:\n    print('cleaned up', flush=True)\n"
    )
    outcome = supervise(
        [sys.executable, "-c", script], tmp_path / "log", timeout=5, grace=30
    )
    assert outcome.timed_out
    said = (tmp_path / "log").read_text().splitlines()
    assert said == ["up", "Still running after 5 s: ended.", "cleaned up"]


def test_what_a_process_leaves_behind_is_ended(tmp_path: Path) -> None:
    script = (
        "import subprocess, sys, os\n"
        "child = subprocess.Popen(\n"
        "    [sys.executable, '-c', 'import time; time.sleep(60)'], process_group=0)\n"
        "print(os.getpid(), child.pid, flush=True)\n"
    )
    outcome = supervise([sys.executable, "-c", script], tmp_path / "log", timeout=20)
    assert outcome.code == 0
    assert outcome.seconds < 10
    session, child = map(int, (tmp_path / "log").read_text().split())
    assert child not in session_members(session)


def test_a_command_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(WorkshopError, match="no-such-python"):
        supervise(["/no-such-python"], tmp_path / "log", timeout=1)


def test_upstream_tests_run_in_the_tree_and_none_twice(built: Layout) -> None:
    tasks = upstream_tasks(built)
    # gadget-docs names the test of gadget.
    assert [task.name for task in tasks] == [
        "upstream-config-answer",
        "upstream-gadget",
    ]
    assert {task.cwd for task in tasks} == {built.tree}
    result = run_stage(built, Stage("upstream", "", upstream_tasks))
    assert (result.passed, result.problems) == (2, [])


def test_what_a_patch_tests_need_in_the_environment(built: Layout) -> None:
    meta = built.patches / "gadget-docs.toml"
    fields = tomlkit.parse(meta.read_text())
    fields["test_env"] = {"OMP_NUM_THREADS": "2"}
    meta.write_text(tomlkit.dumps(fields))
    # The test of gadget is another one in another environment.
    environs = {task.name: task.env for task in upstream_tasks(built)}
    assert {name: env["OMP_NUM_THREADS"] for name, env in environs.items() if env} == {
        "upstream-config-answer": "1",
        "upstream-gadget": "1",
        "upstream-gadget-docs": "2",
    }


def test_each_is_a_verb_of_its_own(built: Layout) -> None:
    result = run_stage(built, Stage("each", "", each_tasks))
    assert result.problems == []
    log = (built.reports / "each.log").read_text()
    assert "trials, " in log
    assert "all well" in log


def test_the_summary_names_what_failed_and_where() -> None:
    text = summary(
        [
            verb.Result("lint", 2),
            verb.Result("e2e", 75, passed=3, failed=1, problems=["e2e: bad; a.log"]),
        ]
    )
    assert "FAILED: e2e, in 1 min 17 s." in text
    assert "e2e: bad; a.log" in text
