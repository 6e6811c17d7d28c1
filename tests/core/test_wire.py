"""Records survive encode and decode, old readers survive new writers, nonsense is a usage error."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.core import errors, wire

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=20),
    lambda children: (
        st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=5), children, max_size=3)
    ),
    max_leaves=5,
)
MOUNTS = st.builds(
    wire.Mount,
    id=st.text(max_size=12),
    image=st.text(max_size=40),
    digest=st.text(max_size=71),
    state=st.sampled_from(["starting", "ready", "restarting", "failed", "unmounted"]),
    fuse_mountpoint=st.text(max_size=40),
    image_path=st.text(max_size=40),
    worker_pid=st.integers(0, 1 << 22),
    restarts=st.integers(0, 1000),
    created_unix_s=st.floats(0, 1e10),
    config=st.dictionaries(st.text(max_size=8), JSON_VALUES, max_size=3),
    trace_path=st.text(max_size=40),
    label=st.text(max_size=10),
    error=st.text(max_size=40),
)
RECORDS: tuple[type[Any], ...] = (
    wire.MountRequest,
    wire.Mount,
    wire.Status,
    wire.ErrorBody,
    wire.WorkerSpec,
    wire.WorkerStart,
    wire.WorkerReady,
    wire.WorkerCall,
    wire.WorkerReply,
)


@given(MOUNTS)
def test_a_record_survives_the_wire(mount: wire.Mount) -> None:
    data = wire.encode(mount)
    assert b"\n" not in data
    assert wire.decode(data, wire.Mount) == mount


@given(MOUNTS)
def test_a_newer_writer_does_not_break_an_old_reader(mount: wire.Mount) -> None:
    value = json.loads(wire.encode(mount))
    value["from_the_future"] = {"deep": [1, 2, 3]}
    assert wire.decode(json.dumps(value).encode(), wire.Mount) == mount


def test_what_a_client_may_leave_out() -> None:
    request = wire.decode(b'{"image": "/images/a"}', wire.MountRequest)
    assert request == wire.MountRequest(image="/images/a")
    assert (request.mountpoint, request.prefetch, request.record, request.deadline_s) == (
        None,
        True,
        True,
        30.0,
    )


@pytest.mark.parametrize("kind", RECORDS)
@given(data=st.binary(max_size=60))
def test_garbage_is_a_usage_error(kind: type[Any], data: bytes) -> None:
    try:
        wire.decode(data, kind)
    except errors.UsageError as error:
        assert error.message.startswith(f"malformed {kind.__name__}: ")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        "{}",
        '{"image": 5}',
        '{"image": "a", "deadline_s": "soon"}',
        '{"image": "a", "mountpoint": 5}',
        '{"image": "a"',
        '{"image": "\\ud800"}',
        "[" * 5000,
    ],
)
def test_a_malformed_request_says_what_is_wrong(text: str) -> None:
    with pytest.raises(errors.UsageError, match="malformed MountRequest"):
        wire.decode(text.encode(), wire.MountRequest)


def test_an_unknown_operation_is_refused() -> None:
    with pytest.raises(errors.UsageError):
        wire.decode(b'{"op": "format_disk"}', wire.WorkerCall)


def test_an_error_body_says_what_the_error_says() -> None:
    body = wire.ErrorBody.of(errors.NotFoundError("there is no mount", hint="see status"))
    assert body == wire.ErrorBody("not_found", "there is no mount", "see status")
    assert wire.decode(wire.encode(body), wire.ErrorBody) == body


def test_a_reply_does_not_share_its_default_with_the_next() -> None:
    first, second = wire.WorkerReply(pid=1), wire.WorkerReply(pid=2)
    first.values["a"] = 1
    assert second.values == {}


def test_records_are_structs() -> None:
    assert all(issubclass(kind, msgspec.Struct) for kind in RECORDS)
