"""The patch series on disk, and the commits it stands for.

A patch is one slug: a mail `patches/<slug>.patch` with hunks on files that exist,
facts about it in `patches/<slug>.toml`, and new files under `overlay/`. `assemble`
makes one commit of each; `mail_of` is its inverse, byte for byte.
"""

from __future__ import annotations

import hashlib
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from tools.errors import WorkshopError
from tools.git import COMMITTER_EMAIL, COMMITTER_NAME, Git, GitError
from tools.layout import Layout

SLUG = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")

_FIELDS: dict[str, type] = {
    "why": str,
    "removal": str,
    "depends_on": list,
    "test_depends_on": list,
    "overlay": list,
    "upstream": list,
    "tests": list,
    "test_env": dict,
}
_KINDS = {str: "string", list: "list", dict: "table"}
_REQUIRED = ("why", "removal", "tests")


@dataclass(frozen=True)
class Meta:
    """Facts of one patch, from its `.toml`.

    Attributes:
        why: What is wrong or missing without the patch.
        removal: When the patch can be dropped.
        depends_on: Slugs whose code this one's code needs.
        test_depends_on: Further slugs that its tests need on a CPU.
        overlay: New files that it owns, as paths in vLLM's tree.
        upstream: Known issues and pull requests, e.g. `#54478`.
        tests: Arguments for pytest, run in the patched tree.
        test_env: What they need in the environment when Python starts.
    """

    why: str
    removal: str
    depends_on: tuple[str, ...] = ()
    test_depends_on: tuple[str, ...] = ()
    overlay: tuple[str, ...] = ()
    upstream: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()
    test_env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Patch:
    slug: str
    mail: Path
    meta_file: Path
    meta: Meta


@dataclass(frozen=True)
class Series:
    """All patches, in the order in which they are applied."""

    layout: Layout
    patches: tuple[Patch, ...]

    def __getitem__(self, slug: str) -> Patch:
        for patch in self.patches:
            if patch.slug == slug:
                return patch
        known = ", ".join(patch.slug for patch in self.patches)
        raise WorkshopError(f"No patch is named {slug!r}.", f"The series has: {known}.")

    @property
    def slugs(self) -> tuple[str, ...]:
        return tuple(patch.slug for patch in self.patches)

    def closure(self, slug: str, tests: bool = False) -> tuple[Patch, ...]:
        """`slug` and what it depends on, in series order.

        Args:
            tests: Also what its tests need (`test_depends_on`).
        """
        wanted: set[str] = set()
        queue = [slug]
        if tests:
            queue += self[slug].meta.test_depends_on
        while queue:
            name = queue.pop()
            if name not in wanted:
                wanted.add(name)
                queue += self[name].meta.depends_on
        return tuple(patch for patch in self.patches if patch.slug in wanted)

    def digest(self, base: str) -> str:
        """Hash of all that decides the tip: base tree, order, mails, overlay.

        Prose in the metadata does not count.
        """
        digest = hashlib.sha256(base.encode())
        for patch in self.patches:
            digest.update(f"\0{patch.slug}\0".encode())
            digest.update(hashlib.sha256(patch.mail.read_bytes()).digest())
            for name in sorted(patch.meta.overlay):
                mode, data = read_overlay(self.layout.overlay / name)
                digest.update(f"\0{name}\0{mode}\0".encode())
                digest.update(hashlib.sha256(data).digest())
        return digest.hexdigest()

    def patch_digest(self, slug: str) -> str:
        """Hash of one patch: its mail, words and all, and its overlay files."""
        return self._hash(slug, self[slug].mail.read_bytes())

    def content_digest(self, slug: str) -> str:
        """Hash of what one patch does to a tree; the mail's words do not count."""
        _, _, hunks = self[slug].mail.read_bytes().partition(b"\ndiff --git ")
        # Names of blobs change with patches before this one.
        lines = [line for line in hunks.split(b"\n") if not line.startswith(b"index ")]
        return self._hash(slug, b"\n".join(lines))

    def _hash(self, slug: str, mail: bytes) -> str:
        patch = self[slug]
        digest = hashlib.sha256(mail)
        for name in sorted(patch.meta.overlay):
            mode, data = read_overlay(self.layout.overlay / name)
            digest.update(f"\0{name}\0{mode}\0".encode() + data)
        return digest.hexdigest()


def load_series(layout: Layout) -> Series:
    """Read order, mails and metadata.

    Raises:
        WorkshopError: Something is missing, unknown or malformed. All problems are
            in one report.
    """
    series, problems = scan_series(layout)
    if problems:
        raise WorkshopError(
            f"The series has {len(problems)} problem(s).",
            "\n".join(problems),
            "Mend the files named above; `make check` shows the whole report.",
        )
    return series


