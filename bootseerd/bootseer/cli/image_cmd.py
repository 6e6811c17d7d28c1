"""``bootseer image …``: convert, mount, umount, trace, prefetch, ls, inspect (``run``: ``run_cmd``)."""

from __future__ import annotations

import errno
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from bootseer.cli.client import Client
from bootseer.cli.output import (
    Json,
    Reference,
    absolute,
    emit,
    emit_json,
    fields,
    progress_bar,
    say,
    size,
    table,
)
from bootseer.cli.run_cmd import RUN_LABEL, explained
from bootseer.cli.targets import MOUNT_LABEL, Target, image_of, lookup, node_state_dir
from bootseer.core import wire
from bootseer.core.errors import (
    BackendUnavailableError,
    NotFoundError,
    UsageError,
)
from bootseer.core.mountinfo import mounted_on

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Images: convert, start commands in them, look at traces.",
)

_RELEASE_S = 3.0  # how long the kernel may take to let go of a loop device
_RELEASE_POLL_S = 0.05


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(help="A root directory or an OCI layout.")],
    destination: Annotated[Path, typer.Argument(help="The OCI layout to add the image to.")],
    tag: Annotated[str, typer.Option(help="Name of the image in the layout.")] = "latest",
    average_chunk_bytes: Annotated[int, typer.Option("--average-chunk", help="Average chunk in bytes.")] = 256
    << 10,
    level: Annotated[int, typer.Option(min=1, max=19, help="zstd level.")] = 3,
    as_json: Json = False,
) -> None:
    """Make an image that starts lazily: EROFS, cut into zstd chunks, with a digest-chained chunk map."""
    from bootseer.image.convert import convert as run_convert

    started = time.monotonic()
    with progress_bar("reading", None) as advance:
        done_bytes = 0

        def show(stage: str, stage_bytes: int, total_bytes: int) -> None:
            nonlocal done_bytes
            advance(stage_bytes - done_bytes, stage, total_bytes)
            done_bytes = stage_bytes

        image = run_convert(
            source, destination, tag=tag, average_chunk_bytes=average_chunk_bytes, level=level, progress=show
        )
    elapsed_s = time.monotonic() - started
    if as_json:
        emit_json(
            {
                "digest": image.digest,
                "tag": tag,
                "image_bytes": image.image_bytes,
                "blob_bytes": image.blob_bytes,
                "meta_bytes": image.meta_bytes,
                "chunks": image.chunks,
                "files": image.files,
                "elapsed_s": elapsed_s,
            }
        )
        return
    emit(f"{destination}@{image.digest}")
    say(
        f"{image.files} files, {size(image.image_bytes)} in {image.chunks} chunks, {size(image.blob_bytes)} stored,"
        f" {elapsed_s:.1f} s"
    )


@app.command()
def mount(
    context: typer.Context,
    reference: Reference,
    target: Annotated[Path, typer.Argument(help="Where the root file system appears, read-only.")],
    prefetch: Annotated[bool, typer.Option(help="Prefetch hot chunks.")] = True,
    record: Annotated[bool, typer.Option(help="Record first uses.")] = True,
    background_fill: Annotated[bool, typer.Option(help="Fetch cold chunks when idle.")] = True,
    as_json: Json = False,
) -> None:
    """Mount an image's root file system read-only on a directory."""
    from bootseer.image.runtime import mount_erofs

    client: Client = context.obj
    if not target.is_dir():
        raise UsageError(f"{target} is not a directory")
    target = target.resolve()
    label = f"{MOUNT_LABEL}{target}"
    if any(other.label == label for other in client.mounts()):
        raise UsageError(f"an image is mounted on {target} already", hint="`bootseer image umount` it first")
    made = client.mount(
        wire.MountRequest(
            image=absolute(reference),
            prefetch=prefetch,
            record=record,
            background_fill=background_fill,
            label=label,
        )
    )
    try:
        how = mount_erofs(made.image_path, target)
    except BackendUnavailableError as error:
        reason = explained(error, client, made.id)
        client.unmount(made.id, lazy=True)
        raise reason from None
    except BaseException:
        client.unmount(made.id, lazy=True)
        raise
    if as_json:
        emit_json({"mount": made, "target": str(target), "erofs": how})
    else:
        emit(made.id)


