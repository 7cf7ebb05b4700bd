"""Pictures of one or several run folders: learning curves, calibration, case study, heat map, credit, comparison.

    python plots.py RUN [RUN ...] [--out DIR]      # default: the first run's plots/ folder

Reads config.json, metrics.jsonl, episodes.jsonl, summary.json, heatmap.json and decompositions.json; whatever is
missing is skipped with one line (the pictures of step rewards silently: only stepopsd.py has any). Runs of the same
(algo, env, model) form a group: several are drawn as their mean and its 95% confidence band. All pictures but curves,
compare and the last panels of credit show the first given run that has the data; the title names it.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import findfont, get_font
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe-Ito, colour-blind safe
GREY, GOOD, BAD = "#777777", "#009E73", "#D55E00"
RC = {"font.family": "DejaVu Sans", "font.size": 9, "axes.titlesize": 10, "legend.fontsize": 8, "axes.grid": True,
      "grid.alpha": 0.25, "axes.spines.top": False, "axes.spines.right": False,
      "text.parse_math": False}  # fmt: skip  # a `$` in a text is a dollar
MAIN, THIN, DASH = dict(lw=1.8), dict(lw=0.9, alpha=0.75), dict(lw=1.3, ls="--")
PANELS = (  # title, [(metric, label, line style)]: the article's six indicators (5.2)
    ("Success rate", [("eval/success", "validation", MAIN), ("train/success", "train", THIN)]),
    ("Length of successful validation episodes (steps)", [("eval/ep_len", "validation", MAIN)]),
    ("Score error (MSE)", [("score/mse_val", "held out", MAIN), ("score/mse_train", "train", THIN),
                           ("score/mse_constant", "constant predictor", DASH)]),
    ("Advantage", [("adv/std", "std", MAIN), ("adv/mean", "mean", DASH)]),
    ("Policy entropy (nats a token)", [("policy/entropy", "entropy", MAIN)]),
    ("KL divergence", [("policy/approx_kl", "from old policy", MAIN), ("policy/ref_kl", "from reference", DASH)]),
)  # fmt: skip


class PlotError(ValueError):
    """A wrong argument, told to the user in one line."""


# ------------------------------------------------------------------------------------------------------------- reading


def read_json(path: Path) -> dict:
    """The object in a JSON file; {} when it is missing, torn or something else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def read_jsonl(path: Path) -> list[dict]:
    """The objects of a JSON-lines file; anything else (a torn last line) is left out."""
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n") if path.is_file() else ():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return [row for row in rows if isinstance(row, dict)]


def number(mapping, key) -> float:
    """mapping[key] as a float; nan when it is missing, null, infinite or no number."""
    value = mapping.get(key) if isinstance(mapping, dict) else None
    return float(value) if isinstance(value, (int, float)) and abs(value) < 1e300 else math.nan


def item(values: list, i: int) -> float:
    return number(dict(enumerate(values)), i)


def dicts(value) -> list[dict]:
    return [v for v in value if isinstance(v, dict)] if isinstance(value, list) else []


def clean(text, limit: int = 60) -> str:
    """One line of at most `limit` characters that the font can draw: others become □."""
    text, font = " ".join(str(text)[: 20 * limit].split()), get_font(findfont(RC["font.family"]))
    text = text if len(text) <= limit else text[: limit - 1].rstrip() + "…"
    return "".join(c if c == " " or font.get_char_index(ord(c)) else "□" for c in text)


class Run:
    def __init__(self, folder: Path):
        self.folder, self.name = folder, clean(folder.resolve().name, 70)
        self.config = read_json(folder / "config.json")
        self.metrics, self.summary = read_jsonl(folder / "metrics.jsonl"), read_json(folder / "summary.json")
        self.group = " · ".join(clean(self.config.get(k, "?"), 40) for k in ("algo", "env", "model"))

    def last_stage(self, key: str) -> list[dict]:
        """Evaluation episodes of the last stage in which a step has the number `key` (the latest scorer's)."""
        found = read_jsonl(self.folder / "episodes.jsonl")
        found = [e for e in found if any(math.isfinite(number(s, key)) for s in dicts(e.get("steps")))]
        return [e for e in found if str(e.get("stage")) == str(found[-1].get("stage"))]


