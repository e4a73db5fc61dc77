"""Makes the base, a git repository of vLLM's files as the pin describes them."""

from __future__ import annotations

import os
import re
import shutil
import tarfile
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

import click

from tools.download import download, sha256_of
from tools.errors import WorkshopError
from tools.git import Git, GitError
from tools.layout import Layout
from tools.lock import hold
from tools.pin import Pin, load_pin
from tools.state import BASE_REF, BRANCH, base_commit, base_object, find_foreign
from tools.ui import say, step
from tools.versions import tree_versions

_TEMPORARY = ".fetch-"
_VERSION_FILE = "vllm/_version.py"
_SHOWN = 10


def fetch(layout: Layout, from_git: str | None = None) -> str:
    """Make `build/vllm`, at the base, where there is none.

    A tree that has the base stays as it is. One with the base of an older pin gets
    the new base's objects; `apply` moves it there.

    Args:
        from_git: URL or folder of an upstream clone to take the files from, instead
            of the source distribution. They must give the same tree.

    Returns:
        The base commit.

    Raises:
        WorkshopError: The files are not the pinned ones, or `build/vllm` is not
            ours. Nothing is kept then.
    """
    pin = load_pin(layout.pin)
    commit = base_commit(pin)
    with hold(layout, "make fetch"):
        exists = layout.tree.exists() or layout.tree.is_symlink()
        if exists:
            if foreign := find_foreign(layout, pin):
                raise WorkshopError(
                    "Nothing was fetched.", foreign.detail, foreign.todo
                )
            if not from_git and _has_base(layout.tree, pin):
                say(f"{layout.relative(layout.tree)} has the base already.")
                return commit
        with _temporary_folder(layout.build) as folder:
            repo = folder / "vllm"
            repo.mkdir()
            git = Git(repo)
            git("init", "--quiet", "--template=", f"--initial-branch={BRANCH}", ".")
            if from_git:
                _import_clone(layout, pin, from_git, git, folder / "upstream")
            else:
                _import_sdist(layout, pin, git)
            if exists:
                # A fetch by path copies objects only; no ref and no file changes.
                Git(layout.tree)(
                    "fetch",
                    "--quiet",
                    "--no-tags",
                    "--no-auto-maintenance",
                    "--no-write-fetch-head",
                    str(repo),
                    BASE_REF,
                )
            else:
                with step("Writing the base tree"):
                    git("update-ref", f"refs/heads/{BRANCH}", commit)
                    git("read-tree", "-m", "-u", commit)
                    _date_back(git)
                repo.rename(layout.tree)
    return commit


def _date_back(git: Git) -> None:
    """Date all files two seconds back, so that none is as new as the index.

    Git would else read the files that were written in the index's own second each
    time it is asked what changed: 0.3 s on vLLM's tree.
    """
    at = time.time() - 2
    for name in git("ls-files", "-z").split("\0"):
        if name:
            os.utime(git.cwd / name, (at, at), follow_symlinks=False)
    git("update-index", "-q", "--refresh")


def _has_base(tree: Path, pin: Pin) -> bool:
    return Git(tree).resolve(f"{base_commit(pin)}^{{tree}}") == pin.tree


