"""Bars where somebody watches, lines where a log is kept; both say what became of every point."""

import pytest

from quantlab.sweep import progress
from quantlab.sweep.jobs import Job, Progress, Stored

JOB = Job("m:f", ".", "mamba2 seed 0", ())


@pytest.mark.parametrize("terminal", [True, False])
def test_every_stored_point_has_a_line(capsys, monkeypatch, terminal):
    monkeypatch.setattr(progress, "LINE_EVERY", 0.0)
    monkeypatch.setenv("COLUMNS", "200")
    with progress.Reporter(2, terminal=terminal) as reporter:
        reporter.event(JOB, Progress(text="shadow"))
        reporter.event(JOB, Progress(1, 4))
        reporter.event(JOB, Stored("0", "[bold]@1", "ok", None, 1.25))
        reporter.event(JOB, Stored("1", "b@1", "failed", "ValueError: no", 0.0))
        reporter.event(JOB, None)
    out, err = capsys.readouterr()
    assert out == ""
    assert "[1/2] mamba2 seed 0 | [bold]@1 | ok (1.2 s)" in err
    assert "[2/2] mamba2 seed 0 | b@1 | failed: ValueError: no (0.0 s)" in err
    if not terminal:
        assert "mamba2 seed 0: 25 %" in err
