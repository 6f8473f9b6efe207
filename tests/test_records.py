"""The record and stream-file schema: what goes in comes out, and nothing half-written or unsound gets in."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantlab import records
from quantlab.errors import InputError
from quantlab.sweep.environment import archived_revision

POINT = {"kind": "drift", "policy": "nvfp4@1", "stream": {"family": "mamba2", "alpha": 0.99, "seed": 0}}


def make(point=POINT, **result):
    return records.complete_record(point, result, environment={"threads": 1}, seconds=0.5)


def json_values(floats):
    leaves = st.none() | st.booleans() | st.integers() | floats | st.text(max_size=5)
    leaves = leaves.filter(lambda leaf: leaf not in ("inf", "-inf", "nan"))
    return st.recursive(
        leaves, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=4), v, max_size=3)
    )


@given(json_values(st.floats(allow_nan=False)))
def test_encode_survives_json_exactly(value):
    text = json.dumps(records.encode(value), allow_nan=False)
    assert records.decode(json.loads(text)) == value


def test_non_finite_floats_are_strings_both_ways():
    encoded = records.encode({"a": [math.inf, -math.inf, math.nan, 1.5]})
    assert encoded == {"a": ["inf", "-inf", "nan", 1.5]}
    decoded = records.decode(encoded)["a"]
    assert decoded[:2] == [math.inf, -math.inf]
    assert math.isnan(decoded[2])


@pytest.mark.parametrize("value", ["nan", {1: 2}, {"x": object()}, {"x": b"bytes"}])
def test_encode_refuses_what_would_not_come_back(value):
    with pytest.raises(InputError):
        records.encode(value)


def test_hash_is_of_content_not_of_order_and_tells_points_apart():
    shuffled = json.loads(json.dumps({key: POINT[key] for key in reversed(POINT)}))
    assert records.content_hash(shuffled) == records.content_hash(POINT)
    assert records.content_hash(POINT | {"policy": "nvfp4@2"}) != records.content_hash(POINT)
    # Fixed for good: committed records are found under this name.
    assert records.content_hash({"kind": "drift", "policy": "fp32@1"}) == "e69519297b648046"


def test_record_round_trip(tmp_path):
    record = make(
        status="diverged", metrics={"output_error": math.inf, "n": np.int64(3)}, curve={"step": [1, 2]}
    )
    path = records.save_record(tmp_path, record)
    assert path.name == records.content_hash(POINT) + ".json"
    loaded = records.load_record(path)
    assert loaded["metrics"] == {"output_error": math.inf, "n": 3}
    assert loaded["protocol"] == records.protocol_fingerprint("drift")
    assert records.load_records(tmp_path) == [loaded]


def test_other_files_are_passed_over(tmp_path):
    records.save_record(tmp_path, make())
    (tmp_path / "study.json").write_text("{}")
    (tmp_path / ".0123456789abcdef.json.x.1.y.tmp").write_text("{")
    assert len(records.load_records(tmp_path)) == 1


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"schema_version": 2}, "schema_version"),
        ({"status": "okay"}, "status"),
        ({"kind": "drfit"}, "kind"),
        ({"kind": "eval"}, "kind"),
        ({"metrics": None}, "metrics"),
        ({"status": "failed"}, "message"),
        ({"extra": 1}, "extra"),
        ({"point": {"kind": "drift"}}, "policy"),
    ],
)
def test_validation_names_the_field_in_one_line(change, names):
    with pytest.raises(InputError, match=names) as error:
        records.validate_record(make() | change)
    assert "\n" not in str(error.value)


def test_missing_field_is_named():
    record = make()
    del record["curve"]
    with pytest.raises(InputError, match="the field curve"):
        records.validate_record(record)


def test_unknown_status_suggests_the_nearest():
    with pytest.raises(InputError, match="nearest: diverged"):
        records.validate_record(make() | {"status": "divergd"})


def test_renamed_and_broken_records_are_refused(tmp_path):
    path = records.save_record(tmp_path, make())
    moved = path.rename(tmp_path / "0123456789abcdef.json")
    with pytest.raises(InputError, match="hash of its point"):
        records.load_record(moved)
    moved.write_text(moved.read_text()[:40])
    with pytest.raises(InputError, match="readable JSON"):
        list(records.iterate_records(tmp_path))
    with pytest.raises(InputError, match="existing folder"):
        list(records.iterate_records(tmp_path / "none"))


def test_failed_write_leaves_the_old_file_and_no_temporary(tmp_path):
    target = tmp_path / "table.csv"
    records.write_atomic(target, b"old")

    def torn():
        with records.atomic_path(target) as temporary:
            temporary.write_bytes(b"ne")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        torn()
    assert target.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["table.csv"]


def test_failed_rename_leaves_no_temporary(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError("no")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="no"):
        records.write_atomic(tmp_path / "a", b"x")
    assert os.listdir(tmp_path) == []


def test_written_files_are_as_readable_as_others(tmp_path):
    records.write_atomic(tmp_path / "a", b"x")
    (tmp_path / "b").write_bytes(b"x")
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "b").stat().st_mode


def test_stale_temporaries_of_dead_processes_only(tmp_path):
    script = (
        "import os, sys; from quantlab import records\n"
        "with records.atomic_path(sys.argv[1] + '/dead') as t: t.write_text('x'); os._exit(1)"
    )
    subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], check=False, cwd=Path(records.__file__).parents[2]
    )
    with records.atomic_path(tmp_path / "live") as live:
        assert len(os.listdir(tmp_path)) == 2
        assert records.remove_stale(tmp_path) == 1
        assert live.exists()
    assert os.listdir(tmp_path) == ["live"]


def test_output_folder(tmp_path):
    made = records.check_output_folder(tmp_path / "a" / "b")
    assert made.is_dir()
    assert list(made.iterdir()) == []
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(InputError, match="file is in the way"):
            records.check_output_folder(path)


def test_output_folder_that_takes_no_files():
    # No process may create files in procfs, root included: stands in for a read-only file system.
    for path in ("/proc/self", "/proc/quantlab"):
        with pytest.raises(InputError, match="output"):
            records.check_output_folder(path)


def test_output_folder_without_space(tmp_path, monkeypatch):
    usage = type("usage", (), {"free": records.MINIMUM_FREE_BYTES - 1})
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    with pytest.raises(InputError, match="free space"):
        records.check_output_folder(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_output_folder_without_permission(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(InputError, match="Permission"):
        records.check_output_folder(tmp_path)


def test_environment_imports_nothing_heavy_and_names_no_machine():
    script = (
        "import json, sys; from quantlab.sweep.environment import capture_environment; e = capture_environment(3)\n"
        "assert not {'torch', 'triton', 'transformers', 'lm_eval'} & set(sys.modules); print(json.dumps(e))"
    )
    root = Path(records.__file__).parents[2]
    text = subprocess.run(
        [sys.executable, "-c", script], check=True, cwd=root, capture_output=True, text=True
    ).stdout
    environment = json.loads(text)
    assert environment["threads"] == 3
    assert environment["versions"]["numpy"] == np.__version__
    assert os.uname().nodename not in text
    assert str(root) not in text


def test_unpacked_archive_knows_its_revision(tmp_path):
    """Records made from an archive of a checkout carry its revision, by the project's own two files."""
    root, checkout, unpacked = Path(records.__file__).parents[2], tmp_path / "checkout", tmp_path / "unpacked"
    checkout.mkdir()
    unpacked.mkdir()
    for name, text in ((".gitattributes", None), (".git_archival.txt", "$Format:%H$\n")):
        (checkout / name).write_text(text or (root / name).read_text())

    def git(*arguments):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        return subprocess.run(
            ["git", "-C", checkout, *identity, *arguments], check=True, capture_output=True
        ).stdout

    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "files")
    subprocess.run(["tar", "-x", "-C", unpacked], input=git("archive", "HEAD"), check=True)
    assert archived_revision(unpacked) == git("rev-parse", "HEAD").decode().strip()
    assert archived_revision(checkout) is None, "a checkout holds the pattern, not a revision"
    assert archived_revision(tmp_path / "none") is None


