"""A stand-in for the policy parser, and a runner whose behaviour is chosen by the policy's name."""

import textwrap

import pytest

RUNNER = """
import os, signal, time
from pathlib import Path


def run_points(points, *, threads, on_progress):
    folder = Path(points[0]["log"])
    with (folder / "calls").open("a") as log:
        log.write(" ".join(point["policy"] for point in points) + chr(10))
    for number, point in enumerate(points):
        policy = point["policy"]
        if policy == "raise":
            raise ValueError("too bad" + chr(10) + "second line")
        if policy == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if policy == "input":
            from quantlab.errors import InputError
            raise InputError("policy", policy, "something else")
        if policy == "silent":
            continue
        if policy.startswith("slow"):
            (folder / "started").touch()
            time.sleep(0.3)
        on_progress(policy)
        on_progress(number + 1, len(points))
        result = {"metrics": {"threads": os.environ["OMP_NUM_THREADS"], "pid": os.getpid(), "told": threads}}
        if policy == "series":
            result["series"] = {"step": [1, 2], "output_error": [0.5, 0.25]}
        if policy == "diverged":
            result |= {"status": "diverged", "message": "at step 3"}
        yield point, result
"""


@pytest.fixture
def parser(monkeypatch):
    """Policies are any text; spaces are what canonical text drops."""
    monkeypatch.setattr("quantlab.schemes.parse_policy", lambda text: text.replace(" ", ""), raising=False)
    monkeypatch.setattr("quantlab.recurrences.RECURRENCES", {"mamba2": 0, "gated_delta": 0}, raising=False)


@pytest.fixture
def study(tmp_path, parser):
    """study(*policies per block) -> path of a spec with one script block per argument."""
    (tmp_path / "runner.py").write_text(RUNNER)

    def write(*blocks, extra=""):
        text = 'title = "a study"\n' + extra
        for number, policies in enumerate(blocks):
            text += textwrap.dedent(f"""
                [[script]]
                name = "block{number}"
                runner = "runner.py:run_points"
                params = {{ log = "{tmp_path}" }}
                policies = {list(policies)}
                """)
        path = tmp_path / "spec.toml"
        path.write_text(text)
        return path

    return write
