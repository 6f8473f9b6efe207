"""The oldest supported release of transformers runs the same tests, in an environment that is built on the spot."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RELEASE = "5.17.0"
# transformers with what it needs in releases other than the pinned ones: its hub client is of another major version,
# whose HTTP client is another package.  Everything else comes from the running environment.
PACKAGES = (f"transformers=={RELEASE}", "huggingface_hub==1.33.0", "httpx==0.28.1", "httpcore==1.0.9")
# Geometries are read from configurations without transformers; this file would start itself.
LEFT_OUT = ("test_release_517.py", "test_capacity.py", "test_published.py", "test_damaged_config.py")


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """A folder with PACKAGES, kept beside a virtual environment's own files and made only once."""
    inside = sys.prefix != sys.base_prefix and os.access(sys.prefix, os.W_OK)
    folder = (Path(sys.prefix) if inside else tmp_path_factory.mktemp("release")) / f"transformers-{RELEASE}"
    if folder.is_dir():
        return folder
    partial = folder.with_name(f"{folder.name}.{os.getpid()}")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    made = subprocess.run([*command, "--target", partial, *PACKAGES], capture_output=True, text=True)
    if made.returncode:
        shutil.rmtree(partial, ignore_errors=True)
        reason = made.stderr.strip().splitlines() or ["pip gave no reason"]
        pytest.fail(f"no environment with transformers {RELEASE}: pip says {reason[-1]}", pytrace=False)
    try:
        partial.rename(folder)
    except OSError:  # another process was first
        shutil.rmtree(partial)
    return folder


def run(packages, *arguments):
    path = os.pathsep.join([str(packages), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
def test_every_architecture_passes_with_the_oldest_release(packages):
    found = run(packages, "-c", "import transformers; print(transformers.__version__, transformers.__file__)")
    assert found.stdout.split()[:1] == [RELEASE], found.stderr
    assert str(packages) in found.stdout
    left_out = [f"--ignore=tests/models/{name}" for name in LEFT_OUT]
    options = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-rfEs", "--tb=line")
    tests = run(packages, "-m", "pytest", *options, *left_out, "tests/models")
    assert tests.returncode == 0, tests.stdout[-4000:] + tests.stderr[-1000:]
    noted = re.findall(r"^(SKIPPED|FAILED|ERROR)\b(.*)$", tests.stdout, re.MULTILINE)
    others = [line for word, line in noted if word != "SKIPPED" or not line.endswith(": no CUDA device")]
    assert not others, others
