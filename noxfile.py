"""Every task of the workspace: tests, lint, types, wheels, benchmarks and the training run.

Packages and their dependencies are discovered (build/workspace.py). Sessions that need a framework share one
environment, `.nox/dev`, with all packages installed editable, so that torch is installed once; those that need only tools
share another, `.nox/tools-3.11`, to which each adds its group of tools when it first runs.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import sys
from functools import partial
from pathlib import Path

import nox

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "build"))

from workspace import Package, affected, discover, with_dependents  # noqa: E402

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
# Compiling all of torch and transformers to bytecode takes longer than installing them; Python does so for what is imported.
PIP = ("--quiet", "--no-compile")


@nox.session(venv_backend="none")
@nox.parametrize("package", [nox.param(name, id=name) for name in [*PACKAGES, WORKSPACE]])
def tests(session: nox.Session, package: str) -> None:
    """Run the tests of every package, of one, `tests(hp-core)`, or those that cross packages, `tests(workspace)`."""
    if package != WORKSPACE and PACKAGES[package].native and not _has_compiler():
        session.skip("no C++ compiler is here, so there is nothing native to test")
    folders = [ROOT / "tests"] if package == WORKSPACE else _folders(PACKAGES[package], "tests", "tests_both")
    _pytest(session, _development(session), folders)


@nox.session(venv_backend="none")
def tests_mindspore(session: nox.Session) -> None:
    """Run the tests of the MindSpore platform, and those for both frameworks, in an environment with the two."""
    python = _mindspore(session)
    for package in PACKAGES.values():
        folders = _folders(package, "tests_mindspore", "tests_both")
        if folders and (not package.native or _has_compiler()):
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


@nox.session(venv_backend="none")
def lint(session: nox.Session) -> None:
    """Check style, formatting, generated files, the import rules and the images (`-- --fix` mends what can be mended)."""
    python = _tools(session, "lint")
    fix = "--fix" in session.posargs
    # The packages are read where they lie; none needs to be installed, or compiled, to be linted.
    sources = {"PYTHONPATH": os.pathsep.join(str(package.source.parent) for package in PACKAGES.values())}
    run = partial(session.run, python, external=True, env=sources)
    run("-m", "ruff", "check", *(["--fix"] if fix else []), ".")
    run("-m", "ruff", "format", *([] if fix else ["--check"]), ".")
    run("build/stubs.py", *([] if fix else ["--check"]))
    run("build/side_by_side.py", *(["--update"] if fix else []))
    run("build/import_rules.py")
    tools = Path(python).parent
    images = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docker").glob("*/Dockerfile"))
    session.run(str(tools / "hadolint"), *images, external=True)
    scripts = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docker").glob("*.sh"))
    session.run(str(tools / "shellcheck"), *scripts, external=True)


@nox.session(venv_backend="none")
def typecheck(session: nox.Session) -> None:
    """Check types, strictly: the packages, and what builds and tests them."""
    python = _development(session)
    sources = [str(package.source.relative_to(ROOT)) for package in PACKAGES.values()]
    session.run(python, "-m", "mypy", *sources, "build", "noxfile.py", "dev.py", external=True)


@nox.session(venv_backend="none")
@nox.parametrize("package", [nox.param(name, id=name) for name in PACKAGES])
def build(session: nox.Session, package: str) -> None:
    """Build the source archive and the wheel of every package, or of one, `build(hp-core)`, into dist/."""
    _build(session, [PACKAGES[package]])


@nox.session(venv_backend="none")
def wheels(session: nox.Session) -> None:
    """Build wheels for a target in its image (`-- --target openeuler-22.03`), or in place (`-- --host`), and check them."""
    parser = argparse.ArgumentParser(prog="nox -s wheels --", description=wheels.__doc__)
    way = parser.add_mutually_exclusive_group(required=True)
    way.add_argument("--target", help="a folder of docker/: build, and try, in the image of that system")
    way.add_argument("--host", action="store_true", help="build in place, and say which targets the result serves")
    way.add_argument(
        "--finish", metavar="TARGET", help="only tag and check what is in dist/; it must serve the target (or host)"
    )
    parser.add_argument("--arch", help="with --target: x86_64 or aarch64, where it isn't this machine's")
    parser.add_argument(
        "--build-arg", action="append", default=[], metavar="NAME=VALUE", help="with --target: for the image"
    )
    chosen = parser.parse_args(session.posargs)
    python = _tools(session, "build")
    if chosen.target:
        options = [
            *(["--arch", chosen.arch] if chosen.arch else []),
            *(f"--build-arg={one}" for one in chosen.build_arg),
        ]
        session.run(python, "build/images.py", chosen.target, *options, external=True)
        return
    if chosen.host:
        _build(session, list(PACKAGES.values()))
    demand = ["--target", chosen.finish] if chosen.finish not in (None, "host") else []
    session.run(python, "build/finish_wheels.py", *demand, str(DIST), external=True)


@nox.session(venv_backend="none")
def wheel_smoke(session: nox.Session) -> None:
    """Build and try all wheels as the images do: by docker/build.sh, in a clean copy of the tree, and docker/test.sh."""
    copy = ROOT / ".nox" / "clean"
    _copy_tree(session, copy)
    environment = {"CMAKE_BUILD_PARALLEL_LEVEL": str(os.cpu_count() or 1)}
    session.run("bash", str(copy / "docker" / "build.sh"), "host", sys.executable, external=True, env=environment)
    # From the tree itself, whose history has the oldest siblings.
    session.run("bash", "docker/test.sh", "host", str(copy / "dist"), sys.executable, external=True)


@nox.session(venv_backend="none")
def release(session: nox.Session) -> None:
    """Prepare a release, `-- hp-fsdp`: version, changelog, ranges, tests of dependents. It publishes nothing (`--dry-run`)."""
    python = _tools(session, "release")
    session.run(python, "build/release.py", "prepare", *session.posargs, external=True)
    if {"--dry-run", "-h", "--help"} & set(session.posargs):
        return
    [name] = [name for name in PACKAGES if name in session.posargs]
    # The versions and ranges have changed since this file was read.
    packages = discover()
    development = _development(session)
    for package in with_dependents(packages, [name]):
        _pytest(session, development, _folders(package, "tests", "tests_both"), [])
    _pytest(session, development, [ROOT / "tests" / "test_wheels.py"], [])
    session.run(python, "build/release.py", "next", name, external=True)


@nox.session(venv_backend="none")
def docs(session: nox.Session) -> None:
    """Build the documentation into site/, every link checked; `-- serve` shows it while you write."""
    python = _tools(session, "docs")
    command = session.posargs or ["build", "--quiet", "--strict"]
    session.run(python, "-m", "mkdocs", *command, external=True, env={"NO_MKDOCS_2_WARNING": "1"})


@nox.session(venv_backend="none")
def bench(session: nox.Session) -> None:
    """Run every benchmarks/*/run.py, or those named: `bench -- imports`."""
    python = _development(session)
    names = session.posargs or sorted(path.parent.name for path in ROOT.glob("benchmarks/*/run.py"))
    for name in names:
        session.run(python, f"benchmarks/{name}/run.py", external=True)