@contextmanager
def _temporary_folder(build: Path) -> Iterator[Path]:
    """A folder beside the tree; those of killed runs are removed first."""
    for left in build.glob(f"{_TEMPORARY}*"):
        pid = left.name.removeprefix(_TEMPORARY).split("-")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(left, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{_TEMPORARY}{os.getpid()}-", dir=build))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _import_sdist(layout: Layout, pin: Pin, git: Git) -> None:
    archive = download(layout, pin.sdist)
    with step(f"Reading {pin.sdist.filename}"):
        files = read_sdist(archive, pin)
        write_base(git, pin, files)
    tree = git("rev-parse", f"{BASE_REF}^{{tree}}")
    if tree != pin.tree:
        raise WorkshopError(
            f"{pin.sdist.filename} does not give the pinned tree.",
            f"It gives     {tree}\nvllm.pin has {pin.tree} (base.tree)",
            "Mend base.tree or sdist.generated in vllm.pin.",
        )
    listed = set(layout.sdist_files.read_text(encoding="utf-8").splitlines())
    if wrong := sorted(listed ^ files.keys()):
        raise WorkshopError(
            f"{layout.sdist_files.name} does not list the files of the base.",
            _names(wrong),
            f"List exactly the files of {pin.sdist.filename}, one a line.",
        )


def read_sdist(archive: Path, pin: Pin) -> dict[str, tuple[str, bytes]]:
    """Mode and content of the files of a source distribution.

    Files that setuptools generates are left out. Nothing is written.

    Raises:
        WorkshopError: It is no archive, has a path that points elsewhere, or is
            not of the pinned version and commit.
    """
    files: dict[str, tuple[str, bytes]] = {}
    recorded = ""
    try:
        with tarfile.open(archive, "r:*") as tar:
            for member in tar:
                if member.isdir():
                    continue
                name = _inner_name(member.name, archive)
                if member.issym():
                    mode, data = "120000", os.fsencode(member.linkname)
                    if ".." in Path(member.linkname).parts or data.startswith(b"/"):
                        raise _unsafe(archive, f"{name} -> {member.linkname}")
                elif (content := tar.extractfile(member)) is not None:
                    data = content.read()
                    mode = "100755" if member.mode & 0o100 else "100644"
                else:
                    raise _unsafe(archive, name)
                if name == _VERSION_FILE:
                    recorded = data.decode(errors="replace")
                if not any(
                    name == left or name.startswith(f"{left}/")
                    for left in pin.generated
                ):
                    files[name] = (mode, data)
    except (tarfile.TarError, EOFError, OSError) as error:
        raise WorkshopError(
            f"{archive} is not a readable archive.",
            str(error),
            "Remove it and run again.",
        ) from None
    _check_recorded(archive, recorded, pin)
    return files


def _inner_name(name: str, archive: Path) -> str:
    """A member's path below the archive's one top folder."""
    parts = PurePosixPath(name).parts
    if name.startswith("/") or len(parts) < 2 or {"..", ".git"} & set(parts):
        raise _unsafe(archive, name)
    return "/".join(parts[1:])


def _unsafe(archive: Path, name: str) -> WorkshopError:
    return WorkshopError(
        f"{archive} holds a path that no source distribution has: {name}."
    )


def _check_recorded(archive: Path, text: str, pin: Pin) -> None:
    """Compare the version and the commit that the sdist records with the pin's."""
    commit = re.search(r"commit_id\s*=\s*'g([0-9a-f]{7,40})'", text)
    if not commit or not pin.commit.startswith(commit[1]):
        raise WorkshopError(
            f"{archive.name} was not made from the pinned commit.",
            f"Its {_VERSION_FILE} records {commit[1] if commit else 'no commit'}; "
            f"{pin.file} says {pin.commit}.",
            f"Mend base.commit or [sdist] in {pin.file}.",
        )
    version = re.search(r"version\s*=\s*'([^']+)'", text)
    if not version or version[1] != pin.version:
        raise WorkshopError(
            f"{archive.name} is not of the pinned version.",
            f"Its {_VERSION_FILE} records {version[1] if version else 'none'}; "
            f"{pin.file} says {pin.version}.",
            f"Mend base.version or [sdist] in {pin.file}.",
        )


def write_base(git: Git, pin: Pin, files: dict[str, tuple[str, bytes]]) -> None:
    """Make the base commit of these files, as `refs/workshop/base`."""
    head, message = base_object(pin).split(b"\n\n", 1)
    author, committer = head.split(b"\n")[1:]
    parts = [b"commit %s\n" % BASE_REF.encode(), author, b"\n", committer, b"\n"]
    parts += [b"data %d\n" % len(message), message]
    for name, (mode, data) in files.items():
        quoted = name.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        parts.append(f'M {mode} inline "{quoted}"\n'.encode("utf-8", "surrogateescape"))
        parts += [b"data %d\n" % len(data), data, b"\n"]
    parts.append(b"done\n")
    git.raw(
        "-c",
        "pack.compression=1",
        "fast-import",
        "--quiet",
        "--done",
        "--depth=0",
        "--date-format=raw",
        stdin=b"".join(parts),
    )


def _import_clone(
    layout: Layout, pin: Pin, source: str, git: Git, folder: Path
) -> None:
    """Make the base commit from upstream's commit, less what the sdist lacks."""
    upstream = _fetch_commit(pin, source, folder)
    found = tree_versions(upstream, pin.commit)
    wanted = layout.sdist_files.read_text(encoding="utf-8").splitlines()
    if missing := sorted(set(wanted) - found.keys()):
        raise WorkshopError(
            f"Commit {pin.commit} of {source} lacks files of the source distribution.",
            _names(missing),
            f"Mend {layout.sdist_files.name} or base.commit in vllm.pin.",
        )
    kept = {name: _follow(upstream, found, name) for name in wanted}
    rows = "".join(f"{mode} {blob}\t{name}\0" for name, (mode, blob) in kept.items())
    upstream("update-index", "--add", "-z", "--index-info", stdin=rows)
    tree = upstream("write-tree")
    if tree != pin.tree:
        raise WorkshopError(
            f"Commit {pin.commit} of {source} does not give the pinned tree.",
            f"It gives     {tree}\nvllm.pin has {pin.tree} (base.tree)\n"
            + _explain(layout, pin, kept, folder.parent),
            "Use a clone of upstream's own repository, or mend vllm.pin.",
        )
    commit = upstream(
        "hash-object", "-t", "commit", "-w", "--stdin", stdin=base_object(pin)
    )
    upstream("update-ref", BASE_REF, commit)
    git("fetch", "--quiet", "--no-tags", str(folder), f"{BASE_REF}:{BASE_REF}")
    _report_extra(layout, pin, source, sorted(found.keys() - kept.keys()))


def _follow(git: Git, files: dict[str, tuple[str, str]], name: str) -> tuple[str, str]:
    """A file as an sdist has it, which holds the targets of symbolic links."""
    at = name
    for _ in range(5):
        mode, blob = files[at]
        if mode != "120000":
            return mode, blob
        target = git("cat-file", "blob", blob)
        at = os.path.normpath(PurePosixPath(at).parent / target)
        if at not in files:
            break
    return files[name]


def _fetch_commit(pin: Pin, source: str, folder: Path) -> Git:
    """Fetch the pinned commit, and no history, into a new bare repository."""
    folder.mkdir()
    # Read by the other end too, when that is on this machine: the clone may be
    # owned by someone else, and the commit need not be the tip of a branch.
    settings = folder / "workshop-settings"
    settings.write_text(
        "[safe]\n\tdirectory = *\n[uploadpack]\n\tallowAnySHA1InWant = true\n"
        "[http]\n\tlowSpeedLimit = 1000\n\tlowSpeedTime = 60\n"
    )
    git = Git(
        folder,
        {
            "GIT_CONFIG_GLOBAL": str(settings),
            "GIT_SSH_COMMAND": "ssh -oBatchMode=yes -oConnectTimeout=20",
        },
    )
    git("init", "--quiet", "--bare", "--template=", ".")
    local = Path(source).expanduser()
    where = source
    if local.is_dir():
        where = str(local.resolve())
        clone = Git(Path(where), git.env)
        if not clone.ok("rev-parse", "--git-dir"):
            raise WorkshopError(
                f"{source} is not a git repository.",
                todo="Give the URL or the folder of a clone of vLLM's repository.",
            )
        if promisor := _promisor_if_incomplete(clone, pin.commit):
            say(f"{source} is a partial clone; taking the files from {promisor}.")
            where = promisor
    try:
        with step(f"Fetching commit {pin.commit[:12]} from {where}"):
            git("fetch", "--quiet", "--no-tags", "--depth=1", where, pin.commit)
    except GitError as error:
        raise _fetch_error(pin, where, error) from None
    return git


def _promisor_if_incomplete(clone: Git, commit: str) -> str | None:
    """Where a partial clone gets its files from, if it has not all of a commit's."""
    try:
        out = clone("config", "--get-regexp", r"^remote\..*\.promisor$")
        remote = out.split()[0].removeprefix("remote.").removesuffix(".promisor")
        url = clone("config", f"remote.{remote}.url")
    except GitError:
        return None
    try:
        objects = clone(
            "rev-list", "--objects", "--missing=print", f"{commit}^{{tree}}"
        )
    except GitError:
        return url
    if any(line.startswith("?") for line in objects.splitlines()):
        path = clone.cwd / url
        return str(path) if path.is_dir() else url
    return None


def _fetch_error(pin: Pin, where: str, error: GitError) -> WorkshopError:
    text = error.stderr.strip()
    if "not our ref" in text or "find remote ref" in text:
        return WorkshopError(
            f"{where} does not have commit {pin.commit}, the pinned one.",
            text,
            "Fetch in that clone first (a shallow one may lack it), or give the URL "
            "of upstream's repository.",
        )
    return WorkshopError(
        f"Nothing could be fetched from {where}.",
        text,
        "Check the URL or path and the network. A proxy is taken from the "
        "environment, not from git's settings.",
    )


def _explain(
    layout: Layout, pin: Pin, kept: dict[str, tuple[str, str]], folder: Path
) -> str:
    """Which paths differ from the pinned tree, where that tree is at hand."""
    reference = Git(layout.tree)
    if not layout.tree.exists() or not _has_base(layout.tree, pin):
        cached = layout.cache / pin.sdist.filename
        if not cached.is_file() or sha256_of(cached) != pin.sdist.sha256:
            return "Run `make fetch` first to be told which paths differ."
        path = folder / "reference"
        path.mkdir()
        reference = Git(path)
        reference("init", "--quiet", "--bare", "--template=", ".")
        write_base(reference, pin, read_sdist(cached, pin))
    expected = tree_versions(reference, pin.tree)
    names = {
        name
        for name in expected.keys() | kept.keys()
        if expected.get(name) != kept.get(name)
    }
    return f"{len(names)} paths differ: {_names(sorted(names))}"


def _report_extra(layout: Layout, pin: Pin, source: str, extra: list[str]) -> None:
    layout.reports.mkdir(parents=True, exist_ok=True)
    report = layout.reports / "from-git.txt"
    report.write_text(
        f"Files of upstream commit {pin.commit}, from {source}, that "
        f"{pin.sdist.filename} does not have: {len(extra)}\n"
        + "".join(f"{name}\n" for name in extra),
        encoding="utf-8",
    )
    say(
        f"The base is the pinned one. Upstream has {len(extra)} files that the source "
        f"distribution has not: {_names(extra)}"
    )
    say(f"All are listed in {layout.relative(report)}.")


def _names(names: Iterable[str]) -> str:
    every = list(names)
    text = ", ".join(every[:_SHOWN]) or "none"
    return text if len(every) <= _SHOWN else f"{text}, and {len(every) - _SHOWN} more"


@click.command()
@click.option(
    "--from-git",
    metavar="URL_OR_PATH",
    help="Take the files from an upstream clone instead of the source distribution.",
)
@click.pass_obj
def command(layout: Layout, from_git: str | None) -> None:
    """Make build/vllm at the pinned base.

    Everything is checked against vllm.pin: the sha256 of the download, the commit
    that it records, and the tree that its files give.
    """
    commit = fetch(layout, from_git)
    say(f"Base {commit[:12]} is in {layout.relative(layout.tree)}.")
