"""Speed of the parts of a run: python tests/bench.py [--env webnav] [--model smollm2] [--episodes 24] [--demos 30]

Prints tokens a second for sampling (environment and decoding included), for the policy update and for the score, each
as a share of what the measured rate of 1024 x 1024 matrix products would allow, the seconds of one iteration by phase,
and the peak memory. The policy clones `--demos` expert episodes first (that pass is the update measured), so that it
samples as a run does. `--profile` (on a CPU) then says which kinds of work the seconds of each part go to.

`--vs_trl` compares with GRPOTrainer of TRL (pip install -c requirements.txt trl==1.16.0) instead: both sample groups of
completions of the same length for the same states, take log-probs under the policy before the update and under the
reference, and make two updates of 96 completions each (drawn with replacement here, in order there); same 4-bit base,
compute dtype and LoRA shapes. Each has a process of its own; the first round, in which caches fill, is not counted.
`--trl_rows` completions go through TRL's model at once.
"""

import argparse
import importlib.util
import multiprocessing
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
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


def iteration(learner, scorer, steps, sample_s: float, score_s: float) -> dict[str, float]:
    """Seconds of an iteration's phases on the steps just sampled (in `sample_s`) and scored (in `score_s`)."""
    lm, args, clock = learner.lm, learner.args, common.Stopwatch()
    lm.copy_adapter("policy", "ref")
    for step in steps:
        step.version = 1
    common.fill_logprobs(threespo.token_logprobs, lm, steps, args, logp="policy", ref_logp="ref")
    clock.lap("log-probs")
    threespo.fill_values(scorer, steps)
    threespo.fill_advantages(steps, args)
    scorer.fit_head(steps)
    clock.lap("score")
    replay = threespo.Replay(args)
    replay.add(steps)
    threespo.update_policy(lm, learner.policy, replay, 1, args, 0.0, False)
    clock.lap("policy")
    return {"collect": sample_s, **clock.laps, "score": clock.laps["score"] + score_s}


KINDS = {"matrix products": {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"},
         "copies and gathers": {"aten::copy_", "aten::cat", "aten::index_select", "aten::index", "aten::index_copy_",
                                "aten::fill_", "aten::clone", "aten::gather"}}  # fmt: skip


def profile(name: str, work):
    """Print a row of a table: the seconds of work() and the share of each kind of operator in them.

    Elementwise: all other operators (norms, rotation, activation, softmax, sampling) and their dispatch. Outside:
    Python between the operators, environments, tokenizer, and what the profiler itself takes.
    """
    start = time.perf_counter()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        work()
        wall = time.perf_counter() - start
    seconds = dict.fromkeys([*KINDS, "elementwise"], 0.0)
    for event in found.key_averages():
        kind = next((k for k, names in KINDS.items() if event.key in names), "elementwise")
        seconds[kind] += event.self_cpu_time_total / 1e6
    seconds["outside"] = wall - sum(seconds.values())
    print("| " + " | ".join([name, f"{wall:.1f}", *(f"{100 * s / wall:.0f}%" for s in seconds.values())]) + " |")


def profiles(learner, scorer, steps):
    """The parts of an iteration on a dozen episodes and on the steps given, under the profiler."""
    lm, args = learner.lm, learner.args
    print("| profile | s | " + " | ".join([*KINDS, "elementwise", "outside"]) + " |\n|---|---|---|---|---|---|")
    profile("sampling", lambda: threespo.rollout(lm, args, "train", range(12), temperature=0.8, key=("profile",)))
    profile("log-probs", lambda: common.fill_logprobs(threespo.token_logprobs, lm, steps, args, logp="policy"))
    for step in steps:
        step.feature_at = -1  # not kept from before
    profile("score", lambda: scorer.score(steps))
    replay = threespo.Replay(args)
    replay.add(steps)
    profile("update", lambda: threespo.update_policy(lm, learner.policy, replay, 1, args, 0.0, False))


# ------------------------------------------------------------------------------------------------- the same job in TRL
MINIBATCH = 96  # completions an update; two updates a round


def overlap(text: str, goal: str) -> float:
    """A reward that both can compute: the share of the goal's words that the completion holds."""
    return len(set(text.split()) & set(goal.split())) / max(len(set(goal.split())), 1)


def make_job(given) -> dict:
    """The states of expert episodes, as text, and the expert's action in each, in one list for each round."""
    env, states = common.training_env(make_env, threespo.Args(env=given.env)), []
    rounds, size = given.rounds + 1, 2 * MINIBATCH // given.group
    while len(states) < rounds * size:
        obs, _ = env.reset()
        over = False
        while not over:
            states.append((obs, env.expert()))
            obs, _, terminated, truncated, _ = env.step(states[-1][1])
            over = terminated or truncated
    names = "model", "group", "completion", "trl_rows", "trl_attention"
    rounds = [states[i * size : (i + 1) * size] for i in range(rounds)]
    return {**{name: getattr(given, name) for name in names}, "rounds": rounds}


def ours(job: dict) -> dict:
    lm = common.load_model(job["model"], seed=1, adapters=("policy", "ref"))
    lm.eos_ids = set()  # every completion has the full length
    args = threespo.Args(minibatch=MINIBATCH, policy_passes=1.0, priority_alpha=0.0, target_kl=1e9)
    optimizer = common.Optimizer(lm.params("policy"), 1e-5, warmup=1)
    noise, laps = torch.Generator(lm.device).manual_seed(1), []
    for version, states in enumerate(job["rounds"]):
        start, steps = time.perf_counter(), []
        asked = [(lm.encode(obs), goal) for obs, goal in states for _ in range(job["group"])]
        for first in range(0, len(asked), args.num_envs):
            part = asked[first : first + args.num_envs]
            outs = lm.generate([ids for ids, _ in part], job["completion"], 1.0, noise)
            for (ids, goal), out in zip(part, outs, strict=True):
                steps.append(threespo.Step(ids, out["trunk"], out["ids"], overlap(lm.decode(out["ids"]), goal),
                                           terminated=True, version=version))  # fmt: skip
        rewards = np.array([s.reward for s in steps]).reshape(len(states), -1)  # (states, group)
        advantages = (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, keepdims=True) + 1e-4)
        for step, advantage in zip(steps, advantages.ravel(), strict=True):
            step.advantage = float(advantage)
        common.fill_logprobs(threespo.token_logprobs, lm, steps, args, logp="policy", ref_logp="ref")
        replay = threespo.Replay(args)
        replay.add(steps)
        threespo.update_policy(lm, optimizer, replay, version, args, 0.0, False)
        laps.append((time.perf_counter() - start, sum(len(s.state) + len(s.action) for s in steps)))
    return {"laps": laps, **common.peak_memory()}