@nox.session(venv_backend="none")
def fuzz(session: nox.Session) -> None:
    """Call the native kernels at random under the sanitizers, 100,000 times each (`-- --kernel permute --calls N --seed N`)."""
    python = _tools(session, "build")
    package = PACKAGES["hp-kernels"]
    folder = ROOT / ".nox" / "fuzz"
    tools = {"PATH": f"{Path(python).parent}:{os.environ['PATH']}"}
    settings = ("-DHP_SANITIZE=address,undefined", f"-DPython_EXECUTABLE={python}", "-DCMAKE_BUILD_TYPE=Release")
    session.run("cmake", "-S", str(package.folder), "-B", str(folder), *settings, external=True, env=tools)
    session.run("cmake", "--build", str(folder), external=True, env=tools)
    [module] = folder.glob("_native*.so")
    # The sanitizer must be there before Python is, with the library of the exceptions that it watches, and see every allocation.
    # Python itself leaves memory behind at its end.
    preloaded = [
        str(session.run("c++", f"-print-file-name={library}", external=True, silent=True)).strip()
        for library in ("libasan.so", "libstdc++.so")
    ]
    environment = {
        "LD_PRELOAD": " ".join(preloaded),
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
        "PYTHONMALLOC": "malloc",
        "PYTHONPATH": str(package.source.parent),
    }
    calls = () if "--calls" in session.posargs else ("--calls", "100000")
    command = [python, str(package.folder / "fuzz" / "run.py"), "--module", str(module), *calls, *session.posargs]
    session.run(*command, external=True, env=environment)


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