def scan_series(layout: Layout) -> tuple[Series, list[str]]:
    """What can be read of the series, and all that is wrong with it.

    A patch is left out if its mail or metadata is missing or cannot be read, not if
    a required field is still empty.
    """
    problems: list[str] = []
    patches: list[Patch] = []
    slugs = read_order(layout, problems)
    for slug in slugs:
        mail = layout.patches / f"{slug}.patch"
        meta_file = layout.patches / f"{slug}.toml"
        missing = [path for path in (mail, meta_file) if not path.is_file()]
        problems += [f"{layout.relative(path)} is missing." for path in missing]
        if missing:
            continue
        meta = _read_meta(meta_file, layout, problems)
        if meta is not None:
            patches.append(Patch(slug, mail, meta_file, meta))
    problems += _cross_problems(layout, patches, slugs)
    return Series(layout, tuple(patches)), problems


def read_order(layout: Layout, problems: list[str]) -> list[str]:
    """Slugs of `patches/series`, in order; problems are added to the list."""
    try:
        lines = layout.series.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        problems.append(f"{layout.relative(layout.series)} is missing.")
        return []
    slugs: list[str] = []
    for number, line in enumerate(lines, 1):
        slug = line.split("#", 1)[0].strip()
        if not slug:
            continue
        where = f"{layout.relative(layout.series)}:{number}"
        if not SLUG.fullmatch(slug):
            problems.append(
                f"{where}: {slug!r} is not a slug (small letters, digits, hyphens)."
            )
        elif slug in slugs:
            problems.append(f"{where}: {slug} is listed twice.")
        else:
            slugs.append(slug)
    return slugs


def _holds_strings(value: Any) -> bool:
    if isinstance(value, dict):
        value = value.values()
    return isinstance(value, str) or all(isinstance(entry, str) for entry in value)


def _frozen(value: Any) -> Any:
    if isinstance(value, str):
        return value.strip()
    return tuple(value) if isinstance(value, list) else value


def _read_meta(path: Path, layout: Layout, problems: list[str]) -> Meta | None:
    where = layout.relative(path)
    try:
        data: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        problems.append(f"{where}: not valid TOML: {error}")
        return None
    before = len(problems)
    fields: dict[str, Any] = dict.fromkeys(_REQUIRED, "") | {"tests": ()}
    for key, value in data.items():
        kind = _FIELDS.get(key)
        if kind is None:
            problems.append(
                f"{where}: unknown field {key!r}; known: {', '.join(_FIELDS)}."
            )
        elif not isinstance(value, kind):
            problems.append(f"{where}: {key} must be a {_KINDS[kind]}.")
        elif not _holds_strings(value):
            problems.append(f"{where}: {key} must be a {_KINDS[kind]} of strings.")
        else:
            fields[key] = _frozen(value)
    meta = Meta(**fields) if len(problems) == before else None
    problems += [
        f"{where}: {key} is missing or empty."
        for key in _REQUIRED
        if key not in data or not fields[key]
    ]
    return meta


def _cross_problems(
    layout: Layout, patches: Sequence[Patch], slugs: Sequence[str]
) -> list[str]:
    problems: list[str] = []
    order = {slug: at for at, slug in enumerate(slugs)}
    owner: dict[str, str] = {}
    for patch in patches:
        where = layout.relative(patch.meta_file)
        for kind in ("depends_on", "test_depends_on"):
            for name in getattr(patch.meta, kind):
                if name not in order:
                    problems.append(f"{where}: {kind} names {name!r}, no such patch.")
                elif kind == "depends_on" and order[name] >= order[patch.slug]:
                    problems.append(
                        f"{where}: depends_on names {name}, which comes later."
                    )
        for name in patch.meta.overlay:
            pure = PurePosixPath(name)
            if pure.is_absolute() or ".." in pure.parts or str(pure) != name:
                problems.append(f"{where}: overlay path {name!r} is not a plain path.")
            elif name in owner:
                problems.append(
                    f"{where}: overlay/{name} is already owned by {owner[name]}."
                )
            elif not _is_overlay_file(layout.overlay / name):
                problems.append(f"{where}: overlay/{name} is missing.")
            owner.setdefault(name, patch.slug)
    return problems


def _is_overlay_file(path: Path) -> bool:
    # A link's target is a path in vLLM's tree: it need not exist in overlay/.
    return path.is_symlink() or path.is_file()


