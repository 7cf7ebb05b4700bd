"""SLEA-RL: Step-Level Experience Augmented RL for LLM agents, in one file.

Give every written thought its own credit, then train on thoughts and actions as one sequence of decisions.
Source: the article "SLEA-RL" (sections 2-5); numbers below are used at the functions.

(1) micro-steps  an answer `<think>1. x_1 2. x_2 ..</think> a` is K + 1 decisions x_1 .. x_K, a with token spans
(2) evaluator    f_k = E[G | s, x_1 .. x_k], f_{K+1} with the action; fitted to observed returns G_t = Σ_k γ^k r_{t+k}
(3) credit       c_k = f_k - f_{k-1}  (--credit difference; or counterfactual, inverse)
(4) r_step       (1 - κ) c_k + κ kb_k,  kb: key steps;  κ <- κ min(1, error of f on new episodes / a constant's)
(5) advantage    δ_j = r_j + γ_j V_{j+1} - V_j,  A_j = Σ_l λ^l Γ δ_{j+l};  r_j is r_step of a thought and the
                 environment's reward of an action; γ_j is γ at the end of a turn and 1 inside (Γ their product)
(6) policy       -min(ρ A, clip(ρ, 1-ε, 1+ε) A) + kl_coef k3(π || π_ref) - ent_coef H, mean over tokens, each with
                 the A of its own micro-step;  + β NLL of the best steps of successful episodes (--imitation)

Stages: warmup (clone a few demonstrations) -> slea (repeat: collect, augment, advantage, update). --no_augment makes
the whole answer one decision: plain episode-level PPO, the baseline. --algo bc stops after the warm-up.
Differs from the article: thinking is not discounted; steps come from the sampled ids, not from re-encoded text; the
evaluator's cold start decays by its measured error. The published SLEA-RL (arXiv 2603.18079) is another algorithm.

    python slea_rl.py --env troubleshoot     # the README says what has been measured

Environment protocol (swap the one import to use your own): env.reset(seed=task) -> obs, info; env.step(text) -> obs,
reward, terminated, truncated, info; obs is the prompt; info["success"], info["valid"], info["cut"] are bools;
env.expert() gives a demonstration's answer; env.key_steps() known good steps [(pattern, weight)], optional;
env.return_bounds is (lo, hi); env.max_action_tokens. Shapes: B turns of a batch, T tokens of a state, n tokens of an
answer, N all of a batch, m micro-steps of a turn, M all of a batch or the most in it, D hidden size, V vocabulary.
"""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F

import common
from common import LM, RL_FLOOR, Optimizer, rng_for, token_batches, torch_rng_for
from envs import make_env


