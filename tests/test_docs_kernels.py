"""docs/kernels.md: its floors are those of the ledger, its command runs, and its records have what it names."""

import re
import shlex
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from quantlab.cli import app
from quantlab.kernels.bench import run_cases
from quantlab.kernels.bench_cases import Case, traffic
from quantlab.kernels.bench_timing import Times
from quantlab.recurrences import StepInputs
from quantlab.schemes import parse_policy, steps
from quantlab.schemes.ledger import StateShape

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "kernels.md").read_text(encoding="utf-8")


def floors(policy, family, shape):
    """The page's table for one row: bytes read and written."""
    parsed, window = parse_policy(policy), parse_policy(policy).window
    full = (shape.heads, shape.value_dim, shape.key_dim)
    c = sum(parsed.checkpoint.stored_bits(full).values()) / 8
    gates = 4 * shape.heads * (shape.key_dim if family == "kimi_delta" else 1)
    record = 2 * shape.key_heads * shape.key_dim + 2 * shape.heads * shape.value_dim + gates
    held, left = record * sum(range(window)) / window, record * (window - 1) / window
    if window == 1:
        return c, c
    if parsed.read_copy is None:
        return c + held, c / window + left
    r = sum(parsed.read_copy.stored_bits(full).values()) / 8
    keys = r / window if family != "mamba2" else 0.0  # contents=derived: S k of the rows that flush
    return r * (window - 1) / window + keys + c / window + held, (c + r) / window + left


@pytest.mark.parametrize("family", ["mamba2", "gated_delta", "kimi_delta"])
@pytest.mark.parametrize("policy", ["fp16@1", "fp32@16:buffer=bf16", "int8/nvfp4@16:buffer=bf16"])
def test_the_floors(policy, family):
    shape = StateShape(8, 64, 128, 8)
    derived = "" if family == "mamba2" or policy == "fp16@1" else ":contents=derived"
    found = traffic(Case(family, shape, str(parse_policy(policy + derived)), 1))
    expected = floors(policy, family, shape)
    assert (sum(found.read.values()), sum(found.written.values())) == pytest.approx(expected)


def test_the_code_of_the_page():
    """On the CPU, by the twins of the same names, with a smaller layer."""
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    step, verify = (
        next(code for code in blocks if name in code) for name in ("decode_token", "verify_tokens")
    )
    load = "for pool, initial in zip(pools, prefill_states):\n    load_states(pool, slot_numbers, initial)\n"
    verify = verify.replace("plan = begin_step", load + "plan = begin_step", 1)

    def inputs(*count):
        keys = torch.randn(2, *count, 2, 32), torch.randn(2, *count, 2, 32)
        return StepInputs(*keys, torch.randn(2, *count, 4, 16), -torch.rand(2, *count, 4))

    torch.manual_seed(0)
    names = {"slots": 4, "layers": 1, "T": 4, "slot_numbers": torch.tensor([1, 2], dtype=torch.int32)}
    names |= {
        "counts": torch.tensor([2, 1], dtype=torch.int32),
        "prefill_states": [torch.randn(2, 4, 16, 32)],
    }
    names |= {"layer_inputs": [inputs()], "layer_tokens": [inputs(4)]}
    for code, count in ((step, ()), (verify, (4,))):
        code = code.replace("quantlab.kernels", "quantlab.schemes").replace('"cuda"', '"cpu"')
        code = re.sub(r"StateShape\(.*?\)", "StateShape(4, 16, 32, 2)", code)
        names["outputs"] = [torch.full((2, *count, 4, 16), torch.nan)]
        exec(code, names)
        assert torch.isfinite(names["outputs"][0]).all()
    assert names["pools"][0].counters.cursor.tolist() == [0, 2, 1, 0]


def test_the_dry_run_of_the_page():
    (command,) = re.findall(r"^quantlab (bench .*--dry-run.*)$", PAGE, re.MULTILINE)
    done = CliRunner().invoke(app, shlex.split(command))
    assert done.exit_code == 0
    assert "us at 4.23 TB/s" in done.stdout


def test_a_record_has_what_the_page_names():
    class Clock:
        device, name, l2_bytes = torch.device("cpu"), "a device", 1

        def measure(self, work):
            work()
            return Times(1.0, 1.0, 1.0, 11)

        def free_bytes(self):
            return 2**30

    case = Case("mamba2", StateShape(2, 16, 32, 1), "fp32/nvfp4@4", 2)
    (record,) = run_cases([case], Clock(), environment={}, steps=steps, bandwidth=1.0)
    table = PAGE[PAGE.index("### Records") :]
    rows = re.findall(r"^\| ([a-z_0-9, ]+) \|", table, re.MULTILINE)
    named = {name for row in rows for name in row.split(", ")} - {"name"}
    assert set(record["metrics"]) - {"token_bytes", "checkpoint_bits"} <= named
    assert named - set(record["metrics"]) == {"source"}
    assert all(f"`{name}`" in table for name in set(record["point"]) - {"kind"})
