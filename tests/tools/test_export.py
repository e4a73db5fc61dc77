"""`export` on real repositories: round trip, matching, refusals, kills."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import tomlkit

import tools.export_files
from tools.apply import apply
from tools.errors import WorkshopError
from tools.export import export
from tools.export_files import meta_text, series_text
from tools.export_match import slug_from
from tools.git import Git, scratch
from tools.layout import Layout
from tools.pin import load_pin
from tools.series import assemble, load_series, scan_series

Commit = Callable[..., str]

BODY = "## Purpose\n\nWhy.\n\nCo-authored-by: A Machine\n"


@pytest.fixture
def git(applied: Layout, user_git: Callable[..., str]) -> Callable[..., str]:
    """Git in `build/vllm`, as the user runs it."""

    def run(*args: str, **env: str) -> str:
        return user_git(applied.tree, *args, **env)

    return run


@pytest.fixture
def commit(applied: Layout, git: Callable[..., str]) -> Commit:
    """Write files (None removes one) and commit them."""

    def run(files: dict[str, str | bytes | None], *args: str, **env: str) -> str:
        for name, content in files.items():
            path = applied.tree / name
            if content is None:
                path.unlink()
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.encode() if isinstance(content, str) else content)
        git("add", "--all", "--force", "--", *files)
        git("commit", "--quiet", "--no-verify", *args, **env)
        return git("rev-parse", "HEAD")

    return run


def snapshot(layout: Layout) -> dict[str, tuple[int, bytes]]:
    """Content and mode of all that an export may write."""
    found = {"vllm.pin": (0, layout.pin.read_bytes())}
    for top in (layout.patches, layout.overlay):
        for path in sorted(top.rglob("*")):
            name = str(path.relative_to(layout.root))
            if path.is_symlink():
                found[name] = (0o120000, str(path.readlink()).encode())
            elif path.is_file():
                found[name] = (path.stat().st_mode & 0o777, path.read_bytes())
    return found


def assembled_tree(layout: Layout) -> str:
    """Tree that the series on disk gives."""
    series, _ = scan_series(layout)
    with scratch(layout.tree) as private:
        base = Git(layout.tree)("rev-parse", "refs/workshop/base")
        tip = list(assemble(private, base, series.patches, layout.overlay).values())
        return private("rev-parse", f"{tip[-1]}^{{tree}}")


def assert_round_trip(layout: Layout) -> None:
    """The series gives HEAD's tree, the pin says so, and nothing is left to do."""
    tree = Git(layout.tree)("rev-parse", "HEAD^{tree}")
    assert assembled_tree(layout) == tree
    assert load_pin(layout.pin).tip_tree == tree
    before = snapshot(layout)
    again = export(layout)
    assert snapshot(layout) == before
    assert again.unchanged == tuple(order(layout))


def order(layout: Layout) -> list[str]:
    lines = layout.series.read_text().splitlines()
    return [slug for line in lines if (slug := line.split("#")[0].strip())]


def overlay_of(layout: Layout, slug: str) -> list[str]:
    meta = tomlkit.parse((layout.patches / f"{slug}.toml").read_text())
    return list(meta.get("overlay", []))


def insert_before(git: Callable[..., str], count: int) -> None:
    """Move the last commit so that `count` commits come after it."""
    new = git("rev-parse", "HEAD")
    git("checkout", "--quiet", "--detach", f"HEAD~{count + 1}")
    git("cherry-pick", new)
    git("cherry-pick", f"{new}~{count + 1}..{new}~1")


# Round trip


def test_apply_then_export_changes_no_file(
    applied: Layout, mtimes: Callable[[Path], dict[str, int]]
) -> None:
    def times() -> list[dict[str, int]]:
        return [mtimes(applied.patches), mtimes(applied.overlay), _pin_time(applied)]

    before = times()
    done = export(applied)
    assert times() == before
    assert done.unchanged == ("config-answer", "gadget", "gadget-docs")
    assert done.notes == ()


def _pin_time(layout: Layout) -> dict[str, int]:
    return {"pin": layout.pin.stat().st_mtime_ns}


