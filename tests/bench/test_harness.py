"""The parts of the benches that figures depend on."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from bench._network import Link
from bench._report import report

from bench import cold_start

LINK = Link(8_000_000, 0.5)  # 1 MB/s


@pytest.fixture
def origin(tmp_path: Path) -> Iterator[http.client.HTTPConnection]:
    """A connection to a real origin that serves ``tmp_path``."""
    (tmp_path / "blob").write_bytes(bytes(range(256)))
    command = [sys.executable, "-m", "bench._origin", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        connection = http.client.HTTPConnection("127.0.0.1", int(process.stdout.readline()), timeout=20)
        yield connection
        connection.close()
        process.kill()


def get(
    connection: http.client.HTTPConnection, path: str, byte_range: str | None = None
) -> tuple[int, bytes]:
    connection.request("GET", path, headers={"Range": byte_range} if byte_range else {})
    response = connection.getresponse()
    return response.status, response.read()


def test_origin_serves_ranges_on_one_connection(origin: http.client.HTTPConnection) -> None:
    assert get(origin, "/blob") == (200, bytes(range(256)))
    assert get(origin, "/blob", "bytes=10-19") == (206, bytes(range(10, 20)))
    assert get(origin, "/blob", "bytes=250-") == (206, bytes(range(250, 256)))
    assert get(origin, "/blob", "bytes=250-9999") == (206, bytes(range(250, 256)))
    assert get(origin, "/blob", "bytes=256-")[0] == 416


def test_origin_serves_nothing_else(origin: http.client.HTTPConnection) -> None:
    assert get(origin, "/missing")[0] == 404
    assert get(origin, "/../../../../etc/hostname")[0] == 404


@pytest.mark.parametrize(
    ("needs", "expected_s"),
    [
        ([], 2.0),
        ([(1.0, 500_000)], 2.0),  # there just in time
        ([(0.0, 1_000_000)], 3.5),  # a round trip and a second
        ([(5.0, 1_000_000), (5.0, 5_000_000)], 3.5),  # the sum counts
        ([(0.0, 0), (9.0, 1_000_000)], 2.5),  # even nothing costs a round trip when it is needed at once
    ],
)
def test_bound(needs: list[tuple[float, int]], expected_s: float) -> None:
    assert cold_start.bound_s(2.0, needs, LINK) == pytest.approx(expected_s)


def test_ratios_pair_the_runs_of_a_round() -> None:
    assert cold_start.ratios([2.0, 9.0], [1.0, 3.0]) == [2.0, 3.0]
    with pytest.raises(ValueError, match="argument 2 is longer"):
        cold_start.ratios([1.0], [1.0, 2.0])


def test_last_line(capsys: pytest.CaptureFixture[str]) -> None:
    report("x", {"a_over_b": [1.0, 3.0, 2.0]})
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert line["bench"] == "x"
    assert line["figures"]["a_over_b"]["median"] == 2.0
    assert line["figures"]["a_over_b"]["runs"] == [1.0, 3.0, 2.0]
    assert {"cpus", "kernel", "memory_bytes"} <= line["machine"].keys()
