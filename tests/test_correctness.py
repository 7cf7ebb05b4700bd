"""What must hold for all three algorithms: resume after SIGKILL in every stage, damage, broken environments, adapters,
non-finite numbers, secrets. Whole runs of the real main() in this process, on an environment of a few states."""

import contextlib
import gc
import io
import json
import math
import os
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import fuzz
import pytest
import safetensors
import torch
from conftest import rows_of, tensors_of
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


def tensor_bytes():
    """Bytes of all tensors that are alive in this process; shared memory counts once."""
    gc.collect()
    storages = [o.untyped_storage() for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


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
    """An uninterrupted run of each algorithm, with its weights at the start, behind the warm-up and at the end."""
    name, kept, held = request.param, {}, {}
    module, outside = FILES[name], tensor_bytes()

    def copies(lm):
        return {k: p.detach().clone() for k, p in lm.peft.named_parameters()}

    class Watched(module.Learner):
        def __init__(self, argv):
            super().__init__(argv)
            kept.update(learner=self, start=copies(self.lm))

        def begin(self, *args):
            super().begin(*args)
            kept["warm"] = copies(self.lm)

        def save(self, name="last"):
            super().save(name)
            if name == "last" and self.p.stage == self.args.algo:
                copied = sum(p.nbytes for copy in (kept["start"], kept.get("warm", {})) for p in copy.values())
                held[self.p.iteration] = tensor_bytes() - outside - copied
                if self.p.iteration == 1 and not half.exists():
                    shutil.copytree(folder, half)

    folder = tmp_path_factory.mktemp("whole") / name
    half = folder.with_name("half")  # what a run killed behind the checkpoint of its first iteration leaves
    before = signal.getsignal(signal.SIGINT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "Learner", Watched)
        patch.setattr(plots, "plot_runs", lambda folders: [])
        code, out, err = run(name, *flags(name, folder))
    signal.signal(signal.SIGINT, before)
    assert code == 0, err[-3000:]
    end = copies(kept.pop("learner").lm)
    return SimpleNamespace(name=name, folder=folder, half=half, end=end, held=held, **kept)


@pytest.fixture
def half(whole, tmp_path):
    """A copy of the run as it was after its first iteration."""
    return Path(shutil.copytree(whole.half, tmp_path / "half"))


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


def test_a_resumed_run_holds_no_more_tensors(whole, half, monkeypatch):
    """Weights, optimisers, ring and caches behind the same iteration, against the uninterrupted run."""
    module, held = FILES[whole.name], {}

    class Watched(module.Learner):
        def save(self, name="last"):
            super().save(name)
            if name == "last":
                held[self.p.iteration] = tensor_bytes() - outside

    monkeypatch.setattr(module, "Learner", Watched)
    outside = tensor_bytes()
    assert run(whole.name, "--resume", half)[0] == 0
    assert held and max(held) > 1 and min(held.values()) > 1e5, held
    assert all(held[i] <= 1.01 * whole.held[i] for i in held), (held, whole.held)


def test_resume_with_another_value_is_refused_and_named(whole):
    before = files_of(whole.folder)
    others = dict(seed=4, gamma=0.5, env="gridworld", policy_lr=1e-5, lora_layers="half")
    for flag, value in others.items():
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
        original, calls = safetensors.serialize_file, []

        def serialize_file(specs, path):
            calls.append(1)
            original(specs, path)
            if len(calls) == call:
                os.truncate(path, os.path.getsize(path) // 2)
                die()

        safetensors.serialize_file = serialize_file

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


# ---------------------------------------------------------------------------------------------------- damage and errors


def flip(path, place, bit=1):
    data = bytearray(path.read_bytes())
    data[place] ^= bit
    path.write_bytes(data)


def test_no_flipped_byte_of_a_checkpoint_is_loaded(tmp_path, capsys):
    """Every byte of both files in turn: the checkpoint before is loaded instead, never another number."""
    folder = tmp_path / "last"
    common.save_checkpoint(folder, {"w": torch.zeros(3)}, {"value": 17, "rows": [0.25]})
    common.save_checkpoint(folder, {"w": torch.ones(3)}, {"value": 18, "rows": [0.75]})
    for name in ("state.json", "tensors.safetensors"):
        for place in range((folder / name).stat().st_size):
            flip(folder / name, place)
            tensors, state = common.load_checkpoint(folder)
            right = (state["value"], state["rows"]) in ((17, [0.25]), (18, [0.75]))
            assert right and tensors["w"].tolist() == [float(state["value"] == 18)] * 3, (name, place)
            assert state["value"] == 17 or "state_sha256" not in (folder / name).read_text()  # the sum's own name
            flip(folder / name, place)
    assert common.load_checkpoint(folder)[1]["value"] == 18
    assert "going on from last.prev" in capsys.readouterr().err


def raising(error, call):
    """A stand-in for a function, which raises `error` when called for the call-th time and does nothing else then."""

    def wrap(original):
        calls = []

        def function(*args, **kwargs):
            calls.append(1)
            if len(calls) == call:
                raise error
            return original(*args, **kwargs)

        return function

    return wrap


FULL = SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")  # as it was seen
BROKEN = {  # what happens to the run: (owner, function, error, part of the message)
    "disk full in the tensors": (safetensors, "serialize_file", FULL, "No space left"),
    "disk full in state.json": (os, "fsync", OSError(28, "No space left on device"), "No space left"),
    "read-only folder": (os, "replace", PermissionError(13, "Permission denied"), "Permission denied"),
}


def test_full_disk_read_only_folder_and_a_damaged_checkpoint(whole, half, monkeypatch):
    """Each ends the run with one line and exit code 2; at last a byte is flipped, and still the end is the same."""
    before = common.load_checkpoint(half / "checkpoints" / "last")[1]
    for owner, name, error, part in BROKEN.values():
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, raising(error, 1)(getattr(owner, name)))
            code, _, err = run(whole.name, "--resume", half)
        assert code == 2 and part in error_line(err)
        assert common.load_checkpoint(half / "checkpoints" / "last")[1] == before
    tensors = half / "checkpoints" / "last" / "tensors.safetensors"
    flip(tensors, tensors.stat().st_size // 2)
    code, _, err = run(whole.name, "--resume", half)
    assert code == 0 and "the file is damaged; going on from last.prev" in err
    assert differences(whole.folder, half) == []


@pytest.mark.parametrize("whole", ["threespo"], indirect=True)
def test_a_disk_that_is_really_full(whole, tmp_path):
    """A small file system of its own, where the machine allows one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    size = sum(len(content) for _, content in files_of(whole.half).values())
    if os.system(f"mount -t tmpfs -o size={size + 200_000} tmpfs {disk} 2>/dev/null"):
        pytest.skip("no right to mount a file system")
    try:
        shutil.copytree(whole.half, disk / "run")
        code, _, err = run(whole.name, "--resume", disk / "run")
        assert code == 2 and "No space left on device" in error_line(err)
        shutil.copytree(disk / "run", tmp_path / "run")  # to where there is room
    finally:
        os.system(f"umount {disk}")
    assert run(whole.name, "--resume", tmp_path / "run")[0] == 0
    assert differences(whole.folder, tmp_path / "run") == []


@pytest.mark.parametrize("moment", ["log", "save"])
def test_a_run_folder_removed_under_the_run(whole, half, monkeypatch, moment):
    """Nothing is made anew in its place: half a run folder would look like a run."""
    owner = {"log": common.Run, "save": common.Checkpoints}[moment]
    original = getattr(owner, moment)

    def remove(self, *args):
        shutil.rmtree(half)
        return original(self, *args)

    monkeypatch.setattr(owner, moment, remove)
    code, _, err = run(whole.name, "--resume", half)
    assert code == 2 and f"{half} was removed" in error_line(err) and not half.exists()


def test_an_impossible_place_for_a_run_is_one_line(tmp_path):
    (tmp_path / "file").write_text("x")
    for folder in (tmp_path / "file" / "run", tmp_path / ("n" * 300)):
        code, _, err = run("threespo", *flags("threespo", folder))
        assert code == 2 and error_line(err)


def test_five_nonfinite_updates_stop_the_run_at_its_last_good_state(whole, half, monkeypatch):
    module = FILES[whole.name]
    good, original = tensors_of(half), module.ppo_loss
    monkeypatch.setattr(module, "ppo_loss", lambda *args: (original(*args)[0] * math.nan, original(*args)[1]))
    code, _, err = run(whole.name, "--resume", half)
    assert code == 1 and "5 non-finite updates in a row; the last checkpoint holds the last good state" in err
    assert error_line(err)
    now = tensors_of(half)
    assert all(torch.equal(now[k], good[k]) and torch.isfinite(now[k].float()).all() for k in good)
    monkeypatch.setattr(module, "ppo_loss", original)
    assert run(whole.name, "--resume", half)[0] == 0 and differences(whole.folder, half) == []


def test_one_nonfinite_update_is_skipped_and_counted(whole, half, monkeypatch):
    module, calls = FILES[whole.name], []
    original = module.ppo_loss

    def once(*args):
        calls.append(1)
        loss, sums = original(*args)
        return loss * (math.inf if len(calls) == 2 else 1.0), sums

    monkeypatch.setattr(module, "ppo_loss", once)
    code, _, err = run(whole.name, "--resume", half)
    assert code == 0, err[-3000:]
    skipped = [r["policy/skipped_steps"] for r in rows_of(half) if "policy/skipped_steps" in r]
    assert skipped[0] == 0 and set(skipped[1:]) == {1}
    assert all(torch.isfinite(v.float()).all() for v in tensors_of(half).values())


# ----------------------------------------------------------------------------------------------------- bad environments


class Rough(Corridor):
    """Misbehaves by task number (training); two of three evaluation tasks of a split fail, too."""

    WAYS = "good raise hang endless nan 1e30 megabytes surrogate tuple".split()
    max_steps = 10**9

    def reset(self, seed=None):
        self.way = self.WAYS[seed % len(self.WAYS)] if self.split == "train" else "raise" if seed % 3 else "surrogate"
        self.big = "<|im_end|> <eos> 页" * 500_000 if self.way == "megabytes" else "\ud800" * (self.way == "surrogate")
        return super().reset(seed)

    def text(self):
        return self.big + super().text()

    def step(self, text):
        if self.way == "raise":
            raise ConnectionError("the page is gone")
        if self.way == "hang":
            time.sleep(60)
        if self.way == "tuple":
            return "text alone", 0.0
        obs, reward, won, _, info = super().step(text)
        over = self.t >= {"megabytes": 1, "endless": 99}.get(self.way, 4)
        reward = {"nan": math.nan, "1e30": 1e30}.get(self.way, reward)
        return obs, reward, won and self.way != "endless", over, info


@pytest.mark.parametrize("name", FILES)
def test_whatever_an_environment_does_costs_its_episode_only(name, tmp_path, monkeypatch):
    monkeypatch.setattr(common, "STEP_SECONDS", 1.0)
    monkeypatch.setattr(common, "MAX_EPISODE_STEPS", 6)
    original = common.tiny_model

    def narrow(seed):  # 2,048 tokens of every long state take a minute
        model, tokenizer = original(seed)
        model.config.max_position_embeddings = 200
        return model, tokenizer

    monkeypatch.setattr(common, "tiny_model", narrow)
    alarm = signal.getsignal(signal.SIGALRM)
    more = "--demos 0 --total_env_steps 24 --episodes_per_iter 9 --num_envs 9 --target_kl 1e9".split()
    more += "--score_episodes 9 --random_episodes 0".split() if name == "threespo" else []
    begun = time.monotonic()
    code, out, err = run(name, *flags(name, tmp_path / "run", *more, env="Rough"))
    assert code == 0, err[-3000:]
    for cause in ("ConnectionError: the page is gone", "TimeoutError: no answer in 1 s", "no end after 6 steps",
                  "reward is nan", "reward is 1e+30", "ValueError: not enough values to unpack"):  # fmt: skip
        assert cause in err, cause
    rows = [r for r in common.read_jsonl(tmp_path / "run" / "metrics.jsonl") if "rollout/env_errors" in r]
    assert rows and {r["rollout/env_errors"] for r in rows} == {6}  # of nine tasks
    assert all(r["rollout/cut_frac"] > 0 for r in rows)
    groups = "train/", "policy/", "adv/", "score/"
    assert None not in [v for r in rows for k, v in r.items() if k.startswith(groups)]  # null: it was not finite
    assert all(torch.isfinite(v.float()).all() for v in tensors_of(tmp_path / "run").values())
    test = json.loads((tmp_path / "run" / "summary.json").read_text())["test"]
    assert test["episodes"] == 3  # the two that failed are failures, not left out
    assert signal.getsignal(signal.SIGALRM) == alarm and time.monotonic() - begun < 120


class Dead(Corridor):
    def step(self, text):
        raise ConnectionError("no network here")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("demos", ["20", "3", "0"])
def test_an_environment_that_never_works_stops_the_run_with_the_cause(name, demos, tmp_path):
    """Ten in a row; fewer demonstrations, none of which can be had; no demonstrations."""
    more = ["--demos", demos, "--val_episodes", "12"]
    code, _, err = run(name, *flags(name, tmp_path / "run", *more, env="Dead"))
    line = error_line(err)
    assert code == 2 and ("every one of 3 demonstrations" in line if demos == "3" else "no network here" in line)


def test_time_limit_wakes_a_sleeper_again_and_leaves_no_alarm():
    before = signal.getsignal(signal.SIGALRM)
    begun = time.monotonic()
    with pytest.raises(TimeoutError, match="no answer in 0.1 s"), common.time_limit(0.1):
        with contextlib.suppress(TimeoutError):
            time.sleep(30)  # swallowed once
        time.sleep(30)
    assert time.monotonic() - begun < 10 and signal.getsignal(signal.SIGALRM) == before
    with common.time_limit(0.05):
        pass
    time.sleep(0.1)  # nothing rings later
    assert signal.setitimer(signal.ITIMER_REAL, 0) == (0.0, 0.0)


def test_an_absurd_state_is_kept_in_part_and_read_the_same(tiny):
    text = "goal " + "x1 " * 40_000 + "last"
    short = common.bounded(text)
    assert len(short) == common.MAX_STATE_CHARS + len("\n...\n") < len(text)
    assert short.startswith("goal x1") and short.endswith("x1 last")
    assert tiny.encode_prompt(short, 5) == tiny.encode_prompt(text, 5)
    assert common.bounded("x" * common.MAX_STATE_CHARS) == "x" * common.MAX_STATE_CHARS


@pytest.mark.parametrize("name", fuzz.TARGETS)
def test_any_text_is_read_or_refused_in_bounded_time(name):
    fuzz.fuzz(name, cases=300)


# -------------------------------------------------------------------------------------------------------------- secrets


def test_the_teachers_key_is_in_no_file_of_a_run(tmp_path, monkeypatch):
    from test_stepopsd import Server, says

    key = "sk-7f3a-never-to-be-written"
    monkeypatch.setenv("TEACHER_API_KEY", key)
    with Server([], always=lambda body: says("ANSWER: A\nTURN: 1")) as server:
        more = ["--labeler", "llm", "--teacher_url", server.url, "--teacher_model", "judge", "--tie_margin", "0"]
        code, out, err = run("stepopsd", *flags("stepopsd", tmp_path / "run", *more))
    assert code == 0, err[-3000:]
    assert server.seen and {seen[1]["Authorization"] for seen in server.seen} == {f"Bearer {key}"}
    labels = common.read_jsonl(tmp_path / "run" / "preferences.jsonl")
    assert labels and {row["labeler"] for row in labels} == {"llm"}
    files = files_of(tmp_path / "run")
    assert len(files) >= 10 and [name for name, (_, content) in files.items() if key.encode() in content] == []
    assert key not in out + err


def test_labels_beyond_the_memory_are_forgotten_but_counted(tmp_path):
    """A long run's texts would fill the memory; the file keeps them, and a resumed run counts the same."""
    store = common.PreferenceStore(tmp_path / "p.jsonl")
    for i in range(7):
        store.add([(f"a{i}", "x")], [(f"b{i}", "y")], 1.0, None)
    train, held, fresh, logs = store.usable(4, since=5)
    assert len(train) + len(held) == 4 and [r["a"][0][0] for r in fresh] == ["a5", "a6"] and logs["pref/labels"] == 7
    assert len(store.rows) == len(store.keys) == 4 and store.count == 7
    store.add([("a7", "x")], [("b7", "y")], 0.0, None)
    assert store.holds([("a7", "x")], [("b7", "y")], since=7) and not store.holds([("a6", "x")], [("b6", "y")], since=7)
    assert store.holds([("a6", "x")], [("b6", "y")], since=6)
    assert [r["a"][0][0] for r in store.usable(4, since=7)[2]] == ["a7"]
    assert common.PreferenceStore(tmp_path / "p.jsonl").count == 8
