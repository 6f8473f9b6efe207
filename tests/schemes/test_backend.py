"""Which code serves an op, and that it says so."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest

import quantlab.schemes
from quantlab.errors import InputError
from quantlab.schemes import StateShape, dual_read, parse_policy, steps
from quantlab.schemes.backend import FUNCTIONS, choose, find, ops
from quantlab.testing import in_triton_process

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def lonely(tmp_path, monkeypatch):
    """An op that has a twin and no kernel."""
    (tmp_path / "lonely.py").write_text("def lonely():\n    return 'twin'\n")
    monkeypatch.setattr(quantlab.schemes, "__path__", [*quantlab.schemes.__path__, str(tmp_path)])
    yield "lonely"
    sys.modules.pop("quantlab.schemes.lonely", None)


def test_the_twin_serves_the_cpu(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert find("dual_read", "cpu") is dual_read.dual_read
    assert (
        str(choose("dual_read", "cpu"))
        == "dual_read on cpu: torch (no CUDA device, TRITON_INTERPRET not set)"
    )


def test_the_interpreter_is_used_when_asked_for():
    found = in_triton_process(choose, "dual_read", "cpu", interpret=True)
    assert str(found) == "dual_read on cpu: triton (Triton interpreter)"
    assert found.function.__module__ == "quantlab.kernels.dual_read"


def test_a_missing_kernel_falls_back_and_says_so(lonely, monkeypatch, caplog):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with caplog.at_level(logging.WARNING, logger="quantlab"):
        assert find(lonely, "cpu")() == "twin"
        assert "no kernel quantlab.kernels.lonely" in choose(lonely, "cpu").reason
    assert [record.getMessage() for record in caplog.records] == [
        "lonely on cpu: torch, because there is no kernel quantlab.kernels.lonely"
    ]


def test_interpreting_too_late_falls_back_and_says_why(monkeypatch):
    import triton

    monkeypatch.setenv("TRITON_INTERPRET", "0" if triton.knobs.runtime.interpret else "1")
    found = choose("dual_read", "cpu")
    assert found.kind == "torch"


UNKNOWN = ["dual_raed", "policy.x", "backend", "", "dual_read."]
UNKNOWN += ["steps", "steps.", "steps.check_slots", "steps.decode", ".decode_token"]


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_op_is_refused(name):
    with pytest.raises(InputError, match=r"^op .*expected one of .*dual_read"):
        find(name, "cpu")


@pytest.mark.parametrize("function", FUNCTIONS["steps"])
def test_functions_of_a_module_are_ops(function, monkeypatch):
    name = f"steps.{function}"
    assert name in ops()
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert find(name, "cpu") is getattr(steps, function)
    found = in_triton_process(choose, name, "cpu", interpret=True)
    assert str(found) == f"{name} on cpu: triton (Triton interpreter)"
    assert found.function.__module__ == "quantlab.kernels.steps"
    assert found.function.__name__ == function


def test_a_policy_without_a_kernel_falls_back_and_says_why():
    for key_dim, served in ((128, None), (96, "a key dim that is no power of two from 32 on")):
        work = parse_policy("fp32@16"), "mamba2", StateShape(4, 64, key_dim, 2)
        found = in_triton_process(choose, "steps.decode_token", "cpu", *work, interpret=True)
        assert found.kind == ("triton" if served is None else "torch")
        assert found.reason == ("Triton interpreter" if served is None else f"no kernel serves {served}")


def test_more_drafts_than_kernels_take_at_once_fall_back():
    work = parse_policy("fp32@4"), "mamba2", StateShape(4, 64, 128, 2)
    assert in_triton_process(choose, "drafts.verify_tokens", "cpu", *work, 4, interpret=True).kind == "triton"
    found = in_triton_process(choose, "drafts.verify_tokens", "cpu", *work, 5, interpret=True)
    assert found.kind == "torch"
    assert found.reason == "no kernel serves 5 drafts at once, more than 4"


def test_ops_are_the_modules_that_define_them():
    assert "dual_read" in ops()
    assert "steps" not in ops()
    assert "check_arguments" not in ops()


def test_the_cpu_needs_no_triton():
    code = "import sys; from quantlab.schemes.backend import find; find('dual_read', 'cpu')"
    code += "; assert 'triton' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, env={"PYTHONPATH": str(ROOT)})
