"""plots.py: every picture from a full folder, nothing crashes on a damaged one, the statistics by hand."""

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import plots

ROOT = Path(plots.__file__).parent
ALL = ("curves.png", "calibration.png", "case_study.png", "heatmap.png", "compare.png")


def make_run(folder, seed=1, algo="3spo", env="gridworld", rows=24, hard=False, **config):
    """A full synthetic run folder; hard: dollar signs, unicode and very long action texts."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    config = dict(algo=algo, env=env, model="tiny", seed=seed, target_kl=0.1, used={"device": "cpu"}) | config
    (folder / "config.json").write_text(json.dumps(config))
    metrics = [{"env_steps": 0, "iter": 0, "stage": "warmup", "eval/success": 0.05, "eval/ep_len": None}]
    metrics += [{"env_steps": 0, "iter": 0, "stage": "score", "eval/success": 0.4, "eval/ep_len": 6.0}]
    for i in range(5):
        mse = {"score/mse_train": 0.4 / (i + 1), "score/mse_val": 0.5 / (i + 1), "score/mse_constant": 0.45}
        metrics.append({"env_steps": 600, "iter": i, "stage": "score", "score/rank_corr": 0.1 * i, **mse})
    for i in range(rows):
        z = 1 - math.exp(-i / 8)
        kl, up = 0.03 + rng.normal(0, 0.005), 0.4 + 0.4 * z + rng.normal(0, 0.05)
        row = {"env_steps": 600 + 200 * (i + 1), "iter": i, "stage": algo, "train/success": up}
        row |= {"policy/approx_kl": kl, "policy/ref_kl": 0.3 * z, "policy/entropy": 0.8 - 0.5 * z}
        row |= {"adv/mean": rng.normal(0, 0.05), "adv/std": 0.3 - 0.1 * z, "score/mse_train": 0.1}
        row |= {"score/mse_val": 0.12, "score/mse_constant": 0.45, "perf/env_steps_per_s": None}
        if i % 2 == 0:
            row |= {"eval/success": min(1, 0.45 + 0.45 * z + rng.normal(0, 0.03)), "eval/ep_len": 6 - z}
        metrics.append(row)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in metrics))
    texts = ["up", "left", "down", "right"]
    if hard:
        texts = ["$\\frac{1}{0}$ costs $5", "_^{$", "", 'click "größe 漢字 🙂"', "x" * 5000, "a\nb\tc\x00\ud800"]
    episodes = []
    for i in range(40):
        success, n = i % 3 != 0, int(rng.integers(3, 20))
        returns = np.linspace(0.5, 1, n) if success else np.linspace(-0.1, -0.6, n)
        steps = []
        for t in range(n):
            v = float(0.8 * returns[t] + rng.normal(0, 0.12))
            steps.append(dict(state="s", action=texts[t % len(texts)], reward=0.0, valid=t % 7 != 3, score=v, value=v))
            steps[-1]["return"] = float(returns[t])
        task = "$x_i$ " * 30 if hard else f"reach:{i}"
        episodes.append(dict(stage=algo, split="test", task=task, kind="reach", success=success, steps=steps))
    blank = [dict(e, stage="warmup", steps=[dict(s, score=None, value=None) for s in e["steps"]]) for e in episodes]
    (folder / "episodes.jsonl").write_text("".join(json.dumps(r) + "\n" for r in [*blank, *episodes]))
    tests = {"warmup": dict(success=0.42, ci95=[0.33, 0.52]), algo: dict(success=0.8 + 0.02 * seed, ci95=[0.75, 0.93])}
    summary = dict(algo=algo, stages={k: {"wall_s": 1.0, "test": v} for k, v in tests.items()}, test=tests[algo])
    (folder / "summary.json").write_text(json.dumps(summary))
    grids = []
    for _ in range(4):
        cells = [[r, c, 0.8 - 0.1 * (r + c) + rng.normal(0, 0.03), r + c] for r in range(5) for c in range(5)]
        cells = [cell for cell in cells if rng.random() > 0.2 or cell[3] == 0]
        cells[-1][3] = None  # cut off from the goal
        grids.append(dict(size=5, cells=cells, rank_corr=0.93))
    (folder / "heatmap.json").write_text(json.dumps(dict(grids=grids)))
    return folder


def check_png(path, least=5_000, most=400_000):
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n" and data[-8:-4] == b"IEND"
    assert least < len(data) < most
    width, height = (int.from_bytes(data[i : i + 4], "big") for i in (16, 20))
    assert 500 <= width <= 2200 and 400 <= height <= 2200


def test_full_run_gives_every_picture(tmp_path, capsys):
    run = make_run(tmp_path / "run", hard=True)
    written = plots.plot_runs([run])
    assert written == [run / "plots" / name for name in ALL[:4]]
    for path in written:
        check_png(path)
    assert capsys.readouterr().out == ""


def test_groups_and_out(tmp_path, capsys):
    runs = [make_run(tmp_path / f"3spo{s}", seed=s) for s in (1, 2, 3)]
    runs.append(make_run(tmp_path / "ppo", algo="ppo", gamma=0.9))
    assert plots.main([*map(str, runs), "--out", str(tmp_path / "new" / "out")]) == 0
    written = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert written == [tmp_path / "new" / "out" / name for name in ALL]
    for path in written:
        check_png(path)


@pytest.fixture
def unsaved(monkeypatch):
    """Figures are made and laid out in full but not written: the slow part is tested elsewhere."""
    monkeypatch.setattr(plots.Figure, "savefig", lambda self, path: None)


def test_uneven_groups_are_noted(tmp_path, capsys, unsaved):
    runs = [make_run(tmp_path / "a"), make_run(tmp_path / "b", seed=2, rows=10, gamma=0.9)]
    assert plots.plot_runs(runs) == [runs[0] / "plots" / name for name in ALL[:4]]
    out = capsys.readouterr().out
    assert "differ in gamma\n" in out and "stop at 2600 env_steps" in out and out.count("note:") == 2


def test_missing_files_are_skipped_with_one_line_each(tmp_path, capsys, unsaved):
    run = make_run(tmp_path / "run")
    (run / "episodes.jsonl").unlink()
    (run / "heatmap.json").unlink()
    assert [p.name for p in plots.plot_runs([run])] == ["curves.png"]
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == [f"skipped {name}" for name in ALL[1:4]]
    (run / "metrics.jsonl").write_text("")
    assert plots.plot_runs([run]) == []
    assert "skipped curves.png: no metrics.jsonl" in capsys.readouterr().out
    other = make_run(tmp_path / "other", algo="ppo")
    for folder in (run, other):
        (folder / "summary.json").unlink()
    assert [p.name for p in plots.plot_runs([run, other])] == list(ALL[:4])  # of the first run that has the data
    assert capsys.readouterr().out == "skipped compare.png: no summary.json with test results\n"


def test_torn_null_and_nan_are_tolerated(tmp_path):
    run = make_run(tmp_path / "run")
    (run / "heatmap.json").write_text('{"grids": [{"cells": [[0, 0, NaN, 1], [1, 1, 0.5, null]]}, {"cel')
    junk = '{"env_steps": NaN, "eval/success": 1}\n[1]\nnull\n\n'
    junk += '{"env_steps": 9000, "eval/success": null, "adv/std": Infinity}\n'
    junk += '{"env_steps": 1' + "0" * 400 + ', "stage": [], "train/success": "x"}\n'
    with open(run / "metrics.jsonl", "a") as file:
        file.write(junk + '{"env_steps": 9200, "eval/suc')
    steps = '[null, {}, {"score": NaN, "value": 0.5, "return": null}, {"score": 0.5, "value": 0.1, "return": 0.2}]'
    with open(run / "episodes.jsonl", "a") as file:
        file.write('{}\n{"stage": "3spo", "steps": null}\n{"stage": "3spo", "success": true, "steps": ' + steps)
        file.write('}\n{"stage": "3s')
    written = plots.plot_runs([run])
    assert [p.name for p in written] == list(ALL[:3])
    for path in written:
        check_png(path)
    assert plots.curve(plots.Run(run).metrics, "eval/success")[0].max() < 9000


@pytest.mark.parametrize("value", [None, {}, "x", -1, math.nan, [None], [[0, 0]]])
def test_any_damage_still_plots(tmp_path, unsaved, value):
    runs = [make_run(tmp_path / "a"), make_run(tmp_path / "b", algo="ppo")]
    grids = [dict(size=value, cells=[[0, 0, 0.5, value], [1, 1, value, 2]], rank_corr=value), dict(cells=value), value]
    good, bad = {"score": 0.5, "value": 0.5, "return": 0.1}, dict.fromkeys(("score", "value", "return", "valid"), value)
    steps = [good | {"action": value}, bad, good]
    lines = [dict(stage=value, success=s, steps=steps, task=value) for s in (True, False, value)]
    lines += [dict(steps=value), value]
    metrics = [dict.fromkeys(("env_steps", "stage", "eval/success"), value)]
    metrics += [{"env_steps": 1, "adv/std": value, "adv/mean": 1}]
    stages = {"x": {"test": {"success": 0.5, "ci95": value}}, "y": value}
    for run in runs:
        (run / "heatmap.json").write_text(json.dumps(dict(grids=grids)))
        (run / "episodes.jsonl").write_text("\n".join(map(json.dumps, lines)))
        (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, metrics)))
        (run / "summary.json").write_text(json.dumps(dict(stages=stages)))
    assert [p.name for p in plots.plot_runs(runs)] == list(ALL)
    for name in ("heatmap.json", "episodes.jsonl", "metrics.jsonl", "summary.json"):
        (runs[0] / name).write_text(json.dumps(value))
    assert plots.plot_runs(runs[:1]) == []
    (runs[0] / "summary.json").write_text(json.dumps(dict(stages=value, test=value)))
    assert plots.stage_tests(plots.Run(runs[0])) == {}


def test_mean_and_band_by_hand():
    # three runs constant at 0.0, 0.3, 0.6: mean 0.3, s = 0.3, half-width 4.303 * 0.3 / sqrt(3) = 0.74530
    curves = [(np.array([0.0, 10.0]), np.array([v, v])) for v in (0.0, 0.3, 0.6)]
    grid, mean, half = plots.aggregate(curves, points=5)
    assert grid.tolist() == [0, 2.5, 5, 7.5, 10]
    assert mean == pytest.approx(np.full(5, 0.3)) and half == pytest.approx(np.full(5, 0.74530), abs=1e-4)


def test_aggregate_interpolates_on_the_common_range_and_keeps_the_last_of_equal_x():
    a = (np.array([0.0, 0.0, 10.0]), np.array([9.0, 0.0, 10.0]))  # y = x; the 9 is overwritten
    b = (np.array([20.0, 2.0, 6.0]), np.array([22.0, 4.0, 8.0]))  # y = x + 2, not sorted
    grid, mean, half = plots.aggregate([a, b], points=3)
    assert grid.tolist() == [2, 6, 10] and mean.tolist() == [3, 7, 11]
    assert half == pytest.approx(np.full(3, 12.706 * math.sqrt(2) / math.sqrt(2)))  # s = sqrt(2), n = 2
    assert [len(v) for v in plots.aggregate([a, (np.array([30.0]), np.array([1.0]))])] == [0, 0, 0]
    assert [len(v) for v in plots.aggregate([a, (np.array([10.0]), np.array([1.0]))])] == [1, 1, 1]
    assert np.isnan(plots.mean_and_half(np.array([0.5]))[1])


def test_t_quantile_and_spearman():
    assert [plots.t_quantile(n) for n in (1, 4, 11, 20)] == pytest.approx([12.706, 2.776, 2.201, 2.086], abs=3e-3)
    assert plots.spearman(np.array([1.0, 2, 3]), np.array([10.0, 20, 90])) == pytest.approx(1)
    # ranks (1, 2.5, 2.5, 4) and (1, 2, 3, 4): covariance 4.5, variances 4.5 and 5
    assert plots.spearman(np.array([1.0, 2, 2, 3]), np.array([1.0, 2, 3, 4])) == pytest.approx(4.5 / math.sqrt(4.5 * 5))
    assert math.isnan(plots.spearman(np.ones(3), np.arange(3.0)))


def test_case_study_takes_the_longest_of_the_last_stage_and_marks_jump_and_drop(tmp_path):
    run = make_run(tmp_path / "run")
    steps = [dict(score=s, action="$a$") for s in (0.0, 0.1, 0.7, 0.2, 0.3)] + [dict(score=None)] * 30
    rows = [dict(stage="late", success=False, steps=steps[:n]) for n in (2, 35, 3)]
    rows.append(dict(stage="late", success=True, steps=[]))
    with open(run / "episodes.jsonl", "a") as file:
        file.write("".join(json.dumps(r) + "\n" for r in rows))
    cases = plots.pick_cases(plots.Run(run))
    assert [len(e["steps"]) for e in cases] == [35]
    with plots.matplotlib.rc_context(plots.RC):
        ax = plots.figure(5, 5).subplots()
        plots.draw_case(ax, cases[0])
        labels = ax.get_legend_handles_labels()[1]
        assert labels == ["largest jump +0.60, step 1: $a$", "largest drop -0.50, step 2: $a$"]
        assert not any(label.get_parse_math() for label in ax.get_xticklabels())


def with_credit(folder, rows=12):
    """A run of slea_rl.py: credits of two positions in each iteration, of a third in some, and the evaluator."""
    make_run(folder, algo="slea", env="troubleshoot")
    more = []
    for i in range(rows):
        row = {"env_steps": 6000 + 100 * i, "iter": i, "stage": "slea", "evaluator/kappa": 0.8**i}
        row |= {"evaluator/mse_val": 0.5 - 0.02 * i, "evaluator/mse_constant": 0.45}
        row |= {"credit/step_1": 0.1 * i, "credit/step_2": -0.1 * i} | ({"credit/step_3": 1.0} if i == 0 else {})
        more.append(row)
    with open(folder / "metrics.jsonl", "a") as file:
        file.write("".join(json.dumps(r) + "\n" for r in more))
    return folder


def test_credit_picture(tmp_path, capsys):
    runs = [with_credit(tmp_path / "a"), with_credit(tmp_path / "b"), make_run(tmp_path / "c")]
    (first, early), (last, late) = plots.credit_by_position(plots.Run(runs[0]))
    assert (first, last) == ("first quarter", "last quarter")  # iterations 0 to 2 and 9 to 11
    assert early == pytest.approx([0.1, -0.1, 1.0]) and late[:2] == pytest.approx([1.0, -1.0]) and math.isnan(late[2])
    written = plots.plot_runs(runs, tmp_path / "out")
    assert tmp_path / "out" / "credit.png" in written
    check_png(tmp_path / "out" / "credit.png")
    fig = plots.draw_credit([plots.Run(r) for r in runs], {"slea": [plots.Run(r) for r in runs[:1]]})
    assert fig is not None and plots.draw_credit([plots.Run(runs[2])], {}) is None  # not asked for


def test_clean_makes_one_short_drawable_line():
    assert plots.clean("a\n b\t$c$ é") == "a b $c$ é"
    assert plots.clean("漢\ud800\x00") == "□□□"
    assert len(plots.clean("x" * 10**6, 28)) == 28


@pytest.mark.parametrize("kind", ["missing", "empty", "file", "damaged", "no run", "unknown flag", "out is a file"])
def test_cli_errors_are_one_line_and_exit_2(tmp_path, capsys, kind):
    good, folder = make_run(tmp_path / "good"), tmp_path / "folder"
    if kind != "missing":
        folder.mkdir()
    if kind == "damaged":
        (folder / "config.json").write_text('{"algo": ')
    args = {"file": [good / "config.json"], "no run": [], "unknown flag": [good, "--nope"],
            "out is a file": [good, "--out", good / "config.json"]}.get(kind, [good, folder])  # fmt: skip
    try:
        code = plots.main([str(a) for a in args])
    except SystemExit as stop:
        code = stop.code
    out, err = capsys.readouterr()
    assert code == 2 and out == "" and err.startswith("error: ") and err.count("\n") == 1


def test_command_line_in_its_own_process_without_torch(tmp_path):
    run = make_run(tmp_path / "run", hard=True)
    (run / "heatmap.json").unlink()
    (run / "metrics.jsonl").unlink()
    bad = "{'torch', 'common', 'envs', 'threespo', 'matplotlib.pyplot'} & set(sys.modules)"
    code = f"import sys, plots; r = plots.main(sys.argv[1:]); bad = {bad}"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", f"{code}; print(sorted(bad)); sys.exit(r)", "run"],
        cwd=tmp_path, env={"PYTHONPATH": str(ROOT), "PATH": "", "HOME": str(tmp_path)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if not line.startswith("skipped ")]
    assert lines == [str(Path("run", "plots", n)) for n in ALL[1:3]] + ["[]"]
    check_png(run / "plots" / "case_study.png")


# ---------------------------------------------------------------------------------------------- step rewards (stepopsd)


def add_step_rewards(run, clip=2.0):
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(config | {"reward_clip": clip}))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for i, row in enumerate(rows[7:]):
        row["reward/hist"] = [0, 10 - i % 5, i % 5, 0]
    (run / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    episodes = [json.loads(line) for line in (run / "episodes.jsonl").read_text().splitlines()]
    for episode in episodes[40:]:
        for t, step in enumerate(episode["steps"]):
            step |= {"share": 1 / len(episode["steps"]), "step_reward": 0.1 * t - 0.3}
    (run / "episodes.jsonl").write_text("".join(json.dumps(r) + "\n" for r in episodes))
    table = {"attention": {"accuracy": 0.8, "progress_corr": None}, "td": {"accuracy": None, "progress_corr": -0.2}}
    (run / "decompositions.json").write_text(json.dumps(table))


STEP_REWARDS = ("step_rewards.png", "attention.png", "decompositions.png")


def test_step_reward_pictures(tmp_path):
    run = make_run(tmp_path / "r", algo="stepopsd", hard=True)
    assert not {p.name for p in plots.plot_runs([run])} & set(STEP_REWARDS)
    add_step_rewards(run)
    assert set(STEP_REWARDS) <= {p.name for p in plots.plot_runs([run])}


def test_histograms_are_read_by_hand(tmp_path):
    make_run(tmp_path / "r")
    add_step_rewards(tmp_path / "r")
    steps, counts, clip = plots.reward_histograms(plots.Run(tmp_path / "r"))
    assert clip == 2.0 and steps[:2].tolist() == [800.0, 1000.0] and len(steps) == 24
    assert counts[0].tolist() == [0, 10, 0, 0] and counts[3].tolist() == [0, 7, 3, 0]


@pytest.mark.parametrize("damage", [None, [], "x", [1, None, 2, 0], [0, 0, 0, 0], [1, 2]])
def test_damaged_step_rewards_crash_nothing(tmp_path, damage):
    make_run(tmp_path / "r")
    add_step_rewards(tmp_path / "r")
    rows = [json.loads(line) for line in (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()]
    rows[-1]["reward/hist"] = damage
    (tmp_path / "r" / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (tmp_path / "r" / "decompositions.json").write_text(json.dumps({"td": damage, "label": {"accuracy": "high"}}))
    (tmp_path / "r" / "episodes.jsonl").write_text('{"success": true, "steps": [{"share": 0.5, "action": 3}]}\n')
    written = {p.name for p in plots.plot_runs([tmp_path / "r"])}
    assert "attention.png" in written and "decompositions.png" not in written
