"""``bootseer image …``: convert, mount, umount, run, trace, prefetch, ls, inspect."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer

from bootseer.cli.client import Client
from bootseer.cli.output import emit, emit_json, fields, progress_bar, say, size, table
from bootseer.core import wire
from bootseer.core.errors import NotFoundError, UsageError

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Images: convert, start commands in them, look at traces.",
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Reference = Annotated[str, typer.Argument(help="Layout directory or http(s) URL, with :TAG or @sha256:…")]


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
    as_json: Json = False,
) -> None:
    """Mount an image's root file system read-only on a directory."""
    from bootseer import native

    client: Client = context.obj
    if not target.is_dir():
        raise UsageError(f"{target} is not a directory")
    made = client.mount(
        wire.MountRequest(
            image=_absolute(reference), prefetch=prefetch, record=record, label=f"mount:{target.absolute()}"
        )
    )
    try:
        how = native.mount_erofs(made.image_path, str(target))
    except BaseException:
        client.unmount(made.id, lazy=True)
        raise
    if as_json:
        emit_json({"mount": made, "target": str(target.absolute()), "erofs": how})
    else:
        emit(made.id)


@app.command()
def umount(
    context: typer.Context,
    target: Annotated[str, typer.Argument(help="Directory or mount id.")],
    lazy: Annotated[
        bool, typer.Option("--lazy", help="Detach now, end when the last user has left.")
    ] = False,
) -> None:
    """Undo ``image mount``."""
    from bootseer import native

    client: Client = context.obj
    found = _find(client, target)
    if found.label.startswith("mount:"):
        try:
            native.umount(found.label.removeprefix("mount:"), lazy=lazy)
        except OSError as error:
            if error.errno == 16:
                raise UsageError(f"{target} is busy", hint="end its users, or use --lazy") from None
            if error.errno != 22:  # EINVAL: somebody has unmounted it already
                raise
    client.unmount(found.id, lazy=lazy)


@app.command(context_settings={"ignore_unknown_options": False, "allow_interspersed_args": False})
def run(
    context: typer.Context,
    reference: Reference,
    command: Annotated[
        list[str] | None, typer.Argument(help="After --: the command; default: the image's.")
    ] = None,
    runtime: Annotated[str, typer.Option(help="auto, runc, crun or namespaces.")] = "auto",
    prefetch: Annotated[bool, typer.Option(help="Prefetch hot chunks.")] = True,
    record: Annotated[bool, typer.Option(help="Record first uses.")] = True,
    background_fill: Annotated[bool, typer.Option(help="Fetch cold chunks when idle.")] = True,
    env: Annotated[list[str] | None, typer.Option("--env", "-e", help="NAME=VALUE.")] = None,
    workdir: Annotated[str, typer.Option("--workdir", "-w", help="Working directory in the image.")] = "",
    user: Annotated[str, typer.Option("--user", "-u", help="UID[:GID] or names of the image.")] = "",
    hostname: Annotated[str, typer.Option(help="Host name in the container.")] = "",
    volume: Annotated[list[str] | None, typer.Option("--volume", "-v", help="SRC:DST[:ro].")] = None,
) -> int:
    """Run a command in an image, on a writable overlay that is thrown away. Exits with the command's code."""
    from bootseer.image import runtime as runtimes

    client: Client = context.obj
    environment = {}
    for entry in env or []:
        name, separator, value = entry.partition("=")
        if not separator or not name:
            raise UsageError(f"{entry!r} is not NAME=VALUE")
        environment[name] = value
    chosen = runtimes.choose(runtime)
    wanted = runtimes.Command(
        argv=command[1:] if command and command[0] == "--" else command or [],
        env=environment,
        workdir=workdir,
        user=user,
        hostname=hostname,
        volumes=[runtimes.Volume.parse(text) for text in volume or []],
    )
    request = wire.MountRequest(
        image=_absolute(reference),
        prefetch=prefetch,
        record=record,
        background_fill=background_fill,
        label="run",
    )
    made = client.mount(request)
    try:
        with (
            runtimes.temporary_work_dir() as work_dir,
            runtimes.root_file_system(made.image_path, work_dir) as root,
        ):
            return runtimes.run(root, made.config, wanted, chosen, work_dir)
    finally:
        client.unmount(made.id, lazy=True)


