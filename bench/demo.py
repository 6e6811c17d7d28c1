"""The main job, once: ``make demo``. A real image, an origin behind a rate limit, three ways to start a command."""

from __future__ import annotations

from bench import cold_start


def main() -> None:
    """Run one round on the first link and say what it means."""
    link = cold_start.LINKS[0]
    times = cold_start.run([link], rounds=1)[link]
    full, lazy, prefetch, bound = times.full[0], times.lazy[0], times.prefetch[0], times.bound[0]
    print(
        f"\nFrom nothing to `import torch`: {full:.1f} s by full copy, {lazy:.1f} s lazily, {prefetch:.1f} s with"
        f" record-and-prefetch; the link and the CPU allow {bound:.1f} s. That is {full / prefetch:.1f} x faster than"
        f" the copy and {prefetch / bound:.2f} x the bound."
    )


if __name__ == "__main__":
    main()
