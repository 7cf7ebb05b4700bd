"""Speed of the parts of a run: python tests/bench.py [--env webnav] [--model smollm2] [--episodes 24] [--demos 30]

Prints tokens a second for sampling (environment and decoding included), for the policy update and for the score, each
as a share of what the measured matrix-multiplication peak would allow, and the peak memory. The policy clones `--demos`
expert episodes first (that pass is the update measured), so that it samples as a run does.
"""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

import common
import threespo
from envs import make_env


def matmul_peak(dtype, device, size: int = 1024, seconds: float = 1.0) -> float:
    """GFLOP/s of square matrix products."""
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    a @ b
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        a @ b
        count += 1
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return 2 * size**3 * count / (time.perf_counter() - start) / 1e9


def matrix_weights(lm) -> tuple[int, int]:
    """Weights of the decoder's matrices: (all layers, the upper layers that carry adapters)."""
    kinds = "Linear", "Linear4bit"
    per_layer = [sum(m.in_features * m.out_features for name, m in layer.named_modules()
                     if type(m).__name__ in kinds and "lora_" not in name and not hasattr(m, "base_layer"))
                 for model in (lm.lower, lm.upper) for layer in model.layers]  # fmt: skip
    upper = len(lm.upper.layers)
    return sum(per_layer), sum(per_layer[len(per_layer) - upper :])


def update(learner, steps, minibatch: int) -> float:
    """Seconds of one cloning pass over the steps."""
    start = time.perf_counter()
    for first in range(0, len(steps), minibatch):
        threespo.clone(learner, steps[first : first + minibatch], first / len(steps))
    return time.perf_counter() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", default="webnav")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--episodes", type=int, default=24, help="episodes sampled")
    parser.add_argument("--demos", type=int, default=30, help="expert episodes cloned")
    given = parser.parse_args()
    args = threespo.Args(env=given.env, model=given.model, demos=given.demos, demo_noise=0.0)
    tiny = given.model == "tiny"
    lm = common.load_model(given.model, seed=1, adapters=("policy", "score", "ref"), load_4bit=not tiny,
                           lora_layers="all" if tiny else "half")  # fmt: skip
    env = make_env(given.env, seed=1, split="train")
    learner = argparse.Namespace(lm=lm, args=args, policy=common.Optimizer(lm.params("policy"), args.warmup_lr))
    peaks = {d: matmul_peak(d, lm.device) for d in (torch.bfloat16, torch.float32)}
    peak = peaks[lm.compute]
    demos = [threespo.Step(s, o["trunk"], o["ids"]) for s, o in common.demonstrations(lm, env, args)]
    useful = sum(len(s.trunk) for s in demos)
    padded = sum(len(rows) * max(len(demos[i].trunk) for i in rows)
                 for rows in common.token_batches([len(s.trunk) for s in demos], args.micro_tokens))  # fmt: skip
    update(learner, demos[: 2 * args.warmup_minibatch], args.warmup_minibatch)  # not measured: caches fill
    update_s = update(learner, demos, args.warmup_minibatch)
    start = time.perf_counter()
    episodes, stats, _ = threespo.rollout(lm, args, "train", range(given.episodes), temperature=0.8, key=("bench",))
    sample_s = time.perf_counter() - start
    steps = [s for e in episodes for s in e]
    sampled = sum(len(s.state) + len(s.action) for s in steps)
    scorer = threespo.ScoreModel(lm, env.return_bounds, args)
    start = time.perf_counter()
    scorer.score(steps)
    score_s, scored = time.perf_counter() - start, sum(len(s.state) for s in steps)
    whole, upper = matrix_weights(lm)
    rows = (("sampling (prompt + generated)", sampled, sample_s, 2 * whole),
            ("policy update, trunk known", useful, update_s, 4 * upper),
            ("score, trunk known", scored, score_s, 2 * upper))  # fmt: skip
    print(f"{lm.describe()['summary']}\nmatmul peak: bf16 {peaks[torch.bfloat16]:.0f}, "
          f"fp32 {peaks[torch.float32]:.0f} GFLOP/s; {torch.get_num_threads()} threads")  # fmt: skip
    print("| part | tokens | s | tokens/s | share of the matmul peak |\n|---|---|---|---|---|")
    for name, tokens, seconds, flops in rows:
        share = tokens * flops / seconds / 1e9 / peak
        print(f"| {name} | {tokens} | {seconds:.1f} | {tokens / seconds:.0f} | {100 * share:.0f}% |")
    print(f"environment: {stats['steps'] / sample_s:.1f} steps/s; padding in the update's attention: "
          f"{100 * (padded / useful - 1):.0f}%; {common.peak_memory()}")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
