"""3SPO: State-Score-Supervised Policy Optimization for LLM agents, in one file.

Learn to score states, then move the policy toward states that score higher.
Source: the article "3SPO" (sections 2-5); numbers below are used at the functions.

(1) score       S(s) = Σ_k p_k(s) z_k          categorical over K atoms z in [-1, 1], read at the state's last token
(2) target      Ĝ = affine(G) in [-1, 1],      G_t = Σ_k γ^k r_{t+k};  V(s) = S mapped back to return units
(3) score loss  w (S - Ĝ)² - β_H H(p)          (or the histogram cross-entropy, --score_loss hlgauss)
(4) advantage   δ_t = r_t + γ V(s_{t+1}) - V(s_t),  A_t = Σ_l (γλ)^l δ_{t+l}
                λ = 0 is the pure score difference "move to higher-scored states", λ = 1 is the article's G_t - V(s_t)
(5) policy      -min(ρ A, clip(ρ, 1-ε, 1+ε) A) + kl_coef k3(π || π_ref) - ent_coef H,  mean over action tokens
(6) replay      P(i) ~ (|δ_i| + ε)^α,  importance weight (N P_i)^-β / max

Stages: warmup (clone a few demonstrations) -> score (fit S on the warmed policy's and random episodes) -> 3spo (repeat:
collect, update score, recompute V and A of the whole replay ring, update policy). --algo ppo is the same file without
score pre-training and replay; --algo bc stops after the warm-up.
Differs from the article: S reads the last token (its sketch reads token 0, which in a causal model has seen nothing);
GAE, replay of whole iterations and PPO-clip are on from the start; episodes are collected in lockstep, not async.

    python threespo.py --env gridworld --model tiny     # minutes on 2 CPU cores; the README has the measured results

Environment protocol (swap the one import to use your own): env.reset(seed=task) -> obs, info; env.step(text) -> obs,
reward, terminated, truncated, info; obs is the prompt; info["success"], info["valid"], info["cut"] are bools;
env.expert() gives a demonstration's action text; env.legal_actions() some legal action texts; env.return_bounds is
(lo, hi); env.max_action_tokens. Shapes: B steps of a batch, T tokens of a state, D hidden size, n action tokens of a
step, N all action tokens, V vocabulary, K atoms.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from tqdm import tqdm

import common
from common import LM, RL_FLOOR, Optimizer, rng_for, token_batches, torch_rng_for
from envs import make_env


@dataclass
class Args:
    env: str = "webnav"  # task: see `python envs.py`
    model: str = "auto"  # auto (CUDA: Qwen2.5-0.5B-Instruct, else smollm2), smollm2, tiny, a hub id or a local path
    seed: int = 1  # seeds weights, tasks, sampling and minibatches
    out: str = ""  # run folder (empty: runs/<algo>__<env>__<model>__s<seed>__<time>)
    resume: str = ""  # continue the run in this folder with the flags it was started with
    eval_only: str = ""  # evaluate the best checkpoint of this run folder on the test tasks and stop
    algo: Literal["3spo", "ppo", "bc"] = "3spo"  # ppo: no score pre-training, no replay; bc: stop after the warm-up
    preset: Literal["default", "quick"] = "default"  # quick: every stage with small numbers, to see the machinery
    total_env_steps: int = 3700  # environment steps of the stages score and 3spo together
    num_envs: int = 50  # environments stepped together
    eval_every: int = 2  # iterations between evaluations on validation tasks
    eval_episodes: int = 100  # held-out test tasks after each stage
    val_episodes: int = 48  # validation tasks (rollback and choice of the best checkpoint)
    load_4bit: bool = True  # NF4 4-bit base (product default; off for tiny unless given)
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"  # compute dtype (auto: bfloat16 where fast; tiny float32)
    lora_rank: int = 16  # rank of each adapter
    lora_layers: str = "half"  # adapted layers, from the top: half, all or a number (the rest is computed once a state)
    gradient_checkpointing: bool | None = None  # recompute activations: less memory, slower (None: by a GPU's memory)
    device: str = "auto"  # auto, cpu, cuda or cuda:N
    track: Literal["none", "tensorboard", "wandb", "trackio"] = "none"  # optional tracker beside metrics.jsonl
    overwrite: bool = False  # replace an existing run folder
    micro_tokens: int = 768  # tokens a forward pass, common prefixes once (memory; in bf16 it changes the rounding)
    demos: int = 40  # expert episodes cloned in the warm-up (4.2 A)
    demo_noise: float = 0.15  # chance that another action is carried out than the one demonstrated
    warmup_epochs: int = 3  # passes over the demonstrations
    warmup_lr: float = 2e-3  # learning rate of cloning (its own cosine)
    warmup_minibatch: int = 12  # steps a cloning update (small: the number of updates matters more than their noise)
    score_episodes: int = 96  # episodes of the warmed policy that pre-train the score (4.2 B)
    random_episodes: int = 10  # episodes of random legal actions beside them
    score_minibatch: int = 16  # steps a score update
    score_epochs: int = 0  # most adapter passes of score pre-training; stops when the held-out error rises
    score_lr: float = 3e-4  # learning rate of the score adapter and head (4.3)
    head_l2: float = 500.0  # weight decay, over the number of steps, of the head's full-batch fit; 0: no such fit
    scorer: Literal["model", "prompt"] = "model"  # prompt: zero-shot rating by the base model, for comparison (3.2)
    score_loss: Literal["mse", "hlgauss"] = "mse"  # squared error of the mean, or histogram cross-entropy
    score_entropy: float = 0.003  # β_H of (3), against over-confident scores (4.3)
    score_passes: float = 0.0  # adapter updates of the score an iteration, in units of the fresh steps (0: head alone)
    gamma: float = 0.95  # discount (4.3)
    gae_lambda: float = 0.5  # λ of (4): 0 score difference, 1 return minus score
    adv_clip: float = 1.0  # advantages are normalised, then clipped to this (4.3)
    neg_scale: float = 0.5  # negative ones are then multiplied by this: many failed steps must not drown the good ones
    episodes_per_iter: int = 128  # episodes collected an iteration
    policy_lr: float = 4e-4  # learning rate of the policy adapter in stage 3spo
    policy_passes: float = 1.5  # policy updates an iteration, in units of the fresh steps
    minibatch: int = 96  # steps a policy update (few and large: the gradient of so few episodes is mostly noise)
    clip_eps: float = 0.2  # ε of (5)
    kl_coef: float = 0.01  # weight of k3(π || π_ref)
    ent_coef: float = 0.001  # weight of the entropy bonus
    target_kl: float = 0.1  # stop the epoch, without taking the step, above this approx KL(π_old || π)
    temperature: float = 1.0  # sampling temperature while training; log-probs are taken at it
    replay_iters: int = 2  # iterations kept in the ring (4.1)
    priority_alpha: float = 0.6  # α of (6)
    priority_beta: float = 0.4  # β of (6) at the start; grows to 1
    rollback_drop: float = 0.1  # validation success this far below the best, twice running, restores the best


TUNED = {  # defaults that depend on another flag; a flag given by hand always wins
    ("preset", "quick"): dict(total_env_steps=350, demos=24, warmup_epochs=3, score_episodes=16, random_episodes=8,
                              episodes_per_iter=16, num_envs=24, val_episodes=8, eval_episodes=24),
    ("model", "tiny"): dict(load_4bit=False, lora_rank=64, lora_layers="all", warmup_lr=2e-3, score_lr=1e-3,
                            score_passes=0.7, policy_lr=2e-4, micro_tokens=8192),
    ("env", "gridworld"): dict(demos=450, warmup_minibatch=32, total_env_steps=6000, minibatch=64,
                               score_episodes=150, random_episodes=60, episodes_per_iter=80, num_envs=100, gamma=0.9,
                               score_minibatch=32, score_epochs=4, policy_passes=3.0, temperature=0.8),
    ("env", "miniwob/*"): dict(num_envs=12, total_env_steps=900, score_episodes=48, episodes_per_iter=64,
                               val_episodes=32, eval_episodes=60),  # a browser for each environment
    ("algo", "ppo"): dict(replay_iters=1, score_episodes=0, random_episodes=0, score_epochs=0, score_passes=0.7,
                          head_l2=0.0),
}  # fmt: skip


# -------------------------------------------------------------------------------------------------- the idea: the score
class ScoreModel:
    """S_φ(s): adapter `score` on the shared base and a linear head over K atoms, equations (1)-(3) (article 3.2).

    `bounds` are the environment's (lowest, highest) return: V(s) = lo + (S + 1)/2 (hi - lo).
    """

    K = 21

    def __init__(self, lm: LM, bounds, args):
        self.lm, self.args, (self.low, self.high) = lm, args, bounds
        self.atoms = torch.linspace(-1, 1, self.K, device=lm.device)  # (K,)
        self.head = torch.nn.Linear(lm.hidden_size, self.K, device=lm.device)
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)
        params = {**lm.params("score"), "head.weight": self.head.weight, "head.bias": self.head.bias}
        self.optimizer = Optimizer(params, args.score_lr, weight_decay=0.01)

    def to_score(self, returns):
        """G in return units -> Ĝ in [-1, 1], equation (2)."""
        return (2 * (returns - self.low) / (self.high - self.low) - 1).clip(-1, 1)

    def to_value(self, scores):
        """S in [-1, 1] -> V in return units."""
        return self.low + (scores + 1) / 2 * (self.high - self.low)

    def distribution(self, steps) -> torch.Tensor:
        """Log-probabilities over the atoms (B, K), read at the last token of each of B states; no action token is read.

        Call with adapter `score` active.
        """
        return self.head(common.last_hidden(self.lm, steps).float()).log_softmax(-1)  # (B, K)

    def features(self, steps) -> torch.Tensor:
        """The head's inputs (B, D), kept in the steps until the adapter is updated."""
        return common.stored_features(self.lm, "score", steps, self.optimizer.steps, self.args.micro_tokens)

    @torch.no_grad()
    def score(self, steps) -> np.ndarray:
        """S of the states of any number of steps -> (B,)."""
        return (self.head(self.features(steps)).softmax(-1) @ self.atoms).cpu().numpy()

    def fit_head(self, steps):
        """Fit the head to `step.ret` of all steps at once: L-BFGS on (3) + head_l2/B ||W||², features of unit σ.

        Minibatches left the mean of S swinging by a tenth of its range; a full batch of stored features takes a second.
        """
        if not self.args.head_l2:
            return
        x = self.features(steps)  # (B, D)
        targets = self.to_score(np.array([s.ret for s in steps]))  # (B,)
        targets = torch.as_tensor(targets, dtype=torch.float32, device=self.lm.device)
        sigma, ones = x.std(0, correction=0).clamp(min=1e-3), torch.ones_like(targets)  # (D,), (B,)
        weight, bias = self.head.weight.detach() * sigma, self.head.bias.detach().clone()  # (K, D), (K,)
        solver = torch.optim.LBFGS([weight.requires_grad_(), bias.requires_grad_()], max_iter=60,
                                   line_search_fn="strong_wolfe")  # fmt: skip

        def closure():
            solver.zero_grad()
            log_probs = (x / sigma @ weight.T + bias).log_softmax(-1)  # (B, K)
            loss = self.loss(log_probs, targets, ones) + self.args.head_l2 * weight.square().sum()
            loss = loss / len(steps)  # mean over the steps
            loss.backward()
            return loss

        solver.step(closure)
        with torch.no_grad():
            self.head.weight.copy_(weight / sigma)
            self.head.bias.copy_(bias)
        self.optimizer.adopt()

    def loss(self, log_probs, targets, weights) -> torch.Tensor:
        """Equation (3), summed over the batch: squared error of the mean (or histogram cross-entropy) and entropy term.

        log_probs (B, K), targets Ĝ (B,), weights w (B,) importance weights of prioritised replay.
        """
        probs = log_probs.exp()
        if self.args.score_loss == "hlgauss":  # mass of N(Ĝ, σ²) in each bin, σ = 0.75 bin widths
            width = 2 / (self.K - 1)
            edges = torch.linspace(-1 - width / 2, 1 + width / 2, self.K + 1, device=targets.device)  # (K+1,)
            cdf = 0.5 * (1 + torch.erf((edges[None] - targets[:, None]) / (0.75 * width * math.sqrt(2))))  # (B, K+1)
            mass = cdf.diff(dim=-1)
            error = -(mass / mass.sum(-1, keepdim=True) * log_probs).sum(-1)  # (B,)
        else:
            error = (probs @ self.atoms - targets) ** 2  # (B,)
        entropy = -(probs * log_probs).sum(-1)  # (B,) subtracting it keeps the distribution from collapsing
        return (weights * (error - self.args.score_entropy * entropy)).sum()

    def update(self, steps, weights, progress) -> float:
        """One optimiser step on a minibatch of steps with targets in `step.ret`; returns the mean loss."""
        weights = torch.as_tensor(weights, dtype=torch.float32, device=self.lm.device)
        targets = self.to_score(np.array([s.ret for s in steps]))  # (B,)
        targets = torch.as_tensor(targets, dtype=torch.float32, device=self.lm.device)
        total = 0.0
        with self.lm.adapter("score"):
            for rows in token_batches([s.state for s in steps], self.args.micro_tokens):
                log_probs = self.distribution([steps[i] for i in rows])
                loss = self.loss(log_probs, targets[rows], weights[rows]) / len(steps)  # mean over the minibatch
                loss.backward()
                total += loss.detach()
            self.optimizer.step(progress)
        return float(total)


