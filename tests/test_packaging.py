"""What a user installs: the two links, the wheel, the extras, the pins, and that transformers survives kernels/."""

import importlib
import importlib.metadata
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
CODE = ("quantlab", "kernels", "evals")
LINKED = ("kernels", "evals")
TESTED_EXTRAS = ("dev", "study")
# The environment that constraints.txt describes, for markers.
TESTED_ON = {
    "python_version": "3.11",
    "python_full_version": "3.11.7",
    "sys_platform": "linux",
    "platform_system": "Linux",
    "platform_machine": "x86_64",
}
RUFF = ("-m", "ruff", "check", "--stdin-filename", "quantlab/example.py", "-")
KERNELS_STUB = """
def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    accept = {"__init__": lambda self, *args, **kwargs: None, "__call__": lambda self, decorated: decorated}
    return type(name, (), accept)
"""


def python(*arguments: str, cwd: Path = ROOT, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=cwd, input=stdin, capture_output=True, text=True, check=False)


def source_files(folder: str) -> list[Path]:
    """Files of one code folder relative to the root, without those reached through the links."""
    links = [ROOT / "quantlab" / name for name in LINKED]
    return sorted(
        path.relative_to(ROOT)
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
        if not any(path.is_relative_to(link) for link in links)
    )


def installed_name(path: Path) -> str:
    return path.as_posix() if path.parts[0] == "quantlab" else f"quantlab/{path.as_posix()}"


# The links, and transformers


@pytest.mark.parametrize("name", LINKED)
def test_linked_folders_have_no_init(name):
    assert (ROOT / name).is_dir()
    assert not (ROOT / name / "__init__.py").exists(), "it would shadow another package of that name"


@pytest.mark.parametrize("name", LINKED)
def test_links_are_relative(name):
    link = ROOT / "quantlab" / name
    assert link.is_symlink()
    assert link.readlink() == Path("..", name)


@pytest.mark.parametrize("name", LINKED)
def test_links_are_committed_as_links(name):
    if not (ROOT / ".git").exists():  # an unpacked source archive
        return
    command = ["git", "ls-files", "-s", f"quantlab/{name}"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert listed.startswith("120000 "), f"git does not hold quantlab/{name} as a link: {listed!r}"


@pytest.mark.slow  # the rules that it follows from are above: no __init__.py, links, and ruff's ban below
def test_transformers_works_from_the_root_beside_a_package_called_kernels(tmp_path):
    # transformers imports names from Hugging Face's kernels package if its version fits; a regular package
    # kernels/ in the root would be found first and lack them (Python puts the current folder in front).
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text(KERNELS_STUB)
    (tmp_path / "kernels-0.dist-info").mkdir()
    script = f"""
import pathlib, sys
stub = pathlib.Path({str(tmp_path)!r})
sys.path.append(str(stub))
from transformers.utils.import_utils import KERNELS_MIN_VERSION, is_kernels_available
metadata = f"Metadata-Version: 2.1\\nName: kernels\\nVersion: {{KERNELS_MIN_VERSION}}\\n"
(stub / "kernels-0.dist-info" / "METADATA").write_text(metadata)
import transformers.modeling_utils
assert is_kernels_available(), "the stub did not pass for the package, so nothing was tested"
assert sys.modules["kernels"].__file__.startswith(str(stub)), sys.modules["kernels"]
import quantlab.kernels
print(next(iter(quantlab.kernels.__path__)))
"""
    done = python("-c", script)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip().splitlines()[-1]).resolve() == ROOT / "kernels"


@pytest.mark.parametrize(
    "statement", ["import kernels", "from kernels import dual_read", "import evals.plugin"]
)
def test_ruff_bans_the_second_copy(statement):
    done = python(*RUFF, stdin=f"{statement}\n")
    assert done.returncode == 1
    assert "TID251" in done.stdout


def test_ruff_allows_the_first_copy():
    done = python(
        *RUFF, stdin="import quantlab.kernels.dual_read\n\nquantlab.kernels.dual_read.dual_read()\n"
    )
    assert done.returncode == 0, done.stdout


# The wheel


