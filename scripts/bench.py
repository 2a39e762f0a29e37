"""Measure hvdlite side by side with what else averages gradients, and compare with its targets.

    python scripts/bench.py             about four minutes, on 2 and on 4 ranks
    python scripts/bench.py --quick     half a minute, three rounds and no GPT-2: does it run?

Prints the tables; writes bench-<mpi>.json and, where matplotlib is, bench-<mpi>.png to build/bench.
The mpiexec is the one that MPIEXEC names, or the one beside this Python, or the first on PATH.
The exit code is 1 if any value was wrong; a missed target is only printed.
"""

# ruff: noqa: D102, D103 - a program; what its names say is not said twice

import argparse
import importlib.util
import json
import os
import platform
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WORKLOADS = ("resnet50", "gpt2", "tiny", "mlp-1M", "mlp-256K", "mlp-16K")
LIMIT_S = 600  # after this long a job is taken for hung

# --- running -------------------------------------------------------------------------------------


def find_mpiexec() -> list[str]:
    """The launcher, as the first words of a command."""
    if os.environ.get("MPIEXEC"):
        return shlex.split(os.environ["MPIEXEC"])
    for path in (str(Path(sys.executable).parent), None):
        found = shutil.which("mpiexec", path=path)
        if found:
            return [found]
    raise SystemExit(
        'no mpiexec found; type: python -m pip install "hvdlite[mpich]", or set MPIEXEC'
    )


def environment(ranks: int) -> dict[str, str]:
    """What lets any MPI start `ranks` ranks here, also as root and on fewer cores."""
    env = {"OMP_NUM_THREADS": "1", "PRTE_MCA_hwloc_default_binding_policy": "none"}
    env["PRTE_MCA_rmaps_default_mapping_policy"] = ":oversubscribe"
    if os.geteuid() == 0:
        env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    if ranks > (os.cpu_count() or 1):
        env["OMPI_MCA_mpi_yield_when_idle"] = "1"
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return env | dict(os.environ) | {"PYTHONPATH": path}


def run_ranks(ranks: int, args: argparse.Namespace) -> dict[str, Any]:
    """Run this file on so many ranks; returns what rank 0 wrote."""
    with tempfile.TemporaryDirectory(prefix="hvdlite-bench-") as folder:
        output = Path(folder) / "result.json"
        command = [sys.executable, __file__, "--worker", "--json", str(output)]
        command += ["--workloads", ",".join(args.workloads)]
        command += ["--quick"] * args.quick + ["--no-torch"] * args.no_torch
        if ranks > 1:
            command = [*find_mpiexec(), "-n", str(ranks), *command]
        job = subprocess.Popen(command, env=environment(ranks))
        try:
            code = job.wait(LIMIT_S)
        except BaseException:  # hung, or interrupted: the ranks must not outlive us
            job.terminate()
            job.wait()
            raise
        if code != 0:
            raise SystemExit(f"the benchmark failed with exit code {code} on {ranks} ranks")
        result: dict[str, Any] = json.loads(output.read_text())
        return result


# --- where it ran --------------------------------------------------------------------------------


def commit() -> str:
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def machine() -> str:
    """One line: processor, cores, system, Python and NumPy."""
    import numpy as np

    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), cpu)
    return (
        f"{cpu}, {os.cpu_count()} cores, {platform.system()} {platform.release()}, "
        f"Python {platform.python_version()}, NumPy {np.__version__}"
    )


# --- the results ---------------------------------------------------------------------------------


class Results:
    """Medians of all rows, and the single figures, by number of ranks."""

    def __init__(self, runs: list[dict[str, Any]]) -> None:
        self.rows = [row for run in runs for row in run["rows"]]
        self.figures = {run["ranks"]: run["figures"] for run in runs}
        for row in self.rows:
            row["median_s"] = statistics.median(row["times_s"])
        self.medians = {(r["ranks"], r["workload"], r["contender"]): r for r in self.rows}

    def row(self, ranks: int, workload: str, contender: str) -> Any:
        return self.medians[ranks, workload, contender]

    def time(self, ranks: int, workload: str, contender: str) -> float:
        return float(self.row(ranks, workload, contender)["median_s"])

    def ratio(self, ranks: int, workload: str, over: str, under: str) -> float:
        return self.time(ranks, workload, over) / self.time(ranks, workload, under)


@dataclass(frozen=True)
class Target:
    """A figure of the design, the bound it must keep, and how to get it from the results.

    `value` raises KeyError where it was not measured.
    """

    text: str
    bound: str  # "<= 1.05" or ">= 3"; empty: only to be shown
    value: Callable[[Results, int], float]

    def met(self, value: float) -> bool:
        """Whether the value keeps the bound."""
        sign, bound = self.bound.split()
        return value <= float(bound) if sign == "<=" else value >= float(bound)


def ratio(workload: str, over: str, under: str) -> Callable[[Results, int], float]:
    return lambda results, ranks: results.ratio(ranks, workload, over, under)


