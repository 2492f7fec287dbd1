"""Plots of results files: python3 plots.py DIR FILE.h5 [FILE.h5 ...]

Each plot is drawn from the columns that results/schema.md describes. What a file has no data for is left out and named.
Curves and bars differ in dash, marker and hatch as well as in colour.
"""
import json
import os
import sys

import h5py
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import matplotlib.ticker
import numpy as np

WIDTH, HEIGHT = 6.3, 3.9  # inches: a page's width
STYLES = [("#1f4e79", "-", "o", ""), ("#c55a11", "--", "s", "///"), ("#548235", ":", "^", "..."),
          ("#7030a0", "-.", "D", "xxx"), ("#7f7f7f", (0, (5, 1)), "v", "\\\\\\"), ("#bf9000", (0, (1, 1)), "P", "++")]

plt.rcParams.update({"font.size": 9, "axes.grid": True, "grid.color": "#dddddd", "axes.axisbelow": True,
                     "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False,
                     "hatch.linewidth": 0.6, "savefig.dpi": 200})


class Missing(Exception):
    """A plot without data; the text says which."""


class Run:
    """One results file: its name, mode, and columns by path."""

    def __init__(self, path):
        self.file = h5py.File(path, "r")
        self.name = os.path.splitext(os.path.basename(path))[0]
        settings = self.file.attrs.get("settings", "{}")
        self.settings = json.loads(settings) if isinstance(settings, str) else {}
        self.label = self.name

    def column(self, path):
        if path not in self.file or self.file[path].shape[0] == 0:
            raise Missing(f"{self.name} has no /{path}")
        data = self.file[path]
        return data.asstr()[:] if h5py.check_string_dtype(data.dtype) else data[:]


def style(i):
    return STYLES[i % len(STYLES)]


def curve(axes, i, x, y, label):
    colour, dash, marker, _ = style(i)
    axes.plot(x, y, color=colour, linestyle=dash, marker=marker, markersize=3.5, linewidth=1.3, label=label)


def by_iteration(run, column, weights=None):
    """Mean of a column of /iterations over all blocks that got that far: iterations counted from 1, and the means."""
    at = run.column("iterations/iteration")
    values = run.column("iterations/" + column).astype(float)
    good = np.isfinite(values)
    count = np.bincount(at[good])
    total = np.bincount(at[good], values[good])
    x = np.flatnonzero(count)
    return x + 1, total[x] / count[x]


def iteration_axis(axes, runs):
    most = 1 + max(run.column("iterations/iteration").max() for run in runs)
    axes.set_xlabel("iteration of a block")
    axes.set_xlim(0.4, most + 0.6)
    axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True, min_n_ticks=1))


def blocks_left(axes, run):
    """How many blocks stand behind each mean, on a second axis: the last iterations are often of a few blocks only."""
    count = np.bincount(run.column("iterations/iteration"))
    right = axes.twinx()
    right.fill_between(np.arange(1, len(count) + 1), count, step="mid", color="#000000", alpha=0.07, linewidth=0)
    right.set_ylabel("blocks still refined (grey area)")
    right.set_ylim(0, None)
    right.grid(False)
    right.spines["right"].set_visible(True)
    axes.set_zorder(right.get_zorder() + 1)
    axes.patch.set_visible(False)