def test_fingerprint_moves_with_the_protocol(monkeypatch):
    before = records.protocol_fingerprint("drift")
    assert before != records.protocol_fingerprint("eval")
    monkeypatch.setitem(records.PROTOCOLS, "drift", records.PROTOCOLS["drift"] | {"version": 99})
    assert records.protocol_fingerprint("drift") != before
    with pytest.raises(InputError, match="nearest: drift"):
        records.protocol_fingerprint("drfit")


def stream(**changes):
    rng = np.random.default_rng(0)
    shapes = {
        "q": (5, 1, 2, 8),
        "k": (5, 1, 2, 8),
        "v": (5, 1, 4, 6),
        "log_decay": (5, 1, 4),
        "beta": (5, 1, 4),
    }
    arrays = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    return arrays | {"initial": np.zeros((1, 4, 6, 8), np.float32)} | changes


def test_stream_file_round_trip(tmp_path):
    path = tmp_path / "a.safetensors"
    digest = records.save_stream_file(path, stream(), {"family": "gated_delta", "layer": 3})
    arrays, meta = records.load_stream_file(path)
    assert meta == {"family": "gated_delta", "layer": 3}
    assert records.stream_file_hash(path) == digest
    for name, array in stream().items():
        np.testing.assert_array_equal(arrays[name], array)
    assert os.listdir(tmp_path) == ["a.safetensors"]
    other = stream(v=np.nextafter(stream()["v"], np.float32(9)))
    assert records.save_stream_file(path, other, {"family": "gated_delta"}) != digest


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"v": np.full((5, 1, 4, 6), np.nan, np.float32)}, "v holds NaN or Inf"),
        ({"beta": np.full((5, 1, 4), np.inf, np.float32)}, "beta holds NaN or Inf"),
        ({"beta": np.zeros((4, 1, 4), np.float32)}, "T is 5"),
        ({"k": np.zeros((5, 1, 2, 9), np.float32)}, "K is 8"),
        ({"v": np.zeros((5, 4, 6), np.float32)}, "T, B, H, V"),
        ({"initial": np.zeros((1, 4, 6, 7), np.float32)}, "K is 8"),
        ({name: np.zeros((5, 1, 3, 8), np.float32) for name in "qk"}, "multiple of the key heads"),
    ],
)
def test_unsound_streams_are_neither_written_nor_read(tmp_path, monkeypatch, changes, says):
    path = tmp_path / "a.safetensors"
    with pytest.raises(InputError, match=says):
        records.save_stream_file(path, stream(**changes), {"family": "gated_delta"})
    assert not path.exists()
    with monkeypatch.context() as patch:
        patch.setattr(records.streams, "_check_stream", lambda *_: None)
        records.save_stream_file(path, stream(**changes), {"family": "gated_delta"})
    with pytest.raises(InputError, match=says):
        records.load_stream_file(path)


