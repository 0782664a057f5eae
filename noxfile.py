"""Every task of the workspace: tests, lint, types, wheels, benchmarks and the training run.

Packages and their dependencies are discovered (build/workspace.py). Sessions that need a framework share one
environment, `.nox/dev`, with all packages installed editable, so that torch is installed once; the others have a small
one of their own.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
from pathlib import Path

import nox

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "build"))

from workspace import Package, affected, discover, with_siblings  # noqa: E402

nox.needs_version = ">=2024.10.9"
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_existing_virtualenvs = True
# A Python that isn't there is no fault of the code; the session says that it was skipped.
nox.options.error_on_missing_interpreters = False
nox.options.sessions = ["lint", "typecheck", "tests"]

CONSTRAINTS = str(ROOT / "build" / "constraints.txt")
# MindSpore needs NumPy below 2, so its tests have an environment, and pins, of their own.
MINDSPORE_CONSTRAINTS = str(ROOT / "build" / "constraints-mindspore.txt")
SETTINGS = nox.project.load_toml(str(ROOT / "pyproject.toml"))
PACKAGES = discover()
DIST = ROOT / "dist"
# What the packages ask for beyond their hard dependencies, where they declare it.
DEVELOPMENT_EXTRAS = ("torch", "testing")
WORKSPACE = "workspace"


@nox.session(venv_backend="none")
@nox.parametrize("package", [nox.param(name, id=name) for name in [*PACKAGES, WORKSPACE]])
def tests(session: nox.Session, package: str) -> None:
    """Run the tests of every package, of one, `tests(hp-core)`, or those that cross packages, `tests(workspace)`."""
    folders = [ROOT / "tests"] if package == WORKSPACE else _folders(PACKAGES[package], "tests", "tests_both")
    _pytest(session, _development(session), folders)


@nox.session(venv_backend="none")
def tests_mindspore(session: nox.Session) -> None:
    """Run the tests of the MindSpore platform, and those for both frameworks, in an environment with the two."""
    python = _mindspore(session)
    for package in PACKAGES.values():
        folders = _folders(package, "tests_mindspore", "tests_both")
        if folders:
            _pytest(session, python, folders, HYPER_PARALLEL_PLATFORM="mindspore")


@nox.session(python=["3.10", "3.12", "3.13"])
def pure(session: nox.Session) -> None:
    """Run the tests that need no framework on the other Pythons that this machine has."""
    tools = nox.project.dependency_groups(SETTINGS, "pure")
    _sync(
        session,
        str(Path(session.virtualenv.location) / "bin" / "python"),
        Path(session.virtualenv.location),
        list(tools),
        (),
    )
    paths = [str(package.folder / path) for package in PACKAGES.values() for path in package.pure_tests]
    # Without the settings beside them, some of which need a framework; the profile has no deadlines and repeats its examples.
    settings = ("--noconftest", "--hypothesis-profile=ci")
    session.run("python", "-m", "pytest", *settings, *paths, *session.posargs)


@nox.session(venv_backend="none")
def changed(session: nox.Session) -> None:
    """Test the packages changed since origin/main (or `-- REF`), their dependents, and the workspace."""
    reference = session.posargs[0] if session.posargs else "origin/main"
    base = _git(session, "merge-base", reference, "HEAD")[0]
    paths = _git(session, "diff", "--name-only", base) + _git(session, "ls-files", "--others", "--exclude-standard")
    session.log(f"{len(paths)} files changed since {reference}")
    if not paths:
        return
    chosen = [f"tests({package.name})" for package in affected(PACKAGES, paths)]
    for name in [*chosen, f"tests({WORKSPACE})"]:
        session.notify(name, posargs=())


@nox.session
def lint(session: nox.Session) -> None:
    """Check style, formatting, generated files and the import rules (`-- --fix` mends what can be mended)."""
    _install(session, *nox.project.dependency_groups(SETTINGS, "lint"))
    fix = "--fix" in session.posargs
    session.run("ruff", "check", *(["--fix"] if fix else []), ".")
    session.run("ruff", "format", *([] if fix else ["--check"]), ".")
    session.run("python", "build/stubs.py", *([] if fix else ["--check"]))
    session.run("python", "build/side_by_side.py", *(["--update"] if fix else []))
    session.run("python", "build/import_rules.py")


@nox.session(venv_backend="none")
def typecheck(session: nox.Session) -> None:
    """Check types, strictly: the packages, and what builds and tests them."""
    python = _development(session)
    sources = [str(package.source.relative_to(ROOT)) for package in PACKAGES.values()]
    session.run(python, "-m", "mypy", *sources, "build", "noxfile.py", "dev.py", external=True)


@nox.session
@nox.parametrize("package", [nox.param(name, id=name) for name in PACKAGES])
def build(session: nox.Session, package: str) -> None:
    """Build the source archive and the wheel of every package, or of one, `build(hp-core)`, into dist/."""
    _build(session, [PACKAGES[package]])


@nox.session
def wheel_smoke(session: nox.Session) -> None:
    """Build all wheels; install each alone, with only what it declares, in a clean environment, and import it."""
    _build(session, list(PACKAGES.values()))
    for package in PACKAGES.values():
        clean = Path(session.create_tmp()) / f"only-{package.name}"
        shutil.rmtree(clean, ignore_errors=True)
        session.run("python", "-m", "virtualenv", "--quiet", str(clean))
        # Our own wheels are named as files, so no index can answer for them.
        wheels = [str(_wheel(needed)) for needed in with_siblings(PACKAGES, package.name)]
        python = str(clean / "bin" / "python")
        session.run(python, "-m", "pip", "install", "--quiet", "--constraint", CONSTRAINTS, *wheels, external=True)
        session.run(python, "-I", "build/smoke.py", package.import_name, package.name, package.version, external=True)


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation into site/, every link checked; `-- serve` shows it while you write."""
    tools = nox.project.dependency_groups(SETTINGS, "docs")
    session.install("--quiet", "--constraint", CONSTRAINTS, *tools)
    command = session.posargs or ["build", "--quiet", "--strict"]
    session.run("mkdocs", *command, env={"NO_MKDOCS_2_WARNING": "1"})