class PromptScorer:
    """The article's zero-shot alternative (3.2, plan 2): the base model rates the state 0-9, mean over the digits."""

    QUESTION = "\nHow close is this state to reaching the goal? Rating from 0 (hopeless) to 9 (reached):"

    def __init__(self, lm: LM, bounds, args):
        self.lm, self.args, (self.low, self.high) = lm, args, bounds
        self.digits = [lm.encode(f" {d}")[-1] for d in range(10)]
        self.optimizer = None

    to_score, to_value = ScoreModel.to_score, ScoreModel.to_value

    @torch.no_grad()
    def score(self, steps) -> np.ndarray:
        """One forward pass with the adapters off; nothing is generated, nothing parsed -> (B,)."""
        suffix = self.lm.encode(self.QUESTION)
        if len(self.lm.encode(" 1")) > 1:  # the space is a token of its own: it stands before the digit
            suffix = self.lm.encode(self.QUESTION + " ")[:-1]
        prompts = [s.state + suffix for s in steps]
        asked = list(map(Step, prompts, self.lm.trunk(prompts, self.args.micro_tokens)))
        out = np.zeros(len(steps))
        with self.lm.adapter(None):
            for rows in token_batches([s.state for s in asked], self.args.micro_tokens):
                features = common.last_hidden(self.lm, [asked[i] for i in rows])  # (b, D)
                probs = self.lm.logits(features)[:, self.digits].softmax(-1)  # (b, 10)
                rating = probs @ torch.arange(10.0, device=probs.device)  # (b,) 0..9
                out[rows] = (rating / 4.5 - 1).cpu().numpy()
        return out