def figure(name: str) -> Callable[[Results, int], float]:
    return lambda results, ranks: float(results.figures[ranks][name])


def small_step_excess(results: Results, ranks: int) -> float:
    """Microseconds that a step of 16 KB takes beyond a flat Allreduce and 0.5 us a tensor."""
    step = results.row(ranks, "mlp-16K", "views step")
    beyond_s = float(step["median_s"]) - results.time(ranks, "mlp-16K", "flat")
    return beyond_s * 1e6 - 0.5 * int(step["tensors"])


def sync_excess(results: Results, ranks: int) -> float:
    """Microseconds that a synchronisation of 1 MB takes beyond the bare reduction."""
    times = [results.time(ranks, "mlp-1M", c) for c in ("views sync", "reduction")]
    return (times[0] - times[1]) * 1e6


def overlap(results: Results, ranks: int) -> float:
    if ranks > (os.cpu_count() or 1):
        raise KeyError("a figure for ranks = cores")
    return float(results.figures[ranks]["overlap, x"])


TARGETS = (
    Target("ResNet, views: sync / memcpy", "<= 1.05", ratio("resnet50", "views sync", "memcpy")),
    Target("GPT-2, views: sync / memcpy", "<= 1.05", ratio("gpt2", "views sync", "memcpy")),
    Target("ResNet, packed: step / memcpy", "<= 2.1", ratio("resnet50", "packed step", "memcpy")),
    Target("GPT-2, packed: step / memcpy", "<= 2.1", ratio("gpt2", "packed step", "memcpy")),
    Target("1,000 tiny, views: step / flat", "<= 0.6", ratio("tiny", "views step", "flat")),
    Target("1,000 tiny, packed: step / flat", "<= 1.4", ratio("tiny", "packed step", "flat")),
    Target("ResNet: flat / views sync", ">= 3", ratio("resnet50", "flat", "views sync")),
    Target("GPT-2: flat / views sync", ">= 3", ratio("gpt2", "flat", "views sync")),
    Target("1 MB: flat / views sync", ">= 2", ratio("mlp-1M", "flat", "views sync")),
    Target("256 KB: flat / views sync", ">= 1", ratio("mlp-256K", "flat", "views sync")),
    Target("16 KB: views step beyond flat and 0.5 us a tensor, us", "<= 40", small_step_excess),
    Target("ResNet: gloo / views sync", ">= 5", ratio("resnet50", "gloo", "views sync")),
    Target("grad_ready, views, us", "<= 0.4", figure("grad_ready views, us")),
    Target("grad_ready, packed, beyond copyto, us", "<= 0.6", figure("grad_ready packed, us")),
    Target("  (the machine: np.copyto of 64 bytes, us)", "", figure("copyto of 64 bytes, us")),
    Target("6 tensors, 1 MB: views sync beyond the reduction, us", "<= 60", sync_excess),
    Target("local step(), 161 tensors as views, us", "<= 150", figure("local step, us")),
    Target("allreduce, 1 KiB, beyond 3 bare ones, us", "<= 30", figure("eager beyond 3 MPI, us")),
    Target("1,000 named allreduce_async, us each", "<= 15", figure("eager async, us")),
    Target("a rank 50 ms late: CPU burnt / wait, %", "<= 20", figure("late rank, %")),
    Target("memory beyond the gradients, packed, x", "<= 1.02", figure("memory packed, x")),
    Target("memory beyond the gradients, views, x", "<= 0.02", figure("memory views, x")),
    Target("announced during backward / after it", "<= 1.03", overlap),
    Target("hard floor: flat / views step", ">= 2.5", ratio("resnet50", "flat", "views step")),
    Target("hard floor: flat / packed step", ">= 1.4", ratio("resnet50", "flat", "packed step")),
)


# --- reporting -----------------------------------------------------------------------------------


def table(results: Results) -> Iterator[str]:
    """The lines of one table for each workload and number of ranks."""
    for ranks, workload in dict.fromkeys((r["ranks"], r["workload"]) for r in results.rows):
        rows = [r for r in results.rows if (r["ranks"], r["workload"]) == (ranks, workload)]
        yield ""
        yield (
            f"{workload}: {rows[0]['tensors']} gradients, {rows[0]['bytes']:,} bytes, "
            f"{ranks} ranks, {len(rows[0]['times_s'])} rounds"
        )
        yield (
            f"  {'':<12}{'time ms':>10}{'+-':>9}{'algbw GB/s':>12}{'busbw GB/s':>12}"
            f"{'x memcpy':>10}{'x flat':>8}{'wrong':>7}"
        )
        for row in rows:
            seconds = row["median_s"]
            low, _, high = statistics.quantiles(row["times_s"], n=4)
            algbw = row["bytes"] / seconds / 1e9
            busbw = algbw if row["contender"] == "memcpy" else algbw * 2 * (ranks - 1) / ranks
            yield (
                f"  {row['contender']:<12}{seconds * 1e3:>10.3f}{(high - low) / 2e-3:>9.3f}"
                f"{algbw:>12.2f}{busbw:>12.2f}"
                f"{seconds / results.time(ranks, workload, 'memcpy'):>10.2f}"
                f"{seconds / results.time(ranks, workload, 'flat'):>8.2f}{row['wrong']:>7}"
            )