def trl(job: dict) -> dict:
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    path = common.smollm2_path() if job["model"] == "smollm2" else job["model"]
    tokenizer = AutoTokenizer.from_pretrained(path)
    quant = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
                               bnb_4bit_compute_dtype=torch.bfloat16)  # fmt: skip
    cpu = not torch.cuda.is_available()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, quantization_config=quant,
                                                 attn_implementation=job["trl_attention"],
                                                 device_map={"": "cpu" if cpu else "cuda"})  # fmt: skip
    if cpu:
        common._fix_4bit_on_cpu(model, torch.bfloat16, dense_cache=False)  # else its gradients are garbage
    layers = model.config.num_hidden_layers
    lora = LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules=common.LORA_TARGETS,
                      layers_to_transform=list(range(layers // 2, layers)))  # fmt: skip
    states, passes = [row for states in job["rounds"] for row in states], MINIBATCH // job["trl_rows"]
    lengths, marks = [], []

    def reward(prompts, completions, goal, completion_ids, **_):
        lengths.append(sum(len(tokenizer(p).input_ids) + len(c) for p, c in zip(prompts, completion_ids, strict=True)))
        return [overlap(text, words) for text, words in zip(completions, goal, strict=True)]

    class Clock(TrainerCallback):
        def on_train_begin(self, *_, **__):
            marks.append(time.perf_counter())

        def on_step_end(self, *_, **__):
            marks.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder, per_device_train_batch_size=job["trl_rows"], num_generations=job["group"],
            gradient_accumulation_steps=passes, steps_per_generation=2 * passes,
            max_completion_length=job["completion"], generation_kwargs={"min_new_tokens": job["completion"]},
            temperature=1.0, beta=0.01, learning_rate=1e-5, max_steps=2 * len(job["rounds"]), bf16=True, use_cpu=cpu,
            gradient_checkpointing=False, shuffle_dataset=False, save_strategy="no", report_to="none",
            logging_strategy="no", disable_tqdm=True, seed=1,
        )  # fmt: skip
        data = Dataset.from_dict({"prompt": [obs for obs, _ in states], "goal": [goal for _, goal in states]})
        trainer = GRPOTrainer(model, reward, args=config, train_dataset=data, processing_class=tokenizer,
                              peft_config=lora, callbacks=[Clock()])  # fmt: skip
        trainer.train()
    rounds = [marks[2 * i + 2] - marks[2 * i] for i in range(len(job["rounds"]))]
    return {"laps": list(zip(rounds, lengths, strict=True)), **common.peak_memory()}


def compare(given) -> int:
    job, rates = make_job(given), []
    print("| who | completions | prompt + completion tokens | s a round | tokens/s | peak MB |")
    print("|---|---|---|---|---|---|", flush=True)
    for contestant in (ours, trl):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            found = pool.apply(contestant, (job,))
        seconds, tokens = np.array(found["laps"][1:]).T  # (rounds,) each
        rates.append(tokens.sum() / seconds.sum())
        print(f"| {contestant.__name__} | {2 * MINIBATCH} x {len(seconds)} | {tokens.sum():.0f} "
              f"| {', '.join(f'{s:.1f}' for s in seconds)} | {rates[-1]:.0f} "
              f"| {found['peak_rss_mb']:.0f} |", flush=True)  # fmt: skip
    print(f"groups of {given.group}, {given.completion} tokens a completion, {torch.get_num_threads()} threads; "
          f"TRL with {given.trl_rows} rows a pass, {given.trl_attention} attention")  # fmt: skip
    print(f"ratio: {rates[0] / rates[1]:.2f}")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", default="webnav")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--episodes", type=int, default=24, help="episodes sampled")
    parser.add_argument("--demos", type=int, default=30, help="expert episodes cloned")
    parser.add_argument("--profile", action="store_true", help="also say which kinds of work the time goes to")
    parser.add_argument("--vs_trl", action="store_true", help="compare with TRL's GRPOTrainer and stop")
    parser.add_argument("--group", type=int, default=8, help="completions of a state, against TRL")
    parser.add_argument("--completion", type=int, default=8, help="tokens of a completion, against TRL")
    parser.add_argument("--rounds", type=int, default=3, help="rounds measured, against TRL")
    parser.add_argument("--trl_rows", type=int, default=16, help="rows of a pass in TRL (96 must be a multiple)")
    parser.add_argument("--trl_attention", choices=["eager", "sdpa"], default="eager", help="kind of attention in TRL")
    given = parser.parse_args()
    sizes = "episodes", "demos", "group", "completion", "rounds", "trl_rows"
    if min(getattr(given, name) for name in sizes) < 1:
        parser.error(f"{', '.join(sizes)} are at least 1")
    if given.vs_trl:
        if importlib.util.find_spec("trl") is None:
            parser.error("--vs_trl needs TRL: pip install -c requirements.txt trl==1.16.0")
        if MINIBATCH % given.trl_rows or 2 * MINIBATCH % given.group or given.model in ("tiny", "auto"):
            parser.error("--trl_rows must divide 96, --group 192, and --model be smollm2, a hub id or a path")
        return compare(given)
    args = threespo.Args(env=given.env, model=given.model, demos=given.demos, demo_noise=0.0)
    env, tiny = common.training_env(make_env, args), given.model == "tiny"
    lm = common.load_model(given.model, seed=1, adapters=("policy", "score", "ref"), load_4bit=not tiny,
                           lora_layers="all" if tiny else "half")  # fmt: skip
    learner = argparse.Namespace(lm=lm, args=args, policy=common.Optimizer(lm.params("policy"), args.warmup_lr))
    peaks = {d: matmul_peak(d, lm.device) for d in (torch.bfloat16, torch.float32)}
    peak = peaks[lm.compute]
    demos = [threespo.Step(s, o["trunk"], o["ids"]) for s, o in common.demonstrations(lm, env, args)]
    useful = sum(len(s.trunk) for s in demos)
    padded = sum(len(rows) * max(len(demos[i].trunk) for i in rows)
                 for rows in common.token_batches([s.inputs for s in demos], args.micro_tokens))  # fmt: skip
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
    phases = iteration(learner, scorer, steps, sample_s, score_s)
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
    scale = args.episodes_per_iter / given.episodes
    print(f"an iteration of {args.episodes_per_iter} episodes, from {given.episodes}: "
          + ", ".join(f"{name} {seconds * scale:.0f} s" for name, seconds in phases.items()))  # fmt: skip
    if given.profile:
        profiles(learner, scorer, steps[:96])
    return 0


if __name__ == "__main__":
    common.run_main(main)