def fill_values(scorer, steps):
    """Write V(s_t), and V of the state a truncated episode ended in, into the steps."""
    for step, score in zip(steps, scorer.score(steps), strict=True):
        step.value = float(scorer.to_value(score))
    cut = [s for s in steps if s.truncated]
    ends = [Step(state=s.final_state, trunk=s.final_trunk) for s in cut]
    for step, score in zip(cut, scorer.score(ends), strict=True):
        step.final_value = float(scorer.to_value(score))


# ------------------------------------------------------------------------------------------------------ token log-probs
def token_logprobs(lm: LM, steps, temperature: float, with_entropy: bool = False):
    """Log-probability of every action token under the active adapter (N,), step after step; entropy (N,) or None.

    The logits at position T_i - 1 + j predict action token j of step i (T_i state tokens); only those positions go
    through the output matrix, gathered to a contiguous (N, D) first. Log-probs are at the sampling temperature.
    """
    hidden, rows = lm.top([s.inputs for s in steps], [s.trunk for s in steps])  # (N, D), of each step (T_i + n_i - 1,)
    places = np.concatenate([own[len(s.state) - 1 :] for own, s in zip(rows, steps, strict=True)])

    def of_rows(hidden, actions):  # (n, D), (n,)
        log_probs = lm.logits(hidden, temperature).log_softmax(-1)  # (n, V)
        entropy = -(log_probs.exp() * log_probs).sum(-1) if with_entropy else None  # (n,) over the vocabulary
        return log_probs.gather(1, actions[:, None])[:, 0], entropy

    return lm.in_chunks(of_rows, hidden, places, [a for s in steps for a in s.action])