@dataclass
class Args:
    env: str = "troubleshoot"  # task: see `python envs.py`
    model: str = "auto"  # auto (CUDA: Qwen2.5-0.5B-Instruct, else smollm2), smollm2, tiny, a hub id or a local path
    seed: int = 1  # seeds weights, tasks, sampling and minibatches
    out: str = ""  # run folder (empty: runs/<algo>__<env>__<model>__s<seed>__<time>)
    resume: str = ""  # continue the run in this folder with the flags it was started with
    eval_only: str = ""  # evaluate the best checkpoint of this run folder on the test tasks and stop
    algo: Literal["slea", "bc"] = "slea"  # bc: stop after the warm-up
    augment: bool = True  # split answers into steps with credit; --no_augment is plain episode-level PPO
    preset: Literal["default", "quick"] = "default"  # quick: every stage with small numbers, to see the machinery
    total_env_steps: int = 900  # environment steps of stage slea
    num_envs: int = 50  # environments stepped together
    eval_every: int = 2  # iterations between evaluations on validation tasks
    eval_episodes: int = 100  # held-out test tasks after each stage
    val_episodes: int = 48  # validation tasks (choice of the best checkpoint)
    load_4bit: bool = True  # NF4 4-bit base (product default; off for tiny unless given)
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"  # compute dtype (auto: bfloat16 where fast; tiny float32)
    lora_rank: int = 16  # rank of each adapter
    lora_layers: str = "half"  # adapted layers, from the top: half, all or a number (the rest is computed once a state)
    gradient_checkpointing: bool | None = None  # recompute activations: less memory, slower (None: by a GPU's memory)
    device: str = "auto"  # auto, cpu, cuda or cuda:N
    track: Literal["none", "tensorboard", "wandb", "trackio"] = "none"  # optional tracker beside metrics.jsonl
    overwrite: bool = False  # replace an existing run folder
    micro_tokens: int = 768  # tokens a forward pass, common prefixes once (memory; in bf16 it changes the rounding)
    demos: int = 150  # expert episodes cloned in the warm-up
    demo_noise: float = 0.15  # chance that another action is carried out than the one demonstrated
    warmup_epochs: int = 3  # passes over the demonstrations
    warmup_lr: float = 2e-3  # learning rate of cloning (its own cosine)
    warmup_minibatch: int = 12  # turns a cloning update (small: the number of updates matters more than their noise)
    credit: Literal["difference", "counterfactual", "inverse"] = "difference"  # (3), article 2.2
    hierarchical: bool = False  # nested numbers: a parent's credit is the sum of its sub-steps' (article 5)
    kappa: float = 1.0  # κ of (4) at the start: weight of the knowledge base (article 3)
    evaluator_lr: float = 1e-3  # learning rate of the step evaluator
    evaluator_passes: float = 4.0  # passes of the evaluator over the buffer an iteration
    imitation: float = 0.1  # β of (6) at the start, falls to 0 over the run (article 2.3)
    imitation_quantile: float = 0.2  # best share of the steps of successful episodes that is imitated
    critic_l2: float = 2000.0  # ridge of the value head's least squares over the whole buffer; 0: no such fit
    critic_passes: float = 0.0  # instead: gradient passes of adapter and head over the fresh turns an iteration
    critic_lr: float = 6e-4  # their learning rate
    critic_minibatch: int = 16  # turns a gradient update
    gamma: float = 0.95  # discount a turn
    gae_lambda: float = 0.95  # λ of (5), a micro-step
    adv_clip: float = 2.0  # advantages are normalised, then clipped to this
    neg_scale: float = 0.5  # negative ones are then multiplied by this: many failed steps must not drown the good ones
    episodes_per_iter: int = 40  # episodes collected an iteration
    policy_lr: float = 4e-4  # learning rate of the policy adapter in stage slea
    policy_passes: float = 2.0  # passes of the policy over the fresh turns an iteration
    minibatch: int = 96  # turns a policy update (few and large: the gradient of so few episodes is mostly noise)
    clip_eps: float = 0.2  # ε of (6)
    kl_coef: float = 0.01  # weight of k3(π || π_ref)
    ent_coef: float = 0.001  # weight of the entropy bonus
    target_kl: float = 0.1  # stop the passes, without taking the step, above this approx KL(π_old || π)
    temperature: float = 1.0  # sampling temperature while training; log-probs are taken at it
    replay_iters: int = 3  # iterations kept in the buffer, for evaluator and imitation


TUNED = {  # defaults that depend on another flag; a flag given by hand always wins
    ("preset", "quick"): dict(total_env_steps=300, demos=40, episodes_per_iter=16, num_envs=24, val_episodes=8,
                              eval_episodes=24),
    ("model", "tiny"): dict(load_4bit=False, lora_rank=64, lora_layers="all", critic_passes=1.0, critic_lr=1e-3,
                            policy_lr=2e-4, micro_tokens=8192),
    ("env", "gridworld"): dict(demos=450, warmup_minibatch=32, total_env_steps=6000, minibatch=64,
                               episodes_per_iter=80, num_envs=100, gamma=0.9),
    ("env", "miniwob/*"): dict(num_envs=12, val_episodes=32, eval_episodes=60),  # a browser for each
    ("augment", False): dict(algo="no_augment", imitation=0.0),  # the name sets its runs apart in the pictures
}  # fmt: skip


# ------------------------------------------------------------------------------------------ the idea: steps with credit
NUMBER = re.compile(r"(?<![A-Za-z\d_.])(?:(\d+(?:\.\d+)+)[.)、．:：]?(?=\s|$)|(\d+)[.)、．:：](?!\d))\s*")
OPEN, CLOSE = (re.compile(rf"<\s*{slash}think(?:ing)?\s*>", re.IGNORECASE) for slash in ("", r"/\s*"))


def follows(number: list[int], previous: list[int] | None) -> bool:
    """Whether a number can come next in a nested list: 1 at the start; after 1.2: 1.2.1, 1.3 or 2."""
    if previous is None:
        return number == [1]
    return number == [*previous, 1] or number in [[*previous[:d], previous[d] + 1] for d in range(len(previous))]