def panels(runs, draw, title):
    """One panel a run, side by side or below each other, sharing both axes."""
    columns = min(len(runs), 2)
    rows = -(-len(runs) // columns)
    figure, grid = plt.subplots(rows, columns, figsize=(WIDTH, HEIGHT if rows == 1 else 2.6 * rows + 0.5), sharex=True,
                                sharey=True, squeeze=False)
    for axes in grid.flat[len(runs):]:
        axes.set_visible(False)
    for axes, run in zip(grid.flat, runs):
        draw(axes, run)
        if len(runs) > 1:
            axes.set_title(run.label, fontsize=9)
            axes.label_outer()
    shown = {}
    for axes in grid.flat[:len(runs)]:
        shown.update({text: handle for handle, text in zip(*axes.get_legend_handles_labels())})
    handles, labels = list(shown.values()), list(shown)
    figure.suptitle(title, fontsize=10)
    figure.legend(handles, labels, loc="lower center", ncol=min(len(labels), 4), fontsize=8)
    figure.tight_layout(rect=(0, 0.09 if rows == 1 else 0.05, 1, 1))
    return figure


def traced(runs):
    """The runs with a trace; none is a reason to leave the plot out."""
    with_trace = [r for r in runs if "iterations/iteration" in r.file and r.file["iterations/iteration"].shape[0]]
    if not with_trace:
        raise Missing("no file has /iterations (epoch run --trace)")
    return with_trace


def plot_phases(runs):
    data = [(r, r.column("phases/seconds").sum(axis=0)) for r in runs]
    data = [(r, s) for r, s in data if s.sum() > 0]
    if not data:
        raise Missing("no file has times in /phases/seconds")
    names = data[0][0].column("phases/phase_names")
    height = 0.8 / len(data)
    figure, axes = plt.subplots(figsize=(WIDTH, 1.2 + 0.32 * len(names) * max(1, 0.55 * len(data))))
    most = max(s.max() for _, s in data)
    for i, (run, seconds) in enumerate(data):
        colour, _, _, hatch = style(i)
        y = np.arange(len(names)) - 0.4 + height * (i + 0.5)
        axes.barh(y, seconds, height * 0.92, color=colour if not hatch else "white", edgecolor=colour, hatch=hatch,
                  label=run.label)
        for at, value in zip(y, seconds):
            axes.text(value + 0.01 * most, at, f"{100 * value / seconds.sum():.1f} %", va="center", fontsize=7)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.grid(axis="y")
    axes.set_xlim(0, 1.12 * most)
    axes.set_xlabel("time over all ranks (s), and its share of the run")
    axes.set_title("Time by phase")
    if len(data) > 1:
        axes.legend(loc="best")
    figure.tight_layout()
    return figure


def plot_rows(runs):
    runs = traced(runs)

    def draw(axes, run):
        for i, (column, label) in enumerate([("live", "live (masked)"), ("newly", "newly decoded"),
                                             ("stable", "stable"), ("fresh", "fresh (through experts)")]):
            curve(axes, i, *by_iteration(run, column), label)
        iteration_axis(axes, runs)
        axes.set_ylabel("rows (mean over blocks)")
        axes.set_ylim(0, None)
        if len(runs) == 1:
            blocks_left(axes, run)

    return panels(runs, draw, "Rows of a block over its iterations")


def plot_commits(runs):
    runs = traced(runs)

    def draw(axes, run):
        x, commits = by_iteration(run, "commits")
        _, forced = by_iteration(run, "forced")
        axes.bar(x, commits - forced, color=STYLES[0][0], label="above the threshold, or the best one")
        if forced.any():
            some = forced > 0
            axes.bar(x[some], forced[some], bottom=(commits - forced)[some], color="white", edgecolor=STYLES[1][0],
                     hatch="///", label="forced by the step limit")
        iteration_axis(axes, runs)
        axes.set_ylabel("commits (mean over blocks)")
        if len(runs) == 1:
            blocks_left(axes, run)

    return panels(runs, draw, "Commits per iteration")


def plot_support(runs):
    runs = traced(runs)
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(WIDTH, 5.4), sharex=True)
    for i, run in enumerate(runs):
        colour, dash, marker, _ = style(i)
        tail = f", {run.label}" if len(runs) > 1 else ""
        x, support = by_iteration(run, "support_size")
        _, distinct = by_iteration(run, "distinct_experts")
        top.plot(x, support, color=colour, linestyle=dash, marker=marker, markersize=4, label="support" + tail)
        top.plot(x, distinct, color=colour, linestyle=dash, marker=marker, markersize=4, markerfacecolor="white",
                 label="of them routed to" + tail)
        curve(bottom, i, *by_iteration(run, "coverage"), run.label)
    top.set_ylabel("experts (mean over\nblocks and layers)")
    top.set_ylim(0, None)
    top.legend(fontsize=8, ncol=2)
    top.set_title("Support, the experts used of it, and its coverage")
    bottom.set_ylabel("coverage: score kept of the\nunrestricted top-k (share)")
    iteration_axis(bottom, runs)
    if len(runs) > 1:
        bottom.legend(fontsize=8)
    figure.tight_layout()
    return figure


def observed(run, name):
    """Means of /observed over ranks and sessions: where there is a count, and the mean there."""
    count = run.column(f"observed/{name}_count").sum(axis=0)
    total = run.column(f"observed/{name}_sum").sum(axis=0)
    x = np.flatnonzero(count)
    return x, total[x] / count[x]