# ------------------------------------------------------------------------------------------------- steps, ring, rollout
@dataclass
class Step(common.Transition):
    """One decision. Ids are the sampled ones, never re-encoded text; each quantity has a field of its own."""

    state: list[int]  # (T,) prompt ids of s_t
    trunk: torch.Tensor  # (T + n - 1, D) frozen lower layers on s_t and all but the last action token
    action: list[int] = field(default_factory=list)  # (n,) sampled ids, EOS included when sampled
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    version: int = -1  # iteration of the policy that sampled it; -1: not sampled by the policy
    final_state: list[int] | None = None  # state after the last step of a truncated episode (bootstrap)
    final_trunk: torch.Tensor | None = None
    feature: torch.Tensor | None = None  # (D,) the score head's input at s_t
    feature_at: int = -1  # updates of the score adapter when it was computed
    sampler_logp: torch.Tensor | None = None  # (n,) from cached decoding, only to measure the gap
    logp: torch.Tensor | None = None  # (n,) under the policy that sampled it, by the training forward
    ref_logp: torch.Tensor | None = None  # (n,) under the frozen reference
    value: float = 0.0  # V(s_t)
    final_value: float = 0.0  # V of final_state
    delta: float = 0.0  # δ_t
    advantage: float = 0.0  # A_t, normalised and clipped
    ret: float = 0.0  # G_t, the score's target


class Replay(common.Ring):
    """Ring of the last `replay_iters` iterations of steps with prioritised sampling, equation (6) (article 4.1)."""

    def sample(self, rng, steps: list[Step], size: int, beta: float) -> tuple[list[Step], np.ndarray]:
        """`size` draws with replacement, P ~ (|δ|+ε)^α, and weights (N P)^-β over the ring's largest, all <= 1.

        Raises ValueError on a non-finite priority: one would hold all the probability, or none.
        """
        priorities = (np.abs([s.delta for s in steps]) + 1e-2) ** self.args.priority_alpha  # (N,)
        if not np.isfinite(priorities).all():
            raise ValueError("non-finite priority in the replay ring")
        probs = priorities / priorities.sum()
        chosen = rng.choice(len(steps), size=size, p=probs)
        return [steps[i] for i in chosen], (probs[chosen] / probs.min()) ** -beta