def split_answer(text: str) -> tuple[list[tuple[int, str]], str]:
    """([(first character, number), ..], kind) of an answer's micro-steps; they cover the text, the first begins at 0.

    Numbers are "1", "1.1" for thoughts, "" for the action or a whole answer, a rule's name for a sentence. kind: think,
    unnumbered (the block is one thought), cut_off (no end of the block: the last thought is the action), rules (no
    block; sentences by what they do), whole (nothing found: the answer is one action), empty.
    """
    if not text.strip():
        return [(0, "")], "empty"
    opened, closings = OPEN.search(text), list(CLOSE.finditer(text))
    if not opened and not closings:
        marks = common.sentences(text)  # one that no rule fits belongs to the one before
        return ([(0, marks[0][1]), *marks[1:]], "rules") if marks else ([(0, "")], "whole")
    marks, previous, closed = [], None, closings[-1].start() if closings else len(text)  # as environments read it
    for m in NUMBER.finditer(text, opened.end() if opened else 0, closed):
        number = [int(part) for part in (m[1] or m[2]).split(".")]
        if follows(number, previous):  # "version 2. It" inside a thought is no new step unless 2 is due
            marks.append((m.start(), ".".join(map(str, number))))
            previous = number
    kind = "cut_off" if not closings else "think" if marks else "unnumbered"
    marks = [(0, marks[0][1] if marks else "1"), *marks[1:]] if closed else []  # `</think>` at once: no thought
    return [*marks, *[(closed, "")][: len(closings)]], kind


def parse_steps(lm: LM, action: list[int], split: bool = True) -> tuple[list[int], list[str], list[str], str]:
    """Equation (1): (ends, numbers, texts, kind) of the micro-steps of sampled ids; one is action[ends[j-1]:ends[j]].

    A token belongs to the micro-step its last character stands in, so that every one belongs to exactly one, also those
    of a character of several tokens (a prefix of it decodes to a replacement character in its place).
    """
    text = lm.decode(action)
    marks, kind = split_answer(text) if split else ([(0, "")], "whole")  # --no_augment: one decision
    reach = np.maximum.accumulate([min(len(lm.decode(action[: j + 1])), len(text)) for j in range(len(action))])  # (n,)
    starts = [*(start for start, _ in marks), len(text) + 1]
    ends, numbers, texts = [], [], []
    for (start, number), stop in zip(marks, starts[1:], strict=True):
        end = int((reach <= stop).sum()) if stop <= len(text) else len(action)  # an EOS belongs to the last
        if end > (ends[-1] if ends else 0):  # a mark inside a token of the next step opens nothing
            words = " ".join(CLOSE.sub(" ", OPEN.sub(" ", text[start:stop])).split())
            ends.append(end)
            numbers.append(number)
            texts.append(words[m.end() :] if (m := NUMBER.match(words)) else words)
    return ends, numbers, texts, kind


