"""Other projects' kernels: how they are found, and that they are compared before they are timed."""

import sys

import pytest

from quantlab.errors import InputError
from quantlab.kernels import bench_peers
from quantlab.kernels.bench_cases import expand
from quantlab.report.speed import speed_rows
from quantlab.schemes.ledger import StateShape
from tests.kernels.bench_stand_ins import SMALL, CountingTimer, run


def test_a_peer_that_is_not_there_is_a_line():
    peers, notes = bench_peers.load_peers(bench_peers.parse_peers(["mamba_ssm", "vllm"]))
    assert peers == {}
    assert len(notes) == 3
    assert all(line.startswith("peer ") and "\n" not in line for line in notes)


def test_peer_texts():
    with pytest.raises(InputError, match="nearest: vllm"):
        bench_peers.parse_peers(["vlm"])
    with pytest.raises(InputError, match="vllm=PATH"):
        bench_peers.parse_peers(["vllm=/nowhere/at/all"])


PEER_FILE = """
import torch
from {top}.helper import gain
def selective_state_update(state, x, dt, A, B, C, D=None, dt_bias=None, dt_softplus=False, state_batch_indices=None):
    at = state_batch_indices.long()
    heads = x.shape[1]
    k, q = (t.float().repeat_interleave(heads // t.shape[1], 1) for t in (B, C))
    dt = dt.float()
    old = state[at].float()
    new = torch.exp(dt[:, :, :1, None] * A[:, :1, :1]) * old + (dt * x.float())[..., None] * k[:, :, None]
    state[at] = new.to(state.dtype)
    return (torch.einsum("bhvk,bhk->bhv", new, q) * gain).to(x.dtype)
"""


def write_peer(folder, gain, init=""):
    package = folder / "mamba_ssm"
    kernels = package / "ops" / "triton"
    kernels.mkdir(parents=True)
    (package / "__init__.py").write_text(init)
    (package / "helper.py").write_text(f"gain = {gain}\n")
    (package / "ops" / "__init__.py").touch()
    (kernels / "__init__.py").touch()
    (kernels / "selective_state_update.py").write_text(PEER_FILE.format(top="mamba_ssm"))
    return folder


@pytest.mark.parametrize("given", [".", "mamba_ssm"])
def test_a_peer_is_imported_from_its_path_alone(tmp_path, given):
    write_peer(tmp_path, 1.0)
    wanted = bench_peers.parse_peers([f"mamba_ssm={tmp_path / given}"])
    before = list(sys.path)
    peers, notes = bench_peers.load_peers(wanted)
    assert notes == []
    assert peers["mamba_ssm"].policies("mamba2") == ["fp32@1", "fp16@1"]
    assert peers["mamba_ssm"].policies("gated_delta") == []
    assert sys.path == before
    assert not [name for name in sys.modules if name.split(".")[0] == "mamba_ssm"]
    with peers["mamba_ssm"].active():
        assert "mamba_ssm.helper" in sys.modules
    assert "mamba_ssm" not in sys.modules


def test_a_tree_that_was_never_built_gives_its_kernel_files(tmp_path):
    write_peer(tmp_path, 1.0, "import a_compiled_extension_that_is_not_there")
    peers, _ = bench_peers.load_peers(bench_peers.parse_peers([f"mamba_ssm={tmp_path}"]))
    assert peers["mamba_ssm"].how == "kernel files alone"
    (record,) = run(peer_cases(peers), peers=peers)
    assert record["status"] == "ok"
    assert record["metrics"]["source"] == "kernel files alone"


def peer_cases(peers, policy="fp32@1"):
    cases = expand("mamba2", SMALL, [], [3], {name: peer.policies("mamba2") for name, peer in peers.items()})
    return [c for c in cases if c.policy == policy]


def test_a_peer_is_timed_if_it_computes_the_step(tmp_path):
    right, _ = bench_peers.load_peers(
        bench_peers.parse_peers([f"mamba_ssm={write_peer(tmp_path / 'right', 1.0)}"])
    )
    for policy in ("fp32@1", "fp16@1"):
        (record,) = run(peer_cases(right, policy), peers=right)
        assert record["status"] == "ok", record["message"]
        assert record["point"]["implementation"] == "mamba_ssm"
        assert record["metrics"]["comparison"]["relative_error"]["output"] < 4e-3
    wrong, _ = bench_peers.load_peers(
        bench_peers.parse_peers([f"mamba_ssm={write_peer(tmp_path / 'wrong', 1.05)}"])
    )
    timer = CountingTimer()
    (record,) = run(peer_cases(wrong), peers=wrong, timer=timer)
    assert record["status"] == "comparison_failed"
    assert record["message"].startswith("output off by 0.05")
    assert timer.measured == 0