def rollout(lm: LM, args, split, tasks, *, temperature, key=(), version=-1, policy="policy", stop=None, bar=None):
    """Play one episode of each task in lockstep batches of `num_envs` -> (episodes, statistics, traces).

    episodes: lists of Step in task order; one whose environment raised is dropped and counted (10 in a row: UserError).
    policy "random": uniformly random legal actions. traces: outcome and texts of each episode, for logs and judges.
    """
    queue, running, memo = list(tasks)[::-1], [], {}
    pool = common.EnvPool(make_env, args, split, random=policy == "random", bar=bar)
    noise, rng = torch_rng_for(lm.device, "rollout", *key), rng_for("random actions", *key)
    while (queue or running) and not stop:
        while queue and len(running) < args.num_envs:
            running += pool.begin(queue.pop())
        if not running:
            continue
        room = running[0].env.max_action_tokens
        prompts, cuts = zip(*(lm.encode_prompt(r.obs, room) for r in running), strict=True)
        if policy == "random":
            outs = common.demonstrated(lm, prompts, [r.legal[rng.integers(len(r.legal))] for r in running])
        else:
            with lm.adapter(policy):
                outs = lm.act(prompts, room, temperature, noise, memo)
        for r, prompt, cut, out in zip(running, prompts, cuts, outs, strict=True):
            result = pool.step(r, lm.decode(out["ids"]).strip(), cut, out["finish"])  # reward, terminated, truncated
            if result is None:
                continue
            step = Step(prompt, out["trunk"], out["ids"], *result, version, sampler_logp=torch.tensor(out["logps"]))
            r.steps.append(step)
            if step.truncated:
                step.final_state, _ = lm.encode_prompt(r.obs, room)
                step.final_trunk = lm.trunk([step.final_state])[0]
        running = [r for r in running if r.alive]
    return pool.results(tasks)


# -------------------------------------------------------------------------------------------------- advantages and loss
def compute_gae(rewards, values, terminated, truncated, final_values, gamma: float, lam: float):
    """δ_t and A_t of equation (4) for a run of whole episodes laid end to end: two float arrays (S,).

    Termination cuts the bootstrap, truncation bootstraps from the value of the state the episode was cut in; neither
    lets anything pass to the next episode. values (S,) V(s_t); final_values (S,) V of the final state where truncated.
    """
    deltas, advantages = np.zeros(len(rewards)), np.zeros(len(rewards))
    running = 0.0
    for t in reversed(range(len(rewards))):
        if terminated[t] or truncated[t]:
            following, running = 0.0 if terminated[t] else final_values[t], 0.0
        else:
            following = values[t + 1]
        deltas[t] = rewards[t] + gamma * following - values[t]
        advantages[t] = running = deltas[t] + gamma * lam * running
    return deltas, advantages


def fill_returns(steps: list[Step], gamma: float):
    """G_t of equation (2) by backward accumulation; a truncated episode continues with `final_value`."""
    following = 0.0
    for step in reversed(steps):
        if step.done:
            following = step.final_value if step.truncated else 0.0
        following = step.ret = step.reward + gamma * following


def fill_advantages(steps: list[Step], args) -> np.ndarray:
    """Write G, δ and the normalised A into whole episodes laid end to end; returns the raw advantages (S,).

    Steps the policy did not sample (random actions, version -1) get no part in the normalisation: no update uses them.
    """
    fill_returns(steps, args.gamma)
    names = "reward", "value", "terminated", "truncated", "final_value"
    columns = [np.array([getattr(s, k) for s in steps]) for k in names]
    deltas, advantages = compute_gae(*columns, args.gamma, args.gae_lambda)
    own = np.array([s.version >= 0 for s in steps])
    scaled = np.zeros_like(advantages)
    scaled[own] = normalise(advantages[own], args.adv_clip)
    scaled[scaled < 0] *= args.neg_scale
    for step, delta, advantage in zip(steps, deltas, scaled, strict=True):
        step.delta, step.advantage = float(delta), float(advantage)
    return advantages[own]


def normalise(advantages: np.ndarray, clip: float) -> np.ndarray:
    """Zero mean, unit variance over the batch (zero variance gives zeros), then clipped to ±clip (article 4.3)."""
    std = advantages.std()
    return np.clip((advantages - advantages.mean()) / std, -clip, clip) if std > 1e-8 else np.zeros_like(advantages)


def ppo_loss(logp, old_logp, ref_logp, entropy, advantages, weights, args):
    """Equation (5), summed over the N action tokens given; the caller divides by the minibatch's token count.

    All arguments (N,): advantages and weights are those of the token's step. Returns (loss, sums): the sums are
    detached diagnostics. k3(π || π_ref) = e^d - d - 1 with d = log π_ref - log π is never negative. Where d > 3
    it is flat: e^d of one unlearned token outweighed all others (mean k3 6156, gradient norm 1566 were seen).
    """
    ratio = (logp - old_logp).exp()
    pg_loss = -torch.min(ratio * advantages, ratio.clamp(1 - args.clip_eps, 1 + args.clip_eps) * advantages)
    d = (ref_logp - logp).clamp(max=3.0)
    ref_kl = d.exp() - d - 1
    loss = (weights * (pg_loss + args.kl_coef * ref_kl - args.ent_coef * entropy)).sum()
    with torch.no_grad():
        sums = dict(pg_loss=(weights * pg_loss).sum(), ref_kl=ref_kl.sum(), entropy=entropy.sum(),
                    clip_frac=((ratio - 1).abs() > args.clip_eps).float().sum())  # fmt: skip
    return loss, sums


