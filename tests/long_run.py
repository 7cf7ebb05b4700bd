"""Does a long run grow? python tests/long_run.py [NAME ...] [--iterations 2000] [--mb 24] [--share 0.5]

NAME: threespo, stepopsd, slea_rl (left out: all three). The real main() of each trains `tiny` on gridworld with very
few episodes an iteration and hardly any evaluation. At each tenth of the run are printed: resident memory in MB
(highest), Python objects the collector knows, and the median seconds an iteration, a line of the log and a checkpoint
take. Exits with 1 if the last tenth exceeds the second (the first one fills ring and caches) by more than --mb MB, by
5% of the objects, or, in log and checkpoint, by more than the share --share and 5 ms.
"""

import argparse
import gc
import importlib
import os
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import common  # noqa: E402

FLAGS = """--env gridworld --model tiny --demos 300 --episodes_per_iter 2 --num_envs 2
    --val_episodes 1 --eval_episodes 1 --lora_rank 8 --lora_layers 1 --minibatch 64 --total_env_steps 1000000000
    --eval_every 1000000 --policy_passes 0.3 --seed 1""".split()
MORE = {"threespo": "--score_episodes 5 --random_episodes 0 --score_epochs 1 --score_passes 0.2".split(),
        "stepopsd": "--pairs 4 --rm_ensemble 1 --rm_passes 0.2 --rm_memory 40 --segment_len 2-3".split(),
        "slea_rl": "--evaluator_passes 1".split()}  # fmt: skip


def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


class Gauge:
    """Wraps the log and the checkpoint of the run in this process; after `iterations` it asks the run to stop."""

    def __init__(self, name: str, iterations: int):
        self.name, self.size, self.tenths = name, max(1, iterations // 10), []
        self.left, self.begun, self.now = iterations, time.perf_counter(), []
        self.log, self.save = common.Checkpoints.log, common.Checkpoints.save

    def __enter__(self):
        gauge = self

        def log(learner, row, clock=None):
            begun = time.perf_counter()
            gauge.log(learner, row, clock)
            gauge.logged = time.perf_counter() - begun

        def save(learner, name="last"):
            begun = time.perf_counter()
            gauge.save(learner, name)
            if name == "last" and learner.p.stage == learner.args.algo and learner.p.iteration:
                gauge.tick(learner, time.perf_counter() - begun)

        common.Checkpoints.log, common.Checkpoints.save = log, save
        return self

    def __exit__(self, *_):
        common.Checkpoints.log, common.Checkpoints.save = self.log, self.save

    def tick(self, learner, saved: float):
        now = time.perf_counter()
        self.now.append((resident_mb(), now - self.begun, self.logged, saved))
        self.begun = now
        if len(self.now) == self.size and len(self.tenths) < 10:
            self.close()
        self.left -= 1
        if self.left <= 0:
            learner.stop.asked = True  # as Ctrl-C does

    def close(self):
        """The end of a tenth: one line, and nothing of it is kept but its numbers."""
        gc.collect()
        memory, *times = zip(*self.now, strict=True)
        row = (max(memory), len(gc.get_objects()), *map(statistics.median, times))
        self.tenths.append(row)
        self.now.clear()
        shown = f"{self.name} {10 * len(self.tenths):3d}%  {row[0]:7.1f} MB  {row[1]:7d} objects"
        shown += f"  iteration {row[2]:.3f} s  log {1e3 * row[3]:6.2f} ms  checkpoint {1e3 * row[4]:6.1f} ms"
        print("\n" + shown, file=sys.stderr, flush=True)  # on a line of its own, beside the bar
        self.begun = time.perf_counter()

    def growth(self, mb: float, share: float) -> list[str]:
        if len(self.tenths) < 10:
            return [f"the run ended after {len(self.tenths)} tenths"]
        (m, n, _, log, save), (memory, objects, _, log_end, save_end) = self.tenths[1], self.tenths[-1]
        found = [f"memory from {m:.0f} to {memory:.0f} MB"] if memory > m + mb else []
        found += [f"objects from {n} to {objects}"] if objects > 1.05 * n else []
        for what, a, b in (("log", log, log_end), ("checkpoint", save, save_end)):
            found += [f"{what} from {1e3 * a:.1f} to {1e3 * b:.1f} ms"] if b > (1 + share) * a + 0.005 else []
        return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(MORE), help="algorithms")
    parser.add_argument("--iterations", type=int, default=2000)
    parser.add_argument("--mb", type=float, default=24.0, help="growth of resident memory allowed")
    parser.add_argument("--share", type=float, default=0.5, help="growth of log and checkpoint time allowed")
    args, bad = parser.parse_args(), 0
    for name in args.names:
        module = importlib.import_module(name)
        with tempfile.TemporaryDirectory(prefix="long-") as folder, Gauge(name, args.iterations) as gauge:
            quiet, sys.stdout = sys.stdout, open(os.devnull, "w")
            try:
                module.main([*FLAGS, *MORE[name], "--out", str(Path(folder) / "run")])
            finally:
                sys.stdout.close()
                sys.stdout = quiet
        found = gauge.growth(args.mb, args.share)
        bad += bool(found)
        verdict = f"GREW: {'; '.join(found)}" if found else "flat"
        print(f"{name}: {args.iterations} iterations, {verdict}", flush=True)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
