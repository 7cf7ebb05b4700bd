"""StepOPSD: step-aware online preference distillation for LLM agents, in one file.

Compare short segments of episodes, learn a reward for every single step from the comparisons, train the policy on it.
Source: the article "StepOPSD" (sections 2-5); numbers below are used at the functions.

(1) preference   y in {0, 1/2, 1} for two segments A, B: a rule, a teacher LLM, a person or the value model says so
(2) reward model P(A > B) = sigmoid(R(A) - R(B)),  loss = cross-entropy(y, P)   (Bradley-Terry), R from an encoder
(3) step share   attention, gradient, uniform: r_t = c_t R(τ), Σ c_t = 1;  td, label: r_t = q_t, R(τ) = Σ q_t
(4) ensemble     z_m = (r_m - mean)/std over the replay ring, r_step = clip(min or mean_m z_m / (1 + κ std_m z_m))
(5) reward       r_t = λ r_step + (1 - λ) r_terminal + c/sqrt(visits) - violation;  --lam 0: terminal reward only
(6) advantage    δ_t = r_t + γ V(s_{t+1}) - V(s_t),  A_t = Σ_l (γλ_gae)^l δ_{t+l}
(7) policy       -min(ρ A, clip(ρ, 1-ε, 1+ε) A) + kl_coef k3(π || π_ref) - ent_coef H,  mean over action tokens

Stages: warmup (clone a few demonstrations) -> stepopsd (repeat: A collect; B every `rm_every` iterations label pairs,
new against old, and update the reward model; C relabel every step of the ring, update the value head and the policy).
Differs from the article: a step's embedding is the mean over its state's tokens beside the mean over its action's;
the running normalisation is taken over the ring as the present model sees it (one Bradley-Terry model's zero is not the
next one's); replayed steps keep the log-probs of the policy that sampled them.

    python stepopsd.py --env gridworld --model tiny     # minutes on 2 CPU cores

Environment protocol (swap the one import to use your own): env.reset(seed=task) -> obs, info; env.step(text) -> obs,
reward, terminated, truncated, info; obs is the prompt; info["success"], info["valid"], info["cut"] are bools,
info["violation"] (>= 0, part of the reward) a broken hard constraint; env.expert() gives a demonstration's action text;
env.judge([(obs, action), ...]) in [0, 1] labels for --labeler rule (without one: rewards); env.progress() is only
measured against. Shapes: B steps or segments of a batch, T tokens of a state or steps of a segment, D hidden size, E
embedding size, M members, N action tokens, S steps.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F

import common
from common import LM, RL_FLOOR, Optimizer, rng_for, split_episodes, token_batches, torch_rng_for, turns_in, turns_of
from envs import make_env


@dataclass
class Args:
    env: str = "booking"  # task: see `python envs.py`
    model: str = "auto"  # auto (CUDA: Qwen2.5-0.5B-Instruct, else smollm2), smollm2, tiny, a hub id or a local path
    seed: int = 1  # seeds weights, tasks, sampling and minibatches
    out: str = ""  # run folder (empty: runs/<algo>__<env>__<model>__s<seed>__<time>)
    resume: str = ""  # continue the run in this folder with the flags it was started with
    eval_only: str = ""  # evaluate the best checkpoint of this run folder on the test tasks and stop
    algo: Literal["stepopsd", "bc"] = "stepopsd"  # bc: stop after the warm-up
    preset: Literal["default", "quick"] = "default"  # quick: every stage with small numbers, to see the machinery
    total_env_steps: int = 1300  # environment steps of stage stepopsd
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
    demos: int = 100  # expert episodes cloned in the warm-up
    demo_noise: float = 0.15  # chance that another action is carried out than the one demonstrated
    warmup_epochs: int = 3  # passes over the demonstrations (booking: 2)
    warmup_lr: float = 2e-3  # learning rate of cloning (its own cosine)
    warmup_minibatch: int = 12  # steps a cloning update (small: the number of updates matters more than their noise)
    labeler: Literal["rule", "llm", "human", "model"] = "rule"  # env.judge or rewards, a teacher, you, the value model
    teacher: Literal["local", "url"] = "local"  # of llm: the base model, adapters off, or --teacher_url
    teacher_url: str = ""  # OpenAI-compatible endpoint, https://host/v1; its key comes from TEACHER_API_KEY
    teacher_model: str = ""  # model name at the endpoint
    teacher_timeout: float = 60.0  # seconds a request may take; tried again three times with growing pauses
    votes: int = 1  # questions (differently worded) a pair, each asked in both orders; the majority counts (5.1)
    tie_margin: float = 0.05  # a preference closer to 1/2 than this is a tie
    preferences: str = ""  # labels of earlier runs (preferences.jsonl): trained on from the start; new labels are added
    segment_len: str = "3-7"  # turns of a segment, least-most (4.3)
    pairs: int = 256  # pairs labelled each time (64 where a teacher or you answer)
    pos_frac: float = 0.5  # least share of pairs that hold a segment of a successful episode, if there is one (4.3)
    rm_every: int = 2  # iterations between updates of the reward model (3.1 B)
    decompose: Literal["attention", "gradient", "td", "label", "uniform"] = "label"  # how R(τ) is shared out (3.2)
    rm_ensemble: int = 3  # M, reward models (5.1)
    rm_combine: Literal["min", "mean"] = "mean"  # how their step rewards are combined
    rm_lr: float = 5e-4  # learning rate of the reward models: small, so that the reward moves slowly (3.3)
    rm_passes: float = 4.0  # passes over the remembered pairs each time
    rm_minibatch: int = 16  # pairs a reward-model update
    rm_memory: int = 1000  # latest labels kept for training
    rm_dropout: float = 0.1  # dropout of the reward models
    rm_decay: float = 0.05  # their weight decay (5.1)
    smoothness: float = 0.05  # weight of Σ (q_{t+1} - q_t)² in td and label
    turn_coef: float = 0.5  # weight of the cross-entropy on the turn the judge named, in label
    augment: float = 0.25  # share of pairs that are trained on once more, reworded by template (5.1)
    kappa: float = 0.5  # κ of (4): how much the ensemble's spread damps the reward
    reward_clip: float = 1.0  # step rewards are clipped to ± this
    lam: float = 0.1  # λ of (5); 0 is the baseline: terminal reward only, no labels
    curiosity: float = 0.0  # c of (5): bonus c/sqrt(visits of the state) (5.2)
    value_lr: float = 3e-4  # learning rate of the value adapter and head
    value_minibatch: int = 16  # steps a value update
    value_passes: float = 0.0  # value updates an iteration, in units of the fresh steps (0: the head alone is fitted)
    value_warmup: float = 0.0  # passes over the first episodes instead: no policy update follows an untrained value
    value_l2: float = 2000.0  # ridge of the head's least squares on features of unit σ; 0: no such fit
    gamma: float = 0.95  # discount (booking: 0.7)
    gae_lambda: float = 0.9  # λ_gae of (6) (booking: 0.5)
    adv_clip: float = 2.0  # advantages are normalised, then clipped to this
    neg_scale: float = 0.5  # negative ones are then multiplied by this: many failed steps must not drown the good ones
    episodes_per_iter: int = 32  # episodes collected an iteration
    policy_lr: float = 4e-4  # learning rate of the policy adapter in stage stepopsd
    policy_passes: float = 2.0  # policy updates an iteration, in units of the fresh steps
    minibatch: int = 96  # steps a policy update (few and large: the gradient of so few episodes is mostly noise)
    clip_eps: float = 0.2  # ε of (7)
    kl_coef: float = 0.01  # weight of k3(π || π_ref)
    ent_coef: float = 0.001  # weight of the entropy bonus (5.2)
    target_kl: float = 0.1  # stop the epoch, without taking the step, above this approx KL(π_old || π)
    temperature: float = 1.0  # sampling temperature while training; log-probs are taken at it
    replay_iters: int = 2  # iterations kept in the ring: old and new policies' episodes (3.1)
    priority_alpha: float = 0.0  # minibatches are drawn ~ |δ|^α; 0: uniformly
    priority_beta: float = 0.4  # exponent of their importance weights at the start; grows to 1
    rollback_drop: float = 0.1  # validation success this far below the best, twice running, restores the best


TUNED = {  # defaults that depend on another flag; a flag given by hand always wins
    ("labeler", "llm"): dict(pairs=64),  # each question is read by the teacher
    ("labeler", "human"): dict(pairs=64),
    ("preset", "quick"): dict(total_env_steps=350, demos=40, warmup_epochs=2, episodes_per_iter=16, num_envs=24,
                              val_episodes=8, eval_episodes=24, pairs=48),
    ("model", "tiny"): dict(load_4bit=False, lora_rank=64, lora_layers="all", warmup_lr=2e-3, value_lr=1e-3,
                            value_passes=0.7, value_warmup=3.0, policy_lr=2e-4, micro_tokens=8192),
    ("lam", 0.0): dict(algo="lam_0"),  # the baseline: the name sets its runs apart in the pictures
    ("labeler", "model"): dict(value_passes=0.7),  # the success logit is trained with the adapter alone
    ("env", "booking"): dict(warmup_epochs=2, gamma=0.7, gae_lambda=0.5),  # longer views hid good turns: README
    ("env", "gridworld"): dict(demos=450, warmup_minibatch=32, total_env_steps=6000, minibatch=64,
                               episodes_per_iter=80, num_envs=100, gamma=0.9, lam=0.3, pairs=64, decompose="attention"),
    ("env", "miniwob/*"): dict(num_envs=12, val_episodes=32, eval_episodes=60),  # a browser for each
}  # fmt: skip


# -------------------------------------------------------------------------------- the idea: the step-aware reward model
class RewardNet(torch.nn.Module):
    """R(τ), c_t and q_t of a segment: [CLS] and the steps' embeddings through a transformer encoder (3.2, 4.2)."""

    def __init__(self, size: int, dropout: float, width: int = 128, layers: int = 2, longest: int = 64):
        super().__init__()
        self.project = torch.nn.Linear(size, width)
        self.cls = torch.nn.Parameter(torch.zeros(1, 1, width))
        self.position = torch.nn.Parameter(0.02 * torch.randn(longest, width))
        self.blocks = torch.nn.ModuleList(common.EncoderBlock(width, dropout) for _ in range(layers))
        self.norm = torch.nn.LayerNorm(width)
        self.total = torch.nn.Linear(width, 1, bias=False)  # no bias: the differences of (2) could not learn it
        last = torch.nn.Linear(width, 1, bias=False)
        self.step = torch.nn.Sequential(torch.nn.Linear(size, width), torch.nn.GELU(), torch.nn.Dropout(dropout), last)

    def forward(self, x: torch.Tensor, real: torch.Tensor):
        """x (B, T, E), real (B, T) bool, True at steps -> R read at [CLS] (B,), q (B, T), [CLS] attention (B, T).

        q_t is read from step t alone (its state holds the history): behind the encoder every step knows the whole
        segment, and the smoothness penalty would spread R over good and bad turns alike (that was measured).
        """
        h = self.project(x) + self.position[: x.shape[1]]  # (B, T, W)
        h = torch.cat([self.cls.expand(len(x), -1, -1), h], 1)  # (B, 1 + T, W)
        padded = torch.cat([torch.zeros_like(real[:, :1]), ~real], 1)  # (B, 1 + T)
        for block in self.blocks:
            h, weights = block(h, padded)  # weights (B, 1 + T, 1 + T): mean over heads, row = who looks
        h = self.norm(h)
        return self.total(h[:, 0])[:, 0], self.step(x)[..., 0] * real, weights[:, 0, 1:] * real