def build(kind: str, source: Path, out: Path) -> Path:
    """Build a wheel or sdist of the project in ``source`` with the installed setuptools; no network."""
    out.mkdir(exist_ok=True)
    done = python(
        "-c", f"from setuptools import build_meta; build_meta.build_{kind}({str(out)!r})", cwd=source
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = out.iterdir()
    return built


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A copy of the project, so that the build leaves nothing in the checkout."""
    copy = tmp_path_factory.mktemp("source")
    caches = shutil.ignore_patterns("__pycache__")
    for name in CODE:
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=caches)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    return copy


@pytest.fixture(scope="module")
def wheel_names(source, tmp_path_factory):
    with zipfile.ZipFile(build("wheel", source, tmp_path_factory.mktemp("wheel"))) as wheel:
        return set(wheel.namelist())


@pytest.mark.parametrize(
    ("folder", "pattern"),
    [
        ("quantlab", "*.py"),
        ("kernels", "*.py"),
        ("evals", "*.py"),
        ("evals", "*.yaml"),
        ("quantlab/report", "*.html*"),
    ],
)
def test_there_is_something_for_the_wheel_to_hold(folder, pattern):
    assert [path for path in (ROOT / folder).rglob(pattern) if path.is_file()]


def test_wheel_holds_every_file_of_the_code_folders(wheel_names):
    missing = {installed_name(path) for folder in CODE for path in source_files(folder)} - wheel_names
    assert missing == set(), "extend [tool.setuptools.package-data]"


def test_wheel_installs_one_top_level_package(wheel_names):
    tops = {name.partition("/")[0] for name in wheel_names}
    assert tops == {"quantlab", f"quantlab-{PROJECT['version']}.dist-info"}


def test_sdist_builds_the_same_wheel(source, wheel_names, tmp_path):
    archive = build("sdist", source, tmp_path / "sdist")
    with tarfile.open(archive) as opened:
        opened.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    with zipfile.ZipFile(build("wheel", unpacked, tmp_path / "wheel")) as wheel:
        assert set(wheel.namelist()) == wheel_names


def test_console_script_resolves():
    for target in PROJECT["scripts"].values():
        module, _, attribute = target.partition(":")
        assert callable(getattr(importlib.import_module(module), attribute))


def test_version_is_the_same_everywhere():
    quantlab = importlib.import_module("quantlab")
    assert quantlab.__version__ == PROJECT["version"]
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.findall(r"^version: (.+)$", citation, re.MULTILINE) == [PROJECT["version"]]


# Dependencies


def extras_named(text: str) -> set[str]:
    """Extras in ``quantlab[a,b]`` and ``.[a,b]``."""
    groups = re.findall(r"(?:quantlab|(?<![\w\])])\.)\[([a-z][a-z,\s_-]*)\]", text)
    return {extra.strip() for group in groups for extra in group.split(",")}


def test_extras_are_found_where_they_are_named():
    assert extras_named("pip install 'quantlab[ray, hf]', or -e '.[dev]'; not x.shape[b] or y().[c]") == {
        "ray",
        "hf",
        "dev",
    }


def test_every_extra_that_is_named_exists():
    texts = [ROOT / name for name in ("Makefile", "constraints.txt")]
    texts += ROOT.glob("*.md")
    texts += [path for folder in (*CODE, "docs", "experiments") for path in (ROOT / folder).rglob("*.py")]
    texts += [path for folder in ("docs", "experiments") for path in (ROOT / folder).rglob("*.md")]
    named = {path: extras_named(path.read_text(encoding="utf-8")) for path in texts}
    unknown = {str(path.relative_to(ROOT)): extras - EXTRAS.keys() for path, extras in named.items()}
    assert {path: extras for path, extras in unknown.items() if extras} == {}
    assert set().union(*named.values()) >= set(TESTED_EXTRAS)  # the Makefile's


def imported_packages() -> dict[str, str]:
    """Top-level package -> a file that imports it, over the three code folders."""
    pattern = re.compile(r"^\s*(?:import|from)\s+([A-Za-z_]\w*)", re.MULTILINE)
    files = [path for folder in CODE for path in source_files(folder) if path.suffix == ".py"]
    texts = {str(path): (ROOT / path).read_text(encoding="utf-8") for path in files}
    return {name: path for path, text in texts.items() for name in pattern.findall(text)}


def test_every_import_is_a_declared_dependency():
    declared = {
        canonicalize_name(Requirement(line).name)
        for line in [*PROJECT["dependencies"], *(line for lines in EXTRAS.values() for line in lines)]
    }
    providers = importlib.metadata.packages_distributions()
    undeclared = {
        name: file
        for name, file in imported_packages().items()
        if name in providers and name != "quantlab"
        if not {canonicalize_name(provider) for provider in providers[name]} & declared
    }
    assert undeclared == {}


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    requirements = [Requirement(line) for line in lines if line and not line.startswith("#")]
    found = {}
    for requirement in requirements:
        (specifier,) = requirement.specifier
        assert specifier.operator == "==", requirement
        assert canonicalize_name(requirement.name) not in found, f"{requirement.name} is pinned twice"
        found[canonicalize_name(requirement.name)] = specifier.version
    return found


def direct_requirements() -> list[Requirement]:
    lines = [*PROJECT["dependencies"], *(line for extra in TESTED_EXTRAS for line in EXTRAS[extra])]
    return [Requirement(line) for line in lines]


@pytest.mark.parametrize("requirement", direct_requirements(), ids=str)
def test_every_direct_dependency_is_pinned_inside_its_range(requirement):
    pinned = pins()[canonicalize_name(requirement.name)]
    assert requirement.specifier.contains(pinned)
    assert any(s.operator in (">=", "==") for s in requirement.specifier), "a range needs a lower end"


def test_pins_carry_no_local_version():
    assert {name: version for name, version in pins().items() if Version(version).local} == {}


def installed_as_pinned() -> bool:
    versions = {canonicalize_name(found.name): found.version for found in importlib.metadata.distributions()}
    return all(Version(versions.get(name, "0")).public == pinned for name, pinned in pins().items())


@pytest.mark.skipif(
    not installed_as_pinned(), reason="other releases than constraints.txt pins are installed"
)
def test_pins_are_the_closure_of_the_tested_dependencies():
    """Every package that the tested ones pull in is pinned, and nothing else is."""
    reached, todo, done = set(), direct_requirements(), set()
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        for extra in {"", *requirement.extras} - {extra for seen, extra in done if seen == name}:
            done.add((name, extra))
            try:
                lines = importlib.metadata.requires(name) or []
            except importlib.metadata.PackageNotFoundError:
                continue  # another platform's, or of another Python
            reached.add(name)
            here = {**TESTED_ON, "extra": extra}
            needed = [Requirement(line) for line in lines]
            todo += [need for need in needed if need.marker is None or need.marker.evaluate(here)]
    pinned_by_torch = {name for name in reached if name.startswith(("nvidia-", "cuda-"))}
    assert reached - pinned_by_torch == set(pins())