@app.command()
def umount(
    context: typer.Context,
    target: Annotated[str, typer.Argument(help="Directory or mount id.")],
    lazy: Annotated[
        bool, typer.Option("--lazy", help="Detach now, end when the last user has left.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Undo ``image mount``."""
    client: Client = context.obj
    found = lookup(client, target)
    if found is None:
        if not _is_image(Path(target).absolute(), None):
            raise NotFoundError(
                f"nothing of ours is mounted on {target}", hint="`bootseer image ls` lists the mounts"
            )
        _unmount_erofs(Path(target).absolute(), lazy=lazy)  # its daemon has lost it
    else:
        directory = Path(found.label.removeprefix(MOUNT_LABEL))
        if found.label.startswith(MOUNT_LABEL) and _is_image(directory, found):
            _unmount_erofs(directory, lazy=lazy)
        _unmount_fuse(client, found, lazy=lazy)
    if as_json:
        emit_json({"mount": found, "lazy": lazy})


def _unmount_erofs(directory: Path, *, lazy: bool) -> None:
    from bootseer import native

    try:
        native.umount(str(directory), lazy=lazy)
    except OSError as error:
        if error.errno == errno.EBUSY:
            raise UsageError(f"{directory} is busy", hint="end its users, or use --lazy") from None
        raise


def _unmount_fuse(client: Client, found: wire.Mount, *, lazy: bool) -> None:
    """Loop devices let go of a file some time after their last user."""
    deadline = time.monotonic() + _RELEASE_S
    while True:
        try:
            client.unmount(found.id, lazy=lazy)
            return
        except UsageError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(_RELEASE_POLL_S)


def _is_image(directory: Path, found: wire.Mount | None) -> bool:
    """Whether what is mounted on a directory, topmost, is an EROFS image of ours (of ``found``)."""
    entry = mounted_on(directory)
    if entry is None or entry.file_system != "erofs":
        return False
    of_file = entry.source == found.image_path if found is not None else entry.source.endswith("/image.erofs")
    return of_file or entry.source.startswith("/dev/loop")


@app.command()
def trace(
    context: typer.Context,
    target: Target,
    top: Annotated[int, typer.Option(min=0, help="How many first uses to show; 0: all.")] = 20,
    as_json: Json = False,
) -> None:
    """What the starts of an image touched first: the union of the last recordings."""
    from bootseer import native
    from bootseer.image.traces import TraceStore

    client: Client = context.obj
    state_dir = node_state_dir(client)
    image = image_of(client, target, state_dir)
    recordings = TraceStore(state_dir).recordings(image.manifest_digest)
    if not recordings:
        raise NotFoundError(f"{target} has no trace yet", hint="`bootseer image run` records one")
    merged = native.Trace.merge(recordings)
    chunk_map = native.ChunkMap.parse(image.chunk_map)
    records = merged.records()
    plan = merged.plan(chunk_map)
    hot_bytes = sum(chunk_map.chunk(chunk)[3] for chunk, _ in plan)
    if as_json:
        emit_json(
            {
                "digest": image.manifest_digest,
                "recordings": len(recordings),
                "hot_chunks": len(plan),
                "hot_bytes": hot_bytes,
                "chunks": chunk_map.chunk_count,
                "records": [
                    {"offset": offset, "length": length, "pid": pid, "t_ns": t_ns}
                    for offset, length, pid, t_ns in records
                ],
            }
        )
        return
    fields(
        [
            ("recordings", len(recordings)),
            ("hot", f"{len(plan)} of {chunk_map.chunk_count} chunks, {size(hot_bytes)} to fetch"),
            ("span", f"{max(t for *_, t in records) / 1e9:.3f} s"),
            ("readers", ", ".join(f"{pid}: {n}" for pid, n in Counter(r[2] for r in records).most_common(5))),
        ]
    )
    emit("")
    table(
        ("TIME (s)", "OFFSET", "LENGTH", "PID"),
        [(f"{t / 1e9:.4f}", offset, length, pid) for offset, length, pid, t in records[: top or None]],
    )


@app.command()
def prefetch(
    context: typer.Context,
    target: Target,
    everything: Annotated[bool, typer.Option("--all", help="All chunks, not only the hot ones.")] = False,
    as_json: Json = False,
) -> None:
    """Fetch the hot chunks of an image into the node's cache, ahead of any mount or beside one."""
    from bootseer import native
    from bootseer.fusefs.blobs import open_blobs
    from bootseer.image.traces import TraceStore

    client: Client = context.obj
    state_dir = node_state_dir(client)
    image = image_of(client, target, state_dir)
    chunk_map = native.ChunkMap.parse(image.chunk_map)
    if everything:
        plan = [(chunk, 0) for chunk in range(chunk_map.chunk_count)]
    else:
        plan = TraceStore(state_dir).plan(image.manifest_digest, chunk_map)
        if not plan:
            raise NotFoundError(
                f"{target} has no trace yet", hint="`bootseer image run` records one, --all needs none"
            )
    cache = native.Cache(str(state_dir / "cache"))
    file = native.BlockFile(
        cache, image.cache_key, chunk_map, open_blobs(image.blobs), record=False, background_fill=False
    )
    try:
        file.prefetch(plan)
        with progress_bar("fetching", sum(chunk_map.chunk(chunk)[3] for chunk, _ in plan)) as advance:
            for chunk, _ in plan:
                raw_offset, _, _, blob_bytes, _ = chunk_map.chunk(chunk)
                file.pread(raw_offset, 1)  # waits for the chunk, and says why it will not come
                advance(blob_bytes)
        fetched_bytes = file.statistics()["fetched_bytes"]
    finally:
        file.close()
        cache.close()
    if as_json:
        emit_json({"digest": image.manifest_digest, "chunks": len(plan), "fetched_bytes": fetched_bytes})
    else:
        say(f"{len(plan)} chunks are here, {size(fetched_bytes)} were fetched")


@app.command("ls")
def list_images(context: typer.Context, as_json: Json = False) -> None:
    """Images that this node knows, and where they are mounted."""
    from bootseer.image.inventory import known_images

    client: Client = context.obj
    mounts = client.mounts()
    images = known_images(node_state_dir(client))
    if as_json:
        emit_json({"images": [asdict(image) for image in images], "mounts": mounts})
        return
    table(
        ("DIGEST", "SIZE", "STORED", "CACHED", "TRACES", "IMAGE"),
        [
            (
                image.digest.removeprefix("sha256:")[:12],
                size(image.image_bytes),
                size(image.blob_bytes),
                f"{image.cached_bytes / max(image.image_bytes, 1):.0%}",
                image.recordings,
                image.reference or "-",
            )
            for image in images
        ],
    )
    emit("")
    table(
        ("MOUNT", "STATE", "IMAGE", "DIGEST", "WHERE"),
        [(m.id, m.state, m.image, m.digest.removeprefix("sha256:")[:12], _where(m)) for m in mounts],
    )


def _where(found: wire.Mount) -> str:
    if found.label.startswith(MOUNT_LABEL):
        return found.label.removeprefix(MOUNT_LABEL)
    if found.label.startswith(RUN_LABEL):
        return f"image run, pid {found.label.split(':')[1]}"
    return found.fuse_mountpoint


@app.command()
def inspect(context: typer.Context, target: Target, as_json: Json = False) -> None:
    """An image's manifest, sizes and chunks; or the statistics of a mount."""
    client: Client = context.obj
    if (found := lookup(client, target, needed=False)) is not None:
        statistics = client.statistics(found.id)
        if as_json:
            emit_json({"mount": found, "statistics": statistics})
        else:
            fields([("mount", found.id), ("image", found.image), ("digest", found.digest)])
            fields(sorted(statistics.items()))
        return
    from bootseer import native
    from bootseer.image.inventory import summarize

    state_dir = node_state_dir(client, needed=False)
    image = image_of(client, target, state_dir)
    chunk_map = native.ChunkMap.parse(image.chunk_map)
    values: dict[str, Any] = {
        "digest": image.manifest_digest,
        **summarize(chunk_map),
        "blobs": [
            {"digest": blob.digest, "bytes": blob.bytes, "url": blob.endpoints[0].url} for blob in image.blobs
        ],
        "annotations": image.annotations,
        "config": image.config,
    }
    if as_json:
        emit_json(values)
        return
    fields((name, size(value) if name.endswith("_bytes") else value) for name, value in values.items())