def shares(weights: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """Non-negative weights (B, T) -> c_t: they sum to 1 over a segment's steps; without any weight, equal parts."""
    total = weights.sum(1, keepdim=True)  # (B, 1)
    equal = real / real.sum(1, keepdim=True)
    return torch.where(total > 1e-12, weights / total.clamp(min=1e-12), equal)


def decompose(net: RewardNet, x: torch.Tensor, real: torch.Tensor, how: str):
    """Equation (3): step rewards r (B, T), whose sum over a segment is R (B,), and c_t (B, T) for pictures.

    gradient: c_t ~ relu(sign(R) x_t · ∂R/∂x_t), what pushed R the way it went (Grad-CAM's reading).
    """
    with torch.enable_grad() if how == "gradient" else torch.no_grad():
        x = x.detach().requires_grad_(how == "gradient")
        total, q, attention = net(x, real)
        if how == "gradient":
            (slope,) = torch.autograd.grad(total.sum(), x)  # (B, T, E)
            attention = (total.detach().sign()[:, None] * (slope * x.detach()).sum(-1)).relu() * real
    if how in ("td", "label"):
        return q, q.sum(1), shares(q.abs(), real)
    c = shares(torch.zeros_like(attention) if how == "uniform" else attention, real)  # (B, T)
    return c * total.detach()[:, None], total.detach(), c


def preference_loss(net: RewardNet, batch: dict, args) -> torch.Tensor:
    """Equation (2), mean over P pairs; td adds the smoothness penalty, label the turn's cross-entropy as well.

    batch: x (2P, T, E) with the A's before the B's, real (2P, T), y (P,), turn (2P,) the decisive turn or -1.
    """
    (total, q, _), smoothness = net(batch["x"], batch["real"]), 0.0
    if args.decompose in ("td", "label"):
        total, both = q.sum(1), batch["real"][:, 1:] & batch["real"][:, :-1]  # (2P,), (2P, T - 1)
        smoothness = args.smoothness * ((q.diff(dim=1)) ** 2 * both).sum(1).mean()  # mean over segments
    first, second = total.chunk(2)
    loss = F.binary_cross_entropy_with_logits(first - second, batch["y"]) + smoothness
    if args.decompose == "label" and (named := batch["turn"] >= 0).any():
        logits = q.masked_fill(~batch["real"], -math.inf)[named]
        loss = loss + args.turn_coef * F.cross_entropy(logits, batch["turn"][named])  # mean over named turns
    return loss


class RewardModel:
    """An ensemble of M RewardNets on cached step embeddings, on the CPU (it is small); equations (2)-(4)."""

    def __init__(self, embed: common.Embeddings, args):
        self.embed, self.args, self.nets = embed, args, []
        low, high = common.segment_range(args)
        self.window = (low + high) // 2
        for m in range(args.rm_ensemble):
            with common.torch_seed(args.seed, "reward model", m):
                self.nets.append(RewardNet(embed.size, args.rm_dropout, longest=max(high, 8)).eval())
        params = {f"{m}.{k}": p for m, net in enumerate(self.nets) for k, p in net.named_parameters()}
        self.optimizer = Optimizer(params, args.rm_lr, weight_decay=args.rm_decay, floor=RL_FLOOR)
        self.mean, self.std = np.zeros(len(self.nets)), np.ones(len(self.nets))  # (M,) of raw step rewards in the ring

    def batch(self, segments: list[list[tuple[str, str]]]):
        """Segments as (obs, action) pairs -> x (B, T, E) and real (B, T)."""
        return common.pad([torch.stack([self.embed[turn] for turn in segment]) for segment in segments])

    def pairs(self, rows: list[dict]) -> dict:
        """Labelled rows -> the batch of `preference_loss`."""
        x, real = self.batch([r["a"] for r in rows] + [r["b"] for r in rows])
        y = torch.tensor([float(r["y"]) for r in rows])
        turns = [r["turn"] if r["y"] == won else -1 for won in (1, 0) for r in rows]  # a turn is one of the winner's
        turns = [-1 if t is None else t for t in turns]
        return dict(x=x, real=real, y=y, turn=torch.tensor(turns))

    def fit(self, rows: list[dict], key: tuple, progress: float = 0.0) -> dict:
        """`rm_passes` over the pairs; each member sees its own order. Returns the mean loss and gradient norm."""
        rows = common.augmented(rows, self.args.augment)
        self.embed.add(turns_in(rows))
        args, losses, norms = self.args, [], []
        orders = [common.minibatches(rows, args.rm_minibatch, args.rm_passes, args.seed, "fit", m, *key)
                  for m in range(len(self.nets))]  # fmt: skip
        with common.torch_seed(args.seed, "dropout", *key):
            for chunks in zip(*orders, strict=True):
                for net, chunk in zip(self.nets, chunks, strict=True):
                    loss = preference_loss(net.train(), self.pairs(chunk), args)
                    loss.backward()
                    losses.append(float(loss.detach()))
                    net.eval()
                norms.append(self.optimizer.step(progress) or 0.0)
        return {"reward/loss": float(np.mean(losses)), "reward/grad_norm": float(np.mean(norms))}

    def accuracy(self, rows: list[dict]) -> float | None:
        """Share of decided pairs in which the ensemble's mean R prefers the right one; None without any."""
        rows = [r for r in rows if r["y"] != 0.5]
        if not rows:
            return None
        self.embed.add(turns_in(rows))
        batch = self.pairs(rows)
        totals = sum(decompose(net, batch["x"], batch["real"], self.args.decompose)[1] for net in self.nets)  # (2P,)
        first, second = totals.chunk(2)
        return float(((first > second) == (batch["y"] == 1)).float().mean())

    def raw(self, episodes: list[list[tuple[str, str]]]):
        """Step rewards of every member (M, S) and c_t (S,) for whole episodes laid end to end.

        An episode is read in overlapping windows of the middle segment length; a step gets the mean over the windows
        it lies in (3.3). Call after `embed.add`.
        """
        spans, size = common.windows(episodes, self.window), sum(map(len, episodes))
        sums, counts = np.zeros((len(self.nets) + 1, size)), np.zeros(size)  # last row: shares
        for first in range(0, len(spans), 256):
            part = spans[first : first + 256]
            x, real = self.batch([turns for _, turns in part])
            out = [decompose(net, x, real, self.args.decompose) for net in self.nets]
            c = sum(o[2] for o in out) / len(out)  # (B, T) mean over members
            values = torch.stack([*(o[0] for o in out), c]).detach().numpy()  # (M + 1, B, T)
            for row, (start, turns) in enumerate(part):
                sums[:, start : start + len(turns)] += values[:, row, : len(turns)]
                counts[start : start + len(turns)] += 1
        return sums[:-1] / counts, sums[-1] / counts

    def combine(self, raw: np.ndarray, measure: bool = False):
        """Equation (4): raw (M, S) -> step rewards and the members' spread (S,). measure: take the ring's mean, std."""
        if measure:
            self.mean, self.std = raw.mean(1), raw.std(1)
        z = np.where(self.std[:, None] > 1e-6, (raw - self.mean[:, None]) / np.maximum(self.std, 1e-6)[:, None], 0.0)
        merged = z.min(0) if self.args.rm_combine == "min" else z.mean(0)
        spread = z.std(0)
        return np.clip(merged / (1 + self.args.kappa * spread), -self.args.reward_clip, self.args.reward_clip), spread


# ------------------------------------------------------------------------------------- the idea: pairs and their labels
def draw_pairs(episodes: list[list[Step]], version: int, args) -> list[tuple[list[Step], list[Step]]]:
    """`pairs` pairs of segments: new against old, the same kind of task when possible, `pos_frac` with a success.

    Each wish narrows the choice as long as something is left; which of the two is called A is a coin's choice.
    """
    rng, out, (low, high) = rng_for(args.seed, "pairs", version), [], common.segment_range(args)
    new = [e for e in episodes if e[0].version == version] or episodes
    while len(out) < args.pairs and len(episodes) > 1:
        positive = len(out) < math.ceil(args.pos_frac * args.pairs)
        firsts = [e for e in new if positive and e[0].success] or new
        first = firsts[rng.integers(len(firsts))]
        others = [e for e in episodes if e is not first]
        if positive and not first[0].success:
            others = [e for e in others if e[0].success] or others
        others = [e for e in others if e[0].kind == first[0].kind] or others
        others = [e for e in others if e[0].version < version] or others
        second = others[rng.integers(len(others))]
        n = min(int(rng.integers(low, high + 1)), len(first), len(second))  # else a sum over more steps would win
        starts = [int(rng.integers(len(e) - n + 1)) for e in (first, second)]
        a, b = (e[i : i + n] for e, i in zip((first, second), starts, strict=True))
        out.append((a, b) if rng.random() < 0.5 else (b, a))
    return out


def label_pairs(L: Learner, pairs, version: int) -> int:
    """Ask the labeler about each pair and keep the answers in the store; returns how many gave none (4.3, 5.1)."""
    if L.args.labeler == "model":
        fill_values(L.value, L.replay.steps)

    def ask(a, b):  # -> (y, decisive turn or None), or None
        if L.args.labeler != "model":
            return L.ask(turns_of(a), turns_of(b)) if L.ask else common.reward_label(a, b, L.args.tie_margin)
        gap = a[-1].outlook - b[-1].outlook
        return (0.5 if abs(gap) <= L.args.tie_margin else float(gap > 0)), None

    return L.store.label(pairs, ask, L.p.labels, L.stop, L.args.labeler, version)


def update_reward(L: Learner, version: int, progress: float) -> dict:
    """Stage B: label pairs of the ring, clean the store and train the reward model; returns metrics (3.1, 5.1)."""
    pairs = draw_pairs(split_episodes(L.replay.steps), version, L.args)
    failed = label_pairs(L, pairs, version)
    if L.stop:
        return {}
    train, held, fresh, logs = L.store.usable(L.args.rm_memory, L.p.labels)
    L.p.labels = L.store.count
    wins = sum(a[0].success or b[0].success for a, b in pairs)
    logs |= {"pref/failed": failed, "pref/pos_frac": wins / max(len(pairs), 1)}
    if not train:
        print(f"\nno usable labels in iteration {version} ({failed} failed): the reward model stays")
        return logs
    logs["pref/accuracy_new"] = L.reward.accuracy(fresh)  # before they are trained on
    logs |= L.reward.fit(train, (version,), progress)
    return logs | {"pref/accuracy": L.reward.accuracy(held), "pref/accuracy_train": L.reward.accuracy(train)}


# --------------------------------------------------------------------------------------------- the idea: the new reward
def relabel(L: Learner) -> np.ndarray:
    """Stage C: equation (5) for every step of the ring, with the present reward model (3.1, 5.3); the spread (S,)."""
    args, steps, spread = L.args, L.replay.steps, np.zeros(0)
    if args.lam > 0 and L.reward.optimizer.steps:  # an untrained model's noise must not become reward
        raw, c = L.reward.raw([turns_of(e) for e in split_episodes(steps)])
        rewards, spread = L.reward.combine(raw, measure=True)
        for step, reward, share in zip(steps, rewards, c, strict=True):
            step.step_reward, step.share = float(reward), float(share)
    for step in steps:
        terminal = step.env_reward + step.violation  # what the environment pays but for the hard constraints
        bonus = args.curiosity / math.sqrt(L.p.visits.get(common.text_key(step.obs), 1))
        step.reward = args.lam * step.step_reward + (1 - args.lam) * terminal + bonus - step.violation
    return spread


# ------------------------------------------------------------------------------------------------------- the value head
class ValueModel:
    """V(s): adapter `value` and a linear head at the state's last token; second output: success (labeler model)."""

    def __init__(self, lm: LM, args):
        self.lm, self.args = lm, args
        self.head = torch.nn.Linear(lm.hidden_size, 2, device=lm.device)
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)
        params = {**lm.params("value"), "head.weight": self.head.weight, "head.bias": self.head.bias}
        self.optimizer = Optimizer(params, args.value_lr, weight_decay=0.01, floor=RL_FLOOR)

    def features(self, steps) -> torch.Tensor:
        """The head's inputs (B, D), kept in the steps until the adapter is updated."""
        return common.stored_features(self.lm, "value", steps, self.optimizer.steps, self.args.micro_tokens)

    @torch.no_grad()
    def predict(self, steps) -> np.ndarray:
        """V and success logit of any number of states (B, 2)."""
        return self.head(self.features(steps)).cpu().double().numpy()

    @torch.no_grad()
    def fit_head(self, steps):
        """Least squares of V on `step.ret` of all steps: Σ (V - G)² + value_l2 ||w||², features of unit σ."""
        if not self.args.value_l2:
            return
        x = self.features(steps)  # (B, D)
        y = torch.tensor([s.ret for s in steps], device=x.device)  # (B,)
        self.head.weight[0], self.head.bias[0] = common.ridge(x, y, self.args.value_l2)
        self.optimizer.adopt()

    def update(self, steps, progress) -> float:
        """One optimiser step on squared error to `step.ret`, mean over the minibatch; returns the gradient norm."""
        with self.lm.adapter("value"):
            for rows in token_batches([s.state for s in steps], self.args.micro_tokens):
                read = self.head(common.last_hidden(self.lm, [steps[i] for i in rows]).float())
                value, logit = read.unbind(1)  # (b,) each
                target = torch.tensor([[steps[i].ret, float(steps[i].success)] for i in rows], device=value.device)
                loss = ((value - target[:, 0]) ** 2).sum()
                if self.args.labeler == "model":
                    loss = loss + F.binary_cross_entropy_with_logits(logit, target[:, 1], reduction="sum")
                (loss / len(steps)).backward()
            return self.optimizer.step(progress) or 0.0