def _pytest(
    session: nox.Session, python: str, folders: list[Path], arguments: list[str] | None = None, **environment: str
) -> None:
    # Distributed tests start their ranks themselves, and four ranks share a few cores.
    session.run(
        python,
        "-m",
        "pytest",
        *[str(folder.relative_to(ROOT)) for folder in folders],
        *(session.posargs if arguments is None else arguments),
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


def _tools(session: nox.Session, *groups: str) -> str:
    """The interpreter of the environment of tools, with the tools of some groups in it, and no framework.

    One environment per Python, since a native wheel is built by the Python that it is for.
    """
    home = ROOT / ".nox" / "tools-{}.{}".format(*sys.version_info)
    python = str(home / "bin" / "python")
    if not Path(python).exists():
        session.run(sys.executable, "-m", "virtualenv", "--quiet", str(home), external=True)
    missing, stamps = set(), {}
    for group in groups:
        tools = set(nox.project.dependency_groups(SETTINGS, group))
        if group == "build":
            tools.update(*(package.build_requires for package in PACKAGES.values()), _compilation())
        digest = hashlib.sha256(repr(sorted(tools)).encode() + Path(CONSTRAINTS).read_bytes()).hexdigest()
        stamp = home / f".installed-{group}"
        if not stamp.exists() or stamp.read_text() != digest:
            missing.update(tools)
            stamps[stamp] = digest
    if missing:
        session.log(f"bringing {home.name} up to date")
        pip = [python, "-m", "pip", "install", *PIP, "--constraint", CONSTRAINTS]
        session.run(*pip, *sorted(missing), external=True)
    for stamp, digest in stamps.items():
        stamp.write_text(digest)
    return python


def _compiled_from(package: Package) -> list[Path]:
    """The sources of what a native package compiles."""
    names = ("CMakeLists.txt", "*.cmake", "*.cpp", "*.h")
    return sorted(path for name in names for path in package.folder.rglob(name))


def _has_compiler() -> bool:
    """Whether native packages can be compiled here."""
    return bool(os.environ.get("CXX")) or any(shutil.which(name) for name in ("c++", "g++", "clang++"))


def _compilation() -> list[str]:
    """What native packages need to be compiled beside a compiler, and this machine lacks."""
    if not any(package.native for package in PACKAGES.values()):
        return []
    return [tool for tool in ("cmake", "ninja") if shutil.which(tool) is None]


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
        # An editable install follows its Python files; what is compiled must be compiled anew.
        *(path for package in PACKAGES.values() if package.native for path in _compiled_from(package)),
    ]
    digest = hashlib.sha256(b"\0".join([repr((tools, extras)).encode(), *(path.read_bytes() for path in inputs)]))
    stamp = home / ".installed"
    if stamp.exists() and stamp.read_text() == digest.hexdigest():
        return
    session.log(
        f"bringing {home.name} up to date{' (the first time takes minutes)' if {'torch', 'mindspore'} & set(extras) else ''}"
    )
    packages = [package for package in PACKAGES.values() if not package.native or _has_compiler()]
    if len(packages) < len(PACKAGES):
        session.log(
            "no C++ compiler is here: native packages are left out, and everything works without them, more slowly"
        )
    # What others made comes first and at once; ours then need no look at an index.
    libraries = {requirement for package in packages for requirement in package.build_requires}
    libraries |= {text for package in packages for extra, text in package.libraries if extra in ("", *extras)}
    pip = [python, "-m", "pip", "install", *PIP, "--constraint", constraints]
    session.run(*pip, *sorted(libraries), *_compilation(), "editables", *tools, external=True)
    editable = [argument for package in packages for argument in ("--editable", str(package.folder))]
    session.run(*pip, "--no-deps", "--no-build-isolation", *editable, external=True)
    stamp.write_text(digest.hexdigest())


def _build(session: nox.Session, packages: list[Package]) -> None:
    python = _tools(session, "build")
    for package in packages:
        for old in DIST.glob(f"{package.wheel_name()}*.whl"):
            # One Python's wheel stays when another's is built.
            if not package.native or f"-cp{sys.version_info[0]}{sys.version_info[1]}-" in old.name:
                old.unlink()
        # Straight from the tree, not through the source archive: one build, with the back end that is pinned here.
        command = [python, "-m", "build", "--no-isolation", "--sdist", "--wheel"]
        session.run(*command, "--outdir", str(DIST), str(package.folder), external=True)


def _copy_tree(session: nox.Session, copy: Path) -> None:
    """What a fresh clone of the tree as it is would hold; environments that an earlier run made in the copy stay."""
    copy.mkdir(parents=True, exist_ok=True)
    for old in copy.iterdir():
        if old.name != ".nox":
            shutil.rmtree(old) if old.is_dir() else old.unlink()
    for name in _git(session, "-c", "core.quotepath=off", "ls-files", "--cached", "--others", "--exclude-standard"):
        # A file that was deleted and not yet committed is listed too.
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)


def _git(session: nox.Session, *arguments: str) -> list[str]:
    output = session.run("git", *arguments, external=True, silent=True)
    return str(output or "").splitlines()
