"""The table of mounts, with the names that it may hold."""

from __future__ import annotations

import os

from bootseer.core.mountinfo import mount_table, mounted_on

TABLE = b"""\
22 1 254:0 / / rw,relatime - ext4 /dev/vda rw
40 22 0:30 / /plain rw shared:1 master:2 - tmpfs tmpfs rw
41 22 0:31 / /plain ro,nosuid - fuse.bootseer bootseer ro,user_id=0
42 22 0:32 / /a\\040b\\011c\\012d\\134e rw - xfs /dev/sda rw
43 22 0:33 / /not\xffutf8 rw - btrfs /dev/sdb rw
44 22 0:34 / /form\x0cfeed\x85\xe2\x80\xa8 rw - nfs4 server:/export rw
45 22 0:35 / /dash rw - tmpfs - rw
"""


def file_system(path: bytes) -> str:
    entry = mounted_on(os.fsdecode(path), TABLE)
    assert entry is not None
    return entry.file_system


def test_the_order_and_the_source() -> None:
    assert [entry.path for entry in mount_table(TABLE)][:3] == ["/", "/plain", "/plain"]
    assert [entry.source for entry in mount_table(TABLE)][-2:] == ["server:/export", "-"]


def test_the_topmost_of_several() -> None:
    assert file_system(b"/plain") == "fuse.bootseer"
    assert file_system(b"/") == "ext4"


def test_what_is_not_there() -> None:
    assert mounted_on("/plai", TABLE) is None
    assert mounted_on("/plain/", TABLE) is None
    assert mounted_on("/plain", b"") is None


def test_names_are_bytes() -> None:
    assert file_system(b"/a b\tc\nd\\e") == "xfs"
    assert file_system(b"/not\xffutf8") == "btrfs"
    assert file_system(b"/form\x0cfeed\x85\xe2\x80\xa8") == "nfs4"
    assert file_system(b"/dash") == "tmpfs"
