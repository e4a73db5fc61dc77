"""No setting of the user or of the repository reaches the workshop's git."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tools.apply import apply
from tools.errors import WorkshopError
from tools.fetch import fetch
from tools.git import Git, GitError, remove_scratch, scratch
from tools.layout import Layout
from tools.series import mail_of
from tools.state import State, inspect

UserGit = Callable[..., str]

# Each would change a hash, a byte of a mail or the outcome of a call.
HOSTILE = """\
[am]
	threeWay = true
[apply]
	ignoreWhitespace = change
	whitespace = error-all
[color]
	ui = always
[commit]
	gpgSign = true
	cleanup = scissors
[core]
	abbrev = 5
	attributesFile = {folder}/attributes
	autocrlf = true
	commentChar = "#"
	eol = crlf
	excludesFile = {folder}/excludes
	fileMode = false
	hooksPath = {folder}/hooks
	ignoreCase = true
	logAllRefUpdates = always
	pager = false
	quotePath = true
	safecrlf = true
	splitIndex = true
	symlinks = false
	untrackedCache = true
	whitespace = cr-at-eol
[diff]
	algorithm = patience
	context = 9
	external = false
	indentHeuristic = true
	interHunkContext = 5
	mnemonicPrefix = true
	noprefix = true
	orderFile = {folder}/order
	renames = copies
	suppressBlankEmpty = true
[diff "evil"]
	command = false
	textconv = rev
[filter "evil"]
	clean = rev
	smudge = rev
	required = true
[format]
	attach = true
	coverLetter = true
	encodeEmailHeaders = true
	headers = "X-Evil: yes"
	noprefix = true
	numbered = true
	outputDirectory = {folder}
	pretty = "format:evil"
	signature = evil
	signOff = true
	subjectPrefix = EVIL
	suffix = .evil
	thread = deep
	to = evil@example.invalid
	useAutoBase = true
[gc]
	auto = 1
[i18n]
	commitEncoding = ISO-8859-1
	logOutputEncoding = ISO-8859-1
[init]
	defaultBranch = evil
	templateDir = {folder}/template
[log]
	date = relative
	showSignature = true
[mailinfo]
	scissors = true
[user]
	useConfigOnly = true
	signingKey = evil
"""

ATTRIBUTES = (
    "* text eol=crlf ident diff=evil filter=evil working-tree-encoding=UTF-16\n"
)


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user whose settings, hooks, attributes and environment are all in the way."""
    folder = tmp_path / "user"
    for hooks in (folder / "hooks", folder / "template/hooks"):
        hooks.mkdir(parents=True)
        for name in (
            "applypatch-msg",
            "commit-msg",
            "post-checkout",
            "pre-applypatch",
            "pre-commit",
            "prepare-commit-msg",
            "reference-transaction",
        ):
            (hooks / name).write_text(f"#!/bin/sh\ntouch {folder}/ran-{name}\nexit 1\n")
            (hooks / name).chmod(0o755)
    (folder / "template/info").mkdir()
    (folder / "template/info/attributes").write_text(ATTRIBUTES)
    (folder / "attributes").write_text(ATTRIBUTES)
    (folder / "excludes").write_text("*\n")
    (folder / "order").write_text("vllm/*\ntests/*\n")
    (folder / ".gitconfig").write_text(HOSTILE.format(folder=folder))
    for name, value in {
        "HOME": str(folder),
        "XDG_CONFIG_HOME": str(folder),
        "GIT_CONFIG_GLOBAL": str(folder / ".gitconfig"),
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": "diff.noprefix",
        "GIT_CONFIG_VALUE_0": "true",
        "GIT_CONFIG_PARAMETERS": "'diff.context'='7'",
        "GIT_DIR": "/nonexistent",
        "GIT_WORK_TREE": "/nonexistent",
        "GIT_INDEX_FILE": "/nonexistent/index",
        "GIT_OBJECT_DIRECTORY": "/nonexistent/objects",
        "GIT_NAMESPACE": "evil",
        "GIT_AUTHOR_NAME": "Evil",
        "GIT_AUTHOR_EMAIL": "evil@example.invalid",
        "GIT_AUTHOR_DATE": "2001-01-01T00:00:00Z",
        "GIT_COMMITTER_NAME": "Evil",
        "GIT_COMMITTER_EMAIL": "evil@example.invalid",
        "GIT_COMMITTER_DATE": "2001-01-01T00:00:00Z",
        "GIT_DIFF_OPTS": "--unified=1",
        "GIT_EXTERNAL_DIFF": "false",
        "GIT_LITERAL_PATHSPECS": "1",
        "GIT_TRACE": "1",
        "EMAIL": "evil@example.invalid",
        "LANG": "de_DE.ISO-8859-1",
        "LC_ALL": "de_DE.ISO-8859-1",
        "LANGUAGE": "de",
        "TZ": "Asia/Tokyo",
    }.items():
        monkeypatch.setenv(name, value)
    return folder