class StepEvaluator(torch.nn.Module):
    """f of equation (2): a causal transformer over the embeddings of [state, micro-step 1, .., m] (article 2.2).

    Output (B, M, 2) at every place: the return so far expected, on the scale [-1, 1] of `bounds`, and the log-odds of
    success. Places beyond PLACES share an embedding. Dropout is 0 and the module stays in train mode: the fused
    inference kernel of eval mode rounds differently.
    """

    WIDTH, LAYERS, HEADS, PLACES = 64, 2, 4, 24

    def __init__(self, lm: LM, bounds, args):
        super().__init__()
        self.args, (self.low, self.high) = args, bounds
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(args.seed)
            self.norm = torch.nn.LayerNorm(lm.hidden_size, elementwise_affine=False)
            self.project = torch.nn.Linear(lm.hidden_size, self.WIDTH)
            self.place = torch.nn.Embedding(self.PLACES, self.WIDTH)
            options = dict(dropout=0.0, batch_first=True, norm_first=True)
            layer = torch.nn.TransformerEncoderLayer(self.WIDTH, self.HEADS, 4 * self.WIDTH, **options)
            self.blocks = torch.nn.TransformerEncoder(layer, self.LAYERS, enable_nested_tensor=False)
            self.out = torch.nn.Linear(self.WIDTH, 2)
        torch.nn.init.zeros_(self.out.weight)  # an evaluator that has learned nothing gives no credit
        torch.nn.init.zeros_(self.out.bias)
        self.to(lm.device)
        self.optimizer = Optimizer(dict(self.named_parameters()), args.evaluator_lr, weight_decay=0.01, floor=RL_FLOOR)

    def forward(self, sequences: list[torch.Tensor]) -> torch.Tensor:
        x = common.pad(sequences)[0].to(self.out.weight.device)  # (B, M, D) padding lies in the future
        place = torch.arange(x.shape[1], device=x.device).clamp(max=self.PLACES - 1)  # (M,)
        causal = torch.full((len(place), len(place)), -math.inf, device=x.device).triu(1)  # (M, M)
        hidden = self.project(self.norm(x)) + self.place(place)  # (B, M, WIDTH)
        return self.out(self.blocks(hidden, mask=causal))

    @torch.no_grad()
    def predict(self, sequences: list[torch.Tensor]) -> list[np.ndarray]:
        """Outputs for each sequence (m_i + 1, D) -> (m_i + 1, 2) in float64, so that differences telescope."""
        out = []
        for first in range(0, len(sequences), 256):
            part = sequences[first : first + 256]
            rows = self(part).double().cpu().numpy()
            out += [row[: len(x)] for row, x in zip(rows, part, strict=True)]
        return out

    def credits(self, steps: list[Step]) -> list[np.ndarray]:
        """Equation (3): c of every micro-step in units of return, an (m,) array for each turn.

        difference: f_k - f_{k-1}. counterfactual: f of all minus f without step k.
        inverse: (p⁺ - p⁻) / (p⁺ + p⁻), how much likelier the step is in successes than in failures
        (by Bayes, from the change of the log-odds).
        """
        outputs, half = self.predict([s.embeds for s in steps]), (self.high - self.low) / 2
        if self.args.credit == "difference":
            return [half * np.diff(f[:, 0]) for f in outputs]
        if self.args.credit == "inverse":
            return [half * np.tanh(np.diff(f[:, 1]) / 2) for f in outputs]
        without = self.predict([torch.cat([s.embeds[:k], s.embeds[k + 1 :]]) for s in steps
                                for k in range(1, len(s.embeds))])  # fmt: skip
        last = iter([f[-1, 0] for f in without])
        return [half * np.array([f[-1, 0] - next(last) for _ in range(len(f) - 1)]) for f in outputs]

    def update(self, steps: list[Step], progress: float) -> float:
        """One step on the squared error of f against the observed return at every place (and on the success).

        counterfactual: half of the turns lose a random micro-step, or f would never have seen one left out.
        """
        sequences, rng = [s.embeds for s in steps], rng_for(self.args.seed, "leave out", self.optimizer.steps)
        if self.args.credit == "counterfactual":
            drop = [rng.integers(1, len(x)) if rng.random() < 0.5 else 0 for x in sequences]
            sequences = [torch.cat([x[:k], x[k + 1 :]]) if k else x for x, k in zip(sequences, drop, strict=True)]
        out = self(sequences)  # (B, M, 2)
        real = common.pad(sequences)[1].to(out.device)  # (B, M)
        targets, success = (torch.tensor(x, dtype=torch.float32, device=out.device)[:, None].expand(real.shape)[real]
                            for x in (self.to_score([s.ret for s in steps]), [s.success for s in steps]))  # fmt: skip
        value, log_odds = out[real].unbind(-1)  # (real places,) each
        loss = (value - targets).square().mean()  # mean over the real places of the minibatch
        if self.args.credit == "inverse":
            loss = loss + F.binary_cross_entropy_with_logits(log_odds, success)
        loss.backward()
        self.optimizer.step(progress)
        return float(loss.detach())

    def to_score(self, returns) -> np.ndarray:
        return 2 * (np.asarray(returns, dtype=np.float64) - self.low) / (self.high - self.low) - 1

    def errors(self, steps: list[Step], past: list[Step]) -> tuple[float, float]:
        """(error of f, that of the mean return of `past`) on new turns, means over places.

        Whole episodes are held out: f was fitted to those of `past` alone.
        """
        places = [len(s.embeds) for s in steps]
        values = np.concatenate([f[:, 0] for f in self.predict([s.embeds for s in steps])])  # (places,)
        targets = np.repeat(self.to_score([s.ret for s in steps]), places)  # (places,)
        constant = self.to_score([s.ret for s in past]).mean()
        return float(np.mean((values - targets) ** 2)), float(np.mean((constant - targets) ** 2))


def fill_knowledge(lm: LM, episode: list[Step], key_steps, scale: float):
    """kb of (4): a key step's share of the task's weight goes to the micro-step that takes it.

    key_steps: [(pattern over `state + " " + text`, weight)]. What the state alone shows is nobody's merit. A key step
    earns once a turn, and in the same words once an episode: repeating must not pay. scale: return units of them all.
    """
    total, words = sum(w for _, w in key_steps) or 1.0, set()
    for step in episode:
        state, step.knowledge = lm.decode(step.state), []
        left = [k for k in key_steps if not re.search(k[0], state)]
        for text in step.texts:
            found = [k for k in left if (k[0], text) not in words and re.search(k[0], f"{state} {text}")]
            step.knowledge.append(scale * sum(weight for _, weight in found) / total)
            words |= {(pattern, text) for pattern, _ in found}
            left = [k for k in left if k not in found]


