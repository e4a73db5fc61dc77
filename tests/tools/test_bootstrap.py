"""Tests of tools/bootstrap.py, on real virtual environments.

They have a small stand-in for pip: the real one takes seconds to copy.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tools import bootstrap

SOURCE = Path(bootstrap.__file__)


def run(root: Path, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python, str(root / "tools" / "bootstrap.py")],
        cwd=root,
        env={**os.environ, "PIP_NO_INDEX": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def make_checkout(root: Path) -> Path:
    (root / "tools").mkdir(parents=True)
    shutil.copy(SOURCE, root / "tools")
    (root / "tools" / "requirements.txt").write_text("# none\n")
    return root


def packages(root: Path) -> Path:
    return next((root / ".venv").glob("lib/python3*/site-packages"))


def first_line(script: Path) -> str:
    return script.read_text().splitlines()[0]


PIP = """
import pathlib, sys
wanted = pathlib.Path(sys.argv[-1]).read_text()
if "no-such-project" in wanted:
    print("WARNING: Location '/x' is ignored: it is neither a file nor a directory.")
    print(f"ERROR: No matching distribution found for {wanted}", file=sys.stderr)
    sys.exit(1)
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = make_checkout(tmp_path_factory.mktemp("made") / "checkout")
    venv.EnvBuilder(symlinks=True).create(root / ".venv")
    (packages(root) / "pip").mkdir()
    (packages(root) / "pip" / "__init__.py").touch()
    (packages(root) / "pip" / "__main__.py").write_text(PIP)
    (packages(root) / "marker.py").write_text("here = True\n")
    script = root / ".venv" / "bin" / "pip"
    script.write_text(f"#!{root}/.venv/bin/python\nimport pip\n")
    script.chmod(0o755)
    done = run(root)
    assert done.returncode == 0, done.stderr
    assert "Making .venv" in done.stderr
    return root


@pytest.fixture
def checkout(made: Path, tmp_path: Path) -> Path:
    """A copy of a checkout that is ready: like one that was moved or copied."""
    return Path(shutil.copytree(made, tmp_path / "copied", symlinks=True))


def assert_works(root: Path) -> None:
    python = root / ".venv" / "bin" / "python"
    code = "import marker, pip, sys; print(sys.prefix)"
    out = subprocess.run(
        [python, "-c", code], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    assert out.strip() == str(root / ".venv")
    assert first_line(root / ".venv" / "bin" / "pip").startswith(f"#!{python}")
    assert bootstrap.Environment(root).ready()


def test_fresh_checkout_gets_an_environment_with_pip(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = make_checkout(tmp_path / "a checkout")

    def put_pip(self: venv.EnvBuilder, context: object) -> None:
        shutil.copytree(packages(made) / "pip", packages(root) / "pip")

    monkeypatch.setattr(venv.EnvBuilder, "_setup_pip", put_pip)
    assert bootstrap.main(root) == 0
    assert bootstrap.Environment(root).ready()
    assert not bootstrap.Environment(root).unfinished.exists()


def test_second_run_does_nothing(made: Path) -> None:
    before = (made / ".venv" / ".workshop-tools").stat().st_mtime_ns
    done = run(made)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "")
    assert (made / ".venv" / ".workshop-tools").stat().st_mtime_ns == before
    assert_works(made)


def test_checkout_that_was_copied_gets_its_own_scripts(checkout: Path) -> None:
    pip = checkout / ".venv" / "bin" / "pip"
    assert not first_line(pip).startswith(f"#!{checkout}")
    assert run(checkout).returncode == 0
    assert_works(checkout)
    activate = (checkout / ".venv" / "bin" / "activate").read_text()
    assert str(checkout / ".venv") in activate


def test_python_that_is_gone_is_replaced_and_packages_are_kept(checkout: Path) -> None:
    run(checkout)
    for link in (checkout / ".venv" / "bin").glob("python*"):
        link.unlink()
        link.symlink_to("/nowhere/python3")
    done = run(checkout)
    assert done.returncode == 0, done.stderr
    assert_works(checkout)


def test_pip_failing_is_told_and_the_next_run_mends_it(checkout: Path) -> None:
    listed = checkout / "tools" / "requirements.txt"
    listed.write_text("no-such-project-of-this-name\n")
    for _ in range(2):
        done = run(checkout)
        assert done.returncode == 1
        assert "error: pip could not install tools/requirements.txt" in done.stderr
        assert "distribution found for no-such-project-of-this-name" in done.stderr
        assert "neither a file" not in done.stderr
        assert "do: Check the network" in done.stderr
        assert "Traceback" not in done.stderr
    listed.write_text("# none\n")
    assert run(checkout).returncode == 0
    assert_works(checkout)


@pytest.mark.parametrize("after", ["create", "install"])
def test_a_run_killed_between_two_steps_is_taken_up(
    checkout: Path, after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    real = getattr(bootstrap.Environment, after)

    def dies(self: bootstrap.Environment, *args: object) -> None:
        real(self, *args)
        raise Killed

    (checkout / ".venv" / "bin" / "python").unlink()
    with monkeypatch.context() as patch:
        patch.setattr(bootstrap.Environment, after, dies)
        patch.setenv("PIP_NO_INDEX", "1")
        with pytest.raises(Killed):
            bootstrap.main(checkout)
    assert not bootstrap.Environment(checkout).ready()
    assert run(checkout).returncode == 0
    assert_works(checkout)


@pytest.mark.parametrize("fault", ["killed while making it", "Python was upgraded"])
def test_environment_that_cannot_be_mended_is_made_anew(
    checkout: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = bootstrap.Environment(checkout)
    if fault == "Python was upgraded":
        lib = packages(checkout).parent
        lib.rename(lib.with_name("python3.1"))
    else:
        environment.unfinished.touch()
    assert not environment.works()
    made = []

    def record(self: object, folder: str) -> None:
        made.append([path.name for path in Path(folder).iterdir()])
        assert self.with_pip

    monkeypatch.setattr("venv.EnvBuilder.create", record)
    environment.create()
    assert made == [[environment.unfinished.name]]
    assert not environment.unfinished.exists()


def test_python_that_is_too_old_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = make_checkout(tmp_path / "checkout")
    monkeypatch.setattr(sys, "version_info", (3, 10, 4, "final", 0))
    assert bootstrap.main(root) == 1
    told = capsys.readouterr().err
    assert "3.11 or newer" in told
    assert "make PYTHON=" in told
    assert not (root / ".venv").exists()


def test_old_pythons_can_read_it() -> None:
    ast.parse(SOURCE.read_text(), feature_version=(3, 6))


def test_python_of_the_call_does_not_matter_once_it_is_made(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 9, 0, "final", 0))
    assert bootstrap.main(made) == 0


def test_two_runs_at_once_do_not_disturb_each_other(checkout: Path) -> None:
    runs = [
        subprocess.Popen(
            [sys.executable, str(checkout / "tools" / "bootstrap.py")],
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    told = [each.communicate(timeout=120)[1] for each in runs]
    assert [each.returncode for each in runs] == [0, 0], told
    assert sum("Making .venv" in text for text in told) == 1
    assert_works(checkout)


def test_folder_that_cannot_be_written_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = make_checkout(tmp_path / "checkout")
    (root / "build").write_text("a file where a folder must be\n")
    assert bootstrap.main(root) == 1
    assert "error: .venv could not be made" in capsys.readouterr().err
