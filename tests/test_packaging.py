"""What is installed is `askmany` alone, and Hugging Face's package `kernels` is never shadowed by our folder of that name."""

import os
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

import askmany
from tests.helpers.source import FOLDERS, ROOT, python_files


def _fresh(code: str, cwd: Path = ROOT) -> str:
    env = {**os.environ, "PYTHONPATH": str(cwd)}
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_is_reached_by_a_relative_link_and_holds_no_init(name: str) -> None:
    link = ROOT / "askmany" / name
    assert link.is_symlink()
    assert os.readlink(link) == f"../{name}"
    assert list((ROOT / name).rglob("__init__.py")) == []


def test_no_init_under_tests() -> None:
    assert list((ROOT / "tests").rglob("__init__.py")) == []


def test_our_folder_is_not_importable_as_kernels(tmp_path: Path) -> None:
    """A namespace candidate is all our folder may be, so that a real package `kernels` anywhere on the path wins."""
    real = tmp_path / "site" / "kernels"
    real.mkdir(parents=True)
    (real / "__init__.py").write_text("OWNER = 'someone else'\n")
    code = f"import sys; sys.path.append({str(real.parent)!r}); import kernels; print(kernels.OWNER)"
    assert _fresh(code) == "someone else"


def test_find_spec_of_kernels_is_not_ours() -> None:
    found = _fresh("import importlib.util as u; s = u.find_spec('kernels'); print(s.origin if s and s.has_location else None)")
    assert not found.startswith(str(ROOT / "kernels"))


def test_a_module_is_one_module_by_its_only_name() -> None:
    assert _fresh("import askmany.engine.errors as e; print(e.__name__, e.__file__)").startswith("askmany.engine.errors")


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The names in a wheel built from a copy of the source, without a network."""
    copy = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "LICENSE", "askmany", *FOLDERS):
        subprocess.run(["cp", "-R", "-P", str(ROOT / name), str(copy / name)], check=True)
    code = "from setuptools.build_meta import build_wheel; print(build_wheel('dist'))"
    done = subprocess.run([sys.executable, "-c", code], cwd=copy, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(copy / "dist" / done.stdout.splitlines()[-1]) as wheel:
        return wheel.namelist()


def test_the_wheel_holds_askmany_alone(wheel_names: list[str]) -> None:
    tops = {name.split("/")[0] for name in wheel_names}
    assert tops == {"askmany", f"askmany-{askmany.__version__}.dist-info"}
    assert "askmany/py.typed" in wheel_names


def test_the_wheel_holds_every_module(wheel_names: list[str]) -> None:
    ours = {f"askmany/{path.relative_to(ROOT).as_posix()}" for folder in FOLDERS for path in python_files(folder)}
    assert ours <= set(wheel_names)


def test_one_version() -> None:
    try:
        installed = metadata.version("askmany")
    except metadata.PackageNotFoundError:
        pytest.skip("askmany runs from its source here, not installed")
    assert installed == askmany.__version__
