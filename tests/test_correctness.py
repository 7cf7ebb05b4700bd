"""What must hold for all three algorithms: resume after SIGKILL in every stage, damage, broken environments, adapters,
non-finite numbers, secrets. Whole runs of the real main() in this process, on an environment of a few states."""

import contextlib
import io
import json
import math
import os
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch
from conftest import random_prompts, randomise, rows_of, tensors_of
from safetensors import SafetensorError

import common
import plots
import slea_rl
import stepopsd
import threespo

FILES = {"threespo": threespo, "stepopsd": stepopsd, "slea_rl": slea_rl}
ADAPTERS = ("policy", "value", "ref")
HOSTILE = "<script>alert(1)</script> <img src=x> | [a](b) `c` <eos> <|im_end|>"
FLAGS = """--model tiny --demos 8 --warmup_epochs 2 --total_env_steps 48 --episodes_per_iter 4 --num_envs 4
    --val_episodes 2 --eval_episodes 3 --lora_rank 4 --lora_layers 1 --eval_every 2 --minibatch 3 --warmup_minibatch 4
    --seed 3 --policy_lr 1e-3 --temperature 0.8""".split()
MORE = {"threespo": "--score_episodes 5 --random_episodes 2 --score_epochs 2 --total_env_steps 76".split(),
        "stepopsd": "--pairs 6 --rm_ensemble 2 --rm_passes 1 --segment_len 2-3 --curiosity 0.01".split(),
        "slea_rl": "--imitation_quantile 0.5".split()}  # fmt: skip


class Corridor:
    """Three cells in a row; the text shown is hostile. Words other than the two actions earn a little, for variance."""

    return_bounds, max_action_tokens, max_steps = (-1.0, 1.0), 4, 4
    LEGAL = {"left": 0, "right": 1}

    def __init__(self, split="train"):
        self.split = split

    def reset(self, seed=None):
        self.seed, self.at, self.t = seed, seed % 2, 0
        return self.text(), {}

    def text(self):
        return f"Page: {HOSTILE}\nHere: {self.at} of 2.\nAction:"

    def step(self, text):
        action = text.rpartition(">")[2].strip()
        self.at, self.t = self.at + self.LEGAL.get(action, 0), self.t + 1
        won = self.at >= 2
        reward = 1.0 if won else 0.1 * (len(text) % 3)
        return self.text(), reward, won, False, {"success": won, "valid": action in self.LEGAL}

    def expert(self):
        return "right"

    def legal_actions(self):
        return list(self.LEGAL)


class Thinking(Corridor):
    """Answers are two numbered thoughts and an action."""

    max_action_tokens = 24

    def expert(self):
        return "<think>1. see 2. go</think> right"


def flags(name, folder, *more, env=None):
    env = env or ("Thinking" if name == "slea_rl" else "Corridor")
    return ["--env", f"gym/test_correctness:{env}", *FLAGS, *MORE[name], "--out", str(folder), *more]