HOSTILE = """\
[core]
    abbrev = 4
    autocrlf = true
    attributesFile = {folder}/attributes
    eol = crlf
    hooksPath = {folder}/hooks
    quotePath = true
[commit]
    gpgSign = true
[diff]
    algorithm = patience
    context = 9
    external = false
    indentHeuristic = true
    interHunkContext = 9
    mnemonicPrefix = true
    noprefix = true
    orderFile = {folder}/order
    renames = copies
    submodule = log
    suppressBlankEmpty = true
    wordRegex = .
[format]
    attach
    cc = someone@example.invalid
    coverLetter = true
    encodeEmailHeaders = true
    from = Somebody Else <else@example.invalid>
    headers = "X-Hostile: yes\\n"
    mboxrd = true
    noprefix = true
    notes = true
    numbered = true
    pretty = oneline
    signOff = true
    signature = hostile
    subjectPrefix = HOSTILE
    suffix = .txt
    thread = deep
    useAutoBase = true
[i18n]
    commitEncoding = ISO-8859-1
    logOutputEncoding = ISO-8859-1
[log]
    date = relative
    showSignature = true
[mailinfo]
    scissors = true
[apply]
    ignoreWhitespace = change
    whitespace = error
[user]
    name = Somebody Else
    email = else@example.invalid
[color]
    ui = always
"""


def _hostile(layout: Layout, folder: Path, place: str) -> dict[str, str]:
    """Put hostile settings at a place; returns the environment to run with."""
    folder.mkdir()
    (folder / "hooks").mkdir()
    for hook in ("pre-commit", "commit-msg", "post-checkout", "reference-transaction"):
        path = folder / "hooks" / hook
        path.write_text("#!/bin/sh\nexit 1\n")
        path.chmod(0o755)
    (folder / "attributes").write_text("* -diff text eol=crlf filter=nothing\n")
    (folder / "order").write_text("vllm/*\n*\n")
    settings = HOSTILE.format(folder=folder)
    if place == "user":
        (folder / ".gitconfig").write_text(settings)
        return {"HOME": str(folder), "XDG_CONFIG_HOME": str(folder)}
    if place == "repository":
        with (layout.tree / ".git" / "config").open("a") as file:
            file.write(settings)
        info = layout.tree / ".git" / "info"
        info.mkdir(exist_ok=True)
        shutil.copy(folder / "attributes", info / "attributes")
        shutil.copytree(folder / "hooks", layout.tree / ".git" / "hooks")
        return {}
    (folder / "config").write_text(settings)
    return {
        "GIT_CONFIG_GLOBAL": str(folder / "config"),
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": "diff.noprefix",
        "GIT_CONFIG_VALUE_0": "true",
        "GIT_AUTHOR_NAME": "Somebody Else",
        "GIT_COMMITTER_DATE": "2001-01-01T00:00:00Z",
        "GIT_DIFF_OPTS": "--unified=9",
        "GIT_DIR": "/nowhere",
        "GIT_EXTERNAL_DIFF": "false",
        "GIT_INDEX_FILE": "/nowhere",
        "GIT_WORK_TREE": "/nowhere",
        "LANG": "de_DE.ISO-8859-1",
        "LC_ALL": "tr_TR.UTF-8",
        "TZ": "Asia/Kathmandu",
    }


@pytest.mark.parametrize("place", ["user", "repository", "environment"])
def test_no_setting_changes_a_byte(
    applied: Layout,
    tmp_path: Path,
    commit: Commit,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
) -> None:
    commit(
        {"vllm/config.py": "X = 1\n\nY = 2\n", "vllm/ü.py": "X = 1\n"},
        "-m",
        "[Core] Ünder way",
        "-m",
        BODY,
    )
    expected = shutil.copytree(applied.root, tmp_path / "expected", symlinks=True)
    export(Layout(expected))

    env = _hostile(applied, tmp_path / "hostile", place)
    # The settings do reach a plain git, or the test would prove nothing.
    plain = ["git", "format-patch", "-1", "--stdout"]
    outside = {key: value for key, value in env.items() if value != "/nowhere"}
    outside.pop("GIT_EXTERNAL_DIFF", None)
    mails = [
        subprocess.run(
            plain, cwd=tree, env={"PATH": "/usr/bin:/bin", **extra}, capture_output=True
        ).stdout
        for tree, extra in ((expected / "build/vllm", {}), (applied.tree, outside))
    ]
    assert mails[0] != mails[1]

    for name, value in env.items():
        monkeypatch.setenv(name, value)
    export(applied)
    assert snapshot(applied) == snapshot(Layout(expected))