def read_overlay(path: Path) -> tuple[str, bytes]:
    """Git's mode and content of a file of the overlay; a link's is its target."""
    if path.is_symlink():
        return "120000", os.fsencode(path.readlink())
    executable = path.stat().st_mode & 0o100
    return "100755" if executable else "100644", path.read_bytes()


@dataclass(frozen=True)
class Mail:
    """What a patch mail says besides its hunks."""

    author: str
    email: str
    date: str
    message: str


def read_mail(git: Git, path: Path) -> Mail:
    """Author, date and message of a mail; `[Tags]` of the subject are kept.

    Raises:
        WorkshopError: It is not a mail with author, date and subject.
    """
    body = Path(git.cwd) / "mail-body"
    info = git(
        "mailinfo",
        "-b",
        "--encoding=UTF-8",
        "--no-scissors",
        "--no-message-id",
        str(body),
        str(Path(git.cwd) / "mail-patch"),
        stdin=path.read_bytes(),
    )
    fields = dict(line.split(": ", 1) for line in info.split("\n") if ": " in line)
    missing = [
        key for key in ("Author", "Email", "Subject", "Date") if not fields.get(key)
    ]
    if missing:
        raise WorkshopError(
            f"{path} is not a git-format-patch mail.",
            f"It has no {', '.join(missing)}.",
        )
    try:
        text = body.read_bytes().decode("utf-8").strip("\n")
    except UnicodeDecodeError as error:
        raise WorkshopError(
            f"{path}: the message is not UTF-8.",
            str(error),
            "Write it again in UTF-8.",
        ) from None
    message = fields["Subject"] + "\n" + (f"\n{text}\n" if text else "")
    return Mail(_author(path, fields), fields["Email"], fields["Date"], message)


def _author(path: Path, fields: dict[str, str]) -> str:
    """The author's name; git puts the address for one that it finds odd."""
    if fields["Author"] != fields["Email"]:
        return fields["Author"]
    head = path.read_bytes().split(b"\n\n", 1)[0].decode("utf-8", "replace")
    head = re.sub(r"\n[ \t]+", " ", head)
    match = re.search(r"^From: (.*?) ?<[^<>]*>$", head, re.MULTILINE)
    name = match[1].strip() if match else ""
    if name.startswith('"') and name.endswith('"'):
        name = re.sub(r"\\(.)", r"\1", name[1:-1])
    return name or fields["Author"]


def assemble(
    git: Git,
    base: str,
    patches: Iterable[Patch],
    overlay: Path,
    on_patch: Callable[[str], None] = lambda slug: None,
) -> dict[str, str]:
    """Make one commit per patch on top of `base`.

    Works in the object store and a private index only: no file of any tree is
    touched. The commits are the same on every machine.

    Args:
        git: From `tools.git.scratch`.
        base: Commit to start from.
        on_patch: Called with each slug before it is applied.

    Returns:
        Commit of each slug, in order.

    Raises:
        WorkshopError: A patch does not apply, or an overlay file exists already;
            names the slug and the files.
    """
    git("read-tree", base)
    tip = base
    commits: dict[str, str] = {}
    for patch in patches:
        on_patch(patch.slug)
        mail = read_mail(git, patch.mail)
        if b"\ndiff --git " in patch.mail.read_bytes():
            try:
                git("apply", "--cached", "--whitespace=nowarn", str(patch.mail))
            except GitError as error:
                raise WorkshopError(
                    f"Patch {patch.slug} does not apply.",
                    error.stderr.strip(),
                    "It was made for another base, or a patch before it changed. "
                    "Mend the hunks and run again.",
                ) from None
        _add_overlay(git, patch, overlay)
        tree = git("write-tree")
        tip = commit_tree(git, tree, tip, mail)
        commits[patch.slug] = tip
    return commits


def commit_tree(git: Git, tree: str, parent: str, mail: Mail) -> str:
    """Commit with the mail's author and message and the series' fixed committer."""
    return git(
        "commit-tree",
        tree,
        "-p",
        parent,
        stdin=mail.message,
        env={
            "GIT_AUTHOR_NAME": mail.author,
            "GIT_AUTHOR_EMAIL": mail.email,
            "GIT_AUTHOR_DATE": mail.date,
            "GIT_COMMITTER_NAME": COMMITTER_NAME,
            "GIT_COMMITTER_EMAIL": COMMITTER_EMAIL,
            "GIT_COMMITTER_DATE": mail.date,
        },
    )


