"""A trace written by hand, byte by byte: the shares are known."""

import pytest

from colabtpu import ColabTPUError
from colabtpu.monitor import analyse


def varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out, value = out + bytes([value & 127 | 128]), value >> 7
    return out + bytes([value])


def field(number: int, value: int | bytes | str) -> bytes:
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    body = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(body)) + body


def plane(name: str, line: str, operations: list[tuple[str, str, int, int]]) -> bytes:
    """An XPlane with one line; operations are (name, hlo category, start, length) in us."""
    body, events = field(2, name), field(2, line) + field(3, 1_000)
    categories = field(1, 7) + field(2, field(1, 7) + field(2, "hlo_category"))
    body += field(5, categories)
    for number, (op, category, start, length) in enumerate(operations, 1):
        stat = field(1, 7) + field(5, category)
        metadata = field(1, number) + field(2, op) + field(5, stat)
        body += field(4, field(1, number) + field(2, metadata))
        events += field(4, field(1, number) + field(2, start * 10**6) + field(3, length * 10**6))
    return field(1, body + field(3, events))


def write(folder, *planes: bytes) -> None:
    trace = folder / "run" / "plugins" / "profile" / "2026_12_01" / "vm.xplane.pb"
    trace.parent.mkdir(parents=True)
    trace.write_bytes(b"".join(planes))


HOST = plane("/host:CPU", "tf_XLAEigen/1", [("dot.1", "", 0, 1000)])


def test_shares_of_a_device(tmp_path):
    device = plane(
        "/device:TPU:0",
        "XLA Ops",
        [
            ("dot.3", "", 0, 40),
            ("all-reduce.1", "", 40, 20),
            ("fusion.7", "convolution fusion", 70, 20),
            ("convert.2", "loop fusion", 90, 10),
        ],
    )
    write(tmp_path, HOST, device)
    found = analyse(tmp_path)
    assert found.device == "/device:TPU:0"
    assert found.seconds == pytest.approx(100e-6)
    # 90 of 100 us are busy: 40 + 20 in products, 20 in the all-reduce.
    assert found.matrix_share == pytest.approx(60 / 90)
    assert found.collective_share == pytest.approx(20 / 90)
    assert found.idle_share == pytest.approx(0.1)
    assert found.top[0] == ("dot", pytest.approx(40 / 90))


def test_host_is_read_where_there_is_no_accelerator(tmp_path):
    operations = [
        ("ThreadpoolListener::Record", "", 0, 500),
        ("ThunkExecutor::Execute (wait for completion)", "", 0, 500),
        ("dot_general.1", "", 0, 30),
        ("tanh_fusion", "", 30, 10),
    ]
    write(tmp_path, plane("/host:CPU", "tf_XLAPjRtCpuClient/1", operations))
    found = analyse(tmp_path)
    assert (found.device, found.seconds) == ("/host:CPU", pytest.approx(40e-6))
    assert found.matrix_share == pytest.approx(0.75)


def test_overlapping_operations_are_busy_once(tmp_path):
    device = plane("/device:GPU:0", "Stream #1", [("gemm", "", 0, 10), ("copy", "", 5, 15)])
    write(tmp_path, device)
    assert analyse(tmp_path).idle_share == pytest.approx(0.0)


def test_folder_without_a_trace_says_how_to_make_one(tmp_path):
    with pytest.raises(ColabTPUError, match="profile_steps=3"):
        analyse(tmp_path)


def test_trace_without_operations_says_so(tmp_path):
    write(tmp_path, plane("/device:TPU:0", "Steps", [("1", "", 0, 10)]))
    with pytest.raises(ColabTPUError, match="no operations"):
        analyse(tmp_path)