def update_policy(lm: LM, optimizer: Optimizer, replay: Replay, version: int, args, progress: float, stop) -> dict:
    """Policy epochs over prioritised minibatches of the ring; returns logged means over minibatches.

    approx_kl = mean over the fresh steps' tokens of (ρ - 1) - log ρ, an estimate of KL(π_old || π) under samples of
    π_old (replayed steps come from older policies and would count those updates again). Above `target_kl` the
    accumulated gradient is dropped and the epoch ends: the step is not taken.
    """
    steps = [s for s in replay.steps if s.version >= 0]
    fresh = sum(s.version == version for s in steps)
    rng = rng_for(args.seed, "policy", version)
    beta = args.priority_beta + (1 - args.priority_beta) * progress
    batch, weights = replay.sample(rng, steps, max(1, round(args.policy_passes * fresh)), beta)
    logs, start, useful, stopped = [], time.perf_counter(), 0, False
    for first in range(0, len(batch), args.minibatch):
        chunk, w = batch[first : first + args.minibatch], weights[first : first + args.minibatch]
        tokens, sums = sum(len(s.action) for s in chunk), Counter()
        with lm.adapter("policy"):
            for rows in token_batches([s.inputs for s in chunk], args.micro_tokens):
                part = [chunk[i] for i in rows]
                logp, entropy = token_logprobs(lm, part, args.temperature, with_entropy=True)
                old, ref = (torch.cat([getattr(s, k) for s in part]).to(lm.device) for k in ("logp", "ref_logp"))
                of_step = [(chunk[i].advantage, w[i], chunk[i].version == version) for i in rows]
                lengths = torch.tensor([len(s.action) for s in part])
                of_token = torch.tensor(of_step, dtype=torch.float32).repeat_interleave(lengths, 0)  # (N, 3)
                advantages, importance, now = of_token.T.to(lm.device)  # (N,) each
                loss, part_sums = ppo_loss(logp, old, ref, entropy, advantages, importance, args)
                (loss / tokens).backward()  # mean over the tokens of the whole minibatch, whatever its micro-batches
                sums.update({k: float(v) for k, v in part_sums.items()})
                log_ratio = (logp - old).detach()
                sums.update(approx_kl=float((now * (log_ratio.exp() - 1 - log_ratio)).sum()), fresh=int(now.sum()),
                            ratio_dev=float((now * (log_ratio.exp() - 1).abs()).sum()))  # fmt: skip
                useful += sum(len(s.trunk) for s in part)
        count = max(sums.pop("fresh"), 1)
        row = {k: v / (count if k in ("approx_kl", "ratio_dev") else tokens) for k, v in sums.items()}
        logs.append(row)
        if np.mean([r["approx_kl"] for r in logs[-4:]]) > args.target_kl:  # one minibatch alone is too noisy
            optimizer.zero_grad()
            stopped = True
            break
        row["grad_norm"] = optimizer.step(progress) or 0.0
        if stop:
            break
    logged = common.update_row(logs, stopped, useful, start)
    return logged | {"policy/old_frac": 1 - fresh / len(steps)}


# ------------------------------------------------------------------------------------------------------------ evaluator
def evaluate(lm: LM, args, split: str, episodes: int) -> tuple[dict, list[list[Step]], list[dict]]:
    """Greedy success on `episodes` fixed tasks of a split; uses no random stream, so training does not notice it.

    Returns (success, ci95, mean_steps of all, ep_len of successes, mean_return, invalid_rate, episodes), steps, traces.
    """
    runs, stats, traces = rollout(lm, args, split, range(episodes), temperature=0.0)
    lengths = [len(steps) for steps in runs]
    wins = [t["success"] for t in traces]
    n = len(runs) + stats["env_errors"]  # a dropped episode counts as a failure
    result = dict(success=sum(wins) / n, ci95=common.wilson(sum(wins), n), mean_steps=float(np.mean(lengths or [0])),
                  ep_len=float(np.mean([k for k, w in zip(lengths, wins, strict=True) if w] or [0])),
                  mean_return=float(np.mean([sum(s.reward for s in steps) for steps in runs] or [0])),
                  invalid_rate=stats["invalid"] / max(stats["steps"], 1), episodes=n)  # fmt: skip
    return result, runs, traces


# ----------------------------------------------------------------------------------------------------------------- main
class Learner(common.Checkpoints):
    """The live objects of a run; `common.Checkpoints` logs, saves and restores them together."""

    def __init__(self, argv):
        super().__init__(Args, TUNED, argv, make_env, ("policy", "score", "ref"))
        args, lm, bounds = self.args, self.lm, self.env.return_bounds
        kind = PromptScorer if args.scorer == "prompt" and args.algo == "3spo" else ScoreModel
        self.scorer = kind(lm, bounds, args)
        self.policy = Optimizer(lm.params("policy"), args.warmup_lr)
        optimizers = {"policy": self.policy} | ({"score": self.scorer.optimizer} if self.scorer.optimizer else {})
        self.hold(optimizers, Replay(args), Step, common.Progress(), evaluate)
        print(f"returns in [{bounds[0]:.2f}, {bounds[1]:.2f}]; score head {lm.hidden_size} x {ScoreModel.K}")