SUBJECTS = [
    "[Bugfix][CPU] Keep every tag of a subject",
    "[Core] Grüße an 世界 — naïve",
    "[Core] " + "A very long subject that a mail has to fold " * 6 + "end",
    "[Core] " + "ä" * 150,
    "[Core] Use = and ? and % and $(x) and `y` and \\",
    'Plain: "quotes", <brackets> & a trailing dot.',
    "[v2] [a b]tags",
]
AUTHORS = [
    ("Zoë Ångström", "zoe@example.invalid"),
    ("李明", "li@example.invalid"),
    ("Bo", "bo@example.invalid"),
    ("Doe, John (the third)", "john.doe@example.invalid"),
    ('A "Nick" Name', "nick@example.invalid"),
    ("A" * 70, "long@example.invalid"),
    ("O'Neill", "o@example.invalid"),
]


def test_subjects_and_authors_survive(
    applied: Layout, git: Callable[..., str], commit: Commit
) -> None:
    body = "## Purpose\n\nSträng — 世界.\n\n    indented\n\n- a list\n\nLast line."
    for at, (subject, author) in enumerate(zip(SUBJECTS, AUTHORS, strict=True)):
        who = {
            "GIT_AUTHOR_NAME": author[0],
            "GIT_AUTHOR_EMAIL": author[1],
            "GIT_AUTHOR_DATE": f"2026-02-28T23:59:5{at}-0730",
        }
        commit({"vllm/config.py": f"X = {at}\n"}, "-m", subject, "-m", body, **who)
    assert len(export(applied).added) == len(SUBJECTS)
    assert_round_trip(applied)
    series, _ = scan_series(applied)
    with scratch(applied.tree) as private:
        base = git("rev-parse", "refs/workshop/base")
        made = assemble(private, base, series.patches, applied.overlay)
        tip = list(made.values())[-1]
    log = ("log", "--format=%an%n%ae%n%ai%n%B", "--max-count=7")
    assert git(*log, tip) == git(*log, "HEAD")


def test_odd_files_survive(
    applied: Layout, git: Callable[..., str], commit: Commit
) -> None:
    tree = applied.tree
    (tree / "tools/run.sh").chmod(0o644)
    (tree / "setup.py").chmod(0o755)
    (tree / "vllm").joinpath("link").symlink_to("engine/core.py")
    (tree / "vllm").joinpath("broken link").symlink_to("../no/such/file")
    (tree / "vllm/tool").write_text("#!/bin/sh\n")
    (tree / "vllm/tool").chmod(0o755)
    git("add", "tools/run.sh", "setup.py", "vllm")
    binary = bytes(range(256)) * 4
    commit(
        {
            "vllm/binary.bin": binary,
            "vllm/no newline.py": "X = 1",
            "vllm/crlf new.py": "a\r\nb\r\n",
            "vllm/crlf.py": "# a line\r\n# changed\r\n",
            "vllm/form\ffeed.py": "a\x0cb\u2028c\x1c\n",
            "vllm/na[i]ve *?.py": "X = 1\n",
            'vllm/"quoted"\ttab.py': "X = 1\n",
            "vllm/empty.py": "",
            "vllm/latin1.txt": "ä\n".encode("latin-1"),
            "docs/naïve notes.md": "Changed, and no newline",
            "vllm/engine/core.py": None,
        },
        "-m",
        "[Core] Odd files",
    )
    commit({"vllm/binary.bin": binary[::-1]}, "-m", "[Core] Edit the binary")
    done = export(applied)
    assert done.added == ("odd-files", "edit-the-binary")
    assert_round_trip(applied)
    overlay = applied.overlay / "vllm"
    assert (overlay / "link").is_symlink()
    assert (overlay / "broken link").readlink() == Path("../no/such/file")
    assert (overlay / "tool").stat().st_mode & 0o777 == 0o755
    assert (overlay / "binary.bin").read_bytes() == binary
    assert (
        b"GIT binary patch" in (applied.patches / "edit-the-binary.patch").read_bytes()
    )
    mail = (applied.patches / "odd-files.patch").read_text(errors="replace")
    assert "new file mode" not in mail
    assert "deleted file mode" in mail
    assert "old mode 100755\nnew mode 100644" in mail


def test_a_rename_stays_a_hunk(
    applied: Layout, git: Callable[..., str], commit: Commit
) -> None:
    git("mv", "vllm/config.py", "vllm/settings.py")
    path = applied.tree / "vllm/settings.py"
    commit({"vllm/settings.py": path.read_text() + "MORE = 1\n"}, "-m", "[Core] Rename")
    export(applied)
    assert overlay_of(applied, "rename") == []
    assert (
        "rename to vllm/settings.py" in (applied.patches / "rename.patch").read_text()
    )
    assert_round_trip(applied)