def fill_values(value: ValueModel, steps: list[Step]):
    """V(s_t), V of a truncated episode's final state and the success expected after each step into whole episodes."""
    ends = [Step(s.final_state, s.final_trunk) for s in steps if s.truncated]
    own, final = value.predict(steps), iter(value.predict(ends))
    for i, step in enumerate(steps):
        step.value, after = float(own[i, 0]), next(final) if step.truncated else own[min(i + 1, len(own) - 1)]
        step.final_value = float(after[0]) if step.truncated else 0.0
        step.outlook = float(step.success) if step.terminated else float(1 / (1 + np.exp(-after[1])))


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
    reward: float = 0.0  # r_t the policy is trained on: the environment's until `relabel` mixes it, equation (5)
    terminated: bool = False
    truncated: bool = False
    version: int = -1  # iteration of the policy that sampled it; -1: not sampled by the policy
    final_state: list[int] | None = None  # state after the last step of a truncated episode (bootstrap)
    final_trunk: torch.Tensor | None = None
    sampler_logp: torch.Tensor | None = None  # (n,) from cached decoding, only to measure the gap
    logp: torch.Tensor | None = None  # (n,) under the policy that sampled it, by the training forward
    ref_logp: torch.Tensor | None = None  # (n,) under the frozen reference
    value: float = 0.0  # V(s_t)
    final_value: float = 0.0  # V of final_state
    delta: float = 0.0  # δ_t
    advantage: float = 0.0  # A_t, normalised and clipped
    ret: float = 0.0  # G_t of `reward`, the value head's target
    obs: str = ""  # the state as text: with `text` what judges and the reward model read
    text: str = ""  # the action as text
    kind: str = ""  # kind of task
    success: bool = False  # of its episode
    env_reward: float = 0.0  # what the environment gave, `violation` already subtracted
    violation: float = 0.0  # penalty for a broken hard constraint, >= 0
    progress: float | None = None  # true progress made by the step, where the environment knows it (measured only)
    step_reward: float = 0.0  # r_step of (4), from the present reward model
    share: float = 0.0  # c_t, mean over its windows
    outlook: float = 0.0  # predicted success after the step (--labeler model)
    feature: torch.Tensor | None = None  # (D,) the value head's input at s_t
    feature_at: int = -1  # updates of the value adapter when it was computed


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


