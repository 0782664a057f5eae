"""A release is prepared and nothing is published: on a made-up repository with a core, a component and an umbrella."""

from __future__ import annotations

import shutil
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.version import Version
from tests.made_repository import change, commit, git, make_repository

import release
from minimums import declared_minimums, minimum_wheel
from release import plan
from wheel_file import read_wheel
from workspace import discover

DATE = "2026-12-01"


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_repository(tmp_path_factory.mktemp("template"))


@pytest.fixture
def repository(template: Path, tmp_path: Path) -> Path:
    """A repository of its own for each test."""
    return Path(shutil.copytree(template, tmp_path / "repository"))


def test_what_was_never_released_keeps_its_version(repository: Path) -> None:
    decided = plan(repository, "hp-part", date=DATE)
    assert (decided.old, decided.new, decided.tag) == (Version("0.1.0"), Version("0.1.0"), "hp-part-v0.1.0")
    assert decided.tested == ("hp-part", "hyper-parallel")
    assert decided.section == f"## [0.1.0] - {DATE}\n\n### Added\n\n- The first version.\n"


@pytest.mark.parametrize(
    ("changes", "version"),
    [
        ("### Added\n\n- More.\n", "0.1.1"),
        ("### Fixed\n\n- Less.\n", "0.1.1"),
        ("### Fixed\n\n- Less.\n\n### Changed\n\n- Other.\n", "0.2.0"),
        ("### Removed\n\n- All.\n", "0.2.0"),
    ],
)
def test_the_changes_decide_the_next_version(repository: Path, changes: str, version: str) -> None:
    change(repository, "hp-core", changes)
    assert str(plan(repository, "hp-core").new) == version


def test_a_release_writes_version_changelog_and_ranges(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fragments = {
        "+ring-order.fixed.md": "The order of the ring.\n",
        "+speed.added.md": "Speed.\n",
        "7.changed.md": "API.\n",
    }
    change(repository, "hp-core", "### Added\n\n- One thing,\n  on two lines.\n", fragments)
    head = git(repository, "rev-parse", "HEAD")
    assert release.main(["prepare", "hp-core", "--version", "0.2.0"], repository) == 0
    core, part, umbrella = (repository / "packages" / name for name in ("hp-core", "hp-part", "hyper-parallel"))
    written = (core / "pyproject.toml").read_text("utf-8")
    assert written.startswith("# A comment that stays.\n")
    assert 'version = "0.2.0"  # the only place' in written
    changelog = (core / "CHANGELOG.md").read_text("utf-8")
    today = changelog.partition("## [0.2.0] - ")[2][:10]
    assert changelog == (
        f"# Changelog\n\n## [Unreleased]\n\n## [0.2.0] - {today}\n\n### Added\n\n- One thing,\n  on two lines.\n- Speed.\n\n"
        "### Changed\n\n- API. (#7)\n\n### Fixed\n\n- The order of the ring.\n\n"
        "## [0.1.0] - 2026-01-02\n\n### Added\n\n- The first version.\n"
    )
    assert list((core / "changelog.d").iterdir()) == []
    for dependent in (part, umbrella):
        assert '"hp-core>=0.1.0,<0.3",' in (dependent / "pyproject.toml").read_text("utf-8")
        assert (dependent / "changelog.d" / "+hp-core-0-2.added.md").read_text("utf-8") == "Works with hp-core 0.2.\n"
    assert '"hp-part>=0.1.0,<0.2",' in (umbrella / "pyproject.toml").read_text("utf-8")
    # Nothing left the working tree: no commit, no tag.
    assert git(repository, "rev-parse", "HEAD") == head
    assert git(repository, "tag") == "hp-core-v0.1.0\n"
    capsys.readouterr()
    assert release.main(["next", "hp-core"], repository) == 0
    steps = capsys.readouterr().out
    assert "git tag -a hp-core-v0.2.0" in steps
    assert "git commit -m 'Release hp-core 0.2.0'" in steps
    # The news of a dependent is what its own next release says.
    commit(repository, "Release hp-core 0.2.0")
    assert "- Works with hp-core 0.2." in plan(repository, "hp-part").section


def test_a_patch_leaves_the_ranges_alone(repository: Path) -> None:
    change(repository, "hp-core", "### Fixed\n\n- Less.\n")
    decided = plan(repository, "hp-core")
    assert decided.widened == ()
    assert {path.parent.name for path in decided.texts} == {"hp-core"}


def test_a_dry_run_prints_and_writes_nothing(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(repository, "hp-core", "### Changed\n\n- API.\n", {"+gone.removed.md": "A name.\n"})
    assert release.main(["prepare", "hp-core", "--dry-run"], repository) == 0
    printed = capsys.readouterr().out
    assert "hp-core 0.1.0 -> 0.2.0, tag hp-core-v0.2.0" in printed
    assert "tests to pass: hp-core, hp-part, hyper-parallel" in printed
    assert '+    "hp-core>=0.1.0,<0.3",' in printed
    assert "+++ /dev/null" in printed
    assert git(repository, "status", "--porcelain") == ""


def test_a_dirty_tree_is_refused(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(repository, "hp-core", "### Fixed\n\n- Less.\n")
    (repository / "stray.txt").touch()
    assert release.main(["prepare", "hp-core"], repository) == 1
    message = capsys.readouterr().err
    assert "commit or stash them first" in message
    assert "?? stray.txt" in message
    assert git(repository, "status", "--porcelain") == "?? stray.txt\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["hp-cor"], "no package 'hp-cor'; there are: hp-core, hp-part, hyper-parallel"),
        (["hp-core", "--version", "0.1.0"], "the tag hp-core-v0.1.0 exists"),
        (["hp-core", "--version", "0.0.9"], "0.0.9 would be older"),
        (["hp-core", "--version", "next"], "'next' is no version"),
    ],
)
def test_what_can_not_be_released_is_refused(
    repository: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert release.main(["prepare", *arguments], repository) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "fragments", "message"),
    [
        ("", {}, "no changes under"),
        ("- A change.\n", {}, "stands under no kind: - A change."),
        ("### News\n\n- A change.\n", {}, "'News' is none of Added"),
        ("", {"+ring.news.md": "x"}, "must be named"),
        ("", {"ring-order.fixed": "x"}, "must be named"),
    ],
)
def test_changes_that_can_not_be_read_are_refused(
    repository: Path, changes: str, fragments: dict[str, str], message: str
) -> None:
    change(repository, "hp-core", changes, fragments)
    with pytest.raises(ValueError, match=message):
        plan(repository, "hp-core")


