"""Sum up timelines of hvdlite: what the time went into, and who waited for whom.

    python scripts/timeline_summary.py t.json t.json.rank1       the tables
    python scripts/timeline_summary.py t.json* --png t.png       and a picture of three steps
    python scripts/timeline_summary.py t.json* --steps 10:30     of these steps only
    python scripts/timeline_summary.py t.json* --join all.json   one file for Perfetto, too

The files are those of `hvd.start_timeline(path, all_ranks=True)` or HVDLITE_TIMELINE; they may be
read while the job runs.  The picture needs matplotlib.
"""

import argparse
import json
import re
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Event = dict[str, Any]
Interval = tuple[float, float]

COLORS = {
    "MEMCPY_IN_FUSION_BUFFER": ("pack", "#e8b04a"),
    "QUEUE": ("queue", "#cfcfcf"),
    "ALLREDUCE": ("allreduce", "#5b8fd6"),
    "REDUCE": ("reduce", "#2d4f86"),
    "WAIT": ("wait", "#d9605a"),
    "APPLY": ("optimizer", "#6bb06b"),
}


@dataclass
class Rank:
    """What one rank has recorded."""

    rank: int
    spans: dict[str, list[Event]] = field(default_factory=lambda: defaultdict(list))
    calls: dict[str, list[Event]] = field(default_factory=lambda: defaultdict(list))
    tracks: dict[int, str] = field(default_factory=dict)

    @property
    def steps(self) -> list[Event]:
        """The steps that were recorded from beginning to end."""
        return self.spans["STEP"]


# --- reading -------------------------------------------------------------------------------------


def load(path: Path) -> list[Event]:
    """The events of a file; read again, should it have been written in that instant."""
    for _ in range(10):
        try:
            events = json.loads(path.read_text())
        except json.JSONDecodeError:
            time.sleep(0.01)
        except OSError as exc:
            raise SystemExit(f"{path}: {exc.strerror}") from None
        else:
            if isinstance(events, list):
                return events
            break
    raise SystemExit(f"{path}: no timeline of hvdlite")


def sort_by_rank(events: Iterable[Event], steps: range) -> list[Rank]:
    """Everything that belongs to these steps, or to no step."""
    ranks: dict[int, Rank] = {}
    for event in events:
        rank = ranks.setdefault(event["pid"], Rank(event["pid"]))
        name, args = event["name"].partition(" ")[0], event.get("args", {})
        if event["ph"] == "M" and name == "thread_name":
            rank.tracks[event["tid"]] = args["name"]
        elif event["ph"] == "X" and args.get("step", steps.start) in steps:
            rank.spans[name].append(event)
        elif event["ph"] in "be":
            rank.calls[event["id2"]["local"]].append(event)
    for rank in ranks.values():
        if steps != range(sys.maxsize) and rank.steps:
            first, last = rank.steps[0]["ts"], end_of(rank.steps[-1])
            rank.spans["WAIT"] = [e for e in rank.spans["WAIT"] if first <= e["ts"] < last]
    return [ranks[number] for number in sorted(ranks)]


def end_of(event: Event) -> float:
    """When it was over, in microseconds."""
    return float(event["ts"] + event["dur"])


# --- intervals -----------------------------------------------------------------------------------


def union(events: Iterable[Event]) -> list[Interval]:
    """The times at which any of them was under way."""
    merged: list[Interval] = []
    for start, end in sorted((e["ts"], end_of(e)) for e in events):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def common(one: Sequence[Interval], other: Sequence[Interval]) -> float:
    """For how long both were under way."""
    total, i, j = 0.0, 0, 0
    while i < len(one) and j < len(other):
        total += max(0.0, min(one[i][1], other[j][1]) - max(one[i][0], other[j][0]))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return total


def length(intervals: Iterable[Interval]) -> float:
    """Of all of them, in microseconds."""
    return sum(end - start for start, end in intervals)