def test_apply_takes_the_exported_series(applied: Layout, commit: Commit) -> None:
    commit({"vllm/config.py": "X = 1\n"}, "-m", "[Core] Replace", "-m", BODY)
    export(applied)
    meta = applied.patches / "replace.toml"
    meta.write_text('why = "x"\nremoval = "y"\ntests = ["tests/test_x.py"]\n')
    tree = Git(applied.tree)("rev-parse", "HEAD^{tree}")
    assert apply(applied).slugs[-1] == "replace"
    assert Git(applied.tree)("rev-parse", "HEAD^{tree}") == tree
    assert export(applied).unchanged == (*order(applied),)


# Where things go


def test_an_amended_patch_is_the_only_one_written(
    applied: Layout, git: Callable[..., str], commit: Commit
) -> None:
    before = snapshot(applied)
    commit(
        {"vllm/engine/core.py": "class EngineCore:\n    gadget = 2\n"},
        "--fixup",
        "HEAD~1",
    )
    git("rebase", "--quiet", "-i", "--autosquash", "HEAD~3", GIT_SEQUENCE_EDITOR="true")
    done = export(applied)
    assert done.written == ("gadget",)
    assert done.unchanged == ("config-answer", "gadget-docs")
    after = snapshot(applied)
    changed = {name for name in before | after if before.get(name) != after.get(name)}
    assert changed == {"patches/gadget.patch", "vllm.pin"}
    assert_round_trip(applied)


def test_an_edit_of_an_overlay_file_goes_there_or_into_a_later_mail(
    applied: Layout, git: Callable[..., str], commit: Commit
) -> None:
    commit({"vllm/gadget/__init__.py": "GADGET = 2\n"}, "--fixup", "HEAD~1")
    git("rebase", "--quiet", "-i", "--autosquash", "HEAD~3", GIT_SEQUENCE_EDITOR="true")
    commit({"vllm/gadget/__init__.py": "GADGET = 3\n"}, "-m", "[Core] Three")
    export(applied)
    source = applied.overlay / "vllm/gadget/__init__.py"
    assert source.read_text() == "GADGET = 2\n"
    assert "+GADGET = 3" in (applied.patches / "three.patch").read_text()
    assert overlay_of(applied, "three") == []
    assert_round_trip(applied)


def test_a_file_moves_with_its_owner_and_goes_with_the_last(
    applied: Layout, git: Callable[..., str], commit: Commit
) -> None:
    meta = applied.patches / "gadget.toml"
    text = meta.read_text()
    start = text.index("overlay = ")
    meta.write_text(
        "# Why, in a comment.\n"
        + text[:start]
        + "overlay = [\n"
        + '    "tests/test_gadget.py",  # the test\n'
        + '    "vllm/gadget/__init__.py",\n]\n'
    )
    git("reset", "--quiet", "--hard", "HEAD~1")
    test = (applied.tree / "tests/test_gadget.py").read_text()
    commit({"tests/test_gadget.py": None}, "--amend", "--no-edit")
    docs = {"tests/test_gadget.py": test}
    commit(docs, "-C", "refs/workshop/slug/gadget-docs", "--reset-author")
    done = export(applied)
    assert done.written == ("gadget", "gadget-docs")
    assert overlay_of(applied, "gadget") == ["vllm/gadget/__init__.py"]
    assert overlay_of(applied, "gadget-docs") == ["tests/test_gadget.py"]
    assert meta.read_text().startswith("# Why, in a comment.\n")
    assert (applied.overlay / "tests/test_gadget.py").read_text() == test
    # The document was in the commit before; now no commit adds it.
    assert not (applied.overlay / "docs").exists()
    assert_round_trip(applied)


def test_a_new_patch_enters_at_its_place(
    applied: Layout, git: Callable[..., str], commit: Commit
) -> None:
    applied.series.write_text(
        "# Order.\n\nconfig-answer  # first\n\n# The gadget.\ngadget\n"
        "# Its documentation.\ngadget-docs\n# The end.\n"
    )
    commit({"vllm/other.py": "X = 1\n"}, "-m", "[Core][CPU] Add another (thing)!")
    insert_before(git, 1)
    done = export(applied)
    assert done.added == ("add-another-thing",)
    assert "--slug" in done.notes[0]
    assert applied.series.read_text() == (
        "# Order.\n\nconfig-answer  # first\n\n# The gadget.\ngadget\n"
        "add-another-thing\n# Its documentation.\ngadget-docs\n# The end.\n"
    )
    assert overlay_of(applied, "add-another-thing") == ["vllm/other.py"]
    with pytest.raises(WorkshopError) as caught:
        load_series(applied)
    for field in ("why", "removal", "tests"):
        assert f"add-another-thing.toml: {field} is missing or empty." in str(
            caught.value
        )
    assert_round_trip(applied)


