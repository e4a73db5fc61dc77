"""The series on disk, its digest, and mails as the inverse of commits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tools.errors import WorkshopError
from tools.git import Git, scratch
from tools.layout import Layout
from tools.series import (
    Mail,
    Meta,
    Patch,
    Series,
    assemble,
    commit_tree,
    load_series,
    mail_of,
    read_mail,
    read_overlay,
    scan_series,
)

SLUGS = ("config-answer", "gadget", "gadget-docs")


@pytest.fixture
def private(workspace: Layout) -> Iterator[Git]:
    with scratch(workspace.tree) as git:
        yield git


@pytest.fixture
def base(workspace: Layout) -> str:
    return Git(workspace.tree)("rev-parse", "refs/workshop/base")


def commits(layout: Layout, git: Git, base: str) -> dict[str, str]:
    return assemble(git, base, load_series(layout).patches, layout.overlay)


# Reading


def test_load_series(bare: Layout) -> None:
    series = load_series(bare)
    assert series.slugs == SLUGS
    patch = series["gadget-docs"]
    assert patch.meta.depends_on == ("gadget",)
    assert patch.meta.overlay == ("docs/gadget.md",)
    with pytest.raises(
        WorkshopError, match=r"No patch is named 'nothing'(.|\n)*gadget"
    ):
        series["nothing"]


def test_all_problems_are_told_together(bare: Layout) -> None:
    with bare.series.open("a") as file:
        file.write("Not_A_Slug  # comment\ngadget\nmissing\nbroken\nwrong\n")
    for slug in ("broken", "wrong"):
        (bare.patches / f"{slug}.patch").write_text("x\n")
    (bare.patches / "broken.toml").write_text("why = \n")
    (bare.patches / "wrong.toml").write_text(
        'why = " "\ntests = "tests/test_x.py"\nupstream = [1]\nsurprise = 1\n'
        'depends_on = ["nobody", "wrong"]\n'
        "test_env = {OMP_NUM_THREADS = 1}\n"
    )
    docs = bare.patches / "gadget-docs.toml"
    docs.write_text(
        'why = "x"\nremoval = "x"\ntests = ["x"]\n'
        'overlay = ["/etc/passwd", "a/../b", "tests/test_gadget.py", "no/such"]\n'
        'depends_on = ["broken"]\ntest_depends_on = ["missing"]\n'
    )
    (bare.patches / "gadget.toml").write_bytes(b'why = "\xff"\n')
    with pytest.raises(WorkshopError) as caught:
        load_series(bare)
    for words in (
        "patches/series:5: 'Not_A_Slug' is not a slug",
        "patches/series:6: gadget is listed twice",
        "patches/missing.patch is missing.",
        "patches/missing.toml is missing.",
        "patches/broken.toml: not valid TOML",
        "patches/gadget.toml: not valid TOML",
        "patches/wrong.toml: tests must be a list.",
        "patches/wrong.toml: upstream must be a list of strings.",
        "patches/wrong.toml: test_env must be a table of strings.",
        "patches/wrong.toml: unknown field 'surprise'",
        "patches/wrong.toml: why is missing or empty.",
        "patches/wrong.toml: removal is missing or empty.",
        "patches/gadget-docs.toml: overlay path '/etc/passwd' is not a plain path.",
        "patches/gadget-docs.toml: overlay path 'a/../b' is not a plain path.",
        "patches/gadget-docs.toml: overlay/no/such is missing.",
        "patches/gadget-docs.toml: depends_on names broken, which comes later.",
    ):
        assert words in caught.value.why, words
    # A patch that cannot be read is in the series all the same.
    assert "'missing', no such patch" not in caught.value.why
    assert "problem(s)" in caught.value.what


def test_wrong_dependencies_and_owners(bare: Layout) -> None:
    with (bare.patches / "config-answer.toml").open("a") as file:
        file.write('depends_on = ["gadget", "nobody", "config-answer"]\n')
        file.write('overlay = ["docs/gadget.md"]\n')
    _, problems = scan_series(bare)
    where = "patches/config-answer.toml: depends_on names"
    assert set(problems) == {
        f"{where} gadget, which comes later.",
        f"{where} 'nobody', no such patch.",
        f"{where} config-answer, which comes later.",
        "patches/gadget-docs.toml: overlay/docs/gadget.md is already owned by "
        "config-answer.",
    }


def test_a_patch_with_empty_facts_is_read_but_not_loaded(bare: Layout) -> None:
    path = bare.patches / "gadget.toml"
    text = path.read_text()
    path.write_text(text.replace("When upstream has it.", ""))
    series, problems = scan_series(bare)
    assert series.slugs == SLUGS
    assert series["gadget"].meta.overlay
    assert problems == ["patches/gadget.toml: removal is missing or empty."]
    with pytest.raises(WorkshopError, match="removal is missing"):
        load_series(bare)


def test_a_missing_series(bare: Layout) -> None:
    bare.series.unlink()
    with pytest.raises(WorkshopError, match=r"patches/series is missing"):
        load_series(bare)


def test_closure() -> None:
    def patch(slug: str, needs: str = "", tests: str = "") -> Patch:
        meta = Meta("", "", tuple(needs.split()), test_depends_on=tuple(tests.split()))
        return Patch(slug, Path(slug), Path(slug), meta)

    patches = (
        patch("a"),
        patch("b"),
        patch("c", "a", tests="e"),
        patch("d", "c"),
        patch("e", "b c"),
    )
    series = Series(Layout(Path("/")), patches)

    def slugs(*args: object) -> str:
        return "".join(one.slug for one in series.closure(*args))  # type: ignore[arg-type]

    assert slugs("a") == "a"
    assert slugs("d") == "acd"
    assert slugs("e") == "abce"
    assert slugs("c") == "ac"
    # What the tests need may come later and need more itself.
    assert slugs("c", True) == "abce"
    assert slugs("d", True) == "acd"


# Digest


def _mode(layout: Layout) -> None:
    (layout.overlay / "vllm/gadget/__init__.py").chmod(0o755)


def _bytes(layout: Layout) -> None:
    (layout.overlay / "vllm/gadget/__init__.py").write_text("GADGET = 2\n")


def _link(layout: Layout) -> None:
    path = layout.overlay / "docs/gadget.md"
    path.unlink()
    path.symlink_to("index.md")


def _mail(layout: Layout) -> None:
    path = layout.patches / "gadget.patch"
    path.write_text(path.read_text().replace("There was no", "There is no"))


def _order(layout: Layout) -> None:
    layout.series.write_text("gadget\nconfig-answer\ngadget-docs\n")


def _fewer(layout: Layout) -> None:
    layout.series.write_text("config-answer\ngadget\n")


def _prose(layout: Layout) -> None:
    path = layout.patches / "gadget.toml"
    text = path.read_text().replace("When upstream has it.", "Never.")
    path.write_text("# A comment.\n" + text)
    layout.series.write_text("# Other comments.\n" + layout.series.read_text())


@pytest.mark.parametrize(
    ("change", "counts"),
    [
        (_mode, True),
        (_bytes, True),
        (_link, True),
        (_mail, True),
        (_order, True),
        (_fewer, True),
        (_prose, False),
    ],
)
def test_digest(bare: Layout, change: Callable[[Layout], None], counts: bool) -> None:
    before = load_series(bare).digest("0" * 40)
    assert load_series(bare).digest("0" * 40) == before
    assert load_series(bare).digest("1" * 40) != before
    change(bare)
    assert (load_series(bare).digest("0" * 40) != before) is counts


# Assembling


def test_assemble_is_the_same_each_time_and_touches_no_file(
    workspace: Layout,
    private: Git,
    base: str,
    mtimes: Callable[[Path], dict[str, int]],
) -> None:
    before = mtimes(workspace.tree / "vllm")
    first = commits(workspace, private, base)
    with scratch(workspace.tree) as other:
        assert commits(workspace, other, base) == first
    assert tuple(first) == SLUGS
    assert mtimes(workspace.tree / "vllm") == before
    assert Git(workspace.tree)("rev-parse", "HEAD") == base
    log = private("log", "--format=%cn|%an|%s", f"{base}..{first['gadget-docs']}")
    assert log.split("\n")[-1] == (
        "vLLM AFD/DBO series|Zoë Example|[Bugfix][CPU] Answer 42, not 41"
    )


def test_assemble_tells_each_slug(workspace: Layout, private: Git, base: str) -> None:
    seen: list[str] = []
    patches = load_series(workspace).patches
    assemble(private, base, patches, workspace.overlay, seen.append)
    assert tuple(seen) == SLUGS


def _no_mail(layout: Layout) -> None:
    (layout.patches / "gadget.patch").write_text("diff --git a/x b/x\n")


def _no_hunk(layout: Layout) -> None:
    path = layout.patches / "gadget.patch"
    path.write_text(path.read_text().replace("class EngineCore:", "class Other:"))


def _corrupt(layout: Layout) -> None:
    path = layout.patches / "gadget.patch"
    path.write_text(path.read_text().replace("+    gadget = True\n", ""))


def _exists(layout: Layout) -> None:
    (layout.overlay / "vllm/config.py").write_text("x\n")
    path = layout.patches / "gadget.toml"
    path.write_text(
        path.read_text().replace("overlay = [", 'overlay = ["vllm/config.py", ')
    )


def _not_utf8(layout: Layout) -> None:
    path = layout.patches / "gadget.patch"
    data = path.read_bytes().replace(b"There was", b"There \xff was")
    path.write_bytes(data.replace(b"charset=UTF-8", b"charset=nonsense"))


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (_no_mail, ("gadget.patch", "not a git-format-patch mail", "Author")),
        (_no_hunk, ("Patch gadget does not apply", "vllm/engine/core.py")),
        (_corrupt, ("Patch gadget does not apply", "corrupt patch")),
        (_exists, ("Overlay files of gadget exist", "vllm/config.py")),
        (_not_utf8, ("gadget.patch", "not UTF-8")),
    ],
)
def test_assemble_names_what_is_wrong(
    workspace: Layout,
    private: Git,
    base: str,
    change: Callable[[Layout], None],
    names: tuple[str, ...],
) -> None:
    change(workspace)
    with pytest.raises(WorkshopError) as caught:
        commits(workspace, private, base)
    for name in names:
        assert name in str(caught.value)


def test_mails_are_the_inverse_of_commits(
    workspace: Layout, private: Git, base: str
) -> None:
    made = commits(workspace, private, base)
    for patch in load_series(workspace).patches:
        data, added = mail_of(private, made[patch.slug])
        assert data == patch.mail.read_bytes()
        assert [file.path for file in added] == sorted(patch.meta.overlay)
        for file in added:
            assert (file.mode, file.data) == read_overlay(workspace.overlay / file.path)


# Any message and any author without the marks that mean something in a mail

WORDS = st.text(
    st.characters(
        codec="utf-8",
        categories=("L", "M", "N", "S"),
        include_characters=".,;!?()'\"*_/#",
    ),
    min_size=1,
    max_size=12,
).filter(lambda word: not set(word) & set("<>=`"))
LINES = st.lists(WORDS | st.sampled_from(["", "- x", "    indented", "```"]))
NAMES = st.text(
    st.characters(codec="utf-8", categories=("L", "N"), include_characters=" ,.'()\""),
    max_size=80,
).map(lambda name: f"A{name}z")


@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(subject=st.lists(WORDS, min_size=1, max_size=30), body=LINES, name=NAMES)
def test_any_plain_message_and_author_survive(
    workspace: Layout,
    private: Git,
    base: str,
    subject: list[str],
    body: list[str],
    name: str,
) -> None:
    text = f"[Core] {' '.join(subject)}\n\n" + "\n".join(body) + "\n"
    mail = Mail(name, "a@example.invalid", "Thu, 1 Jan 2026 00:00:00 +0100", text)
    commit = commit_tree(private, f"{base}^{{tree}}", base, mail)
    data, _ = mail_of(private, commit)
    path = workspace.build / "x.patch"
    path.write_bytes(data)
    again = read_mail(private, path)
    copy = commit_tree(private, f"{base}^{{tree}}", base, again)
    assert mail_of(private, copy)[0] == data
    form = "--format=%an%n%ae%n%ad%n%s%n%b"
    told = [private("show", "-s", form, one).strip() for one in (commit, copy)]
    assert told[0] == told[1]