def fill_credits(evaluator: StepEvaluator, steps: list[Step], kappa: float, hierarchical: bool):
    """Equation (4) into `Step.credits`. With --hierarchical a parent's is the sum of its sub-steps' (article 5)."""
    for step, credit in zip(steps, evaluator.credits(steps), strict=True):
        mixed = ((1 - kappa) * credit + kappa * np.array(step.knowledge)).tolist()
        if hierarchical:  # its own words announce the sub-steps: what they are worth is what these achieve
            mixed = [sum(mixed[i] for i in leaves(step.numbers, j)) for j in range(len(mixed))]
        step.credits = mixed


def leaves(numbers: list[str], j: int) -> list[int]:
    """Indices of the sub-steps without sub-steps below step j; j itself where it has none."""
    below = [i for i, n in enumerate(numbers) if numbers[j] and n.startswith(numbers[j] + ".")]
    return [i for i in below if leaves(numbers, i) == [i]] or [j]


class Critic:
    """V(s, steps so far): adapter `value` on the shared base and a linear head (article 2.3, conditional value).

    Read at the last token before each micro-step: the state's, then that of every micro-step but the last.
    """

    def __init__(self, lm: LM, bounds, args):
        self.lm, self.args, (self.low, self.high) = lm, args, bounds
        self.head = torch.nn.Linear(lm.hidden_size, 1, device=lm.device)
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)
        params = {**lm.params("value"), "head.weight": self.head.weight, "head.bias": self.head.bias}
        self.optimizer = Optimizer(params, args.critic_lr, weight_decay=0.01, floor=RL_FLOOR)

    to_score = StepEvaluator.to_score

    def features(self, steps: list[Step]) -> torch.Tensor:
        """The head's inputs before all micro-steps of B turns, end to end (M, D). Call with adapter `value` active."""
        hidden, rows = self.lm.top([s.inputs for s in steps], [s.trunk for s in steps])  # (N, D), (T_i + n_i - 1,)
        places = [own[len(s.state) - 1 + e] for own, s in zip(rows, steps, strict=True) for e in (0, *s.ends[:-1])]
        return hidden[torch.as_tensor(places, device=hidden.device)].float()

    @torch.no_grad()
    def values(self, steps: list[Step]) -> list[list[float]]:
        """V before each micro-step in units of return, m numbers for each turn (one for a state alone)."""
        out = [[]] * len(steps)
        with self.lm.adapter("value"):
            for rows in token_batches([s.inputs for s in steps], self.args.micro_tokens):
                read = self.features([steps[i] for i in rows])  # (M, D)
                values = self.low + (self.head(read)[:, 0].double().cpu() + 1) / 2 * (self.high - self.low)
                sizes = [max(1, len(steps[i].ends)) for i in rows]
                for i, v, x in zip(rows, values.split(sizes), read.cpu().split(sizes), strict=True):
                    out[i], steps[i].read = v.tolist(), x.clone()
        return out

    @torch.no_grad()
    def fit_head(self, steps: list[Step]) -> float:
        """Least squares for the head alone: Σ (score - target)² + critic_l2 ||w||² over all micro-steps.

        The adapter stays the clone's copy, so `Step.read` of older turns holds. Returns the mean squared error.
        """
        x = torch.cat([s.read for s in steps]).to(self.lm.device)  # (M, D)
        y = torch.as_tensor(self.to_score([g for s in steps for g in s.targets])).to(x)  # (M,)
        if self.args.critic_l2:
            self.head.weight[0], self.head.bias[0] = common.ridge(x, y, self.args.critic_l2)
            self.optimizer.adopt()
        return float((self.head(x)[:, 0] - y).square().mean())

    def update(self, steps: list[Step], progress: float) -> float:
        """One optimiser step on the squared error of the scores against `Step.targets`, mean over micro-steps."""
        count, total = sum(len(s.ends) for s in steps), 0.0
        with self.lm.adapter("value"):
            for rows in token_batches([s.inputs for s in steps], self.args.micro_tokens):
                targets = self.to_score([g for i in rows for g in steps[i].targets])  # (M,)
                targets = torch.as_tensor(targets, dtype=torch.float32, device=self.lm.device)
                scores = self.head(self.features([steps[i] for i in rows]))[:, 0]  # (M,)
                loss = (scores - targets).square().sum() / count
                loss.backward()
                total += float(loss.detach())
            self.optimizer.step(progress)
        return total


def fill_values(scorer: Critic, steps: list[Step]):
    """Write V before each micro-step, and V of the state a truncated episode ended in, into the steps."""
    for step, values in zip(steps, scorer.values(steps), strict=True):
        step.values, step.value = values, values[0]
    cut = [s for s in steps if s.truncated]
    ends = [Step(state=s.final_state, trunk=s.final_trunk) for s in cut]
    for step, values in zip(cut, scorer.values(ends), strict=True):
        step.final_value = values[0]


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