def _add_overlay(git: Git, patch: Patch, overlay: Path) -> None:
    taken = add_overlay(git, patch, overlay)
    if taken:
        raise WorkshopError(
            f"Overlay files of {patch.slug} exist already in the tree before it.",
            "\n".join(taken),
            "Turn them into hunks of the patch, or move them.",
        )


def add_overlay(git: Git, patch: Patch, overlay: Path) -> list[str]:
    """Put a patch's new files into the index; those that it has already are left.

    Returns:
        Paths that it has already.
    """
    if not patch.meta.overlay:
        return []
    missing = [n for n in patch.meta.overlay if not _is_overlay_file(overlay / n)]
    if missing:
        raise WorkshopError(
            f"patches/{patch.slug}.toml names overlay files that are not there.",
            "\n".join(missing),
            "Remove them from `overlay`, or `make export` again.",
        )
    taken = git(
        "--literal-pathspecs", "ls-files", "-z", "--", *patch.meta.overlay
    ).split("\0")[:-1]
    entries = []
    for name in patch.meta.overlay:
        if name in taken:
            continue
        mode, data = read_overlay(overlay / name)
        blob = git("hash-object", "-w", "--stdin", "--no-filters", stdin=data)
        entries.append(f"{mode} {blob}\t{name}\0")
    git("update-index", "--add", "-z", "--index-info", stdin="".join(entries))
    return taken


# A renamed file stays a hunk: the overlay holds no text of upstream's.
_RENAMES = ("--find-renames=50%", "-l1000")

# The form of a mail, whatever the settings are.
FORMAT_PATCH = (
    "-1",
    "--stdout",
    "--always",
    "--patch",
    "--full-index",
    "--binary",
    "--no-signature",
    "--no-attach",
    "--no-thread",
    "--no-notes",
    "--no-cover-letter",
    "--no-to",
    "--no-cc",
    "--no-add-header",
    "--no-signoff",
    "--no-numbered",
    "--subject-prefix=PATCH",
    *_RENAMES,
    "--no-ext-diff",
    "--no-textconv",
    "--no-color",
    "--no-indent-heuristic",
    "--unified=3",
    "--inter-hunk-context=0",
    "--src-prefix=a/",
    "--dst-prefix=b/",
    f"-O{os.devnull}",
)


@dataclass(frozen=True)
class Added:
    """A file that a commit adds."""

    path: str
    mode: str
    data: bytes


def mail_of(git: Git, commit: str) -> tuple[bytes, list[Added]]:
    """The mail of a commit and the files that it adds, which the mail leaves out.

    Args:
        git: From `tools.git.scratch`.

    Returns:
        Bytes of `patches/<slug>.patch`, and the files for `overlay/`.
    """
    rows = [row for row in raw_diff(git, commit) if row[2] == "A"]
    contents = git.blobs([blob for _, blob, _, _ in rows])
    files = [
        Added(path, mode, content)
        for (mode, _, _, path), content in zip(rows, contents, strict=True)
    ]
    hunks = _without(git, commit, [file.path for file in files]) if files else commit
    return format_mail(git, hunks), files


def format_mail(git: Git, commit: str) -> bytes:
    """The mail of all that a commit changes, added files too."""
    return git.raw(
        "format-patch",
        "--no-stat",
        "--zero-commit",
        "--no-base",
        "--no-encode-email-headers",
        *FORMAT_PATCH,
        commit,
    )


def _without(git: Git, commit: str, paths: Sequence[str]) -> str:
    """The same commit without some files."""
    git("read-tree", commit)
    entries = "".join(f"0 {'0' * 40}\t{path}\0" for path in paths)
    git("update-index", "-z", "--index-info", stdin=entries)
    show = git(
        "show",
        "-s",
        "--no-notes",
        "--format=%an%x00%ae%x00%ad%x00%B",
        "--date=rfc2822",
        commit,
    )
    author, email, date, message = show.split("\0", 3)
    mail = Mail(author, email, date, message.strip("\n") + "\n")
    return commit_tree(git, git("write-tree"), f"{commit}^", mail)


def raw_diff(git: Git, commit: str) -> list[tuple[str, str, str, str]]:
    """(mode, blob, status, path) of each file that a commit changes."""
    out = git(
        "diff-tree", "-r", "-z", "--no-commit-id", *_RENAMES, f"{commit}^", commit
    )
    fields = iter(out.split("\0")[:-1])
    rows = []
    for meta in fields:
        _, mode, _, blob, status = meta.split()
        path = next(fields)
        if status[0] == "R":
            path = next(fields)
        rows.append((mode, blob, status[0], path))
    return rows
