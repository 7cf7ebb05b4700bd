"""Kill runs at random moments and resume them: python tests/crash.py [NAME ...] [--kills 50] [--seed 0]

NAME: threespo, stepopsd, slea_rl (left out: all three). A short run (tiny model, gridworld) is killed with SIGKILL at a
random moment, with a chance of one in three again while it resumes, then resumed to its end and compared with a run
that was never interrupted: every metric but the clock's, the test trajectories and all weights, bit for bit. Exits
with 1 if any differ; such a run folder is kept. Each run and each resumption is a process of its own, forked from one
that has imported everything and done nothing else, and pictures are not rendered: that is most of the time saved.
"""

import argparse
import importlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import matplotlib.figure  # noqa: E402
import peft  # noqa: E402, F401
import torch  # noqa: E402
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast  # noqa: E402, F401

import common  # noqa: E402
import plots  # noqa: E402, F401

FLAGS = """--env gridworld --model tiny --demos 40 --warmup_epochs 4 --total_env_steps 220 --episodes_per_iter 6
    --num_envs 6 --val_episodes 3 --eval_episodes 3 --lora_rank 8 --lora_layers 1 --eval_every 2
    --minibatch 16""".split()
MORE = {"threespo": "--score_episodes 4 --random_episodes 1 --score_epochs 2".split(),
        "stepopsd": "--pairs 12 --rm_ensemble 2 --rm_passes 1 --segment_len 2-4".split(), "slea_rl": []}  # fmt: skip


def run(name: str, argv: tuple[str, ...], log: Path):
    """The whole of a process: what `python NAME.py ARGV` does, its output in a file."""
    with open(log, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    matplotlib.figure.Figure.savefig = lambda figure, path, **options: Path(path).write_bytes(b"no picture")
    common.run_main(lambda: importlib.import_module(name).main(list(argv)))


def start(name: str, log: Path, *argv: str):
    process = multiprocessing.get_context("fork").Process(target=run, args=(name, argv, log))
    process.start()
    return process


def killed(process, seconds: float) -> bool:
    """Send SIGKILL after so long, if it still runs then."""
    process.join(seconds)
    process.kill()
    process.join()
    return process.exitcode == -signal.SIGKILL


def outcome(folder: Path) -> dict:
    """What must not depend on interruptions."""
    rows = common.read_jsonl(folder / "metrics.jsonl")
    rows = [{k: v for k, v in r.items() if not k.startswith(("perf/", "time/"))} for r in rows]
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    kept = {k: summary[k] for k in ("env_steps", "episodes", "test")}
    return dict(metrics=rows, episodes=common.read_jsonl(folder / "episodes.jsonl"), summary=kept)


def differences(a: Path, b: Path) -> list[str]:
    one, two = outcome(a), outcome(b)
    found = [key for key in one if one[key] != two[key]]
    for name in ("last", "best"):
        left, right = (common.load_checkpoint(f / "checkpoints" / name)[0] for f in (a, b))
        found += [f"{name}: {k}" for k in left if k not in right or not torch.equal(left[k], right[k])]
    return found


def interrupted(name: str, folder: Path, rng: random.Random, length: float) -> tuple[int, str]:
    """A run with one kill or more, resumed to its end; returns (kills, error text)."""
    fresh, log = (*FLAGS, *MORE[name], "--out", str(folder)), folder.with_suffix(".log")
    kills = int(killed(start(name, log, *fresh), rng.uniform(0.05, 1) * length))
    while kills and folder.exists() and rng.random() < 1 / 3:
        kills += killed(start(name, log, "--resume", str(folder)), rng.uniform(0.05, 1) * length)
    last = ("--resume", str(folder)) if folder.exists() else fresh  # killed before it had begun
    process = start(name, log, *last)
    process.join()
    return kills, f"exit {process.exitcode}: {log.read_text()[-300:]}" if process.exitcode else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(MORE), help="algorithms")
    parser.add_argument("--kills", type=int, default=50, help="interrupted runs an algorithm")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    work, bad, done = Path(tempfile.mkdtemp(prefix="crash-")), 0, 0
    for name in args.names:
        begun, reference = time.time(), work / f"{name}-reference"
        importlib.import_module(name)
        process = start(name, work / "log", *FLAGS, *MORE[name], "--out", str(reference))
        process.join()
        if process.exitcode:
            raise SystemExit(f"{name}: the uninterrupted run failed\n{(work / 'log').read_text()[-2000:]}")
        length, rng = time.time() - begun, random.Random(f"{name}/{args.seed}")
        print(f"{name}: an uninterrupted run takes {length:.0f} s", flush=True)
        for number in range(args.kills):
            folder = work / f"{name}-{number}"
            kills, error = interrupted(name, folder, rng, length)
            wrong = [error] if error else differences(reference, folder)
            bad, done = bad + bool(wrong), done + 1
            print(f"{name} {number}: {kills} kills, {'; '.join(wrong[:3]) if wrong else 'identical'}", flush=True)
            if not wrong:
                shutil.rmtree(folder)
    print(f"{done - bad} of {done} identical" + (f"; see {work}" if bad else ""))
    if not bad:
        shutil.rmtree(work)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