# ----------------------------------------------------------------------------------------------- steps, buffer, rollout
@dataclass
class Step(common.Transition):
    """One turn (s, [micro-steps + spans], [r_step], a, r, s', terminated, truncated). Ids are the sampled ones."""

    state: list[int]  # (T,) prompt ids of s_t
    trunk: torch.Tensor  # (T + n - 1, D) frozen lower layers on s_t and all but the last answer token
    action: list[int] = field(default_factory=list)  # (n,) sampled ids, thoughts and action, EOS included when sampled
    reward: float = 0.0
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
    ret: float = 0.0  # G_t, the evaluator's target
    success: bool = False  # of the episode
    ends: list[int] = field(default_factory=list)  # (m,) micro-step j is action[ends[j-1] : ends[j]]
    numbers: list[str] = field(default_factory=list)  # (m,) "1", "1.1" of thoughts, "" of the action
    texts: list[str] = field(default_factory=list)  # (m,) their words
    embeds: torch.Tensor | None = None  # (m + 1, D) of the state and each micro-step
    knowledge: list[float] = field(default_factory=list)  # (m,) kb
    credits: list[float] = field(default_factory=list)  # (m,) r_step; the action's is for the report alone
    values: list[float] = field(default_factory=list)  # (m,) V before each micro-step
    read: torch.Tensor | None = None  # (m, D) what V was read from
    advantages: list[float] = field(default_factory=list)  # (m,) A_j, normalised and clipped
    targets: list[float] = field(default_factory=list)  # (m,) A_j + V_j, the critic's target


class Buffer(common.Ring):
    """The augmented turns of the last `replay_iters` iterations (article 2.3)."""

    def best(self) -> list[tuple[Step, list[bool]]]:
        """Turns of successful episodes with the thoughts among the top `imitation_quantile` by credit: [(turn, (m,))].

        The action's own credit is not compared: its reward is the environment's.
        """
        won = [s for s in self.steps if s.success and len(s.ends) > 1]
        if not won:
            return []
        bound = np.quantile([c for s in won for c in s.credits[:-1]], 1 - self.args.imitation_quantile)
        chosen = [(s, [bool(c >= bound) for c in s.credits[:-1]] + [False]) for s in won]
        return [(s, mask) for s, mask in chosen if any(mask)]


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


def micro_gae(rewards, values, terminated, truncated, final_values, turns, gamma: float, lam: float) -> np.ndarray:
    """A_j of equation (5) for micro-steps of whole episodes laid end to end (M,); turns: number within the episode.

    Only the end of a turn discounts, but `compute_gae` knows one γ. Counted in units of the episode's first turn
    (times γ^turn) the discount is 1 everywhere, and the advantage comes out in those units. γ must not be 0.
    """
    unit = gamma**turns  # (M,)
    finals = final_values * unit * gamma
    return compute_gae(rewards * unit, values * unit, terminated, truncated, finals, 1.0, lam)[1] / unit


def fill_advantages(steps: list[Step], args) -> np.ndarray:
    """Write normalised A_j and the critic's targets into whole episodes laid end to end; returns the raw A_j (M,)."""
    rows, turn = [], 0
    for s in steps:
        for j, end in enumerate(s.ends):
            last = end == s.ends[-1]
            parent = args.hierarchical and leaves(s.numbers, j) != [j]  # its sub-steps bring the reward in later
            reward = s.reward if last else 0.0 if parent else s.credits[j]
            rows.append((reward, s.values[j], s.terminated and last, s.truncated and last, s.final_value, turn))
        turn = 0 if s.done else turn + 1
    columns = [np.array(column) for column in zip(*rows, strict=True)]
    advantages = micro_gae(*columns, args.gamma, args.gae_lambda)
    targets, scaled = advantages + columns[1], normalise(advantages, args.adv_clip)
    scaled[scaled < 0] *= args.neg_scale
    cuts = np.cumsum([len(s.ends) for s in steps])[:-1]
    for step, a, g in zip(steps, np.split(scaled, cuts), np.split(targets, cuts), strict=True):
        step.advantages, step.targets = a.tolist(), g.tolist()
    return advantages


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


def per_token(step: Step, numbers) -> torch.Tensor:
    """A number of each micro-step (m,) for each of its tokens (n,)."""
    return torch.tensor(numbers, dtype=torch.float32).repeat_interleave(torch.tensor([0, *step.ends]).diff())