def test(L: Learner, stage: str):
    """Held-out test of the current weights, with step rewards and shares, into summary.json and episodes.jsonl."""
    result, runs, traces = evaluate(L.lm, L.args, "test", L.args.eval_episodes)
    if L.args.lam > 0 and L.reward.optimizer.steps:
        common.show_rewards(L.reward, runs, traces)
    L.record_test(stage, result, traces)


# ----------------------------------------------------------------------------------------------------------------- main
@dataclass
class Progress(common.Progress):
    labels: int = 0  # labels of preferences.jsonl taken in so far
    visits: dict = field(default_factory=dict)  # times a state was acted in (key of its text -> count)


class Learner(common.Checkpoints):
    """The live objects of a run; `common.Checkpoints` logs, saves and restores them together."""

    def __init__(self, argv):
        super().__init__(Args, TUNED, argv, make_env, ("policy", "value", "ref"), check=common.check_labeler)
        args, lm = self.args, self.lm
        embed = common.Embeddings(lm, args.micro_tokens, self.env.max_action_tokens)
        self.policy, self.value = Optimizer(lm.params("policy"), args.warmup_lr), ValueModel(lm, args)
        self.reward, self.ask = RewardModel(embed, args), common.labeler(lm, self.env, args)
        self.store = common.PreferenceStore(self.run.folder / "preferences.jsonl", args.preferences)
        optimizers = {"policy": self.policy, "value": self.value.optimizer, "reward": self.reward.optimizer}
        self.hold(optimizers, Replay(args), Step, Progress(labels=self.store.imported), evaluate, extra=embed,
                  kept={"reward"})  # what labels taught does not get worse  # fmt: skip


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


