"""The table of mounts, with the names that it may hold."""

from __future__ import annotations

from bootseer.daemon.mountpoint import mounted_on

TABLE = b"""\
22 1 254:0 / / rw,relatime - ext4 /dev/vda rw
40 22 0:30 / /plain rw shared:1 master:2 - tmpfs tmpfs rw
41 22 0:31 / /plain ro,nosuid - fuse.bootseer bootseer ro,user_id=0
42 22 0:32 / /a\\040b\\011c\\012d\\134e rw - xfs /dev/sda rw
43 22 0:33 / /not\xffutf8 rw - btrfs /dev/sdb rw
44 22 0:34 / /form\x0cfeed\x85\xe2\x80\xa8 rw - nfs4 server:/export rw
45 22 0:35 / /dash rw - tmpfs - rw
"""


def test_the_topmost_of_several() -> None:
    assert mounted_on(b"/plain", TABLE) == "fuse.bootseer"
    assert mounted_on(b"/", TABLE) == "ext4"


def test_what_is_not_there() -> None:
    assert mounted_on(b"/plai", TABLE) is None
    assert mounted_on(b"/plain/", TABLE) is None
    assert mounted_on(b"/plain", b"") is None


def test_names_are_bytes() -> None:
    assert mounted_on(b"/a b\tc\nd\\e", TABLE) == "xfs"
    assert mounted_on(b"/not\xffutf8", TABLE) == "btrfs"
    assert mounted_on(b"/form\x0cfeed\x85\xe2\x80\xa8", TABLE) == "nfs4"
    assert mounted_on(b"/dash", TABLE) == "tmpfs"