def watched(runs):
    runs = [r for r in runs if "observed/overlap_count" in r.file and r.file["observed/overlap_count"].shape[0]]
    if not runs:
        raise Missing("no file has /observed")
    return runs


def plot_overlap(runs):
    figure, axes = plt.subplots(figsize=(WIDTH, HEIGHT))
    for i, run in enumerate(watched(runs)):
        x, overlap = observed(run, "overlap")
        curve(axes, i, x + 1, overlap, run.label)
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("iteration of a block")
    axes.set_ylabel("overlap with the iteration before\n(Jaccard, mean over layers)")
    axes.set_title("Experts that consecutive iterations touch")
    axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True, min_n_ticks=1))
    axes.legend()
    figure.tight_layout()
    return figure


def plot_similarity(runs):
    figure, axes = plt.subplots(figsize=(WIDTH, HEIGHT))
    for i, (run, kind) in enumerate((r, k) for r in watched(runs) for k in ("decoded", "live")):
        x, likeness = observed(run, kind)
        curve(axes, i, x, likeness, f"{run.label}: {kind} rows")
    axes.set_xlabel("age (iterations)")
    axes.set_ylabel("cosine similarity to the row's own\noutput so many iterations before")
    axes.set_title("How fast routed-expert outputs change")
    axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True, min_n_ticks=1))
    axes.legend()
    figure.tight_layout()
    return figure


def plot_sweep(runs):
    """Accuracy under the default rule against time per iteration, one point a file and one marker a dataset."""
    if len(runs) < 2:
        raise Missing("a sweep takes several files")
    points = {}
    for run in runs:
        forwards = run.column("phases/forwards").sum()
        seconds = run.column("phases/wall_seconds").sum()
        if "scores/rule" not in run.file or not run.file["scores/rule"].shape[0] or not forwards:
            continue
        table = zip(*(run.column("scores/" + c) for c in ("dataset", "rule", "score", "low", "high")))
        for dataset, rule, score, low, high in table:
            if rule in ("numeric", "pass@1") and np.isfinite(score):
                point = (1e3 * seconds / forwards, score, low, high, run.label)
                points.setdefault(f"{dataset} {rule}", []).append(point)
    if not points:
        raise Missing("no file has scores and times (epoch score FILE.h5)")
    figure, axes = plt.subplots(figsize=(WIDTH, HEIGHT))
    for i, (name, at) in enumerate(points.items()):
        colour, _, marker, _ = style(i)
        x, y, low, high, labels = (np.array(v) for v in zip(*sorted(at)))
        axes.errorbar(x, y, [np.maximum(y - low, 0), np.maximum(high - y, 0)], color=colour, marker=marker,
                      linestyle="none", capsize=3, elinewidth=0.8, label=name)
        for k, text in enumerate(labels):
            left = x[k] > np.mean([min(x), max(x)])
            axes.annotate(str(text), (x[k], y[k]), (-6 if left else 6, 5), textcoords="offset points", fontsize=7,
                          ha="right" if left else "left")
    axes.margins(x=0.12, y=0.08)
    axes.set_xlabel("time per iteration of a rank (ms, decoding only)")
    axes.set_ylabel("accuracy (95 % interval)")
    axes.set_title("Accuracy against time per iteration")
    figure.legend(loc="lower center", ncol=3, fontsize=8)
    figure.tight_layout(rect=(0, 0.04 + 0.05 * -(-len(points) // 3), 1, 1))
    return figure


PLOTS = {"phases": plot_phases, "rows": plot_rows, "commits": plot_commits, "support": plot_support,
         "overlap": plot_overlap, "similarity": plot_similarity, "sweep": plot_sweep}


def main(folder, paths):
    runs = [Run(p) for p in paths]
    if len({r.name for r in runs}) < len(runs):  # the same name in several folders
        for run, path in zip(runs, paths):
            run.label = os.path.join(os.path.basename(os.path.dirname(os.path.abspath(path))), run.name)
    os.makedirs(folder, exist_ok=True)
    for name, draw in PLOTS.items():
        try:
            figure = draw(runs)
        except Missing as why:
            print(f"# {name}.png: not drawn, {why}")
            continue
        target = os.path.join(folder, name + ".png")
        figure.savefig(target)
        plt.close(figure)
        print(target)


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2:])
