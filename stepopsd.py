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

import json
import math
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

import common
from common import LM, Optimizer, UserError, rng_for, token_batches, torch_rng_for
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
    total_env_steps: int = 1000  # environment steps of stage stepopsd
    num_envs: int = 50  # environments stepped together
    eval_every: int = 2  # iterations between evaluations on validation tasks
    eval_episodes: int = 100  # held-out test tasks after each stage
    val_episodes: int = 48  # validation tasks (rollback and choice of the best checkpoint)
    load_4bit: bool = True  # NF4 4-bit base (product default; off for tiny unless given)
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"  # compute dtype (auto: float32 for tiny, else bfloat16)
    lora_rank: int = 16  # rank of each adapter
    lora_layers: str = "half"  # adapted layers, from the top: half, all or a number (the rest is computed once a state)
    gradient_checkpointing: bool = False  # recompute activations in the backward pass: less memory, slower
    device: str = "auto"  # auto, cpu, cuda or cuda:N
    track: Literal["none", "tensorboard", "wandb", "trackio"] = "none"  # optional tracker beside metrics.jsonl
    overwrite: bool = False  # replace an existing run folder
    micro_tokens: int = 1024  # tokens a forward pass (memory; does not change the result)
    demos: int = 100  # expert episodes cloned in the warm-up
    demo_noise: float = 0.15  # chance that another action is carried out than the one demonstrated
    warmup_epochs: int = 3  # passes over the demonstrations
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
    pairs: int = 64  # pairs labelled each time
    pos_frac: float = 0.5  # least share of pairs that hold a segment of a successful episode, if there is one (4.3)
    rm_every: int = 2  # iterations between updates of the reward model (3.1 B)
    decompose: Literal["attention", "gradient", "td", "label", "uniform"] = "attention"  # how R(τ) is shared out (3.2)
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
    lam: float = 0.3  # λ of (5); 0 is the baseline: terminal reward only, no labels
    curiosity: float = 0.0  # c of (5): bonus c/sqrt(visits of the state) (5.2)
    value_lr: float = 6e-4  # learning rate of the value adapter and head
    value_minibatch: int = 16  # steps a value update
    value_passes: float = 0.7  # value updates an iteration, in units of the fresh steps
    gamma: float = 0.95  # discount
    gae_lambda: float = 0.9  # λ_gae of (6)
    adv_clip: float = 2.0  # advantages are normalised, then clipped to this
    episodes_per_iter: int = 32  # episodes collected an iteration
    policy_lr: float = 4e-4  # learning rate of the policy adapter in stage stepopsd
    policy_passes: float = 2.0  # policy updates an iteration, in units of the fresh steps
    minibatch: int = 96  # steps a policy update (few and large: the gradient of so few episodes is mostly noise)
    clip_eps: float = 0.2  # ε of (7)
    kl_coef: float = 0.01  # weight of k3(π || π_ref)
    ent_coef: float = 0.001  # weight of the entropy bonus (5.2)
    target_kl: float = 0.1  # stop the epoch, without taking the step, above this approx KL(π_old || π)
    temperature: float = 0.8  # sampling temperature while training; log-probs are taken at it
    replay_iters: int = 2  # iterations kept in the ring: old and new policies' episodes (3.1)
    priority_alpha: float = 0.0  # minibatches are drawn ~ |δ|^α; 0: uniformly
    priority_beta: float = 0.4  # exponent of their importance weights at the start; grows to 1
    rollback_drop: float = 0.1  # validation success this far below the best, twice running, restores the best