# ---------------------------------------------------------------------------------------------------------- statistics


def t_quantile(df: int) -> float:
    """97.5% quantile of Student's t with df degrees of freedom (table to 10, then Cornish-Fisher; within 0.1%)."""
    table = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
    return table[df - 1] if df <= len(table) else 1.95996 + 2.3723 / df + 2.8225 / df**2


def mean_and_half(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """values (n, ...) of n runs -> mean (...) and half-width (...) of its 95% interval (nan for n = 1)."""
    n, mean = len(values), np.mean(values, axis=0)  # averaged over runs
    half = t_quantile(n - 1) * np.std(values, axis=0, ddof=1) / math.sqrt(n) if n > 1 else np.full_like(mean, math.nan)
    return mean, half


def aggregate(curves: list[tuple[np.ndarray, np.ndarray]], points: int = 200):
    """Curves (x, y) of n runs -> grid, mean, 95% half-width, each (points,), on the x range that all the runs cover.

    Of several values at one x the last one counts. Without a common range the three arrays are empty.
    """
    curves = [(np.unique(x), y[len(x) - 1 - np.unique(x[::-1], return_index=True)[1]]) for x, y in curves]
    low, high = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
    grid = np.linspace(low, high, points if high > low else 1 if high == low else 0)  # (points,)
    return grid, *mean_and_half(np.stack([np.interp(grid, x, y) for x, y in curves]))


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    """Rank correlation, ties get their mean rank; nan when a side is constant. a, b: (n,)"""
    ranks = []
    for values in (a, b):
        _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
        ranks.append((np.cumsum(counts) - (counts - 1) / 2)[inverse])
    return float(np.corrcoef(*ranks)[0, 1]) if min(np.ptp(r) for r in ranks) > 0 else math.nan


def curve(rows: list[dict], key: str) -> tuple[np.ndarray, np.ndarray]:
    """(env_steps, metric) of the rows that have both. Each (n,)"""
    points = np.array([(number(r, "env_steps"), number(r, key)) for r in rows]).reshape(-1, 2)
    return tuple(points[np.isfinite(points).all(axis=1)].T)


def show(value: float, digits: int = 2) -> str:
    return f"{value:.{digits}f}" if math.isfinite(value) else "n/a"


# ------------------------------------------------------------------------------------------------------------ pictures
# Each takes the runs and {group: its runs}; returns a Figure, the reason why there is none, or None (not asked for).


def figure(width: float, height: float) -> Figure:
    fig = Figure(figsize=(width, height), dpi=130, layout="constrained")
    FigureCanvasAgg(fig)  # no pyplot: importing this file leaves the caller's backend alone
    return fig


def first_with(runs: list[Run], find):
    """(run, find(run)) of the first run where find gives something; (None, None) without one."""
    return next(((run, found) for run in runs if (found := find(run))), (None, None))


def draw_stages(axes, rows: list[dict]):
    """Light vertical lines where a stage starts, named in the first panel; stages that start at one x share a line."""
    starts, previous = {}, None
    for row in rows:
        x, stage = number(row, "env_steps"), row.get("stage")
        if stage and stage != previous and math.isfinite(x):
            starts.setdefault(x, []).append(clean(stage, 12))
            previous = stage
    for x, names in starts.items():
        for ax in axes:
            ax.axvline(x, color=GREY, lw=0.8, ls=":", zorder=0)
        axes[0].annotate(", ".join(dict.fromkeys(names)), (x, 0.98), xycoords=axes[0].get_xaxis_transform(), color=GREY,
                         xytext=(2, 0), textcoords="offset points", va="top", rotation=90, fontsize=7)  # fmt: skip


def draw_series(ax, runs: list[Run], key: str, color: str, style: dict) -> list[float]:
    """One metric of one group: a line, or mean and, for a main line, band. Returns the y values to make room for."""
    curves = [c for c in (curve(r.metrics, key) for r in runs) if len(c[0])]
    shown = [y for _, y in curves]
    if len(curves) > 1 and len((result := aggregate(curves))[0]):  # without a common range: one line a run
        grid, mean, half = result
        curves, shown = [(grid, mean)], [mean]
        if style is MAIN:
            ax.fill_between(grid, mean - half, mean + half, color=color, alpha=0.18, lw=0)
            room = max(np.ptp(mean), 0.25 * np.abs(mean).max())  # the band of two or three runs may dwarf the curves
            shown += [np.maximum(mean - half, mean.min() - room), np.minimum(mean + half, mean.max() + room)]
    for x, y in curves:
        ax.plot(x, y, color=color, marker="." if len(x) <= 30 else None, ms=4, **style)
    return [v for y in shown for v in (y.min(), y.max())]


def draw_curves(runs, groups):
    if not any(len(curve(run.metrics, key)[0]) for run in runs for _, series in PANELS for key, *_ in series):
        return "no metrics.jsonl with env_steps and metrics"
    fig = figure(13, 7)
    axes = list(fig.subplots(2, 3).flat)
    for ax, (title, series) in zip(axes, PANELS, strict=True):
        shown = []
        for i, (key, label, style) in enumerate(series):
            before = len(shown)
            for g, group in enumerate(groups.values()):  # colour tells groups apart, or a lone group's metrics
                shown += draw_series(ax, group, key, COLORS[(i if len(groups) == 1 else g) % len(COLORS)], style)
            if len(shown) > before:
                ax.plot([], [], color=COLORS[i] if len(groups) == 1 else GREY, label=label, **style)
        for target in {number(r.config, "target_kl") for r in runs} if title.startswith("KL") and shown else ():
            if math.isfinite(target):
                ax.axhline(target, color=GREY, lw=1, ls=(0, (6, 3)), label=f"target_kl {target:g}")
                shown.append(target)
        if shown:
            margin = 0.06 * (max(shown) - min(shown)) or 0.1 * abs(shown[0]) or 0.1
            bounds = (-0.03, 1.03) if title.startswith("Success") else (min(shown) - margin, max(shown) + margin)
            ax.set_ylim(bounds)
            ax.legend(loc="best", framealpha=0.7)
        else:
            ax.text(0.5, 0.5, "not logged", transform=ax.transAxes, ha="center", color=GREY)
        ax.set(title=title, xlabel="environment steps")
    band = "lines: means over runs, band: 95% confidence of the mean" if len(groups) < len(runs) else None
    names = [f"{name} ({len(group)} run{'s'[: len(group) > 1]})" for name, group in groups.items()]
    if len(groups) > 1:
        lines = [Line2D([], [], color=COLORS[i % len(COLORS)], lw=2) for i in range(len(groups))]
        fig.legend(lines, names, loc="outside upper center", ncols=min(3, len(names)), title=band, fontsize=9)
    else:
        fig.suptitle(f"{names[0]}; {band}" if band else f"{runs[0].group} · {runs[0].name}")
    if len(runs) == 1:
        draw_stages(axes, runs[0].metrics)
    return fig


def value_points(run: Run):
    """(V, G, number of its episode) of every step that has both, and the stage; None with fewer than two steps."""
    episodes = run.last_stage("value")
    rows = [(number(s, "value"), number(s, "return"), i) for i, e in enumerate(episodes) for s in dicts(e["steps"])]
    rows = [row for row in rows if np.isfinite(row).all()]
    return (*np.array(rows).T, clean(episodes[0].get("stage"), 20)) if len(rows) > 1 else None


def draw_calibration(runs, groups):
    run, found = first_with(runs, value_points)
    if not found:
        return "no episodes with value and return"
    value, actual, episode, stage = found  # (n,) each
    fig = figure(6.5, 6.5)
    top, bottom = fig.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    edges = np.linspace(value.min(), value.max() + 1e-9, 11)  # 10 bins of equal width
    where = np.clip(np.digitize(value, edges) - 1, 0, 9)
    for inside in (where == b for b in np.unique(where)):
        mean, m = actual[inside].mean(), len(np.unique(episode[inside]))
        sums = np.bincount(episode[inside].astype(int), actual[inside] - mean)  # steps of an episode go together
        half = t_quantile(m - 1) * math.sqrt(np.sum(sums**2) * m / (m - 1)) / inside.sum() if m > 1 else math.nan
        top.errorbar(value[inside].mean(), mean, half, fmt="o", color=COLORS[0], capsize=3)
    limits = top.get_ylim()
    top.axline((0, 0), slope=1, color=GREY, ls="--", lw=1, label="perfect")
    top.errorbar([], [], [], fmt="o", color=COLORS[0], capsize=3, label="mean of a bin, 95% interval (by episodes)")
    top.set(ylabel="actual return G", ylim=(max(limits[0], actual.min() - 0.1), min(limits[1], actual.max() + 0.1)))
    top.legend(loc="best")
    bottom.hist(value, edges, color=COLORS[5], edgecolor="white")
    bottom.set(ylabel="steps", xlabel="predicted value V(s), in units of return")
    error = f"MSE {np.mean((value - actual) ** 2):.4f} (best constant: {actual.var():.4f})"  # means over steps
    top.set_title(f"Spearman {show(spearman(value, actual))}, {error}\n{len(value)} steps of {len(np.unique(episode))} "
                  f"episodes, stage {stage}\n{run.name}")  # fmt: skip
    return fig


def pick_cases(run: Run) -> list[dict]:
    """The longest success and the longest failure with scores in the last stage, as far as there are any."""
    found = run.last_stage("score")
    found = [[e for e in found if number(e, "success") == wanted] for wanted in (1, 0)]
    return [max(episodes, key=lambda e: len(e["steps"])) for episodes in found if episodes]


def draw_case(ax, episode: dict):
    steps, success = dicts(episode["steps"]), bool(episode["success"])
    score = np.array([number(s, "score") for s in steps])  # (T,)
    x, change = np.arange(len(steps)), np.diff(score)  # change[t]: what action t did to the score
    ax.plot(x, score, color=COLORS[0], marker="o", ms=4, lw=1.5)
    refused = np.array([s.get("valid") is False for s in steps])
    if refused.any():
        ax.plot(x[refused], score[refused], "x", color="black", ms=9, label="action refused")
    for name, sign, color in (("jump", 1, GOOD), ("drop", -1, BAD))[: 1 if success else 2]:
        if np.fmax.reduce(sign * change, initial=0) > 0:
            t = int(np.nanargmax(sign * change))
            label = f"largest {name} {change[t]:+.2f}, step {t}: {clean(steps[t].get('action', ''), 40)}"
            ax.plot(x[t : t + 2], score[t : t + 2], color=color, lw=5, alpha=0.6, solid_capstyle="round", label=label)
    every = math.ceil(len(steps) / 50)
    names = [f"{clean(s.get('action', ''), 28) or '(empty)'}  {t}" for t, s in enumerate(steps)]
    ax.set_xticks(x[::every], names[::every], rotation=50, ha="right", rotation_mode="anchor", fontsize=7.5)
    low, room = np.nanmin(score), max(np.nanmax(score) - np.nanmin(score), 0.1)
    ax.set(ylabel="state score S(s)", xlim=(-0.5, len(steps) - 0.5), ylim=(low - 0.1 * room, low + 1.4 * room))
    where = [clean(episode[k], 40) for k in ("stage", "split", "kind", "task") if episode.get(k) is not None]
    title = f"{'Success' if success else 'Failure'} in {len(steps)} steps, return {show(number(steps[0], 'return'))}"
    ax.set_title(" · ".join([title, *where]))
    if ax.get_legend_handles_labels()[1]:
        ax.legend(loc="upper left", ncols=3, framealpha=0.8)


def draw_case_study(runs, groups):
    run, cases = first_with(runs, pick_cases)
    if not cases:
        return "no episodes with scores"
    fig = figure(12, 0.6 + 4.2 * len(cases))
    for ax, episode in zip(fig.subplots(len(cases), 1, squeeze=False).flat, cases, strict=True):
        draw_case(ax, episode)
    fig.suptitle(f"Score of the state before each action · {run.name}")
    return fig


def reward_histograms(run: Run):
    """(env_steps (n,), counts (n, bins), clip) of the updates that logged reward/hist; None without any."""
    rows = [r for r in run.metrics if isinstance(r.get("reward/hist"), list) and math.isfinite(number(r, "env_steps"))]
    bins = len(rows[-1]["reward/hist"]) if rows else 0
    rows = [r for r in rows if len(r["reward/hist"]) == bins]
    counts = np.array([[item(r["reward/hist"], i) for i in range(bins)] for r in rows]).reshape(len(rows), bins)
    good = np.isfinite(counts).all(1) & (counts.sum(1) > 0) if bins else np.zeros(0, bool)
    clip = number(run.config, "reward_clip")
    if not good.any() or not clip > 0:
        return None
    return np.array([number(r, "env_steps") for r in rows])[good], counts[good], clip


def draw_step_rewards(runs, groups):
    run, found = first_with(runs, reward_histograms)
    if not found:
        return None
    steps, counts, clip = found
    shares = counts / counts.sum(1, keepdims=True)  # (n, bins): of the iteration's steps
    edges = np.linspace(-clip, clip, counts.shape[1] + 1)
    mean = shares @ (edges[1:] + edges[:-1]) / 2  # (n,)
    fig = figure(8, 4.5)
    ax = fig.subplots()
    x = np.arange(len(steps))
    image = ax.imshow(shares.T, origin="lower", aspect="auto", cmap="cividis", extent=(-0.5, len(x) - 0.5, -clip, clip))
    ax.plot(x, mean, color="white", lw=2.5)
    ax.plot(x, mean, color=COLORS[1], lw=1.5, label="mean")
    every = math.ceil(len(x) / 10)
    ax.set_xticks(x[::every], [f"{s:g}" for s in steps[::every]])
    ax.set(xlabel="environment steps", ylabel="step reward", title=f"Step rewards of new episodes\n{run.name}")
    fig.colorbar(image, ax=ax, label="share of the iteration's steps")
    ax.legend(loc="upper left")
    ax.grid(False)
    return fig


def draw_attention(runs, groups):
    """Share of the segment's reward and step reward over the turns of one success and one failure."""

    def find(run):
        episodes = run.last_stage("share")
        found = [[e for e in episodes if number(e, "success") == wanted] for wanted in (1, 0)]
        return [max(part, key=lambda e: len(e["steps"])) for part in found if part]

    run, cases = first_with(runs, find)
    if not cases:
        return None
    fig = figure(11, 0.6 + 3.8 * len(cases))
    for ax, episode in zip(fig.subplots(len(cases), 1, squeeze=False).flat, cases, strict=True):
        steps = dicts(episode["steps"])
        x = np.arange(len(steps))
        reward = np.array([number(s, "step_reward") for s in steps])
        ax.bar(x, [number(s, "share") for s in steps], 0.6, color=COLORS[5], label="share c_t (mean over windows)")
        other = ax.twinx()
        other.plot(x, reward, color=COLORS[1], marker="o", ms=4, label="step reward (right)")
        other.axhline(0, color=GREY, lw=0.8, ls=":")
        other.grid(False)
        every = math.ceil(len(steps) / 40)
        names = [f"{clean(s.get('action', ''), 28) or '(empty)'}  {t}" for t, s in enumerate(steps)]
        ax.set_xticks(x[::every], names[::every], rotation=50, ha="right", rotation_mode="anchor", fontsize=7.5)
        title = f"{'Success' if episode['success'] else 'Failure'} in {len(steps)} turns"
        ax.set(ylabel="share of the segment", title=f"{title} · task {clean(episode.get('task', '?'), 40)}")
        handles = [h for a in (ax, other) for h in a.get_legend_handles_labels()[0]]
        ax.legend(handles, [h.get_label() for h in handles], loc="upper left", framealpha=0.8)
    fig.suptitle(f"Where the reward model looks · {run.name}")
    return fig


def draw_decompositions(runs, groups):
    """Held-out preference accuracy and correlation with the true progress, by decomposition."""

    def find(run):
        table = read_json(run.folder / "decompositions.json")
        rows = [(clean(k, 20), number(v, "accuracy"), number(v, "progress_corr")) for k, v in table.items()]
        return [r for r in rows if math.isfinite(r[1]) or math.isfinite(r[2])]

    run, rows = first_with(runs, find)
    if not rows:
        return None
    fig = figure(8, 4.2)
    ax = fig.subplots()
    x = np.arange(len(rows))
    for k, label, shift in ((1, "held-out preference accuracy", -0.2), (2, "rank correlation with true progress", 0.2)):
        values = np.array([r[k] for r in rows])
        if np.isfinite(values).any():
            ax.bar(x + shift, values, 0.38, color=COLORS[k - 1], label=label)
            for at, value in zip(x + shift, values, strict=True):
                ax.text(at, max(value, 0) + 0.01 if math.isfinite(value) else 0, show(value), ha="center", fontsize=8)
    ax.axhline(0.5, color=GREY, ls="--", lw=1, label="accuracy of a coin")
    ax.set_xticks(x, [r[0] for r in rows])
    ax.set(title=f"Decompositions, one model each on the same labels\n{run.name}", ylim=(None, 1.12))
    ax.legend(loc="upper right", ncols=3, framealpha=0.8)
    ax.grid(False, axis="x")
    return fig


def read_grids(run: Run) -> list[tuple[np.ndarray, int, float]]:
    """[(cells (n, 4) of row, column, score, distance; size; rank correlation)] of heatmap.json, up to three."""
    grids = []
    for grid in dicts(read_json(run.folder / "heatmap.json").get("grids")):
        rows = grid.get("cells") if isinstance(grid.get("cells"), list) else []
        cells = [[item(c, i) for i in range(4)] for c in rows if isinstance(c, list)]
        cells = np.array(cells).reshape(-1, 4)
        cells = cells[(cells[:, :2] >= 0).all(1) & (cells[:, :2] < 50).all(1) & np.isfinite(cells[:, 2])]
        if len(cells):
            size = number(grid, "size")
            size = int(max(cells[:, :2].max() + 1, size if size <= 50 else 0))
            grids.append((cells, size, number(grid, "rank_corr")))
    return grids[:3]


def draw_heatmap(runs, groups):
    run, grids = first_with(runs, read_grids)
    if not grids:
        return "no heatmap.json with cells (gridworld only)"
    fig = figure(8.5, 0.6 + 3.6 * len(grids))
    for pair, (cells, size, rank) in zip(fig.subplots(len(grids), 2, squeeze=False), grids, strict=True):
        left = (pair[0], 2, f"score S, rank correlation {show(rank)}", "cividis", 2)
        right = (pair[1], 3, "true distance to the goal (steps)", "cividis_r", 0)
        for ax, k, title, cmap, digits in (left, right):
            picture = np.full((size, size), math.nan)  # (rows, columns); nan: a wall or no way to the goal, left blank
            picture[cells[:, 0].astype(int), cells[:, 1].astype(int)] = cells[:, k]
            image = ax.imshow(picture, cmap=cmap)
            for (r, c), v in np.ndenumerate(picture):
                if math.isfinite(v) and size <= 10:
                    dark = np.dot(image.to_rgba(v)[:3], (0.3, 0.6, 0.1)) < 0.5
                    color = "white" if dark else "black"
                    ax.text(c, r, f"{v:.{digits}f}", ha="center", va="center", color=color, fontsize=8)
            if np.isfinite(picture).any():
                fig.colorbar(image, ax=ax, shrink=0.85)
            ax.set(title=title, xticks=[], yticks=[])
            ax.spines[:].set_visible(True)
            ax.grid(False)
    fig.suptitle(f"Bright: high score, near the goal. Blank: no way · {run.name}")
    return fig


def stage_tests(run: Run) -> dict[str, dict]:
    """{stage: test} of summary.json; a run without stages has one called final."""
    stages = run.summary.get("stages")
    tests = {k: v.get("test") for k, v in stages.items() if isinstance(v, dict)} if isinstance(stages, dict) else {}
    tests = tests or {"final": run.summary.get("test")}
    return {k: t for k, t in tests.items() if math.isfinite(number(t, "success"))}


def draw_compare(runs, groups):
    if len(groups) < 2:
        return None
    results = {name: [t for t in map(stage_tests, group) if t] for name, group in groups.items()}
    results = {name: found for name, found in results.items() if found}
    if not results:
        return "no summary.json with test results"
    colors, x, ticks = {}, 0.0, []
    fig = figure(min(16, 3 + 2.4 * len(results)), 5)
    ax = fig.subplots()
    for name, found in results.items():
        stages = list(dict.fromkeys(stage for tests in found for stage in tests))
        label = [*name.split(" · "), f"{len(found)} run{'s'[: len(found) > 1]}"]
        ticks.append((x + (len(stages) - 1) / 2, "\n".join(label)))
        for stage in stages:
            tests = [t[stage] for t in found if stage in t]
            values = np.array([number(t, "success") for t in tests])  # (runs,)
            mean, half = mean_and_half(values)
            low, high = mean - half, mean + half
            if len(tests) == 1 and isinstance(tests[0].get("ci95"), list):
                low, high = item(tests[0]["ci95"], 0), item(tests[0]["ci95"], 1)
            error = np.nan_to_num([[mean - max(low, 0)], [min(high, 1) - mean]]).clip(0)
            color = colors.setdefault(stage, COLORS[len(colors) % len(COLORS)])
            ax.bar(x, mean, 0.85, color=color, alpha=0.8, yerr=error, capsize=4, ecolor="#333333")
            ax.plot([x + 0.25] * len(values), values, "o", color="white", mec="#333333", ms=4 * (len(values) > 1))
            ax.text(x - 0.4, mean + 0.01, f"{mean:.2f}", fontsize=8)
            x += 1
        x += 0.8
    ax.set_xticks(*zip(*ticks, strict=True))
    ax.set(ylim=(0, 1.08), ylabel="success on held-out test tasks")
    ax.set_title("95% intervals: of one run over its episodes,\nof several runs for their mean (dots: the runs)")
    ax.grid(False, axis="x")
    ax.legend([Patch(color=c) for c in colors.values()], [clean(s, 20) for s in colors], title="after stage",
              loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)  # fmt: skip
    return fig


def credit_by_position(run: Run) -> list[tuple[str, np.ndarray]]:
    """[(part of the run, mean credit by step position)]: means over the iterations of its first and last quarter."""
    rows = [r for r in run.metrics if math.isfinite(number(r, "credit/step_1"))]
    places = sorted(int(k.removeprefix("credit/step_")) for k in {k for r in rows for k in r}
                    if k.removeprefix("credit/step_").isdecimal() and k.startswith("credit/step_"))  # fmt: skip
    quarter, parts = max(1, len(rows) // 4), []
    for name, chosen in (("first quarter", rows[:quarter]), ("last quarter", rows[-quarter:]))[: len(rows)]:
        values = np.array([[number(r, f"credit/step_{k}") for k in places] for r in chosen])  # (iterations, positions)
        seen = np.isfinite(values).sum(0)
        parts.append((name, np.where(seen, np.nansum(values, 0), math.nan) / np.maximum(seen, 1)))
    return parts


def draw_credit(runs, groups):
    found = [run for run in runs if len(curve(run.metrics, "evaluator/kappa")[0])]
    if not found:
        return None  # no run of slea_rl.py
    fig = figure(13, 4.2)
    left, middle, right = fig.subplots(1, 3)
    for i, (name, values) in enumerate(credit_by_position(found[0])):
        left.plot(np.arange(1, len(values) + 1), values, color=COLORS[i], marker="o", ms=4, label=name)
    left.axhline(0, color=GREY, lw=0.8)
    left.set(title="Credit by step position", xlabel="thought of the turn", ylabel="mean credit (units of return)")
    left.xaxis.get_major_locator().set_params(integer=True)
    names = {name: [r for r in group if r in found] for name, group in groups.items()}
    names = {name: group for name, group in names.items() if group}
    series = ((middle, "evaluator/mse_val", "held-out episodes", MAIN), (right, "evaluator/kappa", "weight", MAIN),
              (middle, "evaluator/mse_constant", "constant predictor", DASH))  # fmt: skip
    for ax, key, label, style in series:
        for g, group in enumerate(names.values()):
            draw_series(ax, group, key, COLORS[g % len(COLORS)], style)
        ax.plot([], [], color=GREY, label=label, **style)
    middle.set(title="Step evaluator: squared error on the [-1, 1] scale", xlabel="environment steps")
    right.set(title="Weight of the knowledge base", xlabel="environment steps", ylim=(-0.03, 1.03))
    for ax in (left, middle, right):
        if ax.get_legend_handles_labels()[1]:
            ax.legend(loc="best", framealpha=0.7)
    if len(names) > 1:
        lines = [Line2D([], [], color=COLORS[i % len(COLORS)], lw=2) for i in range(len(names))]
        fig.legend(lines, names, loc="outside upper center", ncols=min(3, len(names)), fontsize=9)
    fig.suptitle(f"Credit of thoughts · {found[0].name}")
    return fig


PICTURES = {"curves.png": draw_curves, "calibration.png": draw_calibration, "case_study.png": draw_case_study,
            "heatmap.png": draw_heatmap, "step_rewards.png": draw_step_rewards, "attention.png": draw_attention,
            "decompositions.png": draw_decompositions, "credit.png": draw_credit,
            "compare.png": draw_compare}  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- running


def warn_uneven(groups):
    """One line for a group whose runs differ in length or in more than the seed (the band is not that of seeds)."""
    ignored = {"seed", "out", "resume", "eval_only", "overwrite", "track", "device"}
    for name, group in groups.items():
        keys = {k for r in group for k, v in r.config.items() if not isinstance(v, (dict, list))} - ignored
        mixed = sorted(k for k in keys if len({str(r.config.get(k)) for r in group}) > 1)
        if mixed:
            print(f"note: the runs of {name} differ in {clean(', '.join(mixed), 100)}")
        ends = [max(x) for x in (curve(r.metrics, "env_steps")[0] for r in group) if len(x)]
        if ends and min(ends) < 0.9 * max(ends):
            print(f"note: the curves of {name} stop at {min(ends):g} env_steps, the end of its shortest run")


def plot_runs(folders: list[Path], out: Path | None = None) -> list[Path]:
    """Draw every picture the run folders have data for into `out` (default: the first run's plots/); returns the paths.

    Prints a line for each picture skipped. Raises PlotError for a folder that is no run, OSError for a bad `out`.
    """
    folders = list({Path(f).resolve(): Path(f) for f in folders}.values())  # the same run twice is one run
    for folder in folders:
        if not folder.is_dir():
            raise PlotError(f"{folder} does not exist or is no folder")
        if not read_json(folder / "config.json"):
            raise PlotError(f"{folder} is no run folder: it has no readable config.json")
    runs, groups = [Run(folder) for folder in folders], {}
    for run in runs:
        groups.setdefault(run.group, []).append(run)
    warn_uneven(groups)
    out, written = Path(out) if out else folders[0] / "plots", []
    out.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(RC):
        for name, draw in PICTURES.items():
            result = draw(runs, groups)
            if isinstance(result, Figure):
                result.savefig(out / name)
                written.append(out / name)
            elif result:
                print(f"skipped {name}: {result}")
    return written


class Parser(argparse.ArgumentParser):
    def error(self, message):
        self.exit(2, f"error: {message}\n")


def main(argv: list[str] | None = None) -> int:
    parser = Parser(description="Draw the pictures of one or several run folders.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folder (runs/...)")
    parser.add_argument("--out", type=Path, help="folder for the pictures (default: plots/ of the first run)")
    args = parser.parse_args(argv)
    try:
        for path in plot_runs(args.runs, args.out):
            print(path)
    except (PlotError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