def imitate(lm: LM, best, beta: float, args) -> float:
    """Gradient of β times the mean negative log-likelihood of the tokens of the buffer's best thoughts; the NLL."""
    tokens, total = sum(float(per_token(s, mask).sum()) for s, mask in best), 0.0
    for rows in token_batches([s.inputs for s, _ in best], args.micro_tokens):
        logp, _ = token_logprobs(lm, [best[i][0] for i in rows], args.temperature)  # (N,)
        chosen = torch.cat([per_token(*best[i]) for i in rows]).to(lm.device)  # (N,) 1 on those tokens
        nll = -(chosen * logp).sum() / tokens
        (beta * nll).backward()
        total += float(nll.detach())
    return total


def update_policy(lm: LM, optimizer: Optimizer, buffer: Buffer, version: int, args, progress: float, stop) -> dict:
    """PPO passes over the fresh turns, with the imitation of the buffer's best thoughts; logged means over minibatches.

    approx_kl = mean over tokens of (ρ - 1) - log ρ, an estimate of KL(π_old || π) under samples of π_old. Above
    `target_kl` the accumulated gradient is dropped and the passes end: the step is not taken.
    """
    steps, beta, rng = buffer.iterations[-1], args.imitation * (1 - progress), rng_for(args.seed, "imitate", version)
    best = buffer.best() if beta > 0 else []
    logs, start, useful, stopped = [], time.perf_counter(), 0, False
    for chunk in common.minibatches(steps, args.minibatch, args.policy_passes, args.seed, "policy", version):
        tokens, sums = sum(len(s.action) for s in chunk), Counter()
        with lm.adapter("policy"):
            for rows in token_batches([s.inputs for s in chunk], args.micro_tokens):
                part = [chunk[i] for i in rows]
                logp, entropy = token_logprobs(lm, part, args.temperature, with_entropy=True)
                old, ref = (torch.cat([getattr(s, k) for s in part]).to(lm.device) for k in ("logp", "ref_logp"))
                advantages = torch.cat([per_token(s, s.advantages) for s in part]).to(lm.device)  # (N,)
                loss, part_sums = ppo_loss(logp, old, ref, entropy, advantages, torch.ones_like(logp), args)
                (loss / tokens).backward()  # mean over the tokens of the whole minibatch, whatever its micro-batches
                sums.update({k: float(v) for k, v in part_sums.items()})
                log_ratio = (logp - old).detach()
                sums.update(approx_kl=float((log_ratio.exp() - 1 - log_ratio).sum()),
                            ratio_dev=float((log_ratio.exp() - 1).abs().sum()))  # fmt: skip
                useful += sum(len(s.trunk) for s in part)
            row = {k: v / tokens for k, v in sums.items()}
            logs.append(row)
            if np.mean([r["approx_kl"] for r in logs[-4:]]) > args.target_kl:  # one minibatch alone is too noisy
                optimizer.zero_grad()
                stopped = True
                break
            if best:
                some = rng.choice(len(best), size=min(len(best), args.minibatch), replace=False)
                row["imitation_nll"] = imitate(lm, [best[i] for i in some], beta, args)
        row["grad_norm"] = optimizer.step(progress) or 0.0
        if stop:
            break
    logged = common.update_row(logs, stopped, useful, start)
    return {"policy/imitation_nll": 0.0} | logged


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
@dataclass
class Progress(common.Progress):
    kappa: float = 1.0  # κ of (4)


class Learner(common.Checkpoints):
    """The live objects of a run; `common.Checkpoints` logs, saves and restores them together."""

    def __init__(self, argv):
        limits = {(0.01, 1): "gamma", (0.0, 1): "kappa"}
        super().__init__(Args, TUNED, argv, make_env, ("policy", "value", "ref"),
                         check=lambda args, *_: common.check_limits(args, limits))  # fmt: skip
        args, lm, (low, high) = self.args, self.lm, self.env.return_bounds
        self.scorer, self.evaluator = Critic(lm, (low, high), args), StepEvaluator(lm, (low, high), args)
        self.policy = Optimizer(lm.params("policy"), args.warmup_lr)
        optimizers = {"policy": self.policy, "value": self.scorer.optimizer, "evaluator": self.evaluator.optimizer}
        self.hold(optimizers, Buffer(args), Step, Progress(kappa=args.kappa), evaluate)
        size = sum(p.numel() for p in self.evaluator.parameters())
        print(f"returns in [{low:.2f}, {high:.2f}]; value head {lm.hidden_size} x 1; evaluator {size / 1e3:.0f}k")


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
    if L.imitate(demos, clone, evaluate, "value", L.scorer.optimizer):
        test(L, "warmup")
        L.begin(L.args.algo, evaluate)