def test_a_range_that_is_none_is_not_widened(repository: Path) -> None:
    file = repository / "packages" / "hp-part" / "pyproject.toml"
    file.write_text(file.read_text("utf-8").replace("hp-core>=0.1.0,<0.2", "hp-core==0.1.0"), "utf-8")
    with pytest.raises(ValueError, match=r"hp-part requires hp-core==0\.1\.0, which leaves out 0\.2\.0"):
        plan(repository, "hp-core", "0.2.0")


def test_the_oldest_sibling_is_built_from_its_release(repository: Path, tmp_path: Path) -> None:
    """The tree's core is 0.2 and has lost a name; its wheel of 0.1.0, built from the tag, has it."""
    core = repository / "packages" / "hp-core"
    (core / "src" / "hp_core" / "__init__.py").write_text('"""Made up."""\n', "utf-8")
    change(repository, "hp-core", "### Removed\n\n- SINCE.\n")
    assert release.main(["prepare", "hp-core"], repository) == 0
    packages = discover(repository)
    oldest = declared_minimums(packages["hp-part"], packages)
    assert oldest == {"hp-core": Version("0.1.0")}
    wheel = minimum_wheel(packages["hp-core"], oldest["hp-core"], tmp_path / "dist", tmp_path, repository)
    found = read_wheel(wheel)
    assert (found.name, str(found.version)) == ("hp-core", "0.1.0")
    assert b"SINCE" in ZipFile(wheel).read("hp_core/__init__.py")


def test_the_oldest_sibling_is_the_tree_where_nothing_is_older(repository: Path, tmp_path: Path) -> None:
    packages = discover(repository)
    current = tmp_path / "hp_core-0.1.0-py3-none-any.whl"
    current.touch()
    assert minimum_wheel(packages["hp-core"], Version("0.1.0"), tmp_path, tmp_path, repository) == current


def test_a_minimum_that_can_not_be_had_is_refused(repository: Path, tmp_path: Path) -> None:
    packages = discover(repository)
    with pytest.raises(ValueError, match=r"no tag hp-core-v0\.0\.5 .*git fetch --tags"):
        minimum_wheel(packages["hp-core"], Version("0.0.5"), tmp_path, tmp_path, repository)
    git(repository, "tag", "hp-core-v0.0.7")
    with pytest.raises(ValueError, match=r"the tag hp-core-v0\.0\.7 holds hp-core 0\.1\.0"):
        minimum_wheel(packages["hp-core"], Version("0.0.7"), tmp_path, tmp_path, repository)


@pytest.mark.parametrize(
    ("requirement", "message"),
    [("hp-core<0.2", "says no oldest version"), ("hp-core>=0.2,<0.3", "leaves out the 0.1.0")],
)
def test_a_range_without_its_lower_end_is_refused(repository: Path, requirement: str, message: str) -> None:
    file = repository / "packages" / "hp-part" / "pyproject.toml"
    file.write_text(file.read_text("utf-8").replace("hp-core>=0.1.0,<0.2", requirement), "utf-8")
    packages = discover(repository)
    with pytest.raises(ValueError, match=message):
        declared_minimums(packages["hp-part"], packages)