def test_the_user_can_name_a_new_patch(applied: Layout, commit: Commit) -> None:
    name = commit({"vllm/other.py": "X = 1\n"}, "-m", "[Core] Another")
    assert export(applied, {name[:10]: "my-name"}).added == ("my-name",)
    # The name sticks: the mail's subject tells the commit from now on.
    assert export(applied).unchanged[-1] == "my-name"


def test_a_new_order_is_kept(applied: Layout, git: Callable[..., str]) -> None:
    git("checkout", "--quiet", "--detach", "refs/workshop/base")
    for slug in ("gadget", "config-answer", "gadget-docs"):
        git("cherry-pick", f"refs/workshop/slug/{slug}")
    export(applied)
    assert order(applied) == ["gadget", "config-answer", "gadget-docs"]
    assert_round_trip(applied)


def test_a_reworded_patch_keeps_its_slug(
    applied: Layout, git: Callable[..., str]
) -> None:
    git("commit", "--amend", "--quiet", "-m", "[Doc] Other words", "-m", BODY)
    done = export(applied)
    assert done.written == ("gadget-docs",)
    assert done.notes == (
        "gadget-docs has a new subject: [Doc] Other words "
        "(was: [Doc] Describe the gadget).",
    )
    assert_round_trip(applied)


def test_a_rewritten_patch_is_known_by_its_place_and_files(
    applied: Layout, git: Callable[..., str], commit: Commit
) -> None:
    git("reset", "--quiet", "--hard", "HEAD~3")
    commit({"vllm/config.py": "X = 42\n"}, "-m", "[Core] Wholly new")
    for slug in ("gadget", "gadget-docs"):
        git("cherry-pick", f"refs/workshop/slug/{slug}")
    done = export(applied)
    assert done.written == ("config-answer",)
    assert "has a new subject" in done.notes[0]


# Dropping


def test_a_patch_without_a_commit_goes_only_when_told(
    applied: Layout, git: Callable[..., str]
) -> None:
    stray = applied.overlay / "docs" / "stray.md"
    stray.write_text("Nobody's.\n")
    git("reset", "--quiet", "--hard", "HEAD~1")
    before = snapshot(applied)
    with pytest.raises(WorkshopError) as caught:
        export(applied)
    assert "--drop gadget-docs" in caught.value.todo
    assert snapshot(applied) == before
    done = export(applied, drop=["gadget-docs"])
    assert done.dropped == ("gadget-docs",)
    assert order(applied) == ["config-answer", "gadget"]
    gone = before.keys() - snapshot(applied).keys()
    assert gone == {
        "patches/gadget-docs.patch",
        "patches/gadget-docs.toml",
        "overlay/docs/gadget.md",
    }
    assert_round_trip(applied)


def test_drop_refuses_what_is_there_or_unknown(applied: Layout) -> None:
    for slug, words in (("gadget", "still has its commit"), ("nothing", "no such")):
        with pytest.raises(WorkshopError, match=words):
            export(applied, drop=[slug])


# Refusals: each leaves everything as it was


def _at_base(layout: Layout, git: Callable[..., str], commit: Commit) -> None:
    git("reset", "--quiet", "--hard", "refs/workshop/base")


def _merge(layout: Layout, git: Callable[..., str], commit: Commit) -> None:
    git("checkout", "--quiet", "-b", "side", "HEAD~1")
    commit({"vllm/side.py": "X = 1\n"}, "-m", "side")
    git("checkout", "--quiet", "series")
    git("merge", "--quiet", "--no-edit", "side")


def _empty(layout: Layout, git: Callable[..., str], commit: Commit) -> None:
    git("commit", "--allow-empty", "--quiet", "-m", "[Core] Nothing")


def _orphan(layout: Layout, git: Callable[..., str], commit: Commit) -> None:
    git("checkout", "--quiet", "--orphan", "other")
    git("commit", "--quiet", "-m", "[Core] All anew")


def _rebase(layout: Layout, git: Callable[..., str], commit: Commit) -> None:
    git("rebase", "--quiet", "-i", "HEAD~2", GIT_SEQUENCE_EDITOR="sed -i 1s/pick/edit/")