TUNED = {  # defaults that depend on another flag; a flag given by hand always wins
    ("preset", "quick"): dict(total_env_steps=350, demos=40, warmup_epochs=2, episodes_per_iter=16, num_envs=24,
                              val_episodes=8, eval_episodes=24, pairs=48),
    ("model", "tiny"): dict(load_4bit=False, lora_rank=64, lora_layers="all", warmup_lr=2e-3, value_lr=1e-3,
                            policy_lr=2e-4, micro_tokens=8192),
    ("env", "gridworld"): dict(demos=450, warmup_minibatch=32, total_env_steps=6000, minibatch=64,
                               episodes_per_iter=80, num_envs=100, gamma=0.9),
    ("env", "miniwob/*"): dict(num_envs=8),  # browsers: one for each environment
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
    total, q, _ = net(batch["x"], batch["real"])
    if args.decompose in ("td", "label"):
        total = q.sum(1)  # (2P,)
    first, second = total.chunk(2)
    loss = F.binary_cross_entropy_with_logits(first - second, batch["y"])
    if args.decompose in ("td", "label"):
        both = batch["real"][:, 1:] & batch["real"][:, :-1]  # (2P, T - 1)
        loss = loss + args.smoothness * ((q[:, 1:] - q[:, :-1]) ** 2 * both).sum(1).mean()  # mean over segments
    if args.decompose == "label" and (named := batch["turn"] >= 0).any():
        logits = q.masked_fill(~batch["real"], -math.inf)[named]
        loss = loss + args.turn_coef * F.cross_entropy(logits, batch["turn"][named])  # mean over named turns
    return loss


class RewardModel:
    """An ensemble of M RewardNets on cached step embeddings, on the CPU (it is small); equations (2)-(4)."""

    def __init__(self, embed: common.Embeddings, args):
        self.embed, self.args, self.nets = embed, args, []
        low, _, high = args.segment_len.partition("-")
        self.window = (int(low) + int(high)) // 2
        for m in range(args.rm_ensemble):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(int(rng_for(args.seed, "reward model", m).integers(2**31)))
                self.nets.append(RewardNet(embed.size, args.rm_dropout, longest=max(int(high), 8)).eval())
        params = {f"{m}.{k}": p for m, net in enumerate(self.nets) for k, p in net.named_parameters()}
        self.optimizer = Optimizer(params, args.rm_lr, weight_decay=args.rm_decay)
        self.mean, self.std = np.zeros(len(self.nets)), np.ones(len(self.nets))  # (M,) of raw step rewards in the ring

    def batch(self, segments: list[list[tuple[str, str]]]):
        """Segments as (obs, action) pairs -> x (B, T, E) and real (B, T)."""
        rows = [torch.stack([self.embed[turn] for turn in segment]) for segment in segments]  # (T_i, E) each
        x = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        real = torch.arange(x.shape[1])[None] < torch.tensor([len(r) for r in rows])[:, None]
        return x, real

    def pairs(self, rows: list[dict]) -> dict:
        """Labelled rows -> the batch of `preference_loss`."""
        x, real = self.batch([r["a"] for r in rows] + [r["b"] for r in rows])
        y = torch.tensor([float(r["y"]) for r in rows])
        turn = [-1 if r["turn"] is None else r["turn"] for r in rows]
        turns = [t if v == 1 else -1 for t, v in zip(turn, y, strict=True)]
        turns += [t if v == 0 else -1 for t, v in zip(turn, y, strict=True)]  # a turn is one of the winner's
        return dict(x=x, real=real, y=y, turn=torch.tensor(turns))

    def augmented(self, rows: list[dict]) -> list[dict]:
        """The rows and, of a share of them, a copy in other words (5.1)."""
        return rows + [common.reword(r) for r in rows if common.chosen(r, self.args.augment, "augment")]

    def fit(self, rows: list[dict], key: tuple, progress: float = 0.0) -> dict:
        """`rm_passes` over the pairs; each member sees its own order. Returns the mean loss and gradient norm."""
        rows = self.augmented(rows)
        self.embed.add(turns_in(rows))
        size, losses, norms = max(1, round(self.args.rm_passes * len(rows))), [], []
        orders = []
        for m in range(len(self.nets)):
            rng = rng_for(self.args.seed, "fit", m, *key)
            orders.append(np.concatenate([rng.permutation(len(rows)) for _ in range(-(-size // len(rows)))])[:size])
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(rng_for(self.args.seed, "dropout", *key).integers(2**31)))
            for first in range(0, size, self.args.rm_minibatch):
                total = 0.0
                for net, order in zip(self.nets, orders, strict=True):
                    chunk = [rows[i] for i in order[first : first + self.args.rm_minibatch]]
                    loss = preference_loss(net.train(), self.pairs(chunk), self.args)
                    loss.backward()
                    total += float(loss.detach()) / len(self.nets)
                    net.eval()
                norms.append(self.optimizer.step(progress) or 0.0)
                losses.append(total)
        return {"reward/loss": float(np.mean(losses)), "reward/grad_norm": float(np.mean(norms))}

    def accuracy(self, rows: list[dict]) -> float | None:
        """Share of decided pairs in which the ensemble's mean R prefers the right one; None without any."""
        rows = [r for r in rows if r["y"] != 0.5]
        if not rows:
            return None
        self.embed.add(turns_in(rows))
        x, real = self.batch([r["a"] for r in rows] + [r["b"] for r in rows])
        totals = sum(decompose(net, x, real, self.args.decompose)[1] for net in self.nets)  # (2P,)
        first, second = totals.chunk(2)
        return float(((first > second) == torch.tensor([r["y"] == 1 for r in rows])).float().mean())

    def raw(self, episodes: list[list[tuple[str, str]]]):
        """Step rewards of every member (M, S) and c_t (S,) for whole episodes laid end to end.

        An episode is read in overlapping windows of the middle segment length; a step gets the mean over the windows
        it lies in (3.3). Call after `embed.add`.
        """
        spans, offset = [], 0
        for episode in episodes:
            n = min(self.window, len(episode))
            spans += [(offset + i, episode[i : i + n]) for i in range(len(episode) - n + 1)]
            offset += len(episode)
        sums, counts = np.zeros((len(self.nets) + 1, offset)), np.zeros(offset)  # last row: shares
        for first in range(0, len(spans), 256):
            part = spans[first : first + 256]
            x, real = self.batch([turns for _, turns in part])
            out = [decompose(net, x, real, self.args.decompose) for net in self.nets]
            c = sum(o[2] for o in out) / len(out)  # (B, T) mean over members
            for row, (start, turns) in enumerate(part):
                where = slice(start, start + len(turns))
                counts[where] += 1
                for k, values in enumerate([*(o[0] for o in out), c]):
                    sums[k, where] += values[row, : len(turns)].detach().numpy()
        sums /= counts
        return sums[:-1], sums[-1]

    def measure(self, raw: np.ndarray):
        """Take the mean and std over the ring's raw step rewards (M, S) for `combine`."""
        self.mean, self.std = raw.mean(1), raw.std(1)

    def combine(self, raw: np.ndarray):
        """Equation (4): raw (M, S) -> step rewards (S,) and the members' spread (S,). A constant model gives zeros."""
        z = np.where(self.std[:, None] > 1e-6, (raw - self.mean[:, None]) / np.maximum(self.std, 1e-6)[:, None], 0.0)
        merged = z.min(0) if self.args.rm_combine == "min" else z.mean(0)
        spread = z.std(0)
        return np.clip(merged / (1 + self.args.kappa * spread), -self.args.reward_clip, self.args.reward_clip), spread


# ------------------------------------------------------------------------------------- the idea: pairs and their labels
def draw_pairs(episodes: list[list[Step]], version: int, args) -> list[tuple[list[Step], list[Step]]]:
    """`pairs` pairs of segments: new against old, the same kind of task when possible, `pos_frac` with a success.

    Each wish narrows the choice as long as something is left; which of the two is called A is a coin's choice.
    """
    rng, out = rng_for(args.seed, "pairs", version), []
    low, _, high = args.segment_len.partition("-")
    new = [e for e in episodes if e[0].version == version] or episodes
    while len(out) < args.pairs and len(episodes) > 1:
        positive = len(out) < math.ceil(args.pos_frac * args.pairs)
        won = [e for e in new if e[0].success] if positive else []
        first = (won or new)[rng.integers(len(won or new))]
        others = [e for e in episodes if e is not first]
        if positive and not first[0].success:
            others = [e for e in others if e[0].success] or others
        others = [e for e in others if e[0].kind == first[0].kind] or others
        others = [e for e in others if e[0].version < version] or others
        second = others[rng.integers(len(others))]
        n, pair = int(rng.integers(int(low), int(high) + 1)), []
        n = min(n, len(first), len(second))  # equal lengths: a sum over more steps would win by length
        for episode in (first, second):
            start = int(rng.integers(len(episode) - n + 1))
            pair.append(episode[start : start + n])
        out.append(tuple(pair if rng.random() < 0.5 else pair[::-1]))
    return out


def turns_of(segment: list[Step]) -> list[tuple[str, str]]:
    return [(s.obs, s.text) for s in segment]


def turns_in(rows: list[dict]) -> list[tuple[str, str]]:
    return [turn for r in rows for turn in r["a"] + r["b"]]


def rule_label(judge, a, b, margin: float):
    """Label and decisive turn of two segments [(obs, action)] by scripted progress `judge(segment)` in [0, 1]."""
    scores = judge(a), judge(b)
    if abs(scores[0] - scores[1]) <= margin:
        return 0.5, None
    winner = a if scores[0] > scores[1] else b
    so_far = [0.0, *(judge(winner[: i + 1]) for i in range(len(winner)))]
    return float(winner is a), int(np.argmax(np.diff(so_far)))  # the turn with the largest gain


def reward_label(a: list[Step], b: list[Step], margin: float):
    """Label and decisive turn of two segments by the reward each earned: for environments without a judge."""
    totals = sum(s.reward for s in a), sum(s.reward for s in b)
    if abs(totals[0] - totals[1]) <= margin:
        return 0.5, None
    winner = a if totals[0] > totals[1] else b
    return float(winner is a), int(np.argmax([s.reward for s in winner]))


def fill_outlook(value: ValueModel, steps: list[Step]):
    """Predicted success of the state after each step of whole episodes laid end to end; known where one terminated."""
    cut = [Step(s.final_state, s.final_trunk) for s in steps if s.truncated]
    own, ends = value.success(steps), iter(value.success(cut))
    for i, step in enumerate(steps):
        step.outlook = float(step.success if step.terminated else next(ends) if step.truncated else own[i + 1])


def label_pairs(L: Learner, pairs, version: int) -> int:
    """Ask the labeler about each pair and keep the answers in the store; returns how many gave none.

    A label already in the store beyond the last checkpoint (the run was killed) is taken from there, not asked again.
    """
    args, failed = L.args, 0
    if args.labeler == "model":
        fill_outlook(L.value, L.replay.steps)
    for a, b in tqdm(pairs, desc="labels", unit="pair", leave=False, disable=args.labeler in ("rule", "human")):
        texts = turns_of(a), turns_of(b)
        if L.stop:
            break
        if texts[0] == texts[1] or L.store.holds(*texts, since=L.p.labels):
            continue
        if args.labeler == "rule":
            margin = args.tie_margin
            label = rule_label(L.judge, *texts, margin) if L.judge else reward_label(a, b, margin)
        elif args.labeler == "model":
            gap = a[-1].outlook - b[-1].outlook
            label = (0.5 if abs(gap) <= args.tie_margin else float(gap > 0)), None
        elif args.labeler == "llm":
            label = common.teacher_label(L.ask, *texts, args.votes, args.tie_margin)
        else:
            label = common.human_label(*texts, named=args.decompose == "label")
            if label == "quit":
                L.stop.asked = True
                break
        if label is None:  # no answer is no label, never a tie
            failed += 1
            continue
        L.store.add(*texts, *label, kind=a[0].kind, labeler=args.labeler, iteration=version)
    return failed


def held_out(row: dict) -> bool:
    return common.chosen(row, 0.2, "held out")


def update_reward(L: Learner, version: int, progress: float) -> dict:
    """Stage B: label pairs of the ring, clean the store and train the reward model; returns metrics (3.1, 5.1)."""
    pairs = draw_pairs(split_episodes(L.replay.steps), version, L.args)
    failed = label_pairs(L, pairs, version)
    if L.stop:
        return {}
    fresh, L.p.labels = L.store.rows[L.p.labels :], len(L.store.rows)
    rows, contradictions, cycles = common.clean_preferences(L.store.rows[-L.args.rm_memory :])
    train, held = [r for r in rows if not held_out(r)], [r for r in rows if held_out(r)]
    logs = {"pref/labels": len(L.store.rows), "pref/failed": failed, "pref/contradictions": contradictions,
            "pref/cycles": cycles, "pref/tie_frac": sum(r["y"] == 0.5 for r in fresh) / max(len(fresh), 1),
            "pref/pos_frac": sum(a[0].success or b[0].success for a, b in pairs) / max(len(pairs), 1)}  # fmt: skip
    if not train:
        print(f"\nno usable labels in iteration {version} ({failed} failed): the reward model stays")
        return logs
    logs["pref/accuracy_new"] = L.reward.accuracy(fresh)  # before they are trained on
    logs |= L.reward.fit(train, (version,), progress)
    return logs | {"pref/accuracy": L.reward.accuracy(held), "pref/accuracy_train": L.reward.accuracy(train)}


# --------------------------------------------------------------------------------------------- the idea: the new reward
def split_episodes(steps: list[Step]) -> list[list[Step]]:
    """Whole episodes laid end to end -> a list of episodes."""
    ends = [i + 1 for i, s in enumerate(steps) if s.done]
    return [steps[i:j] for i, j in zip([0, *ends], ends, strict=False)]


def relabel(L: Learner) -> np.ndarray:
    """Stage C: equation (5) for every step of the ring, with the present reward model (3.1, 5.3); the spread (S,)."""
    args, steps, spread = L.args, L.replay.steps, np.zeros(0)
    if args.lam > 0 and L.reward.optimizer.steps:  # an untrained model's noise must not become reward
        raw, c = L.reward.raw([turns_of(e) for e in split_episodes(steps)])
        L.reward.measure(raw)
        rewards, spread = L.reward.combine(raw)
        for step, reward, share in zip(steps, rewards, c, strict=True):
            step.step_reward, step.share = float(reward), float(share)
    for step in steps:
        terminal = step.env_reward + step.violation  # what the environment pays but for the hard constraints
        bonus = args.curiosity / math.sqrt(L.p.visits.get(common.text_key(step.obs), 1))
        step.reward = args.lam * step.step_reward + (1 - args.lam) * terminal + bonus - step.violation
    return spread


def count_visits(visits: dict, steps: list[Step]):
    for step in steps:
        key = common.text_key(step.obs)
        visits[key] = visits.get(key, 0) + 1


# ------------------------------------------------------------------------------------------------------- the value head
def last_hidden(lm: LM, trunks) -> torch.Tensor:
    """Final hidden state at the last real token of each of B sequences, trunks (T_i, D) -> (B, D)."""
    hidden, starts = lm.top(trunks)  # (sum T_i, D), (B,)
    return hidden[torch.as_tensor(starts + [len(h) - 1 for h in trunks], device=hidden.device)]


class ValueModel:
    """V(s): adapter `value` and a linear head at the state's last token; its second output is the success logit.

    The logit is trained for --labeler model alone. The interface is that of the score in threespo.py, with S = V.
    """

    def __init__(self, lm: LM, args):
        self.lm, self.args = lm, args
        self.head = torch.nn.Linear(lm.hidden_size, 2, device=lm.device)
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)
        params = {**lm.params("value"), "head.weight": self.head.weight, "head.bias": self.head.bias}
        self.optimizer = Optimizer(params, args.value_lr, weight_decay=0.01)

    @staticmethod
    def to_value(scores):
        return scores

    to_score = to_value

    @torch.no_grad()
    def read(self, steps) -> np.ndarray:
        """V and success logit of the states of any number of steps, in token-budgeted batches -> (B, 2)."""
        out = np.zeros((len(steps), 2))
        with self.lm.adapter("value"):
            for rows in token_batches([len(s.state) for s in steps], self.args.micro_tokens):
                out[rows] = self.head(last_hidden(self.lm, [steps[i].state_trunk for i in rows]).float()).cpu().numpy()
        return out

    def score(self, steps) -> np.ndarray:
        return self.read(steps)[:, 0]

    def success(self, steps) -> np.ndarray:
        """Predicted probability that the episode succeeds from each state (B,)."""
        return 1 / (1 + np.exp(-self.read(steps)[:, 1]))

    def update(self, steps, progress) -> float:
        """One optimiser step on squared error to `step.ret`, mean over the minibatch; returns the gradient norm."""
        with self.lm.adapter("value"):
            for rows in token_batches([len(s.state) for s in steps], self.args.micro_tokens):
                out = self.head(last_hidden(self.lm, [steps[i].state_trunk for i in rows]).float())  # (b, 2)
                target = torch.tensor([[steps[i].ret, float(steps[i].success)] for i in rows], device=out.device)
                loss = ((out[:, 0] - target[:, 0]) ** 2).sum()
                if self.args.labeler == "model":
                    loss = loss + F.binary_cross_entropy_with_logits(out[:, 1], target[:, 1], reduction="sum")
                (loss / len(steps)).backward()
            return self.optimizer.step(progress) or 0.0


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
    hidden, starts = lm.top([s.trunk for s in steps])  # (sum (T_i + n_i - 1), D), (B,)
    places = [i + len(s.state) - 1 + j for i, s in zip(starts, steps, strict=True) for j in range(len(s.action))]
    actions = torch.tensor([a for s in steps for a in s.action], device=hidden.device)  # (N,)
    logits = lm.logits(hidden[torch.as_tensor(places, device=hidden.device)])  # (N, V)
    log_probs = (logits if temperature == 1 else logits / temperature).log_softmax(-1)  # (N, V)
    entropy = -(log_probs.exp() * log_probs).sum(-1) if with_entropy else None  # (N,) over the vocabulary
    return log_probs.gather(1, actions[:, None])[:, 0], entropy


@torch.no_grad()
def fill_logprobs(lm: LM, steps, adapter: str, name: str, args):
    """Store the training forward's log-probs of `adapter` in the steps' field `name` (each (n,), on the CPU)."""
    with lm.adapter(adapter):
        for rows in token_batches([len(s.trunk) for s in steps], args.micro_tokens):
            batch = [steps[i] for i in rows]
            log_probs, _ = token_logprobs(lm, batch, args.temperature)
            for step, values in zip(batch, log_probs.cpu().split([len(s.action) for s in batch]), strict=True):
                setattr(step, name, values)


# ------------------------------------------------------------------------------------------------- steps, ring, rollout
@dataclass
class Step:
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

    @property
    def state_trunk(self) -> torch.Tensor:
        return self.trunk[: len(self.state)]  # (T, D)

    @property
    def done(self) -> bool:
        return self.terminated or self.truncated


class Replay:
    """Ring of the last `replay_iters` iterations of steps with prioritised sampling, equation (6) (article 4.1)."""

    def __init__(self, args):
        self.args, self.iterations = args, []

    def add(self, steps: list[Step]):
        self.iterations = [*self.iterations, steps][-self.args.replay_iters :]

    @property
    def steps(self) -> list[Step]:
        return [s for steps in self.iterations for s in steps]

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


def rollout(lm: LM, args, split, tasks, *, temperature, key=(), version=-1, policy="policy", trace=False, stop=None,
            bar=None):  # fmt: skip
    """Play one episode of each task in lockstep batches of `num_envs` -> (episodes, statistics, traces).

    episodes: lists of Step in task order; one whose environment raised is dropped and counted (10 in a row: UserError).
    policy "random": uniformly random legal actions. `trace` keeps the texts for the evaluation log.
    """
    queue, running, finished, stats, memo = list(tasks)[::-1], [], {}, Counter(), {}
    pool = common.EnvPool(lambda: make_env(args.env, seed=args.seed, split=split), args.env, stats)
    noise, rng = torch_rng_for(lm.device, "rollout", *key), rng_for("random actions", *key)
    while (queue or running) and not stop:
        while queue and len(running) < args.num_envs:
            running += pool.begin(queue.pop())
        legal = [pool.legal(r) if policy == "random" else ["any"] for r in running]
        running, legal = ([x for x, y in zip(xs, legal, strict=True) if y] for xs in (running, legal))
        if not running:
            continue
        room = running[0].env.max_action_tokens
        prompts = [lm.encode_prompt(r.obs, room) for r in running]
        ids = [prompt for prompt, _ in prompts]
        if policy == "random":
            outs = common.demonstrated(lm, ids, [texts[rng.integers(len(texts))] for texts in legal])
        else:
            with lm.adapter(policy):
                sample = temperature > 0
                outs = lm.generate(ids, room, temperature, noise) if sample else lm.generate_greedy(ids, room, memo)
        still = []
        for r, (prompt, cut), out in zip(running, prompts, outs, strict=True):
            text, before = lm.decode(out["ids"]).strip(), r.obs
            result = pool.step(r, text)
            if result is None:
                continue
            reward, terminated, truncated, valid, success, was_cut = result
            step = Step(prompt, out["trunk"], out["ids"], reward, terminated, truncated, version)
            step.sampler_logp = torch.tensor(out["logps"])
            r.steps.append(step)
            stats.update(steps=1, invalid=not valid, cut=cut or was_cut, unfinished=out["finish"] != "eos")
            if trace:
                r.texts.append(dict(state=before, action=text, reward=reward, valid=valid))
            if not step.done:
                still.append(r)
                continue
            if step.truncated:
                step.final_state, _ = lm.encode_prompt(r.obs, room)
                step.final_trunk = lm.trunk([step.final_state])[0]
            finished[r.task] = r
            pool.free.append(r.env)
            stats.update(episodes=1, success=success, truncated=truncated)
            if bar is not None:
                bar.update(1)
        running = still
    done = [finished[t] for t in tasks if t in finished]
    traces = [dict(task=r.task, success=bool(r.info["success"]), kind=r.info.get("task", ""), steps=r.texts)
              for r in done]  # fmt: skip
    return [r.steps for r in done], stats, traces


def annotate(episodes: list[list[Step]], stats: Counter, traces: list[dict]):
    """Write texts, outcome, the environment's reward, violations and true progress of a rollout into its steps."""
    for episode, trace in zip(episodes, traces, strict=True):
        for t, (step, row) in enumerate(zip(episode, trace["steps"], strict=True)):
            step.obs, step.text, step.kind, step.success = row["state"], row["action"], trace["kind"], trace["success"]
            step.env_reward, step.violation = step.reward, float(stats["violation", trace["task"], t])
            if ("progress", trace["task"], 0) in stats:
                step.progress = stats["progress", trace["task"], t + 1] - stats["progress", trace["task"], t]


# -------------------------------------------------------------------------------------------------- advantages and loss
def compute_gae(rewards, values, terminated, truncated, final_values, gamma: float, lam: float):
    """δ_t and A_t of equation (4) for a run of whole episodes laid end to end: two float arrays (S,).

    Termination cuts the bootstrap, truncation bootstraps from the value of the state the episode was cut in; neither
    lets anything pass to the next episode. values (S,) V(s_t); final_values (S,) V of the final state where truncated.
    """
    deltas, advantages = np.zeros(len(rewards)), np.zeros(len(rewards))
    running = 0.0
    for t in reversed(range(len(rewards))):
        if terminated[t]:
            following, running = 0.0, 0.0
        elif truncated[t]:
            following, running = final_values[t], 0.0
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
        tokens = sum(len(s.action) for s in chunk)
        sums, kl, kl_tokens, dev = Counter(), 0.0, 0, 0.0
        with lm.adapter("policy"):
            for rows in token_batches([len(s.trunk) for s in chunk], args.micro_tokens):
                part = [chunk[i] for i in rows]
                counts = torch.tensor([len(s.action) for s in part])

                def spread(x, counts=counts):  # (B,) -> (N,): a step's number for each of its action tokens
                    return torch.tensor(x, dtype=torch.float32).repeat_interleave(counts).to(lm.device)

                logp, entropy = token_logprobs(lm, part, args.temperature, with_entropy=True)
                old, ref = (torch.cat([getattr(s, k) for s in part]).to(lm.device) for k in ("logp", "ref_logp"))
                advantages, importance = spread([s.advantage for s in part]), spread([float(w[i]) for i in rows])
                loss, part_sums = ppo_loss(logp, old, ref, entropy, advantages, importance, args)
                (loss / tokens).backward()  # mean over the tokens of the whole minibatch, whatever its micro-batches
                sums.update({k: float(v) for k, v in part_sums.items()})
                with torch.no_grad():
                    now = spread([float(s.version == version) for s in part])
                    log_ratio = logp - old
                    kl += float((now * (log_ratio.exp() - 1 - log_ratio)).sum())
                    dev += float((now * (log_ratio.exp() - 1).abs()).sum())
                    kl_tokens += int(now.sum())
                useful += sum(len(s.trunk) for s in part)
        row = {k: v / tokens for k, v in sums.items()}
        row |= dict(approx_kl=kl / max(kl_tokens, 1), ratio_dev=dev / max(kl_tokens, 1))
        logs.append(row)
        if np.mean([r["approx_kl"] for r in logs[-4:]]) > args.target_kl:  # one minibatch alone is too noisy
            optimizer.zero_grad()
            stopped = True
            break
        row["grad_norm"] = optimizer.step(progress) or 0.0
        if stop:
            break
    seconds, names = time.perf_counter() - start, ("pg_loss", "approx_kl", "ref_kl", "entropy", "clip_frac")
    return {**{f"policy/{k}": float(np.mean([r[k] for r in logs])) for k in names},
            "policy/grad_norm": float(np.mean([r["grad_norm"] for r in logs if "grad_norm" in r] or [0.0])),
            "policy/first_ratio_dev": logs[0]["ratio_dev"], "policy/minibatches": len(logs),
            "policy/stopped": int(stopped), "policy/old_frac": 1 - fresh / len(steps),
            "perf/update_tokens_per_s": useful / seconds}  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ evaluator
def evaluate(lm: LM, args, split: str, episodes: int, scorer=None) -> tuple[dict, list[dict]]:
    """Greedy success on `episodes` fixed tasks of a split; uses no random stream, so training does not notice it.

    Returns (success, ci95, mean_steps over all, ep_len over successes, mean_return, invalid_rate, episodes) and the
    traces, with S(s_t), V(s_t) and the return G_t at each step when a scorer is given.
    """
    runs, stats, traces = rollout(lm, args, split, range(episodes), temperature=0.0, trace=True)
    lengths = [len(steps) for steps in runs]
    wins = [t["success"] for t in traces]
    n = len(runs) + stats["env_errors"]  # a dropped episode counts as a failure
    result = dict(success=sum(wins) / n, ci95=common.wilson(sum(wins), n), mean_steps=float(np.mean(lengths or [0])),
                  ep_len=float(np.mean([k for k, w in zip(lengths, wins, strict=True) if w] or [0])),
                  mean_return=float(np.mean([sum(s.reward for s in steps) for steps in runs] or [0])),
                  invalid_rate=stats["invalid"] / max(stats["steps"], 1), episodes=n)  # fmt: skip
    if scorer is not None:
        steps = [s for run in runs for s in run]
        fill_values(scorer, steps)
        fill_returns(steps, args.gamma)
        for run, trace in zip(runs, traces, strict=True):
            for step, row in zip(run, trace["steps"], strict=True):
                score = float(scorer.to_score(np.float64(step.value)))
                row |= {"score": score, "value": step.value, "return": step.ret}
    return result, traces


def test(L: Learner, stage: str):
    """Held-out test of the current weights, with step rewards and shares, into summary.json and episodes.jsonl."""
    result, traces = evaluate(L.lm, L.args, "test", L.args.eval_episodes)
    if L.args.lam > 0 and L.reward.optimizer.steps:
        episodes = [[(r["state"], r["action"]) for r in t["steps"]] for t in traces]
        L.reward.embed.add([turn for e in episodes for turn in e])
        raw, c = L.reward.raw(episodes)
        numbers = zip(L.reward.combine(raw)[0], c, strict=True)
        for row, (reward, share) in zip((r for t in traces for r in t["steps"]), numbers, strict=True):
            row |= {"step_reward": float(reward), "share": float(share)}
    L.record_test(stage, result, traces)


# ----------------------------------------------------------------------------------------------------------------- main
@dataclass
class Progress(common.Progress):
    """Where a run stands, with what StepOPSD adds."""

    labels: int = 0  # labels of preferences.jsonl taken in so far
    visits: dict = field(default_factory=dict)  # times a state was acted in (key of its text -> count)
    alarms: int = 0  # iterations with a reward-hacking alarm


class Learner(common.Checkpoints):
    """The live objects of a run; `common.Checkpoints` logs, saves and restores them together."""

    def __init__(self, args: Args, lm: LM, env, run: common.Run, stop: common.Interrupt):
        self.args, self.stop, self.judge = args, stop, getattr(env, "judge", None)
        self.policy, self.value = Optimizer(lm.params("policy"), args.warmup_lr), ValueModel(lm, args)
        self.reward = RewardModel(common.Embeddings(lm, args.micro_tokens, env.max_action_tokens), args)
        self.store = common.PreferenceStore(run.folder / "preferences.jsonl", args.preferences)
        self.ask = common.teacher(lm, args) if args.labeler == "llm" else None
        optimizers = {"policy": self.policy, "value": self.value.optimizer, "reward": self.reward.optimizer}
        super().__init__(run, lm, optimizers, Replay(args), Step, Progress(labels=self.store.imported))

    def extra_tensors(self) -> dict:
        return self.reward.embed.state()

    def restore(self, name: str = "last", weights_only: bool = False):
        every = self.optimizers
        if weights_only:  # the reward model keeps what it learned from labels: those do not get worse
            self.optimizers = {k: v for k, v in every.items() if k != "reward"}
        super().restore(name, weights_only)
        self.optimizers = every
        self.policy.lr = self.args.warmup_lr if self.p.stage == "warmup" else self.args.policy_lr

    def load_extra(self, tensors: dict):
        self.reward.embed.load(tensors)


def clone(L: Learner, steps: list[Step], progress: float) -> float:
    """One update of behaviour cloning: mean negative log-likelihood of the demonstrated action tokens (4.2 A)."""
    tokens, total = sum(len(s.action) for s in steps), 0.0
    with L.lm.adapter("policy"):
        for rows in token_batches([len(s.trunk) for s in steps], L.args.micro_tokens):
            logp, _ = token_logprobs(L.lm, [steps[i] for i in rows], 1.0)
            loss = -logp.sum() / tokens  # mean over the minibatch's action tokens
            loss.backward()
            total += float(loss.detach())
    L.policy.step(progress)
    return total


def score_error(scorer, steps, constant: float) -> tuple[float, float]:
    """(MSE of the stored values, MSE of the constant predictor) against G, both on the [-1, 1] scale of S."""
    targets, predicted = (scorer.to_score(np.array([getattr(s, k) for s in steps])) for k in ("ret", "value"))
    return float(np.mean((predicted - targets) ** 2)), float(np.mean((constant - targets) ** 2))


def validate(L: Learner, episodes: int = 0) -> dict:
    """Greedy evaluation on validation tasks as metrics and one printed line."""
    return L.record_validation(evaluate(L.lm, L.args, "val", episodes or L.args.val_episodes)[0])


def warm_up(L: Learner):
    """Stage A (article 4.2): clone the demonstrations; then freeze a copy of the policy as the KL reference."""
    if L.p.iteration == 0:
        L.log(validate(L, min(8, L.args.val_episodes)))  # the step-0 point of every curve
    env = make_env(L.args.env, seed=L.args.seed, split="train")
    demos = [Step(s, out["trunk"], out["ids"]) for s, out in common.demonstrations(L.lm, env, L.args)]
    if not L.imitate(demos, lambda chunk, progress: clone(L, chunk, progress), L.args, L.stop):
        return
    L.lm.copy_adapter("policy", "ref")
    L.lm.copy_adapter("policy", "value")  # the clone reads these states already: the value learns faster from there
    L.value.optimizer.adopt()
    test(L, "warmup")
    L.begin(L.args.algo, L.args.policy_lr, lambda: validate(L))


def compare_decompositions(L: Learner) -> dict:
    """Fit every decomposition anew on the older four fifths of the labels; accuracy on the newest fifth (3.2).

    Also the rank correlation of its step rewards in the ring with the true progress, where the environment knows it.
    """
    rows, _, _ = common.clean_preferences(L.store.rows[-L.args.rm_memory :])
    cut, table, steps = len(rows) * 4 // 5, {}, L.replay.steps
    for how in ("attention", "gradient", "td", "label", "uniform") if cut else ():
        model = RewardModel(L.reward.embed, replace(L.args, decompose=how, rm_ensemble=1))
        model.fit(rows[:cut], ("compare",))
        raw, _ = model.raw([turns_of(e) for e in split_episodes(steps)])
        correlation = common.progress_correlation(steps, raw[0])
        table[how] = {"accuracy": model.accuracy(rows[cut:]), "progress_corr": correlation}
    return table


def finish(L: Learner):
    """Test the best weights, write summary.json, report.md and plots, print the table of before and after."""
    args, p, sections = L.args, L.p, {}
    if p.stage != "bc":
        L.restore("best", weights_only=True)
        relabel(L)  # a run resumed just here has not measured the ring yet
        test(L, p.stage)
    if p.labels >= 10 and args.lam > 0 and L.reward.optimizer.steps and L.replay.steps:
        episodes = split_episodes(L.replay.steps)
        sections["Spot check: highest and lowest segments"] = common.spot_check(episodes, L.reward.window)
        table = compare_decompositions(L)
        common.write_atomic(L.run.folder / "decompositions.json", json.dumps(table))
        sections["Decompositions"] = common.decomposition_table(table)
    p.finished = True
    L.save()
    common.finish_run(L.run, args, p, p.tested.get(p.stage, p.tested["warmup"]), sections)


def set_up(argv) -> Learner:
    """Arguments, model, adapters and run folder; a resumed run continues from its last checkpoint."""
    args = common.parse_args(Args, argv)
    folder, resumed = common.settle_args(args, TUNED)
    common.check_limits(args)
    common.check_labeler(args, resumed)
    env = common.training_env(make_env, args)
    stop = common.Interrupt()
    lm, run = common.open_run(args, folder, resumed, ("policy", "value", "ref"), __file__)
    L = Learner(args, lm, env, run, stop)
    L.resume(args.eval_only, resumed)
    size = sum(q.numel() for q in L.reward.nets[0].parameters())
    print(f"reward model: {args.rm_ensemble} x {size / 1e6:.2f}M weights on embeddings of {L.reward.embed.size}")
    return L


def iteration_row(L: Learner, episodes: list[list[Step]], stats: Counter, advantages, spread) -> dict:
    """What the collected episodes, their step rewards and the ring's raw advantages say, as metrics."""
    steps, args = [s for e in episodes for s in e], L.args
    gaps = np.concatenate([(s.sampler_logp - s.logp).numpy() for s in steps])  # (N,)
    ended = max(stats["episodes"], 1)
    rates = {f"rollout/{name}": stats[key] / stats["steps"] for name, key in
             (("invalid_rate", "invalid"), ("cut_frac", "cut"), ("unfinished_frac", "unfinished"))}  # fmt: skip
    row = {"train/success": stats["success"] / ended, "train/ep_len": len(steps) / len(episodes),
           "train/return": float(np.mean([sum(s.env_reward for s in e) for e in episodes])),
           "train/violation": float(np.mean([sum(s.violation for s in e) for e in episodes])),
           "adv/mean": float(advantages.mean()), "adv/std": float(advantages.std()),
           "policy/sampler_gap": float(np.mean(np.abs(gaps))), **rates,
           "rollout/truncated_frac": stats["truncated"] / ended, "rollout/env_errors": stats["env_errors"],
           "perf/peak_rss_mb": common.peak_memory()["peak_rss_mb"]}  # fmt: skip
    if len(spread):
        r = np.array([s.step_reward for s in steps])
        counts, _ = np.histogram(r, 20, (-args.reward_clip, args.reward_clip))
        row |= {"reward/step_mean": float(r.mean()), "reward/step_std": float(r.std()), "reward/hist": counts.tolist(),
                "reward/spread": float(spread.mean())}  # fmt: skip
        row["reward/progress_corr"] = common.progress_correlation(steps, r)
    return row


def main(argv=None) -> int:
    L = set_up(argv)
    args, lm, p, run, stop = L.args, L.lm, L.p, L.run, L.stop
    if args.eval_only:
        print(json.dumps(evaluate(lm, args, "test", args.eval_episodes)[0]))
        return 0
    if p.finished and (run.folder / "report.md").exists():
        print(f"this run is finished; see {run.folder / 'report.md'}")
        return 0
    if p.stage == "warmup" and not stop:
        warm_up(L)
    bar = tqdm(total=args.total_env_steps, initial=p.env_steps, desc=args.algo, unit="step", disable=args.algo == "bc")
    while args.algo != "bc" and p.env_steps < args.total_env_steps and not stop:
        done, clock = p.env_steps - p.stage_start, common.Stopwatch()
        progress = done / (args.total_env_steps - p.stage_start)  # of this stage, for the schedules
        version = p.iteration + 1

        # ---- COLLECT (A): episodes of the current policy on training tasks it has not seen
        tasks = range(p.episodes, p.episodes + args.episodes_per_iter)
        episodes, stats, traces = rollout(lm, args, "train", tasks, temperature=args.temperature,
                                          key=(args.seed, version), version=version, trace=True, stop=stop)  # fmt: skip
        steps = [s for e in episodes for s in e]
        if stop:
            break
        if not steps:
            raise UserError(f"every episode of iteration {version} was dropped: the environment {args.env} fails")
        annotate(episodes, stats, traces)
        clock.lap("collect")
        fill_logprobs(lm, steps, "policy", "logp", args)  # π_old by the training forward: ρ starts at 1
        fill_logprobs(lm, steps, "ref", "ref_logp", args)
        L.replay.add(steps)
        ring, logs = L.replay.steps, {}
        count_visits(p.visits, steps if args.curiosity else [])
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
        mse_val, mse_constant = score_error(L.value, steps, float(np.mean([s.ret for s in ring])))
        size, rng, norms = max(1, round(args.value_passes * len(steps))), rng_for(args.seed, "value", version), []
        order = np.concatenate([rng.permutation(len(ring)) for _ in range(-(-size // len(ring)))])[:size]
        for first in range(0, size, args.value_minibatch):
            norms.append(L.value.update([ring[i] for i in order[first : first + args.value_minibatch]], progress))
        fill_values(L.value, ring)
        advantages = fill_advantages(ring, args)
        mse_train, _ = score_error(L.value, ring, 0.0)
        clock.lap("value")

        # ---- UPDATE: PPO on minibatches of the ring
        logs |= update_policy(lm, L.policy, L.replay, version, args, progress, stop)
        clock.lap("policy")
        if stop:
            break

        # ---- EVAL, LOG, SAVE
        p.iteration, p.env_steps, p.episodes = version, p.env_steps + len(steps), tasks.stop
        p.env_seconds += clock.laps["collect"]
        alarm = len(spread) > 0 and common.hacking_alarm(split_episodes(ring), version)
        p.alarms += alarm
        row = iteration_row(L, episodes, stats, advantages, spread) | logs
        row |= {"policy/lr": L.policy.rate(progress), "policy/skipped_steps": L.policy.skipped,
                "value/grad_norm": float(np.mean(norms)), "reward/hacking_alarm": int(alarm),
                "score/mse_train": mse_train, "score/mse_val": mse_val, "score/mse_constant": mse_constant,
                "perf/env_steps_per_s": len(steps) / clock.laps["collect"]}  # fmt: skip
        if version % args.eval_every == 0 or p.env_steps >= args.total_env_steps:
            row |= validate(L)
            L.roll_back(row["eval/success"], args.rollback_drop)
            clock.lap("eval")
        L.log(row | {f"time/{k}": v for k, v in clock.laps.items()})
        success, kl = row["train/success"], row["policy/approx_kl"]
        bar.set_postfix(success=f"{success:.2f}", kl=f"{kl:.3f}", reward=f"{row.get('reward/step_mean', 0):.2f}")
        bar.update(len(steps))
        L.reward.embed.keep(turns_of(ring) + turns_in(L.reward.augmented(L.store.rows[-args.rm_memory :])))
        L.save()
    bar.close()
    if stop:
        print(f"stopped; go on with: python {Path(__file__).name} --resume {run.folder}")
        return 130
    finish(L)
    return 0


if __name__ == "__main__":
    common.run_main(main)
