"""`fetch`: the pinned base from the sdist or from a clone, or a named error."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import shutil
import signal
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tools import fetch as module
from tools.errors import WorkshopError
from tools.fetch import fetch, read_sdist
from tools.git import Git
from tools.layout import Layout
from tools.pin import load_pin
from tools.state import State, base_commit, inspect

UserGit = Callable[..., str]
Mtimes = Callable[[Path], dict[str, int]]


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise WorkshopError("There is no network in this test.")

    monkeypatch.setattr("tools.download._get", fail)


def _sdist(layout: Layout) -> Path:
    return layout.cache / load_pin(layout.pin).sdist.filename


def _repin(layout: Layout) -> None:
    """Make the pin expect the sdist that lies in the cache."""
    old = load_pin(layout.pin).sdist.sha256
    new = hashlib.sha256(_sdist(layout).read_bytes()).hexdigest()
    layout.pin.write_text(layout.pin.read_text().replace(old, new))


def _rewrite(
    layout: Layout,
    change: Callable[[tarfile.TarInfo, bytes], tuple[tarfile.TarInfo, bytes] | None],
    extra: tuple[tarfile.TarInfo, ...] = (),
) -> None:
    """Rewrite the sdist member by member, and pin the result."""
    path = _sdist(layout)
    raw = io.BytesIO()
    with tarfile.open(path) as old, tarfile.open(fileobj=raw, mode="w") as new:
        for member in old:
            content = old.extractfile(member)
            changed = change(member, content.read() if content else b"")
            if changed:
                member, data = changed
                member.size = len(data)
                new.addfile(member, io.BytesIO(data))
        for member in extra:
            new.addfile(member)
    path.write_bytes(gzip.compress(raw.getvalue(), mtime=0))
    _repin(layout)


def _nothing_is_kept(layout: Layout) -> None:
    assert not layout.tree.exists()
    assert not list(layout.build.glob(".fetch-*"))


def test_from_the_sdist(bare: Layout) -> None:
    pin = load_pin(bare.pin)
    commit = fetch(bare)
    git = Git(bare.tree)
    assert commit == base_commit(pin) == git("rev-parse", "refs/workshop/base")
    assert git("rev-parse", "HEAD^{tree}") == git("write-tree") == pin.tree
    assert git("symbolic-ref", "HEAD") == "refs/heads/series"
    assert git("log", "--format=%an <%ae> %cn <%ce> %at %ct %s") == (
        "vLLM AFD/DBO series <afd-dbo-series@users.noreply.invalid> "
        "vLLM AFD/DBO series <afd-dbo-series@users.noreply.invalid> "
        "946684800 946684800 vLLM 0.30.0"
    )
    assert inspect(bare).state is State.CLEAN
    assert git("status", "--porcelain", "--ignored") == ""
    assert not list(bare.build.glob(".fetch-*"))


def test_exactly_the_sdists_files_less_the_generated_ones(bare: Layout) -> None:
    fetch(bare)
    files = {
        str(path.relative_to(bare.tree))
        for path in bare.tree.rglob("*")
        if path.is_file() and ".git" not in path.relative_to(bare.tree).parts
    }
    assert files == set(bare.sdist_files.read_text(encoding="utf-8").splitlines())
    # Tracked though .gitignore names it, as in vLLM.
    assert "vllm/package.spec" in files
    assert "vllm/_version.py" not in files
    assert os.access(bare.tree / "tools/run.sh", os.X_OK)
    assert not os.access(bare.tree / "setup.py", os.X_OK)
    assert (bare.tree / "vllm/crlf.py").read_bytes() == b"# a line\r\n# another\r\n"


def test_second_fetch_changes_nothing(
    bare: Layout, mtimes: Mtimes, capsys: pytest.CaptureFixture[str]
) -> None:
    fetch(bare)
    before = mtimes(bare.tree)
    _sdist(bare).unlink()  # Not even the cache is needed.
    fetch(bare)
    assert mtimes(bare.tree) == before
    assert "has the base already" in capsys.readouterr().err


def test_no_file_is_as_new_as_the_index(bare: Layout, mtimes: Mtimes) -> None:
    """Else git reads it anew each time that it is asked what changed."""
    fetch(bare)
    times = mtimes(bare.tree)
    index = times.pop(".git/index") // 10**9
    assert all(
        at // 10**9 < index for name, at in times.items() if not name.startswith(".git")
    )


def test_corrupt_cached_sdist_and_no_network(
    bare: Layout, capsys: pytest.CaptureFixture[str]
) -> None:
    path = _sdist(bare)
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(WorkshopError):
        fetch(bare)
    assert "is not the pinned file: it has 200 bytes" in capsys.readouterr().err
    assert not path.exists()
    _nothing_is_kept(bare)


def test_truncated_archive_with_the_right_hash(bare: Layout) -> None:
    path = _sdist(bare)
    path.write_bytes(path.read_bytes()[:-20])
    _repin(bare)
    with pytest.raises(WorkshopError, match="not a readable archive"):
        fetch(bare)
    _nothing_is_kept(bare)


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        (b"gced6857af", b"g4ba787ec9", "4ba787ec9"),
        (b"'gced6857af'", b"None", "no commit"),
        (b"'0.30.0'", b"'0.30.1'", "0.30.1"),
    ],
)
def test_sdist_of_another_commit_or_version(
    bare: Layout, old: bytes, new: bytes, named: str
) -> None:
    def change(
        member: tarfile.TarInfo, data: bytes
    ) -> tuple[tarfile.TarInfo, bytes] | None:
        if member.name.endswith("vllm/_version.py"):
            data = data.replace(old, new)
        return member, data

    _rewrite(bare, change)
    with pytest.raises(WorkshopError, match=r"pinned (commit|version)") as caught:
        fetch(bare)
    assert named in caught.value.why
    _nothing_is_kept(bare)


def test_sdist_that_records_nothing(bare: Layout) -> None:
    _rewrite(
        bare, lambda member, data: None if "_version" in member.name else (member, data)
    )
    with pytest.raises(WorkshopError, match="pinned commit"):
        fetch(bare)
    _nothing_is_kept(bare)


def test_tree_that_is_not_the_pinned_one(bare: Layout) -> None:
    def change(
        member: tarfile.TarInfo, data: bytes
    ) -> tuple[tarfile.TarInfo, bytes] | None:
        if member.name.endswith("setup.py"):
            member.mode = 0o755
        return member, data

    _rewrite(bare, change)
    with pytest.raises(WorkshopError, match="not give the pinned tree") as caught:
        fetch(bare)
    assert load_pin(bare.pin).tree in caught.value.why
    _nothing_is_kept(bare)


def test_file_list_that_is_not_the_base(bare: Layout) -> None:
    names = bare.sdist_files.read_text(encoding="utf-8")
    bare.sdist_files.write_text(
        names.replace("setup.py\n", "setup.txt\n"), encoding="utf-8"
    )
    with pytest.raises(WorkshopError, match=r"vllm\.files") as caught:
        fetch(bare)
    assert caught.value.why == "setup.py, setup.txt"
    _nothing_is_kept(bare)


def _member(name: str, **facts: object) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    for key, value in facts.items():
        setattr(member, key, value)
    return member


@pytest.mark.parametrize(
    "member",
    [
        _member("vllm-0.30.0/../../evil.py"),
        _member("/etc/evil"),
        _member("vllm-0.30.0/.git/hooks/post-checkout"),
        _member("toplevel"),
        _member("vllm-0.30.0/link", type=tarfile.SYMTYPE, linkname="../../evil"),
        _member("vllm-0.30.0/link", type=tarfile.SYMTYPE, linkname="/etc/passwd"),
        _member("vllm-0.30.0/pipe", type=tarfile.FIFOTYPE),
    ],
    ids=lambda member: f"{member.name} {member.linkname}".strip(),
)
def test_paths_that_point_elsewhere(bare: Layout, member: tarfile.TarInfo) -> None:
    _rewrite(bare, lambda old, data: (old, data), (member,))
    with pytest.raises(WorkshopError, match="no source distribution has"):
        fetch(bare)
    _nothing_is_kept(bare)
    assert not (bare.root / "evil.py").exists()


def test_links_inside_are_kept(bare: Layout) -> None:
    link = _member("vllm-0.30.0/link", type=tarfile.SYMTYPE, linkname="setup.py")
    _rewrite(bare, lambda old, data: (old, data), (link,))
    files = read_sdist(_sdist(bare), load_pin(bare.pin))
    assert files["link"] == ("120000", b"setup.py")


def test_odd_names_survive_the_import(tmp_path: Path, bare: Layout) -> None:
    git = Git(tmp_path)
    git("init", "--quiet", "--bare", ".")
    names = ['quote".py', "back\\slash.py", "tab\t.py", " space.py", "naïve.py"]
    module.write_base(git, load_pin(bare.pin), dict.fromkeys(names, ("100644", b"x\n")))
    out = git("ls-tree", "-r", "-z", "--name-only", "refs/workshop/base")
    assert sorted(out.split("\0")[:-1]) == sorted(names)


def test_foreign_folder_is_refused(bare: Layout) -> None:
    bare.tree.mkdir()
    (bare.tree / "precious").write_text("mine")
    with pytest.raises(WorkshopError) as caught:
        fetch(bare)
    assert "mv build/vllm build/vllm.old" in caught.value.todo
    assert (bare.tree / "precious").read_text() == "mine"


def test_other_pin_brings_objects_and_moves_nothing(
    applied: Layout, mtimes: Mtimes, user_git: UserGit
) -> None:
    (applied.tree / "README.md").write_text("mine\n")
    user_git(applied.tree, "commit", "--quiet", "--all", "--message", "mine")
    old = load_pin(applied.pin).commit
    text = applied.pin.read_text()
    applied.pin.write_text(text.replace(old, old[:9] + "0" * 31))
    refs = user_git(applied.tree, "show-ref", "--head")
    files = {k: v for k, v in mtimes(applied.tree).items() if k[:5] != ".git/"}
    commit = fetch(applied)
    assert Git(applied.tree).resolve(f"{commit}^{{commit}}") == commit
    assert user_git(applied.tree, "show-ref", "--head") == refs
    assert {k: v for k, v in mtimes(applied.tree).items() if k[:5] != ".git/"} == files


@pytest.mark.parametrize("point", ["read_sdist", "write_base", "_date_back"])
def test_killed_fetch_leaves_nothing_that_counts(bare: Layout, point: str) -> None:
    child = os.fork()
    if child == 0:
        original = getattr(module, point)

        def kill(*args: object) -> None:
            original(*args)
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(module, point, kill)
        fetch(bare)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert not bare.tree.exists()
    assert list(bare.build.glob(".fetch-*"))
    fetch(bare)
    assert inspect(bare).state is State.CLEAN
    assert not list(bare.build.glob(".fetch-*"))


# From a clone.


@pytest.fixture
def upstream(workspace: Layout, tmp_path: Path, user_git: UserGit) -> Path:
    """A clone of "vLLM": the base's files, a few more, and history on both sides.

    The pin of `workspace` names its commit.
    """
    clone = tmp_path / "upstream"
    shutil.copytree(
        workspace.tree, clone, ignore=shutil.ignore_patterns(".git"), symlinks=True
    )
    user_git(clone, "init", "--quiet", "--initial-branch=main")
    user_git(clone, "commit", "--quiet", "--allow-empty", "--message", "before")
    (clone / ".github").mkdir()
    for at in range(12):
        (clone / f".github/{at:02d}.yml").write_text(f"{at}\n")
    # What upstream has as a link, an sdist holds as a file.
    (clone / "docs/index.md").rename(clone / "docs/real.md")
    (clone / "docs/index.md").symlink_to("real.md")
    user_git(clone, "add", "--all", "--force")
    user_git(clone, "commit", "--quiet", "--message", "release")
    user_git(clone, "tag", "v0.30.0")
    commit = user_git(clone, "rev-parse", "HEAD")
    (clone / "setup.py").write_text("later\n")
    user_git(clone, "commit", "--quiet", "--all", "--message", "after")

    pin = workspace.pin.read_text()
    workspace.pin.write_text(pin.replace(load_pin(workspace.pin).commit, commit))
    shutil.rmtree(workspace.tree)
    return clone


def _base_is_right(layout: Layout) -> None:
    seen = inspect(layout)
    assert seen.state is State.CLEAN
    assert seen.base == base_commit(load_pin(layout.pin))
    git = Git(layout.tree)
    assert git("write-tree") == load_pin(layout.pin).tree
    assert not (layout.tree / ".git/shallow").exists()
    assert git("rev-list", "--count", "--all") == "1"
    assert not list(layout.build.glob(".fetch-*"))


@pytest.mark.parametrize("form", ["path", "url", "bare", "worktree"])
def test_from_a_clone(
    workspace: Layout,
    upstream: Path,
    tmp_path: Path,
    user_git: UserGit,
    form: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = str(upstream)
    if form == "url":
        source = f"file://{upstream}"
    elif form == "bare":
        source = str(tmp_path / "bare.git")
        user_git(tmp_path, "clone", "--quiet", "--bare", str(upstream), source)
    elif form == "worktree":
        source = str(tmp_path / "worktree")
        user_git(upstream, "worktree", "add", "--quiet", source)
    fetch(workspace, source)
    _base_is_right(workspace)
    err = capsys.readouterr().err
    assert "Upstream has 13 files that the source distribution has not" in err
    assert ".github/00.yml" in err
    assert "and 3 more" in err
    report = (workspace.reports / "from-git.txt").read_text()
    assert report.splitlines()[1:] == [
        *(f".github/{at:02d}.yml" for at in range(12)),
        "docs/real.md",
    ]


def test_same_commit_as_from_the_sdist(workspace: Layout, upstream: Path) -> None:
    def change(
        member: tarfile.TarInfo, data: bytes
    ) -> tuple[tarfile.TarInfo, bytes] | None:
        if member.name.endswith("_version.py"):
            commit = load_pin(workspace.pin).commit
            data = data.replace(b"ced6857af", commit[:9].encode())
        return member, data

    from_clone = fetch(workspace, str(upstream))
    shutil.rmtree(workspace.tree)
    _rewrite(workspace, change)
    assert fetch(workspace) == from_clone


def test_clone_is_checked_though_the_base_is_there(
    workspace: Layout, upstream: Path, mtimes: Mtimes
) -> None:
    fetch(workspace, str(upstream))
    (workspace.reports / "from-git.txt").unlink()
    before = {k: v for k, v in mtimes(workspace.tree).items() if k[:5] != ".git/"}
    fetch(workspace, str(upstream))
    assert (workspace.reports / "from-git.txt").exists()
    assert {
        k: v for k, v in mtimes(workspace.tree).items() if k[:5] != ".git/"
    } == before


@pytest.mark.parametrize("filter_", ["tree:0", "blob:none"])
def test_from_a_partial_clone(
    workspace: Layout, upstream: Path, tmp_path: Path, user_git: UserGit, filter_: str
) -> None:
    """A partial clone lacks the files of older commits (regression 92)."""
    user_git(upstream, "config", "uploadpack.allowFilter", "true")
    partial = tmp_path / "partial"
    flags = ["--quiet", "--no-checkout", f"--filter={filter_}"]
    user_git(tmp_path, "clone", *flags, f"file://{upstream}", str(partial))
    objects = user_git(partial, "count-objects", "-v")
    fetch(workspace, str(partial))
    _base_is_right(workspace)
    assert user_git(partial, "count-objects", "-v") == objects


def test_from_a_shallow_clone_at_the_commit(
    workspace: Layout, upstream: Path, tmp_path: Path, user_git: UserGit
) -> None:
    shallow = tmp_path / "shallow"
    flags = ["--quiet", "--depth=1", "--branch=v0.30.0"]
    user_git(tmp_path, "clone", *flags, f"file://{upstream}", str(shallow))
    fetch(workspace, str(shallow))
    _base_is_right(workspace)


def test_from_a_shallow_clone_without_the_commit(
    workspace: Layout, upstream: Path, tmp_path: Path, user_git: UserGit
) -> None:
    shallow = tmp_path / "shallow"
    user_git(
        tmp_path, "clone", "--quiet", "--depth=1", f"file://{upstream}", str(shallow)
    )
    with pytest.raises(WorkshopError, match="does not have commit") as caught:
        fetch(workspace, str(shallow))
    assert load_pin(workspace.pin).commit in caught.value.what
    assert "shallow" in caught.value.todo
    _nothing_is_kept(workspace)


@pytest.mark.parametrize("source", ["https://127.0.0.1:9/vllm.git", "/no/such/clone"])
def test_source_that_cannot_be_reached(bare: Layout, source: str) -> None:
    with pytest.raises(WorkshopError, match="Nothing could be fetched") as caught:
        fetch(bare, source)
    assert source in caught.value.what
    _nothing_is_kept(bare)


def test_folder_that_is_no_clone(bare: Layout, tmp_path: Path) -> None:
    with pytest.raises(WorkshopError, match="not a git repository"):
        fetch(bare, str(tmp_path))
    _nothing_is_kept(bare)


def _commit_and_pin(layout: Layout, clone: Path, git: UserGit) -> None:
    git(clone, "commit", "--quiet", "--all", "--message", "other")
    old = load_pin(layout.pin).commit
    text = layout.pin.read_text()
    layout.pin.write_text(text.replace(old, git(clone, "rev-parse", "HEAD")))


def test_clone_with_other_content_and_nothing_to_compare(
    workspace: Layout, upstream: Path, user_git: UserGit
) -> None:
    (upstream / "vllm/config.py").write_text("other\n")
    _commit_and_pin(workspace, upstream, user_git)
    _sdist(workspace).unlink()
    with pytest.raises(WorkshopError, match="not give the pinned tree") as caught:
        fetch(workspace, str(upstream))
    assert "make fetch" in caught.value.why
    _nothing_is_kept(workspace)


def test_clone_with_other_content_compared_with_the_sdist(
    workspace: Layout, upstream: Path, user_git: UserGit
) -> None:
    (upstream / "vllm/config.py").write_text("other\n")
    _commit_and_pin(workspace, upstream, user_git)

    def change(
        member: tarfile.TarInfo, data: bytes
    ) -> tuple[tarfile.TarInfo, bytes] | None:
        if member.name.endswith("_version.py"):
            commit = load_pin(workspace.pin).commit
            data = data.replace(b"ced6857af", commit[:9].encode())
        return member, data

    _rewrite(workspace, change)
    with pytest.raises(WorkshopError, match="not give the pinned tree") as caught:
        fetch(workspace, str(upstream))
    # setup.py was changed by the commit after the release.
    assert "2 paths differ: setup.py, vllm/config.py" in caught.value.why
    _nothing_is_kept(workspace)


def test_clone_that_lacks_files(
    workspace: Layout, upstream: Path, user_git: UserGit
) -> None:
    (upstream / "vllm/config.py").unlink()
    _commit_and_pin(workspace, upstream, user_git)
    with pytest.raises(WorkshopError, match="lacks files") as caught:
        fetch(workspace, str(upstream))
    assert caught.value.why == "vllm/config.py"
    _nothing_is_kept(workspace)


def test_command_line(
    bare: Layout, run_tools: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    done = run_tools(bare, "fetch")
    assert done.returncode == 0, done.stderr
    assert "is in build/vllm" in done.stderr
    done = run_tools(bare, "fetch", "--from-git", "/no/such/clone")
    assert done.returncode == 1
    assert "error: Nothing could be fetched from /no/such/clone." in done.stderr
    assert "Traceback" not in done.stderr