def _spoil_repository(tree: Path, folder: Path) -> None:
    """Put the same settings into the repository itself."""
    config = tree / ".git/config"
    config.write_text(config.read_text() + HOSTILE.format(folder=folder))
    (tree / ".git/info").mkdir(exist_ok=True)
    (tree / ".git/info/attributes").write_text(ATTRIBUTES)


def _ran(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("ran-*"))


def test_hostile_user_gets_the_same_base_and_tip(
    bare: Layout, hostile: Path, templates: Path
) -> None:
    done = apply(bare)  # Fetches, too.
    seen = inspect(Layout(templates / "applied"))
    assert (done.tip, seen.base) == (seen.tip, inspect(bare).base)
    assert inspect(bare).state is State.APPLIED
    assert (bare.tree / "vllm/crlf.py").read_bytes() == b"# a line\r\n# another\r\n"
    assert b"\r" not in (bare.tree / "vllm/config.py").read_bytes()
    assert not (bare.tree / ".git/info/attributes").exists()
    assert _ran(hostile) == []


def test_hostile_repository_gets_the_same_tip(
    workspace: Layout, hostile: Path, templates: Path
) -> None:
    _spoil_repository(workspace.tree, hostile)
    (workspace.tree / "setup.py").touch()  # Attributes count once git reads a file.
    assert inspect(workspace).state is State.CLEAN
    done = apply(workspace)
    assert done.tip == inspect(Layout(templates / "applied")).tip
    assert inspect(workspace).state is State.APPLIED
    assert _ran(hostile) == []
    # What was written are the blobs, whatever the attributes say.
    for path in ("vllm/config.py", "docs/gadget.md", "vllm/gadget/__init__.py"):
        blob = Git(workspace.tree).raw("cat-file", "blob", f"HEAD:{path}")
        assert (workspace.tree / path).read_bytes() == blob


def test_hostile_repository_and_work_put_aside(
    workspace: Layout, hostile: Path
) -> None:
    _spoil_repository(workspace.tree, hostile)
    (workspace.tree / "README.md").write_bytes(b"mine\r\n$Id$\n")
    done = apply(workspace, force=True)
    saved = Git(workspace.tree).raw("cat-file", "blob", f"{done.backup}:README.md")
    assert saved == b"mine\r\n$Id$\n"
    assert inspect(workspace).state is State.APPLIED


def test_hostile_user_gets_the_same_mails(applied: Layout, hostile: Path) -> None:
    _spoil_repository(applied.tree, hostile)
    slugs = inspect(applied).slugs or {}
    with scratch(applied.tree) as git:
        for slug, commit in slugs.items():
            mail, added = mail_of(git, commit)
            assert mail == (applied.patches / f"{slug}.patch").read_bytes()
            for file in added:
                assert file.data == (applied.overlay / file.path).read_bytes()
    assert len(slugs) == 3
    assert _ran(hostile) == []