def target_rows(results: Results) -> list[dict[str, Any]]:
    """Each target with its value by number of ranks, where it was measured."""
    rows = []
    for target in TARGETS:
        values = {}
        for ranks in sorted(results.figures):
            try:
                values[ranks] = target.value(results, ranks)
            except KeyError:
                continue
        met = all(map(target.met, values.values())) if values and target.bound else None
        rows.append({"target": target.text, "bound": target.bound, "values": values, "met": met})
    return rows


def target_table(rows: list[dict[str, Any]]) -> Iterator[str]:
    yield ""
    yield f"{'target':<54}{'bound':<9}measured"
    for row in rows:
        values = ", ".join(f"{v:.3g} on {ranks}" for ranks, v in row["values"].items())
        verdict = {True: "PASS", False: "miss", None: "" if values else "not measured"}[row["met"]]
        yield f"{row['target']:<54}{row['bound']:<9}{values:<29}{verdict}"


def plot(results: Results, title: str, path: Path) -> None:
    """Draw the times over that of a memcpy, one panel for each number of ranks."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    counts = list(dict.fromkeys(row["ranks"] for row in results.rows))
    workloads = list(dict.fromkeys(row["workload"] for row in results.rows))
    contenders = list(dict.fromkeys(row["contender"] for row in results.rows))
    figure, panels = pyplot.subplots(
        len(counts), 1, figsize=(11, 4 * len(counts)), squeeze=False, sharex=True
    )
    for ranks, panel in zip(counts, panels[:, 0], strict=True):
        for k, contender in enumerate(contenders):
            at, heights = [], []
            for i, workload in enumerate(workloads):
                if (ranks, workload, contender) in results.medians:
                    at.append(i + (k - len(contenders) / 2) * 0.8 / len(contenders))
                    heights.append(results.ratio(ranks, workload, contender, "memcpy"))
            panel.bar(at, heights, 0.8 / len(contenders), align="edge", label=contender)
        panel.set_yscale("log")
        panel.set_ylabel(f"time / memcpy, {ranks} ranks")
        panel.set_xticks(range(len(workloads)), workloads)
    panels[0, 0].legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize="small")
    panels[0, 0].set_title(title, fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def report(runs: list[dict[str, Any]], folder: Path) -> int:
    """Print the tables, write the files; returns the exit code."""
    results = Results(runs)
    targets = target_rows(results)
    about = {
        "commit": commit(),
        "machine": machine(),
        "mpi": runs[-1]["mpi library"],
        "command": shlex.join(["python", *sys.argv]),
        "time": time.strftime("%Y-%m-%d %H:%M:%S %z"),
    }
    lines = [f"{key}: {value}" for key, value in about.items()]
    print("\n".join([*lines, *table(results), *target_table(targets)]))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"bench-{runs[-1]['mpi']}.json"
    content = about | {"targets": targets, "figures": results.figures, "rows": results.rows}
    path.write_text(json.dumps(content, indent=1))
    print(f"\nwritten: {path}")
    if importlib.util.find_spec("matplotlib") is None:
        print("no plot without matplotlib; type: python -m pip install matplotlib")
    elif results.rows:
        picture = path.with_suffix(".png")
        plot(results, f"{about['machine']}\n{about['mpi']}, commit {about['commit']}", picture)
        print(f"written: {picture}")
    wrong = sum(row["wrong"] for row in results.rows)
    if wrong:
        print(f"{wrong} WRONG VALUES", file=sys.stderr)
    return 1 if wrong else 0


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure hvdlite and its alternatives.")
    parser.add_argument("--ranks", default="2,4", help="numbers of ranks")
    parser.add_argument("--workloads", default="", help=f"of {','.join(WORKLOADS)}; default: all")
    parser.add_argument("--quick", action="store_true", help="three rounds, and without GPT-2")
    parser.add_argument("--no-torch", action="store_true", help="leave out torch's gloo")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench", metavar="FOLDER")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--json", help=argparse.SUPPRESS)
    args = parser.parse_args()
    default = [w for w in WORKLOADS if not (args.quick and w == "gpt2")]
    args.workloads = args.workloads.split(",") if args.workloads else default
    unknown = [w for w in args.workloads if w not in WORKLOADS]
    if unknown:
        parser.error(f"unknown workloads {unknown}; known: {', '.join(WORKLOADS)}")
    return args


def main() -> int:
    args = parse_args()
    if args.worker:
        import bench_worker  # the ranks load MPI; this driver does not

        bench_worker.run(args)
        return 0
    find_mpiexec()
    return report([run_ranks(n, args) for n in (1, *map(int, args.ranks.split(",")))], args.out)


if __name__ == "__main__":
    sys.exit(main())
