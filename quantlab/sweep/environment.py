"""What a number may depend on besides its point."""

import contextlib
import importlib.metadata
import platform
import re
import subprocess
from pathlib import Path
from typing import Any


def capture_environment(threads: int) -> dict[str, Any]:
    """What a number may depend on besides its point; imports none of the libraries whose versions it reads.

    ``threads`` is the fixed number of compute threads.  Holds no user, host or path name: records are
    published.
    """
    import quantlab

    return {
        "quantlab": quantlab.__version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_model(),
        "threads": threads,
        "versions": {
            name: _version(name) for name in ("torch", "triton", "transformers", "lm-eval", "numpy", "scipy")
        },
        "git": _git_revision(),
    }


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def _git_revision() -> str | None:
    """Revision of the checkout that this package runs from, "+changes" appended, or of the ``git archive`` that it was
    unpacked from; None when installed elsewhere."""
    root = Path(__file__).resolve().parents[2]

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")).resolve() == root:
            return git("rev-parse", "HEAD") + ("+changes" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        pass
    return archived_revision(root)


def archived_revision(root: Path) -> str | None:
    """What ``git archive`` wrote into the root of the tree it packed; None where it has not packed it."""
    try:
        node = (root / ".git_archival.txt").read_text(encoding="utf-8").strip()
    except (OSError, UnicodeError):
        return None
    return node if re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", node) else None