def clone(L: Learner, steps: list[Step], progress: float) -> float:
    """One update of behaviour cloning: mean negative log-likelihood of the demonstrated action tokens (4.2 A)."""
    tokens, total = sum(len(s.action) for s in steps), 0.0
    with L.lm.adapter("policy"):
        for rows in token_batches([s.inputs for s in steps], L.args.micro_tokens):
            logp, _ = token_logprobs(L.lm, [steps[i] for i in rows], 1.0)
            loss = -logp.sum() / tokens  # mean over the minibatch's action tokens
            loss.backward()
            total += float(loss.detach())
    L.policy.step(progress)
    return total


def test(L: Learner, stage: str):
    """Held-out test of the current weights, with V, its scale S and the return, into summary.json, episodes.jsonl."""
    result, runs, traces = evaluate(L.lm, L.args, "test", L.args.eval_episodes)
    if stage != "warmup":
        steps = [s for run in runs for s in run]
        fill_values(L.scorer, steps)
        fill_returns(steps, L.args.gamma)
        common.show_scores(traces, steps, L.scorer.to_score)
    L.record_test(stage, result, traces)


def warm_up(L: Learner):
    """Stage A (article 4.2): clone the demonstrations; then freeze a copy of the policy as the KL reference."""
    demos = [Step(s, out["trunk"], out["ids"]) for s, out in common.demonstrations(L.lm, L.env, L.args)]
    if L.imitate(demos, clone, evaluate, "score", L.scorer.optimizer):
        test(L, "warmup")
        L.begin("bc" if L.args.algo == "bc" else "score", evaluate)


def collect_for_score(L: Learner):
    """Episodes of the warmed policy and of random legal actions, successes and failures, into the ring (4.2 B)."""
    args, p = L.args, L.p
    tasks, end = range(args.score_episodes), args.score_episodes + args.random_episodes
    with tqdm(total=end, desc="score: collect", unit="ep") as bar:
        episodes, stats, _ = rollout(L.lm, args, "train", tasks, temperature=args.temperature, key=(args.seed, "B"),
                                     version=0, stop=L.stop, bar=bar)  # fmt: skip
        random, others, _ = rollout(L.lm, args, "train", range(tasks.stop, end), temperature=1.0, policy="random",
                                    key=(args.seed, "B random"), stop=L.stop, bar=bar)  # fmt: skip
    if L.stop:
        return
    steps = [s for e in [*episodes, *random] for s in e]
    fill_returns(steps, args.gamma)  # nothing is bootstrapped: the score has no opinion yet
    own = [s for s in steps if s.version >= 0]
    common.fill_logprobs(token_logprobs, L.lm, own, args, logp="policy", ref_logp="ref")
    L.replay.add(steps)
    p.env_steps, p.episodes = stats["steps"] + others["steps"], end
    own, other = (t["success"] / max(t["episodes"], 1) for t in (stats, others))
    L.log({"train/success": own, "score/random_success": other})
    L.save()


def pretrain_score(L: Learner):
    """Stage B (article 4.2): fit the score; a fifth of the episodes is held out whole and says when to stop.

    The episodes stay as the ring's first iteration, so that stage 3spo starts with them; the random ones only teach
    the score.
    """
    args, p = L.args, L.p
    if not L.replay.iterations and args.score_episodes:
        collect_for_score(L)
    kept, held = common.hold_out(L.replay.steps)
    if kept and held:
        p.score_constant = float(np.mean(L.scorer.to_score(np.array([s.ret for s in kept]))))
    bar = tqdm(total=args.score_epochs + 1, initial=p.iteration, desc="score: fit", unit="epoch", disable=not kept)
    while kept and held and p.iteration <= args.score_epochs and not p.below and not L.stop:  # the head alone, passes
        update = lambda chunk, progress: L.scorer.update(chunk, np.ones(len(chunk)), progress)  # noqa: E731
        passing = p.iteration and L.scorer.optimizer
        loss = L.epoch(kept, update, args.score_minibatch, args.score_epochs + 1) if passing else 0.0
        if L.stop:
            break
        if L.scorer.optimizer:
            L.scorer.fit_head(kept)
        p.iteration += 1
        fill_values(L.scorer, [*kept, *held])
        train, _ = common.score_error(kept, p.score_constant, L.scorer.to_score)
        val, constant = common.score_error(held, p.score_constant, L.scorer.to_score)
        rank = common.spearman([s.value for s in held], [s.ret for s in held])
        L.log({"score/loss": loss, "score/mse_train": train, "score/mse_val": val, "score/mse_constant": constant,
               "score/rank_corr": rank})  # fmt: skip
        bar.set_postfix(val=f"{val:.3f}", constant=f"{constant:.3f}", rank=f"{rank:.2f}")
        bar.update(1)
        p.below = 0 if val < p.score_best else p.below + 1
        p.score_best = min(p.score_best, val)
        if not L.scorer.optimizer:
            break  # the prompt scorer has nothing to fit
        if not p.below:
            L.save("best")
        L.save()
    bar.close()
    if L.stop:
        return
    if p.below:
        L.restore("best", weights_only=True)  # the pass before the error rose
    p.stage, p.iteration, p.below, p.stage_start = args.algo, 0, 0, p.env_steps
    if L.scorer.optimizer:
        L.scorer.optimizer.floor = RL_FLOOR
    L.save("best")
    L.save()