STORING_MAMBA = """
import torch
def selective_state_update(
    state, x, dt, A, B, C, D=None, dt_bias=None, dt_softplus=False, state_batch_indices=None, out=None,
    num_accepted_tokens=None, cu_seqlens=None,
):
    heads = x.shape[1]
    k, q = (t.float().repeat_interleave(heads // t.shape[1], 1) for t in (B, C))
    for row, slots in enumerate(state_batch_indices.tolist()):
        now = state[slots[int(num_accepted_tokens[row]) - 1]]
        first, last = cu_seqlens[row : row + 2].tolist()
        for slot, token in zip(slots, range(first, last), strict=True):
            decay = torch.exp(dt[token].float()[:, :1, None] * A[:, :1, :1])
            now = now * decay + (dt[token] * x[token]).float()[..., None] * k[token, :, None]
            state[slot] = now
            out[token] = ({gain} * torch.einsum("hvk,hk->hv", now, q[token])).to(out.dtype)
"""

STORING_DELTA = """
import torch
def {name}(
    q, k, v, g, beta, scale=None, initial_state=None, inplace_final_state=True, cu_seqlens=None,
    ssm_state_indices=None, num_accepted_tokens=None{more},
):
    out, repeat = torch.empty_like(v), v.shape[2] // q.shape[2]
    q, k = (t[0].float().repeat_interleave(repeat, 1) for t in (q, k))
    for row, slots in enumerate(ssm_state_indices.tolist()):
        now = initial_state[slots[int(num_accepted_tokens[row]) - 1]]
        first, last = cu_seqlens[row : row + 2].tolist()
        for slot, token in zip(slots, range(first, last), strict=True):
            gate = g[0, token].exp()
            now = now * (gate[:, None, None] if gate.dim() == 1 else gate[:, None])
            d = beta[0, token, :, None] * (v[0, token].float() - torch.einsum("hvk,hk->hv", now, k[token]))
            now = now + {gain} * d[..., None] * k[token, :, None]
            initial_state[slot] = now
            out[0, token] = torch.einsum("hvk,hk->hv", now, q[token] * scale).to(out.dtype)
    return out, initial_state
"""

STORING = {
    "mamba2": ("vllm", "model_executor/layers/mamba/ops/mamba_ssm.py", STORING_MAMBA, {}),
    "gated_delta": (
        "vllm",
        "model_executor/layers/fla/ops/fused_recurrent.py",
        STORING_DELTA,
        {"name": "fused_recurrent_gated_delta_rule", "more": ""},
    ),
    "kimi_delta": (
        "fla",
        "ops/kda/fused_recurrent.py",
        STORING_DELTA,
        {"name": "fused_recurrent_kda_fwd", "more": ", state_v_first=False"},
    ),
}


@pytest.mark.parametrize("family", STORING)
def test_a_peer_that_stores_a_state_a_draft(tmp_path, family):
    name, path, text, names = STORING[family]
    shape = SMALL if family == "mamba2" else StateShape(4, 16, 32, 4 if family == "kimi_delta" else 2)
    for gain, status in ((1.0, "ok"), (1.05, "comparison_failed")):
        file = tmp_path / str(gain) / name / path
        file.parent.mkdir(parents=True)
        file.write_text(text.format(gain=gain, **names))
        peers, _ = bench_peers.load_peers(bench_peers.parse_peers([f"{name}={tmp_path / str(gain)}"]))
        verifying = {name: peers[name].policies(family, 3)}
        policies = ["fp32@4:buffer=bf16"]
        cases = expand(family, shape, policies, [3], {}, [3], verifying)
        records = run(cases, peers=peers)
        theirs = records[-1]
        assert (theirs["point"]["implementation"], theirs["point"]["drafts"]) == (name, 3)
        assert theirs["status"] == status, theirs["message"]
        state = 4 * shape.heads * shape.value_dim * shape.key_dim
        assert theirs["metrics"]["bytes"] == 3 * (1 + 3) * state
        ours = next(
            row for row in speed_rows(records) if row["drafts"] and row["implementation"] == "quantlab"
        )
        over = theirs["metrics"]["us"] / ours["us"] if status == "ok" else None
        assert ours["against_peer"] == over


def test_drafts_are_held_against_as_many_steps_or_a_verification_of_as_many():
    def record(us, implementation, **drafts):
        point = {"implementation": implementation, "policy": "fp32@1", "batch": 8, **drafts}
        metrics = {"us": us, "run": "one", "checkpoint_bits": 32}
        return {"point": point, "metrics": metrics, "status": "ok", "message": ""}

    ours, step = record(10.0, "quantlab", drafts=4), record(5.0, "vllm")
    (row, *_) = speed_rows([ours, step])
    assert row["against_peer"] == 4 * 5.0 / 10.0
    verifications = record(12.0, "fla", drafts=4), record(1.0, "fla", drafts=2)
    (row, *_) = speed_rows([ours, step, *verifications])
    assert (row["against_peer"], row["peer"]) == (12.0 / 10.0, "fla")
