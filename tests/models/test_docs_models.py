"""The code of docs/models.md that stands by itself runs: a tiny model, crop, and ops of a file's own."""

import re
from pathlib import Path

from . import third_party_model as theirs

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "models.md").read_text(encoding="utf-8")


def block(word):
    (found,) = [code for code in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if word in code]
    return found


def test_a_tiny_model_and_its_drafts(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(block("build_tiny("), names)
    assert "'checkpoint': 2, 'read_copy': 3" in capsys.readouterr().out
    exec(block(".crop("), names)
    assert names["cache"].get_seq_length() == 19  # 20 read, 2 taken back, 1 read


def test_a_file_declares_its_ops():
    names: dict = {}
    exec(block("QUANTLAB_FAMILIES"), names)
    (ours,), (other,) = names["QUANTLAB_FAMILIES"], theirs.QUANTLAB_FAMILIES
    for field in ("recurrence", "step_op", "prefill_op", "prefill_state", "to_state", "to_model"):
        assert getattr(ours, field) == getattr(other, field)
    q, k, v = (theirs.torch.full((2, 3, 2, size), 0.5) for size in (16, 16, 4))
    decay = theirs.torch.full((2, 3, 2), 0.9)
    assert ours.key_heads(None, decay, k, v, q) == 2
    for read in (ours, other):
        call = read.chunk_inputs(None, decay, k, v, q)
        assert call.inputs.k is k
        assert call.inputs.v is v
        token = read.token_inputs(None, "state", decay[:, 0], k[:, 0], v[:, 0], q[:, 0])
        assert token.state == "state"
        assert token.inputs.q.shape == (2, 2, 16)