# --- the tables ----------------------------------------------------------------------------------


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> Iterator[str]:
    """Right-aligned columns, with a heading."""
    texts = [[str(cell) for cell in row] for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    for row in texts:
        yield "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))


def steps_table(ranks: Sequence[Rank]) -> Iterator[str]:
    """Where the time of the steps went, a row a rank."""
    head = "rank steps buckets MB ms/step pack reduce communicate wait optimizer overlap GB/s"
    rows = []
    for rank in ranks:
        spans, count = rank.spans, max(len(rank.steps), 1)
        works = union(spans["ALLREDUCE"])
        within = union(rank.steps)
        nbytes = sum(e["args"]["bytes"] for e in spans["ALLREDUCE"])
        pack = sum(e["args"]["busy_us"] for e in spans["MEMCPY_IN_FUSION_BUFFER"])
        waits = union(spans["WAIT"])
        busy = length(works)
        times = (
            length(within),
            pack,
            length(union(spans["REDUCE"])),
            busy,
            common(waits, within),
            length(union(spans["APPLY"])),
        )
        rows.append(
            [
                rank.rank,
                len(rank.steps),
                len(spans["ALLREDUCE"]),
                f"{nbytes / 1e6:.2f}",
                *(f"{us / 1000 / count:.3f}" for us in times),
                f"{100 * (1 - common(works, waits) / busy):.0f}%" if busy else "-",
                f"{nbytes / busy / 1000:.2f}" if busy else "-",
            ]
        )
    yield from table(head.split(), rows)


def waits_table(ranks: Sequence[Rank]) -> Iterator[str]:
    """For whom each rank has waited, in milliseconds."""
    numbers = {rank.rank for rank in ranks}
    waited: dict[int, dict[int, float]] = {}
    for rank in ranks:
        mine = waited[rank.rank] = defaultdict(float)
        for event in rank.spans["WAIT"]:
            for other, us in event["args"].get("missing_us", {}).items():
                if int(other) != rank.rank:
                    mine[int(other)] += us
        numbers |= mine.keys()
    others = sorted(numbers)
    rows = [
        [f"rank {rank}", *(f"{mine[q] / 1000:.1f}" if q in mine else "-" for q in others)]
        for rank, mine in waited.items()
    ]
    yield from table(["waits for", *(f"rank {q}" for q in others)], rows)


def calls_table(ranks: Sequence[Rank]) -> Iterator[str]:
    """The eager calls by kind: until all have made it, and from then on."""
    found: dict[tuple[int, str], list[tuple[int, float, float]]] = defaultdict(list)
    for rank in ranks:
        for events in rank.calls.values():
            if len(events) == 4:  # neither under way nor recorded in part
                submitted, matched, begun, over = events
                nbytes = submitted["args"]["bytes"]
                found[rank.rank, begun["name"]].append(
                    (nbytes, matched["ts"] - submitted["ts"], over["ts"] - begun["ts"])
                )
    rows = [
        [
            rank,
            kind,
            len(calls),
            f"{sum(call[0] for call in calls) / 1e6:.2f}",
            *(f"{sum(call[k] for call in calls) / len(calls) / 1000:.3f}" for k in (1, 2)),
        ]
        for (rank, kind), calls in sorted(found.items())
    ]
    if rows:
        yield from table(["rank", "call", "number", "MB", "negotiate", "carry out"], rows)


def summary(ranks: Sequence[Rank]) -> str:
    """All tables; times are milliseconds, those of steps and calls for one of them."""
    parts = [steps_table(ranks), waits_table(ranks), calls_table(ranks)]
    return "\n\n".join(filter(None, ("\n".join(part) for part in parts)))


# --- the picture ---------------------------------------------------------------------------------


def draw(ranks: Sequence[Rank], path: Path) -> None:
    """Three steps from the middle of what there is, a panel a rank."""
    try:
        import matplotlib as mpl
    except ImportError:
        missing = "matplotlib is missing; type: python -m pip install matplotlib"
        raise SystemExit(missing) from None
    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.patches import Patch

    ranks = [rank for rank in ranks if rank.steps]
    if not ranks:
        raise SystemExit("no step in these timelines: there is nothing to draw")
    start, end = window(ranks)
    figure, axes = plt.subplots(
        len(ranks), 1, sharex=True, squeeze=False, figsize=(10, 0.6 + 1.9 * len(ranks))
    )
    for rank, panel in zip(ranks, axes[:, 0], strict=True):
        lanes = sorted({lane_of(rank, e) for name in COLORS for e in rank.spans[name]}, key=place)
        for name, (_, color) in COLORS.items():
            for event in rank.spans[name]:
                if event["ts"] < end and end_of(event) > start:
                    bar = ((event["ts"] - start) / 1000, event["dur"] / 1000)
                    panel.broken_barh([bar], (lanes.index(lane_of(rank, event)), 0.8), color=color)
        for step in rank.steps:
            if start <= step["ts"] < end:
                panel.axvline((step["ts"] - start) / 1000, color="black", lw=0.5, ls=":")
        panel.set_yticks([k + 0.4 for k in range(len(lanes))], lanes, fontsize=8)
        panel.set_title(f"rank {rank.rank}", fontsize=9, loc="left")
        panel.set_xlim(0, (end - start) / 1000)
        panel.invert_yaxis()
    axes[-1, 0].set_xlabel("milliseconds; dotted: a step begins with its first gradient")
    patches = [Patch(color=color, label=label) for label, color in COLORS.values()]
    figure.legend(handles=patches, loc="upper right", ncol=len(patches), fontsize=8, frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=90)


def window(ranks: Sequence[Rank]) -> Interval:
    """From the first to the last of three steps that every rank has, in microseconds."""
    known = set.intersection(*({e["args"]["step"] for e in rank.steps} for rank in ranks))
    numbers = sorted(known)
    middle = numbers[max(0, len(numbers) // 2 - 1) :][:3]
    chosen = [e for rank in ranks for e in rank.steps if e["args"]["step"] in middle]
    if not chosen:
        raise SystemExit("the ranks have no step in common: there is nothing to draw")
    start, end = min(e["ts"] for e in chosen), max(end_of(e) for e in chosen)
    return start - 0.02 * (end - start), end + 0.02 * (end - start)


def lane_of(rank: Rank, event: Event) -> str:
    """Where it is drawn."""
    return rank.tracks.get(event["tid"], str(event["tid"]))


def place(lane: str) -> tuple[bool, list[str | int]]:
    """Buckets first, in order; then what the process does."""
    words = [int(word) if word.isdigit() else word for word in re.split(r"(\d+)", lane)]
    return "bucket" not in lane, words


def main() -> int:
    """Print, and draw."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="timelines")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw three steps")
    parser.add_argument("--join", type=Path, metavar="FILE", help="write all of it to one file")
    parser.add_argument("--steps", default=":", metavar="FIRST:END", help="sum up these steps")
    args = parser.parse_args()
    found = re.fullmatch(r"(\d*):(\d*)", args.steps)
    if found is None:
        parser.error(f'--steps {args.steps}: give a window such as "10:30"')
    steps = range(int(found[1] or 0), int(found[2] or sys.maxsize))
    events = [event for path in args.files for event in load(path)]
    ranks = sort_by_rank(events, steps)
    print(summary(ranks))
    if args.join:
        args.join.write_text("[\n" + ",\n".join(map(json.dumps, events)) + "\n]\n")
    if args.png:
        draw(ranks, args.png)
    return 0


if __name__ == "__main__":
    sys.exit(main())
