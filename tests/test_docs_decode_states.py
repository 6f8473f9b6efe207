"""The code of docs/decode-states.md runs as it stands, one block after the other."""

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parent.parent / "docs" / "decode-states.md"


def test_the_page_runs(capsys):
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 3
    names: dict = {}
    for block in blocks:
        exec(block, names)
    printed = capsys.readouterr().out
    assert "fp32/nvfp4@16" in printed
    assert "[0, 0]" in printed
    assert "heads 1-2: fp16+sr/nvfp4@16" in printed
    assert names["again"] == names["second"]
    assert names["pool"].free_slots