def _cherry_pick(layout: Layout, git: Callable[..., str], commit: Commit) -> None:
    commit({"vllm/config.py": "X = 1\n"}, "-m", "[Core] One")
    git("reset", "--quiet", "--hard", "HEAD~1")
    commit({"vllm/config.py": "X = 2\n"}, "-m", "[Core] Two")
    with pytest.raises(AssertionError):
        git("cherry-pick", "HEAD@{2}")


def _am(layout: Layout, git: Callable[..., str], commit: Commit) -> None:
    git("reset", "--quiet", "--hard", "HEAD~3")
    commit({"vllm/config.py": "X = 2\n"}, "-m", "[Core] Two")
    with pytest.raises(AssertionError):
        git("am", str(layout.patches / "config-answer.patch"))


def _interrupted(layout: Layout, git: Callable[..., str], commit: Commit) -> None:
    (layout.tree / ".git" / "workshop-switch.json").write_text("{}")


def _modified(layout: Layout, git: Callable[..., str], commit: Commit) -> None:
    (layout.tree / "vllm/config.py").write_text("X = 1\n")


def _staged(layout: Layout, git: Callable[..., str], commit: Commit) -> None:
    (layout.tree / "setup.py").write_text("X = 1\n")
    git("add", "setup.py")


def _untracked(layout: Layout, git: Callable[..., str], commit: Commit) -> None:
    (layout.tree / "vllm/forgotten.py").write_text("X = 1\n")


def _fixup(layout: Layout, git: Callable[..., str], commit: Commit) -> None:
    commit({"vllm/config.py": "X = 1\n"}, "--fixup", "HEAD~1")


def _submodule(layout: Layout, git: Callable[..., str], commit: Commit) -> None:
    git("update-index", "--add", "--cacheinfo", f"160000,{'1' * 40},vllm/sub")
    git("commit", "--quiet", "-m", "[Core] Submodule")
    (layout.tree / "vllm/sub").mkdir()


def _twice(layout: Layout, git: Callable[..., str], commit: Commit) -> None:
    commit({"docs/gadget.md": None}, "-m", "[Doc] Remove it")
    commit({"docs/gadget.md": "Again\n"}, "-m", "[Doc] Add it again")


def _file_and_folder(layout: Layout, git: Callable[..., str], commit: Commit) -> None:
    commit({"docs/gadget.md": None}, "-m", "[Doc] Remove it")
    commit({"docs/gadget.md/x.md": "Again\n"}, "-m", "[Doc] Make it a folder")


def _unclear(layout: Layout, git: Callable[..., str], commit: Commit) -> None:
    git("reset", "--quiet", "--hard", "HEAD~2")
    commit({"vllm/a.py": "X = 1\n"}, "-m", "[Core] A")


def _unnamed(layout: Layout, git: Callable[..., str], commit: Commit) -> None:
    commit({"vllm/a.py": "X = 1\n"}, "-m", "[Core] 世界")


def _broken_meta(layout: Layout, git: Callable[..., str], commit: Commit) -> None:
    (layout.patches / "gadget.toml").write_text("why = \n")


def _other_base(layout: Layout, git: Callable[..., str], commit: Commit) -> None:
    text = layout.pin.read_text()
    layout.pin.write_text(text.replace(load_pin(layout.pin).tree, "0" * 40))


def _no_base(layout: Layout, git: Callable[..., str], commit: Commit) -> None:
    git("update-ref", "-d", "refs/workshop/base")


def _absent(layout: Layout, git: Callable[..., str], commit: Commit) -> None:
    shutil.rmtree(layout.tree)


REFUSALS = [
    (_at_base, "Nothing to export: HEAD of build/vllm is the base"),
    (_merge, "merge commits"),
    (_empty, "change no file"),
    (_orphan, "does not descend from the base"),
    (_rebase, "A rebase is in progress"),
    (_cherry_pick, "A cherry-pick is in progress"),
    (_am, "An am or a rebase is in progress"),
    (_interrupted, "An apply in build/vllm was interrupted"),
    (_modified, "vllm/config.py"),
    (_staged, "setup.py"),
    (_untracked, r"vllm/forgotten\.py \(new\)"),
    (_fixup, "fixup! \\[Core\\] Add the gadget"),
    (_submodule, "vllm/sub"),
    (_twice, "docs/gadget.md is added by gadget-docs and again by add-it-again"),
    (_file_and_folder, "docs/gadget.md is a file in gadget-docs and a folder in"),
    (_unclear, r"not clear which(.|\n)*\[Core\] A(.|\n)*gadget(.|\n)*--slug"),
    (_unnamed, "No slug can be made"),
    (_broken_meta, "patches/gadget.toml: not valid TOML"),
    (_other_base, "not on the base that vllm.pin describes"),
    (_no_base, "refs/workshop/base is missing"),
    (_absent, "build/vllm is no git repository"),
]


