"""The C compiles quietly, and what is packed and installed is what the clone has, with a compiler and without."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import types
import zipfile
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

import pytest

from mpitrain import kernels
from mpitrain.kernels.cuda import launch

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "mpitrain" / "kernels" / "csrc"
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")

pytestmark = pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="these tests do not stand in a clone")


def compiler(name):
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed")
    return path


@pytest.fixture
def recipe(monkeypatch):
    """What setup.py holds: its levels, precisions and flags, read without building."""
    names = "setuptools", "setuptools.command", "setuptools.command.build_ext", "setuptools.modified"
    fake, command, build_ext, modified = map(types.ModuleType, names)
    modified.newer_group = lambda *args: True
    fake.setup, fake.Extension, build_ext.build_ext = (lambda **kw: None), (lambda *args, **kw: None), object
    for module in (fake, command, build_ext, modified):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    content = {}
    exec(compile((ROOT / "setup.py").read_text(), "setup.py", "exec"), content)
    return content


# ------------------------------------------------------------------------------------------------------------ compiling


def jobs(recipe):
    """(source, options) of everything that is compiled."""
    for suffix, (name, flags) in recipe["LEVELS"].items():
        level = [*flags, f"-DLEVEL={suffix}", f'-DMT_LEVEL_NAME="{name}"']
        yield "halves.c", level
        for real, is_float in recipe["PRECISIONS"].items():
            yield "kernels.c", [*level, f"-DREAL={real}", f"-DREAL_IS_FLOAT={is_float}"]
    x86 = ["-DMT_X86=1"] if recipe["IS_X86"] else []
    yield "module.c", [*x86, "-isystem", sysconfig.get_path("include"), "-fPIC"]


def complaints(program, recipe, *extra):
    def one(job):
        source, options = job
        strict = ["-Wall", "-Wextra", "-Wshadow", "-Wvla", "-Wstrict-prototypes", "-Werror"]
        command = [program, *recipe["FLAGS"], *strict, *options, *extra, str(SOURCES / source)]
        run = subprocess.run(command, capture_output=True, text=True)
        return "" if run.returncode == 0 else f"{source} {options}\n{run.stderr}"

    with ThreadPoolExecutor(2) as pool:
        return "".join(pool.map(one, jobs(recipe)))


@pytest.mark.parametrize("name", ["gcc", "clang"])
def test_the_source_is_understood_without_a_warning(name, recipe):
    assert complaints(compiler(name), recipe, "-fsyntax-only") == ""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gcc", "clang"])
def test_the_source_compiles_without_a_warning(name, recipe):
    """Some warnings come only from the optimizer."""
    assert complaints(compiler(name), recipe, "-c", "-o", os.devnull) == ""


def test_the_recipe_names_the_levels_that_the_package_knows(recipe):
    assert {name for name, _ in recipe["LEVELS"].values()} <= set(kernels.ORDER)
    for flag in (*recipe["FLAGS"], *(flag for _, flags in recipe["LEVELS"].values() for flag in flags)):
        assert "native" not in flag
        assert flag not in ("-ffast-math", "-Ofast", "-ffinite-math-only", "-fassociative-math")


# -------------------------------------------------------------------------------------------------- packing, installing


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A copy of what the next commit would hold, and nothing that was built in place."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(listing, cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0")
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this is no git clone: which files belong to the project is not known")
    folder = tmp_path_factory.mktemp("clone")
    for name in filter(None, listed):
        if (ROOT / name).is_file():  # else it was removed and not yet committed
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def build(kind, folder, out, **environ):
    """The path of a freshly built `sdist` or `wheel`."""
    try:
        major = int(metadata.version("setuptools").split(".")[0])
    except metadata.PackageNotFoundError:
        major = 0
    if major < 77:
        pytest.skip("setuptools 77 or newer, with which mpitrain is built, is not installed beside the tests")
    out.mkdir(exist_ok=True)
    code = f"import setuptools.build_meta as build; build.build_{kind}({str(out)!r})"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, env=os.environ | environ
    )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    (path,) = out.iterdir()
    return path


def unpacked(sdist, folder):
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    (inner,) = folder.iterdir()
    return inner


def installed(wheel, folder):
    """A Python with the wheel in it; NumPy and the like come from where these tests run."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps", "--no-index"]
    elsewhere = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}  # what stands there counts as installed
    run = subprocess.run([*pip, str(wheel)], capture_output=True, text=True, env=elsewhere)
    if "No module named pip" in run.stderr:
        pytest.skip("pip is not installed beside the tests")
    assert run.returncode == 0, run.stderr
    return python