def test_unreadable_foreign_and_changed_stream_files(tmp_path, monkeypatch):
    import safetensors.numpy

    path = tmp_path / "a.safetensors"
    for text in (b"", b"not safetensors at all", b"\xff" * 64):
        path.write_bytes(text)
        with pytest.raises(InputError, match="readable"):
            records.load_stream_file(path)
    with pytest.raises(InputError, match="readable"):
        records.load_stream_file(tmp_path / "none")
    safetensors.numpy.save_file(stream(), path)
    with pytest.raises(InputError, match="schema_version 1, not None"):
        records.load_stream_file(path)
    with pytest.raises(InputError, match="family"):
        records.save_stream_file(path, stream(), {})
    records.save_stream_file(path, stream(), {"family": "gated_delta"})
    data = bytearray(path.read_bytes())
    data[-1] ^= 1  # lowest address of the last float's exponent byte: another finite value
    path.write_bytes(data)
    with pytest.raises(InputError, match="file was changed"):
        records.load_stream_file(path)


def test_only_regular_files_are_replaced(tmp_path):
    """A rename would put a file where a device, pipe or folder was: as root, even in place of /dev/null."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    for name in ("pipe", "folder", "loop"):
        before = os.lstat(tmp_path / name)
        with pytest.raises(InputError, match="a regular file or a free name"):
            records.write_atomic(tmp_path / name, b"x")
        assert os.lstat(tmp_path / name) == before
    assert sorted(os.listdir(tmp_path)) == ["folder", "loop", "pipe"]


def test_a_link_is_followed(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to("elsewhere/file")
    records.write_atomic(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "elsewhere" / "file").read_bytes() == b"new"
    assert sorted(os.listdir(tmp_path / "elsewhere")) == ["file"]


def test_messages_are_one_readable_line():
    error = InputError("file", "x" * 5000, "something (first line\n  second line)")
    assert "\n" not in str(error)
    assert len(str(error)) < 400
    assert str(error).endswith("(first line second line)")