def test_hostile_clone_gives_the_same_base(
    workspace: Layout, hostile: Path, tmp_path: Path
) -> None:
    """`fetch --from-git` reads a clone whose owner has such settings."""
    # The base itself serves as upstream's commit.
    clone = workspace.root / "clone"
    workspace.tree.rename(clone)
    base = Git(clone)("rev-parse", "HEAD")
    _spoil_repository(clone, hostile)
    text = workspace.pin.read_text()
    workspace.pin.write_text(
        text.replace("ced6857afa0ea7b2e3f0846a62e1394e90f15607", base)
    )
    fetch(workspace, str(clone))
    assert inspect(workspace).state is State.CLEAN
    assert _ran(hostile) == []


def test_index_that_git_split_is_understood(
    workspace: Layout, user_git: UserGit
) -> None:
    user_git(workspace.tree, "update-index", "--split-index")
    user_git(workspace.tree, "update-index", "--chmod=+x", "setup.py")
    user_git(workspace.tree, "update-index", "--chmod=-x", "setup.py")
    assert list((workspace.tree / ".git").glob("sharedindex.*"))
    apply(workspace)
    assert inspect(workspace).state is State.APPLIED
    assert user_git(workspace.tree, "status", "--porcelain") == ""


def test_replaced_objects_do_not_count(applied: Layout, user_git: UserGit) -> None:
    base = user_git(applied.tree, "rev-parse", "refs/workshop/base")
    user_git(applied.tree, "replace", "HEAD", base)
    assert inspect(applied).state is State.APPLIED


def test_scratch_leaves_nothing_and_touches_no_setting(workspace: Layout) -> None:
    config = (workspace.tree / ".git/config").read_bytes()
    with scratch(workspace.tree) as git:
        blob = git("hash-object", "-w", "--stdin", stdin="new\n")
        assert (workspace.build / Path(git.cwd).name).is_dir()
    assert not list(workspace.build.glob(".scratch-*"))
    # The object stays: it is in the store of the tree.
    assert Git(workspace.tree)("cat-file", "blob", blob) == "new"
    assert (workspace.tree / ".git/config").read_bytes() == config


def test_scratch_of_a_killed_run_is_removed(workspace: Layout) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    dead = workspace.build / f".scratch-{gone.pid}-x"
    alive = workspace.build / f".scratch-{os.getppid()}-y"
    dead.mkdir()
    alive.mkdir()
    remove_scratch(workspace.build)
    assert not dead.exists()
    assert alive.exists()


def test_error_carries_command_and_stderr(workspace: Layout) -> None:
    with pytest.raises(GitError) as caught:
        Git(workspace.tree)("cat-file", "blob", "nothing")
    assert "git cat-file blob nothing failed (exit 128)" in caught.value.what
    assert "Not a valid object name nothing" in caught.value.why


def test_missing_folder_and_missing_git(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(WorkshopError, match="does not exist"):
        Git(tmp_path / "gone")("version")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(WorkshopError, match="git is not installed"):
        Git(tmp_path)("version")


def test_output_is_decoded_without_loss(workspace: Layout) -> None:
    names = Git(workspace.tree)("ls-files", "-z").split("\0")
    assert "docs/naïve notes.md" in names
    odd = b"\xff\xfe\n"
    git = Git(workspace.tree)
    blob = git("hash-object", "-w", "--stdin", stdin=odd)
    assert git.raw("cat-file", "blob", blob) == odd
    assert git("cat-file", "blob", blob).encode("utf-8", "surrogateescape") == odd[:-1]


def test_blobs_in_one_call(workspace: Layout) -> None:
    git = Git(workspace.tree)
    contents = [b"", b"a\n", b"no newline", b"\0\n\n"]
    names = [git("hash-object", "-w", "--stdin", stdin=data) for data in contents]
    assert git.blobs(names) == contents
    assert git.blobs([]) == []
    with pytest.raises(WorkshopError, match="no blob"):
        git.blobs(["1" * 40])