@pytest.mark.parametrize(
    ("prepare", "words"), REFUSALS, ids=[case.__name__ for case, _ in REFUSALS]
)
def test_refusals_write_nothing(
    applied: Layout,
    git: Callable[..., str],
    commit: Commit,
    prepare: Callable[..., None],
    words: str,
) -> None:
    prepare(applied, git, commit)
    before = snapshot(applied)
    with pytest.raises(WorkshopError, match=words) as caught:
        export(applied)
    assert caught.value.todo
    assert snapshot(applied) == before
    assert not list(applied.build.glob(".export-*"))


@pytest.mark.parametrize(
    ("body", "line"),
    [
        ("Text.\n\n---\nAfter the line.", "---"),
        ("Text.\n\n--- a/vllm/config.py\n+++ b/vllm/config.py", "--- a/"),
        ("Text.\n\ndiff --git a/x b/x", "diff --git"),
        ("From: Somebody Else <else@example.invalid>\n\nText.", "From: "),
        ("Subject: Other\n\nText.", "Subject: Other"),
        ("Text.\n\nIndex: x", "Index: x"),
    ],
)
def test_a_message_that_no_mail_can_hold_is_refused(
    applied: Layout, commit: Commit, body: str, line: str
) -> None:
    commit({"vllm/config.py": "X = 1\n"}, "-m", "[Core] X", "-m", body)
    before = snapshot(applied)
    with pytest.raises(WorkshopError) as caught:
        export(applied)
    assert caught.value.what.startswith("x does not come back from its own mail")
    assert line in caught.value.why
    assert snapshot(applied) == before


@pytest.mark.parametrize(
    ("slugs", "words"),
    [
        ({"HEAD": "Not A Slug"}, "is not a slug"),
        ({"nothing": "name"}, "no commit 'nothing'"),
        ({"refs/workshop/base": "name"}, "not one of the commits"),
        ({"HEAD": "name", "HEAD~1": "name"}, "more than one commit"),
    ],
)
def test_wrong_slug_options(applied: Layout, slugs: dict[str, str], words: str) -> None:
    with pytest.raises(WorkshopError, match=words):
        export(applied, slugs)


def test_uncommitted_changes_can_be_left_out(
    applied: Layout, git: Callable[..., str], commit: Commit
) -> None:
    commit({"vllm/config.py": "X = 1\n"}, "-m", "[Core] X")
    _modified(applied, git, commit)
    (applied.tree / "vllm/config.py").write_text("X = 2\n")
    done = export(applied, allow_dirty=True)
    assert "vllm/config.py" in done.notes[0]
    assert "+X = 1" in (applied.patches / "x.patch").read_text()
    assert (applied.tree / "vllm/config.py").read_text() == "X = 2\n"


def test_files_that_are_none_of_the_series_business_do_not_count(
    applied: Layout,
) -> None:
    (applied.tree / "scratch.txt").write_text("x\n")
    (applied.tree / "vllm/_C.so").write_bytes(b"x")
    assert not export(applied).notes


def test_a_subject_without_tag_is_only_warned_about(
    applied: Layout, commit: Commit
) -> None:
    commit({"vllm/config.py": "X = 1\n"}, "-m", "no tag")
    assert any("[Area]" in note for note in export(applied).notes)


# Changes on disk since the last apply


def _edit_message(layout: Layout, slug: str) -> None:
    path = layout.patches / f"{slug}.patch"
    path.write_text(path.read_text().replace("## Purpose", "## Purpose\n\nMore.", 1))


def test_what_changed_on_disk_is_not_undone(
    applied: Layout, git: Callable[..., str], commit: Commit
) -> None:
    _edit_message(applied, "config-answer")
    commit({"vllm/gadget/__init__.py": "GADGET = 2\n"}, "-m", "[Core] Two")
    before = snapshot(applied)
    with pytest.raises(WorkshopError) as caught:
        export(applied)
    assert caught.value.why.split() == ["patches/config-answer.patch"]
    assert snapshot(applied) == before
    assert export(applied, overwrite=True).written == ("config-answer",)
    assert_round_trip(applied)


def test_a_patch_that_went_on_disk_does_not_come_back(
    applied: Layout, git: Callable[..., str]
) -> None:
    for end in (".patch", ".toml"):
        (applied.patches / f"gadget-docs{end}").unlink()
    (applied.overlay / "docs/gadget.md").unlink()
    applied.series.write_text("config-answer\ngadget\n")
    with pytest.raises(WorkshopError, match=r"patches/gadget-docs\.patch"):
        export(applied)