def finish(L: Learner) -> int:
    """Test the best weights, write summary.json, report.md and plots, print the table of before and after."""
    args, p = L.args, L.p
    if p.stage != "bc":
        L.restore("best", weights_only=True)
        test(L, p.stage)
    sections = {"Case study": common.case_study(common.read_jsonl(L.run.folder / "episodes.jsonl"))}
    env = make_env(args.env, seed=args.seed, split="test")
    if hasattr(env, "cells") and p.stage != "bc":
        score = lambda ids, trunks: L.scorer.score(list(map(Step, ids, trunks)))  # noqa: E731
        sections["Score and true distance"] = common.distance_report(L.run, L.lm, env, score)
    return L.finish(sections)


def main(argv=None) -> int:
    L = Learner(argv)
    args, lm, p, stop = L.args, L.lm, L.p, L.stop
    if p.stage == "warmup" and not stop:
        warm_up(L)
    if p.stage == "score" and not stop:
        pretrain_score(L)
    bar = L.bar()
    while args.algo != "bc" and p.env_steps < args.total_env_steps and not stop:
        version, clock = p.iteration + 1, common.Stopwatch()
        progress = (p.env_steps - p.stage_start) / (args.total_env_steps - p.stage_start)  # of this stage

        # ---- COLLECT: episodes of the current policy on training tasks it has not seen
        tasks = range(p.episodes, p.episodes + args.episodes_per_iter)
        episodes, stats, traces = rollout(lm, args, "train", tasks, temperature=args.temperature,
                                          key=(args.seed, version), version=version, stop=stop)  # fmt: skip
        steps = [s for e in episodes for s in e]
        if stop:
            break
        clock.lap("collect")
        common.fill_logprobs(token_logprobs, lm, steps, args, logp="policy", ref_logp="ref")  # π_old: ρ starts at 1
        clock.lap("logprobs")

        # ---- SCORE: error on the new episodes before they are trained on (held out by time), then the fit to the ring
        fill_values(L.scorer, steps)
        fill_advantages(steps, args)  # their δ are the priorities of the pass below
        mse_val, mse_constant = common.score_error(steps, p.score_constant, L.scorer.to_score)
        rank = common.spearman([s.value for s in steps], [s.ret for s in steps])
        L.replay.add(steps)
        ring = L.replay.steps
        if L.scorer.optimizer:
            beta = args.priority_beta + (1 - args.priority_beta) * progress
            size, rng = round(args.score_passes * len(steps)), rng_for(args.seed, "score", version)
            batch, weights = L.replay.sample(rng, ring, size, beta)
            for first in range(0, len(batch), args.score_minibatch):
                part = slice(first, first + args.score_minibatch)
                L.scorer.update(batch[part], weights[part], progress)
            L.scorer.fit_head(ring)
        p.score_constant = float(np.mean(L.scorer.to_score(np.array([s.ret for s in ring]))))

        # ---- ADVANTAGE: V, G and A of the whole ring from the score just updated
        fill_values(L.scorer, ring)
        advantages = fill_advantages(ring, args)
        mse_train, _ = common.score_error(ring, p.score_constant, L.scorer.to_score)
        clock.lap("score")

        # ---- UPDATE: PPO on prioritised minibatches
        logs = update_policy(lm, L.policy, L.replay, version, args, progress, stop)
        clock.lap("policy")
        if stop:
            break

        # ---- EVAL, LOG, SAVE
        p.iteration, p.env_steps, p.episodes = version, p.env_steps + len(steps), tasks.stop
        row = common.rollout_row(episodes, stats, traces, advantages, clock.laps["collect"]) | logs
        row |= {"policy/lr": L.policy.rate(progress), "policy/skipped_steps": L.policy.skipped,
                "score/mse_train": mse_train, "score/mse_val": mse_val, "score/mse_constant": mse_constant,
                "score/rank_corr": rank}  # fmt: skip
        row |= L.milestone(evaluate, clock, args.rollback_drop)
        L.log(row, clock)
        common.advance(bar, len(steps), success=row["train/success"], kl=row["policy/approx_kl"], mse=mse_val)
        L.save()
    bar.close()
    return L.stopped() if stop else finish(L)


if __name__ == "__main__":
    common.run_main(main)