def augment(L: Learner, episodes: list[list[Step]], traces: list[dict]) -> dict:
    """Split the answers into micro-steps, embed them and look them up in the knowledge base (2.2); shares by kind."""
    args, kinds, scale = L.args, Counter(), (L.scorer.high - L.scorer.low) / 2
    pool = common.EnvPool(make_env, args, "train")
    for episode, trace in zip(episodes, traces, strict=True):
        for step in episode:
            step.success = trace["success"]
            step.ends, step.numbers, step.texts, kind = parse_steps(L.lm, step.action, args.augment)
            step.credits = [0.0] * len(step.ends)
            kinds[kind] += 1
        if args.augment:
            fill_knowledge(L.lm, episode, pool.key_steps(trace["task"]), scale)
    steps = [s for e in episodes for s in e]
    if args.augment:
        common.embed(L.lm, steps, args)
    return {f"steps/{k}": kinds[k] / len(steps) for k in ("think", "unnumbered", "cut_off", "rules", "whole", "empty")
            } | {"steps/per_turn": float(np.mean([len(s.ends) for s in steps]))}  # fmt: skip


def give_credit(L: Learner, steps: list[Step]) -> dict:
    """Let κ follow the evaluator's error on new episodes and give their steps credit; both as metrics.

    It has not seen these episodes: fitted to them first, it would hand their noise to the policy as credit.
    """
    p, past, row = L.p, L.replay.steps, {}
    if past:
        error, constant = L.evaluator.errors(steps, past)
        row = {"evaluator/mse_val": error, "evaluator/mse_constant": constant}
        p.kappa = anneal(p.kappa, error, constant)
    fill_credits(L.evaluator, steps, p.kappa, L.args.hierarchical)
    return row | common.credit_row(steps) | {"evaluator/kappa": p.kappa}


def anneal(kappa: float, error: float, constant: float) -> float:
    """κ of (4): falls by the factor by which the held-out error beats the constant's, never rises; 0 below 0.01."""
    kappa *= min(1.0, error / constant) if constant > 0 else 1.0
    return kappa if kappa >= 0.01 else 0.0


def finish(L: Learner) -> int:
    """Test the best weights, write summary.json, report.md and plots, print the table of before and after."""
    args, p = L.args, L.p
    if p.stage != "bc":
        L.restore("best", weights_only=True)
        test(L, p.stage)
    sections = {"Case study": common.case_study(common.read_jsonl(L.run.folder / "episodes.jsonl"))}
    if args.augment and L.replay.iterations:
        sections |= common.step_report(L.replay.steps)
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

        # ---- AUGMENT: micro-steps, their values and returns, then credit from evaluator and knowledge base
        shares = augment(L, episodes, traces)
        fill_values(L.scorer, steps)  # by the critic that has not seen these episodes
        fill_returns(steps, args.gamma)
        constant = float(np.mean(L.scorer.to_score([s.ret for s in L.replay.steps or steps])))
        mse_val, mse_constant = common.score_error(steps, constant, L.scorer.to_score)
        credit = give_credit(L, steps) if args.augment else {}
        L.replay.add(steps)
        clock.lap("augment")

        # ---- ADVANTAGE: over micro-steps; reward of a thought its credit, of an action the environment's
        advantages = fill_advantages(steps, args)

        # ---- UPDATE: PPO with imitation, then critic and evaluator for the next iteration
        logs = update_policy(lm, L.policy, L.replay, version, args, progress, stop)
        clock.lap("policy")
        chunks = common.minibatches(steps, args.critic_minibatch, args.critic_passes, args.seed, "critic", version)
        fitted = [L.scorer.update(chunk, progress) for chunk in chunks] or [L.scorer.fit_head(L.replay.steps)]
        mse_train = float(np.mean(fitted))
        clock.lap("critic")
        chunks = common.minibatches(L.replay.steps, 32, args.evaluator_passes, args.seed, "evaluator", version)
        fitted = [L.evaluator.update(chunk, progress) for chunk in (chunks if args.augment else ())]
        clock.lap("evaluator")
        if stop:
            break

        # ---- EVAL, LOG, SAVE
        p.iteration, p.env_steps, p.episodes = version, p.env_steps + len(steps), tasks.stop
        row = common.rollout_row(episodes, stats, traces, advantages, clock.laps["collect"]) | logs | shares | credit
        row |= {"policy/lr": L.policy.rate(progress), "policy/skipped_steps": L.policy.skipped,
                "score/mse_train": mse_train, "score/mse_val": mse_val, "score/mse_constant": mse_constant,
                "evaluator/loss": float(np.mean(fitted or [0.0]))}  # fmt: skip
        row |= L.milestone(evaluate, clock)
        L.log(row, clock)
        common.advance(bar, len(steps), success=row["train/success"], kl=row.get("policy/approx_kl", 0.0))
        L.save()
    bar.close()
    return L.stopped() if stop else finish(L)


if __name__ == "__main__":
    common.run_main(main)