def run(name, *argv):
    """main() of an algorithm file -> (exit code, stdout, stderr)."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as stopped:
        common.run_main(lambda: FILES[name].main(list(map(str, argv))))
    return stopped.value.code, out.getvalue(), err.getvalue()


def error_line(err):
    """The one line that says what went wrong."""
    assert "Traceback" not in err, err[-3000:]
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, err[-3000:]
    return lines[0]


def files_of(folder):
    """Path -> (time of change, content) of every file."""
    paths = sorted(p for p in Path(folder).rglob("*") if p.is_file())
    return {str(p.relative_to(folder)): (p.stat().st_mtime_ns, p.read_bytes()) for p in paths}


def differences(one, two):
    """What two run folders do not share of all that must not depend on interruptions."""
    found = [f"row {i}: {[k for k in a if a[k] != b.get(k)]}"
             for i, (a, b) in enumerate(zip(rows_of(one), rows_of(two), strict=False)) if a != b]  # fmt: skip
    found += [] if len(rows_of(one)) == len(rows_of(two)) else ["number of rows"]
    for name in ("last", "best"):
        (a, s), (b, t) = (common.load_checkpoint(f / "checkpoints" / name) for f in (one, two))
        found += [f"{name}: {k}" for k in a.keys() | b.keys() if not torch.equal(a.get(k, X), b.get(k, X))]
        clock = {"wall_s", "env_seconds", "tested"}
        steady = [{k: v for k, v in x["progress"].items() if k not in clock} for x in (s, t)]
        found += [f"{name}: progress"] if steady[0] != steady[1] else []
        found += [f"{name}: {k}" for k in ("numbers", "ring") if s[k] != t[k]]
    for name in ("episodes.jsonl", "preferences.jsonl", "decompositions.json"):
        a, b = (f / name for f in (one, two))
        found += [name] if a.exists() != b.exists() or (a.exists() and a.read_bytes() != b.read_bytes()) else []
    a, b = (json.loads((f / "summary.json").read_text()) for f in (one, two))
    return found + [k for k in ("env_steps", "episodes", "test", "rollbacks") if a[k] != b[k]]


X = torch.empty(0, 7)  # equal to no weight


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """No pictures (other tests draw them); the handler of Ctrl-C and the monitor thread of tqdm as they were."""
    monkeypatch.setattr(plots, "plot_runs", lambda folders: [])
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module", params=FILES)
def whole(request, tmp_path_factory):
    """An uninterrupted run of each algorithm, with what its model weighed at the start and when the warm-up was over."""
    name, kept = request.param, {}
    module = FILES[name]

    def copies(lm):
        return {k: p.detach().clone() for k, p in lm.peft.named_parameters()}

    class Watched(module.Learner):
        def __init__(self, argv):
            super().__init__(argv)
            kept.update(learner=self, start=copies(self.lm))

        def begin(self, *args):
            super().begin(*args)
            kept["warm"] = copies(self.lm)

    folder = tmp_path_factory.mktemp("whole") / name
    before = signal.getsignal(signal.SIGINT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "Learner", Watched)
        patch.setattr(plots, "plot_runs", lambda folders: [])
        code, out, err = run(name, *flags(name, folder))
    signal.signal(signal.SIGINT, before)
    assert code == 0, err[-3000:]
    end = copies(kept.pop("learner").lm)
    return SimpleNamespace(name=name, folder=folder, out=out, err=err, end=end, **kept)


# ------------------------------------------------------------------------------------------------------------ one run


def test_ratio_of_the_first_minibatch_is_one(whole):
    """At temperature 0.8, with truncated episodes and states of different lengths in a batch, fp32."""
    rows = [r for r in common.read_jsonl(whole.folder / "metrics.jsonl") if "policy/first_ratio_dev" in r]
    assert len(rows) >= 2 and json.loads((whole.folder / "config.json").read_text())["temperature"] == 0.8
    assert max(r["policy/first_ratio_dev"] for r in rows) < 1e-3
    assert max(r["policy/sampler_gap"] for r in rows) < 1e-3


def test_base_and_reference_never_move(whole):
    """Bit for bit over a whole run; the reference is the policy as the warm-up left it, and the policy went on."""
    base = [k for k in whole.start if "lora_" not in k]
    assert base and all(torch.equal(whole.start[k], whole.end[k]) for k in base)
    ref = [k for k in whole.start if "lora_" in k and ".ref." in k]
    assert ref and all(torch.equal(whole.warm[k], whole.end[k]) for k in ref)
    assert all(torch.equal(whole.warm[k], whole.warm[k.replace(".ref.", ".policy.")]) for k in ref)
    last = tensors_of(whole.folder)
    moved = [not torch.equal(last[f"ref.{k}"], last["policy.master." + k.replace(".ref.", ".policy.")]) for k in ref]
    assert any(moved)


def test_hostile_text_is_shown_escaped(whole):
    report = (whole.folder / "report.md").read_text()
    assert "&lt;script&gt;" in report or whole.name == "slea_rl"  # SLEA-RL's report shows no state of this environment
    assert "<script" not in report and "<img" not in report and "| [a]" not in report


def test_control_tokens_in_a_state_arrive_as_text(whole):
    """`<eos>` spelled in the page is no EOS: no state in the ring holds a control token."""
    state = common.load_checkpoint(whole.folder / "checkpoints" / "last")[1]
    ids = [i for rows in state["ring"] for row in rows for i in row["state"]]
    assert len(ids) > 100 and not {0, 1} & set(ids)


@pytest.mark.parametrize("whole", ["stepopsd"], indirect=True)
def test_same_seed_same_run(whole, tmp_path):
    assert run(whole.name, *flags(whole.name, tmp_path / "again"))[0] == 0
    assert differences(whole.folder, tmp_path / "again") == []


def test_resume_of_a_finished_run_says_so_and_changes_nothing(whole):
    before = files_of(whole.folder)
    code, out, _ = run(whole.name, "--resume", whole.folder)
    assert code == 0 and "this run is finished" in out and files_of(whole.folder) == before


def test_resume_with_another_value_is_refused_and_named(whole):
    before = files_of(whole.folder)
    for flag, value in (("seed", 4), ("gamma", 0.5), ("env", "gridworld"), ("policy_lr", 1e-5), ("lora_layers", "half")):
        code, _, err = run(whole.name, "--resume", whole.folder, f"--{flag}", value)
        assert code == 2 and f"--{flag} {value} differs from the run's" in error_line(err)
    assert run(whole.name, "--resume", whole.folder, "--seed", 3)[0] == 0  # the same value is no other
    assert files_of(whole.folder) == before


# ------------------------------------------------------------------------------------------------------------ SIGKILL


def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)


def dying(owner, attribute, call=1):
    """Install in a child: SIGKILL when `owner.attribute` is called for the call-th time."""

    def install():
        original, calls = getattr(owner, attribute), []

        def counted(*args, **kwargs):
            calls.append(1)
            if len(calls) == call:
                die()
            return original(*args, **kwargs)

        setattr(owner, attribute, counted)

    return install


def half_a_write(call):
    """SIGKILL when half of a checkpoint's tensors are on the disk."""

    def install():
        original, calls = safetensors.torch.save_file, []

        def save_file(tensors, path):
            calls.append(1)
            if len(calls) < call:
                return original(tensors, path)
            data = safetensors.torch.save(tensors)
            Path(path).write_bytes(data[: len(data) // 2])
            die()

        safetensors.torch.save_file = save_file

    return install


def between_the_renames(call):
    """SIGKILL when the old checkpoint has made room and the new one is not in its place yet."""

    def install():
        original, calls = os.replace, []

        def replace(source, target):
            calls.extend([1] if str(source).endswith("last.new") else [])
            if len(calls) == call:
                die()
            return original(source, target)

        os.replace = replace

    return install


MOMENTS = {  # in the order of a run: (what dies, stage of the last row logged)
    "threespo": [(half_a_write(1), "warmup"), (dying(threespo, "clone", 5), "warmup"), (half_a_write(1), "score"),
                 (dying(threespo.ScoreModel, "update", 2), "score"), (half_a_write(2), "score"),
                 (dying(threespo, "ppo_loss", 3), "score"), (between_the_renames(1), "3spo"),
                 (dying(common, "finish_run"), "3spo")],
    "stepopsd": [(half_a_write(1), "warmup"), (dying(stepopsd, "clone", 5), "warmup"), (half_a_write(2), "stepopsd"),
                 (dying(stepopsd.RewardModel, "fit"), "stepopsd"), (dying(stepopsd, "ppo_loss", 3), "stepopsd"),
                 (between_the_renames(1), "stepopsd"), (dying(common, "finish_run"), "stepopsd")],
    "slea_rl": [(half_a_write(1), "warmup"), (dying(slea_rl, "clone", 5), "warmup"), (half_a_write(2), "slea"),
                (dying(slea_rl.Critic, "update", 2), "slea"), (between_the_renames(1), "slea"),
                (dying(slea_rl, "ppo_loss", 3), "slea"), (dying(common, "finish_run"), "slea")],
}  # fmt: skip


def killed(name, argv, install):
    """A forked child that goes on with the run and dies of SIGKILL; nothing it had in memory is left."""
    pid = os.fork()
    if pid == 0:
        try:
            install()
            run(name, *argv)
        finally:
            os._exit(7)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA does not survive a fork: see tests/crash.py")
def test_killed_in_every_stage_and_inside_its_checkpoints_a_run_ends_the_same(whole, tmp_path):
    folder = tmp_path / "broken"
    argv = flags(whole.name, folder)
    for number, (install, stage) in enumerate(MOMENTS[whole.name]):
        assert killed(whole.name, argv, install), f"kill {number} came too late"
        assert common.read_jsonl(folder / "metrics.jsonl")[-1]["stage"] == stage, f"kill {number}"
        argv = ["--resume", folder]
    code, _, err = run(whole.name, *argv)
    assert code == 0, err[-3000:]
    assert differences(whole.folder, folder) == []