@nox.session(venv_backend="none")
def bench(session: nox.Session) -> None:
    """Run every benchmarks/*/run.py, or those named: `bench -- imports`."""
    python = _development(session)
    names = session.posargs or sorted(path.parent.name for path in ROOT.glob("benchmarks/*/run.py"))
    for name in names:
        session.run(python, f"benchmarks/{name}/run.py", external=True)


@nox.session(venv_backend="none")
def train(session: nox.Session) -> None:
    """Train the example's language model on 4 ranks of this machine; arguments after `--` go to the example."""
    python = _development(session)
    launcher = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    arguments = ["examples/train_lm.py", "--mesh", "dp=2,tp=2", "--fsdp", "--check", *session.posargs]
    # One thread per rank: four ranks on a few cores would only fight for them.
    session.run(*launcher, *arguments, external=True, env={"OMP_NUM_THREADS": "1"})


@nox.session(venv_backend="none")
def train_mindspore(session: nox.Session) -> None:
    """Train the same model with MindSpore on 2 ranks, tp=2 and dp=2, against one process and PyTorch; arguments as for train."""
    python = _mindspore(session)
    launcher = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    few = ["--steps", "60", "--batch", "8", "--eval-every", "0", "--check", "--against-torch"]
    environment = {"OMP_NUM_THREADS": "1", "HYPER_PARALLEL_PLATFORM": "mindspore"}
    for axis in ("tp", "dp"):
        run = ["examples/train_lm_mindspore.py", "--mesh", f"{axis}=2", "--name", f"train_lm_mindspore-{axis}"]
        session.run(*launcher, *run, *few, *session.posargs, external=True, env=environment)


def _folders(package: Package, *names: str) -> list[Path]:
    """Those of its folders of tests that a package has."""
    return [package.folder / name for name in names if (package.folder / name).exists()]


def _pytest(session: nox.Session, python: str, folders: list[Path], **environment: str) -> None:
    # Distributed tests start their ranks themselves, and four ranks share a few cores.
    session.run(
        python,
        "-m",
        "pytest",
        *[str(folder.relative_to(ROOT)) for folder in folders],
        *session.posargs,
        external=True,
        env={"OMP_NUM_THREADS": "1", **environment},
    )