def warm_up(L: Learner):
    """Stage A (article 4.2): clone the demonstrations; then freeze a copy of the policy as the KL reference."""
    demos = [Step(s, out["trunk"], out["ids"]) for s, out in common.demonstrations(L.lm, L.env, L.args)]
    if L.imitate(demos, clone, evaluate, "value", L.value.optimizer):
        test(L, "warmup")
        L.begin(L.args.algo, evaluate)


def finish(L: Learner) -> int:
    """Test the best weights, write summary.json, report.md and plots, print the table of before and after."""
    args, p, sections = L.args, L.p, {}
    if p.stage != "bc":
        L.restore("best", weights_only=True)
        relabel(L)  # a run resumed just here has not measured the ring yet
        test(L, p.stage)
    if p.labels >= 10 and args.lam > 0 and L.reward.optimizer.steps and L.replay.steps:
        model_of = lambda how: RewardModel(L.reward.embed, replace(args, decompose=how, rm_ensemble=1))  # noqa: E731
        sections = common.preference_report(L.run, L.replay.steps, L.store, L.reward.window, model_of, args)
    return L.finish(sections)


def main(argv=None) -> int:
    L = Learner(argv)
    args, lm, p, stop = L.args, L.lm, L.p, L.stop
    if p.stage == "warmup" and not stop:
        warm_up(L)
    bar = L.bar()
    while args.algo != "bc" and p.env_steps < args.total_env_steps and not stop:
        version, clock = p.iteration + 1, common.Stopwatch()
        progress = (p.env_steps - p.stage_start) / (args.total_env_steps - p.stage_start)  # of this stage

        # ---- COLLECT (A): episodes of the current policy on training tasks it has not seen
        tasks = range(p.episodes, p.episodes + args.episodes_per_iter)
        episodes, stats, traces = rollout(lm, args, "train", tasks, temperature=args.temperature,
                                          key=(args.seed, version), version=version, stop=stop)  # fmt: skip
        steps = [s for e in episodes for s in e]
        if stop:
            break
        common.annotate(episodes, traces)
        clock.lap("collect")
        common.fill_logprobs(token_logprobs, lm, steps, args, logp="policy", ref_logp="ref")  # π_old: ρ starts at 1
        L.replay.add(steps)
        ring, logs = L.replay.steps, {}
        if args.curiosity:
            p.visits = dict(Counter(p.visits) + Counter(common.text_key(s.obs) for s in steps))
        clock.lap("logprobs")

        # ---- PREFERENCES (B): embed the new steps; now and then label pairs and update the reward model
        if args.lam > 0:
            L.reward.embed.add_steps(steps)
            L.reward.embed.standardise()
            if (version - 1) % args.rm_every == 0:
                logs |= update_reward(L, version, progress)
            if stop:
                break
        clock.lap("preferences")

        # ---- ADVANTAGE (C): relabel the ring, fit V to the returns of the new rewards, then G and A of the whole ring
        spread = relabel(L)
        fill_values(L.value, ring)
        fill_returns(ring, args.gamma)
        mse_val, mse_constant = common.score_error(steps, float(np.mean([s.ret for s in ring])))
        passes = args.value_warmup if version == 1 else args.value_passes * len(steps) / len(ring)
        chunks = common.minibatches(ring, args.value_minibatch, passes, args.seed, "value", version)
        norms = [L.value.update(chunk, progress) for chunk in chunks]
        L.value.fit_head(ring)
        fill_values(L.value, ring)
        advantages = fill_advantages(ring, args)
        mse_train, _ = common.score_error(ring, 0.0)
        clock.lap("value")

        # ---- UPDATE: PPO on minibatches of the ring
        logs |= update_policy(lm, L.policy, L.replay, version, args, progress, stop)
        clock.lap("policy")
        if stop:
            break

        # ---- EVAL, LOG, SAVE
        p.iteration, p.env_steps, p.episodes = version, p.env_steps + len(steps), tasks.stop
        row = common.rollout_row(episodes, stats, traces, advantages, clock.laps["collect"]) | logs
        row |= common.reward_row(ring, steps, spread, args.reward_clip, version)
        row |= {"policy/lr": L.policy.rate(progress), "policy/skipped_steps": L.policy.skipped,
                "value/grad_norm": float(np.mean(norms or [0.0])),
                "score/mse_train": mse_train, "score/mse_val": mse_val, "score/mse_constant": mse_constant}  # fmt: skip
        row |= L.milestone(evaluate, clock, args.rollback_drop)
        L.log(row, clock)
        common.advance(bar, len(steps), success=row["train/success"], kl=row["policy/approx_kl"])
        L.reward.embed.keep(turns_of(ring) + turns_in(common.augmented(L.store.rows[-args.rm_memory :], args.augment)))
        L.save()
    bar.close()
    return L.stopped() if stop else finish(L)


if __name__ == "__main__":
    common.run_main(main)