def ask(python, code, cwd):
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", kernels.VARIABLE)}
    env["PYTHONPATH"] = sysconfig.get_path("purelib")  # its .pth files, and so an editable mpitrain, are not read
    run = subprocess.run([str(python), "-c", code], cwd=cwd, capture_output=True, text=True, env=env)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


WHERE = "import mpitrain; print(mpitrain.__file__)"
LEVELS = "from mpitrain import kernels; print(*kernels.levels(), kernels.level())"
USE = """
import numpy as np
from mpitrain import kernels
x = np.linspace(-3, 3, 33, dtype=np.float32)
for level in kernels.levels():
    kernels.select(level)
    y, _ = kernels.gelu_tanh(x)
    assert abs(y[-1] - 2.9963627) < 1e-5, (level, y[-1])
"""
CUDA = "from mpitrain.kernels.cuda import launch; print([(name, launch.text(name)) for name in launch.sources()])"


def test_the_source_distribution_holds_every_file_of_the_package(clone, tmp_path):
    sdist = build("sdist", clone, tmp_path / "dist")
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {str(path.relative_to(clone)) for path in (clone / "mpitrain").rglob("*") if path.is_file()}
    wanted |= {"setup.py", "pyproject.toml", "README.md", "LICENSE"}
    assert sorted(wanted - held) == []
    assert not [name for name in held if name.endswith((".so", ".o", ".pyc"))]
    assert {f"mpitrain/kernels/csrc/{path.name}" for path in SOURCES.iterdir()} <= held


def test_without_a_compiler_the_package_is_built_and_computes(clone, tmp_path):
    """The way to it goes through the source distribution, as with `pip install mpitrain`."""
    source = unpacked(build("sdist", clone, tmp_path / "dist"), tmp_path / "unpacked")
    wheel = build("wheel", source, tmp_path / "wheel", CC="/bin/false", CXX="/bin/false")
    with zipfile.ZipFile(wheel) as archive:
        assert not [name for name in archive.namelist() if name.endswith(".so")]
    python = installed(wheel, tmp_path / "venv")
    assert ask(python, WHERE, tmp_path).startswith(str(tmp_path / "venv"))
    assert ask(python, LEVELS, tmp_path) == "numpy numpy"
    ask(python, USE, tmp_path)
    assert ask(python, CUDA, tmp_path) == str([(name, launch.text(name)) for name in launch.sources()])


@pytest.mark.slow
def test_a_wheel_from_the_source_distribution_has_the_compiled_kernels(clone, tmp_path, recipe):
    compiler("gcc")
    source = unpacked(build("sdist", clone, tmp_path / "dist"), tmp_path / "unpacked")
    wheel = build("wheel", source, tmp_path / "wheel")
    with zipfile.ZipFile(wheel) as archive:
        held = archive.namelist()
    assert f"mpitrain/kernels/_compiled{SUFFIX}" in held
    assert "mpitrain/py.typed" in held
    modules = {str(path.relative_to(clone)) for path in (clone / "mpitrain").rglob("*.py")}
    assert sorted(modules - set(held)) == []
    assert not [name for name in held if not name.startswith(("mpitrain/", "mpitrain-"))]
    python = installed(wheel, tmp_path / "venv")
    assert ask(python, WHERE, tmp_path).startswith(str(tmp_path / "venv"))
    *levels, chosen = ask(python, LEVELS, tmp_path).split()
    assert levels[:2] == ["numpy", "baseline"]
    assert len(levels) <= 1 + len(recipe["LEVELS"])
    assert chosen == levels[-1]
    ask(python, USE, tmp_path)


def test_source_that_does_not_compile_leaves_no_old_kernels_behind(clone, tmp_path):
    """Else a contributor would test and measure the kernels of before."""
    spoilt = shutil.copytree(clone, tmp_path / "spoilt")
    built = spoilt / "mpitrain" / "kernels" / f"_compiled{SUFFIX}"
    built.write_bytes(b"what was built before")
    header = spoilt / "mpitrain/kernels/csrc/numerics.h"
    header.write_text(header.read_text() + "int broken(\n")
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace", "--build-temp", str(tmp_path / "objects")]
    done = subprocess.run(command, cwd=spoilt, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr  # the NumPy path serves
    assert "error" in done.stderr
    assert not built.exists()
