"""``--quick`` promises a small run, so a spec that says nothing of it is refused."""

import pytest

from quantlab.errors import InputError
from quantlab.sweep.run import run_sweep


def test_a_spec_without_a_quick_table_has_no_quick_run(tmp_path):
    spec = tmp_path / "study.toml"
    spec.write_text('title = "t"\npolicies = ["fp32@1"]\n[[drift]]\nfamily = "mamba2"\n', encoding="utf-8")
    with pytest.raises(InputError, match="quick"):
        run_sweep(spec, tmp_path / "out", quick=True)
    assert not (tmp_path / "out").exists()