def _development(session: nox.Session) -> str:
    """The interpreter of the shared environment with torch, made or brought up to date first where needed."""
    home = ROOT / ".nox" / "dev"
    python = str(home / "bin" / "python")
    if not Path(python).exists():
        session.run(sys.executable, "-m", "virtualenv", "--quiet", str(home), external=True)
    groups = nox.project.dependency_groups(SETTINGS, "test", "typecheck", "example")
    _sync(session, python, home, list(groups), DEVELOPMENT_EXTRAS)
    return python


def _mindspore(session: nox.Session) -> str:
    """The interpreter of the environment with MindSpore, made or brought up to date first where needed."""
    if not (3, 10) <= sys.version_info[:2] <= (3, 11):
        session.skip("the tests of MindSpore are for Python 3.10 and 3.11")
    home = ROOT / ".nox" / "mindspore"
    python = str(home / "bin" / "python")
    if not Path(python).exists():
        session.run(sys.executable, "-m", "virtualenv", "--quiet", str(home), external=True)
    tools = nox.project.dependency_groups(SETTINGS, "mindspore")
    _sync(session, python, home, list(tools), ("mindspore", "testing"), MINDSPORE_CONSTRAINTS)
    return python


def _install(session: nox.Session, *tools: str) -> None:
    """All packages, editable and without extras, and some tools, into the session's own environment."""
    home = Path(session.virtualenv.location)
    _sync(session, str(home / "bin" / "python"), home, list(tools), ())


def _sync(
    session: nox.Session,
    python: str,
    home: Path,
    tools: list[str],
    extras: tuple[str, ...],
    constraints: str = CONSTRAINTS,
) -> None:
    """Install packages and tools, unless nothing that decides what is installed has changed since the last time."""
    inputs = [
        ROOT / "pyproject.toml",
        Path(constraints),
        *(package.folder / "pyproject.toml" for package in PACKAGES.values()),
    ]
    digest = hashlib.sha256(b"\0".join([repr((tools, extras)).encode(), *(path.read_bytes() for path in inputs)]))
    stamp = home / ".installed"
    if stamp.exists() and stamp.read_text() == digest.hexdigest():
        return
    session.log(
        f"bringing {home.name} up to date{' (the first time takes minutes)' if {'torch', 'mindspore'} & set(extras) else ''}"
    )
    backends = sorted({requirement for package in PACKAGES.values() for requirement in package.build_requires})
    pip = [python, "-m", "pip", "install", "--quiet", "--constraint", constraints]
    session.run(*pip, *backends, "editables", *tools, external=True)
    editable = [argument for package in PACKAGES.values() for argument in ("--editable", _with_extras(package, extras))]
    session.run(*pip, "--no-build-isolation", *editable, external=True)
    stamp.write_text(digest.hexdigest())


def _with_extras(package: Package, extras: tuple[str, ...]) -> str:
    declared = [extra for extra in extras if extra in package.extras]
    return str(package.folder) + (f"[{','.join(declared)}]" if declared else "")


def _build(session: nox.Session, packages: list[Package]) -> None:
    tools = nox.project.dependency_groups(SETTINGS, "build")
    backends = sorted({requirement for package in packages for requirement in package.build_requires})
    session.install("--quiet", "--constraint", CONSTRAINTS, "virtualenv", *tools, *backends)
    for package in packages:
        for old in DIST.glob(f"{package.wheel_name()}*.whl"):
            old.unlink()
        # Straight from the tree, not through the source archive: one build, with the back end that is pinned here.
        session.run(
            "python", "-m", "build", "--no-isolation", "--sdist", "--wheel", "--outdir", str(DIST), str(package.folder)
        )


def _wheel(package: Package) -> Path:
    [wheel] = DIST.glob(f"{package.wheel_name()}*.whl")
    return wheel


def _git(session: nox.Session, *arguments: str) -> list[str]:
    output = session.run("git", *arguments, external=True, silent=True)
    return str(output or "").splitlines()