@app.command()
def trace(
    context: typer.Context,
    reference: Reference,
    top: Annotated[int, typer.Option(help="How many first uses to show; 0: all.")] = 20,
    as_json: Json = False,
) -> None:
    """What the starts of an image touched first: the union of the last recordings."""
    from bootseer import native
    from bootseer.image.resolve import resolve
    from bootseer.image.traces import TraceStore

    client: Client = context.obj
    state_dir = Path(client.status().state_dir)
    image = resolve(_absolute(reference), state_dir=state_dir)
    store = TraceStore(state_dir)
    merged = store.merged(image.manifest_digest)
    if merged is None:
        raise NotFoundError(f"{reference} has no trace yet", hint="`bootseer image run` records one")
    chunk_map = native.ChunkMap.parse(image.chunk_map)
    records = merged.records()
    plan = merged.plan(chunk_map)
    hot_bytes = sum(chunk_map.chunk(chunk)[3] for chunk, _ in plan)
    if as_json:
        emit_json(
            {
                "digest": image.manifest_digest,
                "recordings": len(store.recordings(image.manifest_digest)),
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
            ("recordings", len(store.recordings(image.manifest_digest))),
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
    target: Annotated[str, typer.Argument(help="An image reference; or a mount's id or directory.")],
    everything: Annotated[bool, typer.Option("--all", help="All chunks, not only the hot ones.")] = False,
    as_json: Json = False,
) -> None:
    """Fetch the hot chunks of an image into the node's cache: of a mounted one, or ahead of any mount."""
    from bootseer import native
    from bootseer.image.resolve import resolve
    from bootseer.image.traces import TraceStore

    client: Client = context.obj
    mounted = [found for found in client.mounts() if _is_target(found, target)]
    if mounted and not everything:
        client.tell(mounted[0].id, "prefetch")
        if as_json:
            emit_json(mounted[0])
        return
    state_dir = Path(client.status().state_dir)
    image = resolve(_absolute(mounted[0].image if mounted else target), state_dir=state_dir)
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
    source = native.open_source(image.blob_uri, headers=image.headers)
    key = image.blob_digest.removeprefix("sha256:")
    file = native.BlockFile(cache, key, chunk_map, source, record=False, background_fill=False)
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
    """Mounted images."""
    client: Client = context.obj
    mounts = client.mounts()
    if as_json:
        emit_json(mounts)
        return
    table(
        ("MOUNT", "STATE", "IMAGE", "DIGEST", "WHERE"),
        [
            (m.id, m.state, m.image, m.digest[:19], m.label.removeprefix("mount:") or m.fuse_mountpoint)
            for m in mounts
        ],
    )


@app.command()
def inspect(
    context: typer.Context,
    reference: Annotated[
        str, typer.Argument(help="An image reference, or the id of a mount for its statistics.")
    ],
    as_json: Json = False,
) -> None:
    """An image's manifest, sizes and chunks; or the statistics of a mount."""
    client: Client = context.obj
    if "/" not in reference and not Path(reference).exists():
        statistics = client.statistics(_find(client, reference).id)
        if as_json:
            emit_json(statistics)
        else:
            fields(sorted(statistics.items()))
        return
    from bootseer import native
    from bootseer.image.resolve import resolve

    image = resolve(_absolute(reference))
    chunk_map = native.ChunkMap.parse(image.chunk_map)
    values: dict[str, Any] = {
        "digest": image.manifest_digest,
        "image_bytes": chunk_map.image_bytes,
        "meta_bytes": chunk_map.meta_bytes,
        "blob_bytes": chunk_map.blob_bytes,
        "blob_digest": image.blob_digest,
        "chunks": chunk_map.chunk_count,
        "annotations": image.annotations,
        "config": image.config,
    }
    if as_json:
        emit_json(values)
        return
    fields((name, size(value) if name.endswith("_bytes") else value) for name, value in values.items())


def _absolute(reference: str) -> str:
    """The daemon has another working directory."""
    return reference if "://" in reference else str(Path(reference).absolute())


def _find(client: Client, target: str) -> wire.Mount:
    for found in client.mounts():
        if _is_target(found, target):
            return found
    raise NotFoundError(
        f"nothing of ours is mounted on {target}", hint="`bootseer image ls` lists the mounts"
    )


def _is_target(found: wire.Mount, target: str) -> bool:
    """Whether a user means this mount by an id or a directory."""
    absolute = str(Path(target).absolute())
    return target == found.id or absolute in {found.label.removeprefix("mount:"), found.fuse_mountpoint}