def test_an_export_does_not_take_itself_for_a_change_on_disk(
    applied: Layout, git: Callable[..., str], commit: Commit
) -> None:
    for value in ("2", "3"):
        text = f"class EngineCore:\n    gadget = {value}\n"
        commit({"vllm/engine/core.py": text}, "--fixup", "HEAD~1")
        git(
            "rebase",
            "--quiet",
            "-i",
            "--autosquash",
            "HEAD~3",
            GIT_SEQUENCE_EDITOR="true",
        )
        assert export(applied).written == ("gadget",)


# Kills


def test_a_killed_export_is_mended_by_the_next(
    applied: Layout,
    tmp_path: Path,
    git: Callable[..., str],
    commit: Commit,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    git("reset", "--quiet", "--hard", "HEAD~1")
    gadget = {"vllm/gadget/__init__.py": None, "vllm/one.py": "X = 1\n"}
    commit({**gadget, "vllm/engine/core.py": "X = 1\n"}, "--amend", "--no-edit")
    expected = Layout(shutil.copytree(applied.root, tmp_path / "expected"))
    export(expected, drop=["gadget-docs"])

    class Killed(BaseException):
        pass

    real = tools.export_files.place
    calls = 0

    def place(path: Path, file: tuple[str, bytes]) -> None:
        nonlocal calls
        calls += work.build not in path.parents
        if calls > done:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.with_name(".export-1").write_text("half")
            raise Killed
        real(path, file)

    done = 0
    while True:
        work = Layout(shutil.copytree(applied.root, tmp_path / f"kill-{done}"))
        calls = 0
        with monkeypatch.context() as patch:
            patch.setattr(tools.export_files, "place", place)
            try:
                export(work, drop=["gadget-docs"])
                break
            except Killed:
                pass
        present = "gadget-docs" in order(work)
        export(work, drop=["gadget-docs"] if present else [])
        assert snapshot(work) == snapshot(expected), f"killed after {done} files"
        done += 1
    assert done >= 5


# Pieces


def test_slug_from() -> None:
    assert slug_from("[Bugfix][CPU] Fix the Thing!", []) == "fix-the-thing"
    assert slug_from("[Core] Größe naïve", []) == "groe-naive"
    assert slug_from("[Core] One", ["one", "one-2"]) == "one-3"
    assert slug_from("[Core] 世界", []) == ""
    long = slug_from("[Core] " + "word " * 30, [])
    assert len(long) <= 40
    assert not long.endswith("-")


def test_meta_text_keeps_comments() -> None:
    text = '# a\nwhy = "x"  # b\noverlay = ["one", "two"]  # c\n# d\ntests = []\n'
    assert meta_text(text, ["two", "one"]) == text
    assert meta_text(text, ["two"]) == text.replace('"one", ', "")
    assert "overlay" not in meta_text(text, [])
    grown = tomlkit.parse(meta_text(text, ["one", "two", "three"]))
    assert grown["overlay"] == ["one", "two", "three"]
    for comment in "# a", "# b", "# c", "# d":
        assert comment in grown.as_string()


def test_series_text_moves_comments_with_their_slug() -> None:
    text = "# head\na # x\n\n# of b\nb\n# of c\n# more\nc\n\n# end\n"
    assert series_text(text, ["a", "b", "c"]) == text
    assert series_text(text, ["c", "a", "new", "b"]) == (
        "# head\n# of c\n# more\nc\na # x\nnew\n\n# of b\nb\n\n# end\n"
    )
    assert series_text(text, ["b"]) == "# head\n\n# of b\nb\n\n# end\n"
    assert series_text("", ["a"]) == "a\n"


# Command line


def test_the_command_says_what_it_did(
    applied: Layout,
    commit: Commit,
    run_tools: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    commit({"vllm/other.py": "X = 1\n"}, "-m", "[Core] Another", "-m", BODY)
    done = run_tools(applied, "export", "--slug", "HEAD=another-name")
    assert done.returncode == 0, done.stderr
    assert done.stdout == (
        "added:     another-name\nunchanged: config-answer, gadget, gadget-docs\n"
    )
    assert "patches/another-name.toml" in done.stderr
    wrong = run_tools(applied, "export", "--slug", "HEAD")
    assert wrong.returncode == 2
    assert "is not COMMIT=SLUG" in wrong.stderr
