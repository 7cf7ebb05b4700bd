"""slea_rl.py: spans on odd outputs, credit, knowledge base, micro-step GAE, losses; whole runs, kill and resume."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import fields

import numpy as np
import pytest
import torch
from conftest import ROOT, main_here, random_prompts, rows_of, starts_from_the_policy, warmed_up

import common
import slea_rl
from slea_rl import Args, Buffer, Critic, Step, StepEvaluator, fill_advantages, micro_gae, parse_steps, split_answer

ADAPTERS = ("policy", "value", "ref")
LIGHTS = {"train": ("red", "green"), "val": ("blue", "amber"), "test": ("white", "black")}


class Lights:
    """A think-block task: name the light in a thought, then go on even tasks and stop on odd ones, twice."""

    max_action_tokens = 36
    return_bounds = (-0.5, 1.0)

    def __init__(self, seed=0, split="train"):
        self.split, self.task, self.t = split, 0, 0

    def reset(self, seed=None):
        self.task, self.t, self.good = seed, 0, True
        return self.observe(), self.info()

    @property
    def light(self):
        return LIGHTS[self.split][self.task % 2]

    def observe(self):
        return f"Goal: obey\nLight: {self.light}\nTurn: {self.t}\nAction:"

    def info(self, success=False, valid=True):
        return {"success": success, "valid": valid, "cut": False, "task": "obey"}

    def step(self, text):
        self.t += 1
        action = text.rpartition("</think>")[2].strip()
        valid = action in ("go", "stop")
        self.good = self.good and action == ("go", "stop")[self.task % 2]
        ended = self.t == 2
        success = ended and self.good
        return self.observe(), float(success) - 0.02 * (not valid), ended, False, self.info(success, valid)

    def expert(self):
        action = ("go", "stop")[self.task % 2]
        return f"<think>1. light {self.light} 2. so {action}</think> {action}"

    def legal_actions(self):
        return ["go", "stop"]

    def key_steps(self):
        return [(rf"Action: light {self.light}$", 1.0), (r"Action: so (go|stop)$", 3.0)]


def make_env(name, seed=0, split="train", **options):
    return Lights(seed, split) if name == "lights" else slea_rl_make_env(name, seed=seed, split=split, **options)


slea_rl_make_env = slea_rl.make_env


@pytest.fixture(autouse=True)
def lights(monkeypatch):
    monkeypatch.setattr(slea_rl, "make_env", make_env)


def answered(lm, texts, prompts=None, eos=True):
    """Turns with given answers, parsed."""
    prompts = prompts or random_prompts([7] * len(texts))
    ids = [lm.encode(" " + text) + [lm.eos_id] * eos for text in texts]
    trunks = lm.trunk([p + a[:-1] for p, a in zip(prompts, ids, strict=True)])
    steps = [Step(p, h, a) for p, h, a in zip(prompts, trunks, ids, strict=True)]
    for step in steps:
        step.ends, step.numbers, step.texts, _ = parse_steps(lm, step.action)
    return steps


# ------------------------------------------------------------------------------------------------------------- parsing


THINK = "<think>1. see light 2. so go</think> go"
ANSWERS = {  # text: (kind, numbers, texts)
    THINK: ("think", ["1", "2", ""], ["see light", "so go", "go"]),
    "<think>\n1) a\n2) b\n3) c\n</think>\nfix": ("think", ["1", "2", "3", ""], ["a", "b", "c", "fix"]),
    "<think>1. plan 1.1 look 1.2 ask 2. end</think> x": (
        "think", ["1", "1.1", "1.2", "2", ""], ["plan", "look", "ask", "end", "x"]),
    "<think>1. plan\n1.1. look\n1.1.1. deep\n2. end</think> x": (
        "think", ["1", "1.1", "1.1.1", "2", ""], ["plan", "look", "deep", "end", "x"]),
    "<think>1、检查日志 2、重启服务</think> 重启": ("think", ["1", "2", ""], ["检查日志", "重启服务", "重启"]),
    "<think>1. version 3. is old 2. at 10:30 use 1.5 GB</think> go": (
        "think", ["1", "2", ""], ["version 3. is old", "at 10:30 use 1.5 GB", "go"]),
    "<think>just look</think> go": ("unnumbered", ["1", ""], ["just look", "go"]),
    "<think></think> go": ("unnumbered", ["1", ""], ["", "go"]),
    "<think>2. second 3. third</think> go": ("unnumbered", ["1", ""], ["second 3. third", "go"]),
    "<think>1. see 2. so": ("cut_off", ["1", "2"], ["see", "so"]),
    "<think>": ("cut_off", ["1"], [""]),
    "1. see</think> go": ("think", ["1", ""], ["see", "go"]),
    "<think>1. a</think>": ("think", ["1", ""], ["a", ""]),
    "<think>1. a</think> b </think> c": ("think", ["1", ""], ["a b", "c"]),
    "< THINK >1. a 2. b</ Thinking > c": ("think", ["1", "2", ""], ["a", "b", "c"]),
    "</think> x <think>1. a": ("unnumbered", [""], ["x 1. a"]),
    "go": ("whole", [""], ["go"]),
    "прошу перезапустить сервис": ("whole", [""], ["прошу перезапустить сервис"]),
    "": ("empty", [""], [""]),
    "  \n ": ("empty", [""], [""]),
    "Sorry about that. Could you send the log? I suggest a restart. That completes it.": (
        "rules", ["apologise", "ask", "propose", "conclude"],
        ["Sorry about that.", "Could you send the log?", "I suggest a restart.", "That completes it."]),
    "Hello there. Understood, two rooms. They are big. What dates?": (
        "rules", ["confirm", "ask"], ["Hello there. Understood, two rooms. They are big.", "What dates?"]),
}  # fmt: skip


@pytest.mark.parametrize("text", ANSWERS)
def test_steps_of_an_answer_by_hand(tiny, text):
    kind, numbers, texts = ANSWERS[text]
    ids = tiny.encode(text) + [tiny.eos_id]
    ends, found, words, found_kind = parse_steps(tiny, ids)
    assert (found_kind, found, words) == (kind, numbers, texts)
    assert ends[-1] == len(ids) and ends == sorted(set(ends)) and ends[0] > 0
    if kind in ("think", "rules"):  # the ids of a micro-step spell it, but for a token that reaches over a border
        for start, end, wanted in zip([0, *ends], ends, texts, strict=False):
            assert all(word in tiny.decode(ids[start:end]) for word in wanted[1:-1].split())


def test_spans_by_hand(tiny):
    """Token by token: with one token a character, micro-steps are slices of the text."""
    ids = [t for c in THINK for t in tiny.encode(c)]
    assert len(ids) == len(THINK)
    ends, *_ = parse_steps(tiny, ids)
    assert ends == [THINK.index("2."), THINK.index("</think>"), len(THINK)]


def test_a_token_over_a_border_belongs_to_the_step_of_its_last_character():
    class Pieces:
        words = ("<think>1. a ", "b 2", ". c.</", "think> go", "")

        def decode(self, ids):
            return "".join(self.words[i] for i in ids)

    ends, numbers, texts, _ = parse_steps(Pieces(), [0, 1, 2, 3, 4])
    assert numbers == ["1", "2", ""] and texts == ["a b", "c.", "go"]
    assert ends == [1, 2, 5]  # "b 2" holds the first character of step 2, ". c.</" that of the action


def test_every_token_of_a_split_character_belongs_to_the_same_step(tiny):
    text = "<think>1. 灯🙂2. 停</think> 停"  # several tokens a character, no space between the steps
    ids = tiny.encode(text)
    assert len(ids) > len(text)
    ends, numbers, _, _ = parse_steps(tiny, ids)
    assert numbers == ["1", "2", ""]
    parts = [tiny.decode(ids[a:b]) for a, b in zip([0, *ends], ends, strict=False)]
    assert parts == ["<think>1. 灯🙂", "2. 停", "</think> 停"]


def test_random_tokens_are_always_covered_once(tiny):
    rng = np.random.default_rng(0)
    pieces = [tiny.encode(t) for t in ("<think>", "</think>", "1. ", "2. ", "1.1 ", "sorry ", "? ", "\n", "🙂")]
    for _ in range(300):
        ids = [int(i) for i in rng.integers(0, 512, rng.integers(1, 8))]
        for _ in range(rng.integers(0, 6)):
            at = rng.integers(0, len(ids) + 1)
            ids[at:at] = pieces[rng.integers(len(pieces))]
        ends, numbers, texts, kind = parse_steps(tiny, ids)
        assert len(ends) == len(numbers) == len(texts) >= 1
        assert all(a < b for a, b in zip([0, *ends], ends, strict=False)) and ends[-1] == len(ids)
        step = Step([1], torch.zeros(0), ids, ends=ends)
        counted = slea_rl.per_token(step, [1.0] * len(ends))
        assert counted.tolist() == [1.0] * len(ids)
        assert kind in ("think", "unnumbered", "cut_off", "rules", "whole", "empty")


def test_numbers_that_may_follow():
    assert slea_rl.follows([1], None) and not slea_rl.follows([2], None) and not slea_rl.follows([1, 1], None)
    for number in ([1, 2, 1], [1, 3], [2]):
        assert slea_rl.follows(number, [1, 2])
    for number in ([1, 2], [1, 4], [3], [1], [1, 2, 2], [2, 1]):
        assert not slea_rl.follows(number, [1, 2])


def test_split_answer_starts_at_zero_and_is_increasing():
    for text in ANSWERS:
        marks, _ = split_answer(text)
        starts = [start for start, _ in marks]
        assert starts[0] == 0 and starts == sorted(set(starts)) and starts[-1] <= len(text)


# ---------------------------------------------------------------------------------------------------- evaluator, credit


def with_embeds(lengths, size=128, seed=0, **more):
    generator = torch.Generator().manual_seed(seed)
    steps = [Step([1], torch.zeros(0), [1] * n, **more) for n in lengths]
    for step, n in zip(steps, lengths, strict=True):
        step.ends, step.texts = list(range(1, n + 1)), ["x"] * n
        step.numbers = [str(i + 1) for i in range(n - 1)] + [""]
        step.embeds = torch.randn(n + 1, size, generator=generator)
        step.knowledge = [0.0] * n
    return steps


def evaluator_of(lm, bounds=(-0.5, 1.0), **args):
    """With a random output layer: a fresh one predicts 0 everywhere."""
    evaluator = StepEvaluator(lm, bounds, Args(**args))
    with torch.no_grad():
        evaluator.optimizer.master["out.weight"].normal_(std=0.1, generator=torch.Generator().manual_seed(2))
    evaluator.optimizer.publish()
    return evaluator


@pytest.mark.parametrize("credit", ["difference", "counterfactual", "inverse"])
def test_a_fresh_evaluator_gives_no_credit(tiny, credit):
    evaluator = StepEvaluator(tiny, (-0.5, 1.0), Args(credit=credit))
    assert all((c == 0).all() for c in evaluator.credits(with_embeds([1, 3])))


def test_difference_credit_telescopes_exactly(tiny):
    evaluator = evaluator_of(tiny)
    steps = with_embeds([1, 4, 2, 7])
    outputs = evaluator.predict([s.embeds for s in steps])
    for credit, f in zip(evaluator.credits(steps), outputs, strict=True):
        assert len(credit) == len(f) - 1
        assert abs(credit.sum() - 0.75 * (f[-1, 0] - f[0, 0])) < 1e-12  # half of the span 1.5
        assert credit[0] == pytest.approx(0.75 * (f[1, 0] - f[0, 0]), abs=1e-12) and abs(credit).max() > 1e-3


class Table(StepEvaluator):
    """f of a sequence: sum over its places of the embedding's first number; log-odds: sum of the second."""

    def __init__(self, credit):
        torch.nn.Module.__init__(self)
        self.args, self.low, self.high = Args(credit=credit), -0.5, 1.0

    def predict(self, sequences):
        return [np.cumsum(x.double().numpy()[:, :2], axis=0) for x in sequences]


def test_counterfactual_and_inverse_credit_by_hand():
    step = Step([1], torch.zeros(0), [1, 2], ends=[1, 2])
    step.embeds = torch.tensor([[0.1, 0.0], [0.4, math.log(3)], [-0.2, -math.log(2)]])
    (credit,) = Table("counterfactual").credits([step])
    assert credit == pytest.approx([0.75 * 0.4, 0.75 * -0.2])  # f without a place is less by that place
    (credit,) = Table("inverse").credits([step])
    assert credit == pytest.approx([0.75 * 0.5, 0.75 * -1 / 3])  # p+/p- = 3: (3-1)/(3+1); 1/2: (1-2)/(1+2)
    (credit,) = Table("difference").credits([step])
    assert credit == pytest.approx([0.75 * 0.4, 0.75 * -0.2])


def test_counterfactual_of_the_real_evaluator_leaves_one_out(tiny):
    evaluator = evaluator_of(tiny, credit="counterfactual")
    (step,) = with_embeds([3])
    (credit,) = evaluator.credits([step])
    for k in (1, 2, 3):
        rest = torch.stack([e for i, e in enumerate(step.embeds) if i != k])
        both = [evaluator.predict([x])[0][-1, 0] for x in (step.embeds, rest)]
        assert credit[k - 1] == pytest.approx(0.75 * (both[0] - both[1]), abs=1e-6)


def test_evaluator_is_causal_and_does_not_see_padding(tiny):
    evaluator = evaluator_of(tiny)
    short, long = (s.embeds for s in with_embeds([2, 9]))
    alone, padded = evaluator.predict([short])[0], evaluator.predict([short, long])[0]
    assert alone == pytest.approx(padded, abs=1e-5) and len(padded) == 3
    changed = long.clone()
    changed[5:] = torch.randn(5, 128, generator=torch.Generator().manual_seed(5))
    before, after = evaluator.predict([long])[0], evaluator.predict([changed])[0]
    assert before[:5] == pytest.approx(after[:5], abs=1e-6) and abs(before[5:] - after[5:]).min() > 1e-6
    many = with_embeds([60])[0].embeds  # more steps than places
    assert np.isfinite(evaluator.predict([many])[0]).all()


def test_padding_and_order_do_not_change_the_evaluators_update(tiny):
    steps = with_embeds([2, 5, 1])
    for step, ret in zip(steps, (1.0, -0.5, 0.25), strict=True):
        step.ret, step.success = ret, ret > 0
    one, two = evaluator_of(tiny, credit="inverse"), evaluator_of(tiny, credit="inverse")
    assert one.update(steps, 0.0) == pytest.approx(two.update(steps[::-1], 0.0), abs=1e-6)
    f = [evaluator_of(tiny).predict([s.embeds])[0] for s in steps]  # the loss is a mean over the real places
    goals = [(1.0, 1), (-1.0, 0), (0.0, 1)]
    places = [(v, g) for rows, (g, _) in zip(f, goals, strict=True) for v in rows[:, 0]]
    odds = [(z, y) for rows, (_, y) in zip(f, goals, strict=True) for z in rows[:, 1]]
    wanted = np.mean([(v - g) ** 2 for v, g in places]) + np.mean([math.log1p(math.exp(z)) - y * z for z, y in odds])
    assert evaluator_of(tiny, credit="inverse").update(steps, 0.0) == pytest.approx(wanted, abs=1e-5)


def test_evaluator_learns_which_step_matters_and_beats_the_constant(tiny):
    """The return is decided by the second step alone: its credit must carry the sign, the others' stay small."""
    rng = np.random.default_rng(0)
    base = torch.randn(4, 128, generator=torch.Generator().manual_seed(9))
    steps = with_embeds([3] * 240)
    for step in steps:
        good = bool(rng.integers(2))
        step.embeds = base + 0.1 * step.embeds
        step.embeds[2] = base[2] * (1 if good else -1)
        step.ret, step.success = (1.0 if good else -0.5), good
    kept, held = ([s for i, s in enumerate(steps) if (i % 5 == 4) == side] for side in (False, True))
    for credit in ("difference", "counterfactual", "inverse"):
        evaluator = evaluator_of(tiny, credit=credit, evaluator_lr=3e-3)
        for chunk in common.minibatches(kept, 32, 12, "test"):
            evaluator.update(chunk, 0.0)
        error, constant = evaluator.errors(held, kept)
        assert constant == pytest.approx(1.0, abs=0.05) and error < 0.7 * constant  # places 0 and 1 cannot know
        credits = np.array(evaluator.credits(held))  # (48, 3)
        sign = np.array([1 if s.success else -1 for s in held])
        assert (credits[:, 1] * sign > 0.3).all(), credit
        assert abs(credits[:, [0, 2]]).mean() < 0.25 * abs(credits[:, 1]).mean()


def test_errors_by_hand():
    past = [Step([1], torch.zeros(0), [1], ret=r) for r in (1.0, 0.25)]  # targets 1 and 0: constant 0.5
    new = [Step([1], torch.zeros(0), [1], ret=0.25), Step([1], torch.zeros(0), [1], ret=1.0)]
    new[0].embeds = torch.tensor([[0.5, 0.0], [0.25, 0.0], [0.25, 0.0]])  # target 0, f = 0.5, 0.75, 1
    new[1].embeds = torch.tensor([[0.5, 0.0], [0.5, 0.0]])  # target 1, f = 0.5, 1
    error, constant = Table("difference").errors(new, past)
    assert error == pytest.approx((0.25 + 0.5625 + 1 + 0.25 + 0) / 5) and constant == pytest.approx(0.25)


def test_kappa_anneals():
    assert slea_rl.anneal(1.0, 0.5, 0.5) == 1.0 and slea_rl.anneal(0.8, 0.9, 0.5) == 0.8  # no better: it stays
    assert slea_rl.anneal(0.8, 0.2, 0.4) == pytest.approx(0.4)
    assert slea_rl.anneal(0.4, 0.0, 0.0) == 0.4  # every return equal: nothing was learned
    kappa, seen = 1.0, []
    for _ in range(8):
        kappa = slea_rl.anneal(kappa, 0.5, 1.0)
        seen.append(kappa)
    assert seen == [0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625, 0.0, 0.0]


def test_credits_mix_evaluator_and_knowledge():
    step = Step([1], torch.zeros(0), [1, 2], ends=[1, 2], numbers=["1", ""], knowledge=[0.6, 0.0])
    step.embeds = torch.tensor([[0.0, 0.0], [0.4, 0.0], [-0.2, 0.0]])
    slea_rl.fill_credits(Table("difference"), [step], 0.25, False)
    assert step.credits == pytest.approx([0.75 * 0.3 + 0.25 * 0.6, 0.75 * -0.15])


def test_hierarchical_credit_is_the_sum_of_the_sub_steps():
    numbers = ["1", "1.1", "1.2", "1.2.1", "1.2.2", "2", ""]
    step = Step([1], torch.zeros(0), list(range(7)), ends=list(range(1, 8)), numbers=numbers, knowledge=[0.0] * 7)
    values = torch.tensor([0.0, 8.0, 1.0, 8.0, 2.0, 4.0, 16.0, 32.0])
    step.embeds = torch.stack([values, values * 0], 1)
    table = Table("difference")
    table.low, table.high = -1.0, 1.0
    slea_rl.fill_credits(table, [step], 0.0, True)
    assert step.credits == [7, 1, 6, 2, 4, 16, 32]
    slea_rl.fill_credits(table, [step], 0.0, False)
    assert step.credits == [8, 1, 8, 2, 4, 16, 32]
    assert slea_rl.leaves(["1", "10", "1.1", "10.1", ""], 0) == [2] and slea_rl.leaves(["", "1"], 0) == [0]


def test_embeddings_by_hand(tiny):
    """Mean over the span's tokens of the bare base's hidden state, each span read by itself; the adapter is back."""
    steps = answered(tiny, [THINK, "go", THINK])
    with tiny.adapter("policy"):
        common.embed(tiny, steps, Args(micro_tokens=40))
        assert tiny._active == "policy"
    with tiny.adapter(None), torch.no_grad():
        for step in steps:
            spans = [step.state, *(step.action[a:b] for a, b in zip([0, *step.ends], step.ends, strict=False))]
            assert step.embeds.shape == (len(spans), 128)
            for row, span in zip(step.embeds, spans, strict=True):
                wanted = tiny.top([span], tiny.trunk([span]))[0].mean(0)
                assert torch.allclose(row, wanted, atol=1e-5)
    assert torch.equal(steps[0].embeds[1:], steps[2].embeds[1:])  # the same thoughts


def test_knowledge_is_paid_once_to_the_step_that_took_it(tiny):
    prompts = [tiny.encode(f"Symptom: slow\nTurn: {t}\nAction:") for t in range(3)]
    texts = ["<think>1. get the log 2. get the log</think> ask log", "<think>1. get the log 2. slow</think> fix it"]
    texts.append("go")
    steps = answered(tiny, texts, prompts)
    key = [(r"Action: get the log$", 1.0), (r"Action: fix", 2.0), (r"slow", 4.0), (r"Action: ask (log|trace)$", 1.0)]
    slea_rl.fill_knowledge(tiny, steps, key, 0.8)
    assert steps[0].knowledge == pytest.approx([0.1, 0.0, 0.1])  # 0.8 * 1 / 8; the repetition earns nothing
    assert steps[1].knowledge == pytest.approx([0.0, 0.0, 0.2])  # "slow" stands in the state already
    assert steps[2].knowledge == [0.0]
    steps[1].texts = ["get the log", "get the log now", "get the log again"]
    slea_rl.fill_knowledge(tiny, steps, [(r"Action: get the log", 1.0)], 0.8)
    assert steps[0].knowledge == [0.8, 0.0, 0.0] and steps[1].knowledge == [0.0, 0.8, 0.0]  # other words, once a turn
    slea_rl.fill_knowledge(tiny, steps, [], 0.8)
    assert steps[0].knowledge == [0.0, 0.0, 0.0]


# ----------------------------------------------------------------------------------------------------------------- GAE


def micro_gae_by_definition(r, v, terminated, truncated, final, turns, gamma, lam):
    """A_j = Σ_l λ^l (Π_{i<l} γ_{j+i}) δ_{j+l} within the episode; γ_i is γ where a turn ends behind i, else 1."""
    n, out = len(r), []
    for j in range(n):
        total, weight, i = 0.0, 1.0, j
        while True:
            done = terminated[i] or truncated[i]
            discount = gamma if done or turns[i + 1] != turns[i] else 1.0
            following = 0.0 if terminated[i] else final[i] if truncated[i] else v[i + 1]
            total += weight * (r[i] + discount * following - v[i])
            weight *= lam * discount
            if done:
                break
            i += 1
        out.append(total)
    return np.array(out)


def test_micro_gae_by_hand():
    """Two thoughts and an action, then an action that is cut off: only turns discount, the cut one bootstraps."""
    r, v = np.array([0.1, 0.2, 0.0, 1.0]), np.array([0.5, 0.4, 0.3, 0.2])
    flags = np.array([False] * 3 + [True])
    turns, finals, none = np.array([0, 0, 0, 1]), np.array([9.0, 9.0, 9.0, 0.6]), np.array([False] * 4)
    deltas = [0.1 + 0.4 - 0.5, 0.2 + 0.3 - 0.4, 0.5 * 0.2 - 0.3, 1 + 0.5 * 0.6 - 0.2]
    a3 = deltas[3]
    a2 = deltas[2] + 0.5 * 0.8 * a3
    a1 = deltas[1] + 0.8 * a2
    a0 = deltas[0] + 0.8 * a1
    assert micro_gae(r, v, none, flags, finals, turns, 0.5, 0.8) == pytest.approx([a0, a1, a2, a3])
    ended = micro_gae(r, v, flags, none, finals, turns, 0.5, 0.8)
    assert ended[3] == pytest.approx(1 - 0.2) and ended[2] == pytest.approx(deltas[2] + 0.5 * 0.8 * 0.8)


@pytest.mark.parametrize("gamma,lam", [(0.95, 0.9), (1.0, 1.0), (0.3, 0.5), (0.01, 0.95), (0.9, 0.0)])
def test_micro_gae_equals_its_definition(gamma, lam):
    rng = np.random.default_rng(1)
    rows = []
    for _ in range(30):
        length = rng.integers(1, 7)
        for turn in range(length):
            m = rng.integers(1, 5)
            for j in range(m):
                last = turn == length - 1 and j == m - 1
                cut = last and rng.random() < 0.5
                rows.append((rng.normal(), rng.normal(), last and not cut, cut, rng.normal(), turn))
    columns = [np.array(c) for c in zip(*rows, strict=True)]
    found = micro_gae(*columns, gamma, lam)
    assert found == pytest.approx(micro_gae_by_definition(*columns, gamma, lam), rel=1e-9, abs=1e-9)


def turn_of(m, reward=0.0, credits=None, values=None, **more):
    step = Step([1], torch.zeros(0), list(range(m)), reward, ends=list(range(1, m + 1)), **more)
    step.numbers = [str(i + 1) for i in range(m - 1)] + [""]
    step.credits, step.values = credits or [0.0] * m, values or [0.0] * m
    return step


def test_fill_advantages_puts_credit_on_thoughts_and_reward_on_actions():
    args = Args(gamma=0.5, gae_lambda=1.0, adv_clip=10.0, neg_scale=0.25)
    episode = [turn_of(3, -0.1, [0.3, 0.2, 99.0]), turn_of(1, 1.0, [99.0], terminated=True)]
    raw = fill_advantages(episode, args)  # V = 0, λ = 1: the discounted sums to come
    assert raw == pytest.approx([0.3 + 0.2 - 0.1 + 0.5, 0.2 - 0.1 + 0.5, -0.1 + 0.5, 1.0])
    assert episode[0].targets + episode[1].targets == pytest.approx(raw.tolist())
    flat = np.array(episode[0].advantages + episode[1].advantages)
    z = (raw - raw.mean()) / raw.std()
    assert (z < 0).any() and flat == pytest.approx(np.where(z < 0, 0.25 * z, z))
    with_values = [turn_of(1, 1.0, values=[0.25], truncated=True, final_value=2.0)]
    assert fill_advantages(with_values, args) == pytest.approx([1 + 0.5 * 2 - 0.25])  # cut off: bootstraps
    assert with_values[0].targets == pytest.approx([2.0]) and with_values[0].advantages == [0.0]  # zero variance


def test_a_parents_credit_is_not_paid_twice():
    args = Args(gamma=1.0, gae_lambda=1.0, hierarchical=True)
    step = turn_of(4, 1.0, [0.5, 0.2, 0.3, 0.0], terminated=True)
    step.numbers = ["1", "1.1", "1.2", ""]
    assert fill_advantages([step], args) == pytest.approx([1.5, 1.5, 1.3, 1.0])
    args.hierarchical = False
    assert fill_advantages([step], args) == pytest.approx([2.0, 1.5, 1.3, 1.0])


def test_one_micro_step_a_turn_is_ordinary_gae():
    rng = np.random.default_rng(0)
    r, v = rng.normal(size=6), rng.normal(size=6)
    terminated, truncated = np.arange(6) == 3, np.arange(6) == 5
    finals, turns = np.full(6, 0.7), np.array([0, 1, 2, 3, 0, 1])
    wanted = slea_rl.compute_gae(r, v, terminated, truncated, finals, 0.9, 0.8)[1]
    assert micro_gae(r, v, terminated, truncated, finals, turns, 0.9, 0.8) == pytest.approx(wanted)


# ---------------------------------------------------------------------------------------------------- critic and policy


def prepared(lm, args, texts=(THINK, "go", "<think>1. see light</think> stop"), seed=0):
    steps = answered(lm, list(texts), random_prompts((9, 4, 13), seed=seed)[: len(texts)])
    common.fill_logprobs(slea_rl.token_logprobs, lm, steps, args, logp="policy", ref_logp="ref")
    for step in steps:
        step.version, step.terminated = 1, True
        step.advantages, step.credits = [0.0] * len(step.ends), [0.0] * len(step.ends)
    return steps


def test_values_are_read_at_the_last_token_before_each_micro_step(fresh):
    args = Args(micro_tokens=30)
    critic = Critic(fresh, (-0.5, 1.0), args)
    assert critic.values(prepared(fresh, args)) == [[0.25] * 3, [0.25], [0.25] * 2]  # a zero head: mid of the bounds
    with torch.no_grad():
        critic.head.weight.copy_(torch.randn(1, 128, generator=torch.Generator().manual_seed(1)) / 10)
    steps = prepared(fresh, args)
    slea_rl.fill_values(critic, steps)
    for step in steps:
        with fresh.adapter("value"), torch.no_grad():
            for j, start in enumerate([0, *step.ends[:-1]]):
                ids = step.state + step.action[:start]  # nothing behind the last token before the micro-step
                score = critic.head(fresh.top([ids], fresh.trunk([ids]))[0][-1])
                assert step.values[j] == pytest.approx(-0.5 + (float(score) + 1) / 2 * 1.5, abs=1e-5)
        assert step.value == step.values[0]
    cut = prepared(fresh, args)[:1]
    cut[0].truncated, cut[0].final_state, cut[0].final_trunk = True, [7, 8, 9], fresh.trunk([[7, 8, 9]])[0]
    slea_rl.fill_values(critic, cut)
    assert cut[0].final_value == critic.values([Step([7, 8, 9], cut[0].final_trunk)])[0][0]


def test_the_critic_learns_its_targets_and_nothing_else_moves(fresh):
    args = Args(critic_lr=3e-3)
    critic, steps = Critic(fresh, (-0.5, 1.0), args), prepared(fresh, args)
    for step, targets in zip(steps, ([1.0, 0.7, 1.3], [-0.5], [0.0, 0.5]), strict=True):
        step.targets = targets
    before = {a: {k: v.clone() for k, v in fresh.params(a).items()} for a in ADAPTERS}
    first = critic.update(steps, 0.0)
    scores = [4 / 3 * (g + 0.5) - 1 for s in steps for g in s.targets]
    assert first == pytest.approx(np.mean(np.square(scores)), abs=1e-5)  # a zero head; mean over micro-steps
    for _ in range(60):
        last = critic.update(steps, 0.0)
    assert last < 0.05 * first
    for adapter in ("policy", "ref"):
        assert all(torch.equal(v, before[adapter][k]) for k, v in fresh.params(adapter).items())
    assert any(not torch.equal(v, before["value"][k]) for k, v in fresh.params("value").items())


def test_the_critics_least_squares_meet_their_targets_and_no_adapter_moves(fresh):
    args = Args(critic_l2=1e-6)
    critic, steps = Critic(fresh, (-0.5, 1.0), args), prepared(fresh, args)
    before = {k: p.detach().clone() for k, p in fresh.params("value").items()}
    slea_rl.fill_values(critic, steps)
    for number, s in enumerate(steps):
        s.targets = [0.1 * number + 0.2 * j for j in range(len(s.ends))]
    assert critic.fit_head(steps) < 1e-6  # more inputs than micro-steps: every target can be met
    slea_rl.fill_values(critic, steps)
    for s in steps:
        assert s.values == pytest.approx(s.targets, abs=1e-3)
    assert all(torch.equal(p, before[k]) for k, p in fresh.params("value").items())
    args.critic_l2 = 0.0  # no fit: the head stays as it was
    before = critic.head.weight.clone()
    critic.fit_head(steps)
    assert torch.equal(critic.head.weight, before)
    args.critic_l2 = 1e12  # the penalty leaves the mean alone
    critic.fit_head(steps)
    mean = np.mean([g for s in steps for g in s.targets])
    assert [v for row in critic.values(steps) for v in row] == pytest.approx([mean] * sum(len(s.ends) for s in steps))


def test_the_critic_starts_from_the_cloned_policy(tmp_path, keep_sigint):
    learner = warmed_up(slea_rl, tmp_path)
    assert starts_from_the_policy(learner.lm, "value", learner.scorer.optimizer)


def test_per_token_by_hand():
    step = Step([1], torch.zeros(0), [5, 6, 7, 8, 9], ends=[2, 3, 5])
    assert slea_rl.per_token(step, [0.5, -1.0, 2.0]).tolist() == [0.5, 0.5, -1.0, 2.0, 2.0]


def policy_logp(lm, steps, args):
    with lm.adapter("policy"), torch.no_grad():
        logp, _ = slea_rl.token_logprobs(lm, steps, args.temperature)
    return [x for x in logp.split([len(s.action) for s in steps])]


def test_each_token_moves_with_the_advantage_of_its_own_micro_step(fresh):
    """A good first thought and a bad second one in the same answer: their tokens move apart."""
    args = Args(kl_coef=0.0, ent_coef=0.0, imitation=0.0, policy_passes=1, target_kl=10.0)
    steps = prepared(fresh, args, texts=[THINK])
    steps[0].advantages = [1.0, -1.0, 0.0]
    buffer = Buffer(args)
    buffer.add(steps)
    optimizer = slea_rl.Optimizer(fresh.params("policy"), 1e-4, warmup=1)
    before = policy_logp(fresh, steps, args)[0]
    logs = [slea_rl.update_policy(fresh, optimizer, buffer, v, args, 0.0, None) for v in range(8)]
    change = policy_logp(fresh, steps, args)[0] - before
    a, b, _ = steps[0].ends
    assert change[:a].mean() > 0.01 and change[a:b].mean() < -0.01
    assert logs[0]["policy/first_ratio_dev"] < 1e-5 and logs[0]["policy/imitation_nll"] == 0.0


def test_zero_advantage_and_no_terms_leave_the_policy_alone(fresh):
    args = Args(kl_coef=0.0, ent_coef=0.0, imitation=0.0)
    buffer, steps = Buffer(args), prepared(fresh, args)
    buffer.add(steps)
    before = {k: v.clone() for k, v in fresh.params("policy").items()}
    slea_rl.update_policy(fresh, slea_rl.Optimizer(fresh.params("policy"), 1e-2), buffer, 1, args, 0.0, None)
    assert all(torch.equal(v, before[k]) for k, v in fresh.params("policy").items())


def test_micro_batches_do_not_change_the_update(fresh):
    grads = []
    for micro in (10, 10_000):
        args = Args(micro_tokens=micro, policy_passes=1, imitation=0.5, imitation_quantile=1.0)
        steps, buffer = prepared(fresh, args), Buffer(args)
        for i, step in enumerate(steps):
            step.advantages, step.success = [0.5 - i] * len(step.ends), True
        buffer.add(steps)
        optimizer, seen = slea_rl.Optimizer(fresh.params("policy"), 1e-3), {}
        optimizer.step = lambda progress, o=optimizer, seen=seen: seen.update({k: p.grad for k, p in o.params.items()})
        slea_rl.update_policy(fresh, optimizer, buffer, 1, args, 0.0, None)
        optimizer.zero_grad()
        grads.append(seen)
    for key, grad in grads[0].items():
        assert torch.allclose(grad, grads[1][key], atol=1e-6), key
    assert max(g.abs().max() for g in grads[0].values()) > 1e-4


def test_early_stop_takes_no_step(fresh):
    args = Args(target_kl=1e-9, policy_passes=3)
    buffer, steps = Buffer(args), prepared(fresh, args)
    buffer.add(steps)
    for step in steps:
        step.logp = step.logp - 1.0
    before = {k: v.clone() for k, v in fresh.params("policy").items()}
    logs = slea_rl.update_policy(fresh, slea_rl.Optimizer(fresh.params("policy"), 1e-2), buffer, 1, args, 0.0, None)
    assert logs["policy/stopped"] == 1 and logs["policy/minibatches"] == 1
    assert all(torch.equal(v, before[k]) for k, v in fresh.params("policy").items())
    assert all(p.grad is None for p in fresh.params("policy").values())


def test_a_kl_only_update_lowers_the_kl_to_the_reference(fresh):
    """Zero advantages, no entropy, no imitation: what is left pulls the policy to the reference, and moves it alone."""
    args = Args(kl_coef=1.0, ent_coef=0.0, imitation=0.0, target_kl=1e9, policy_passes=1)
    buffer, steps = Buffer(args), prepared(fresh, args)
    buffer.add(steps)
    before = {k: v.detach().clone() for k, v in fresh.peft.named_parameters()}
    optimizer, path = slea_rl.Optimizer(fresh.params("policy"), 3e-3, warmup=1), []
    for _ in range(12):
        logs = slea_rl.update_policy(fresh, optimizer, buffer, 1, args, 0.0, None)
        assert logs["policy/ref_kl"] >= 0 and logs["policy/pg_loss"] == pytest.approx(0, abs=1e-6)
        path.append(logs["policy/ref_kl"])
    assert path[-1] < 0.5 * path[0] and path[0] > 1e-3, path
    moved = {k for k, v in fresh.peft.named_parameters() if not torch.equal(v, before[k])}
    assert moved and all(".policy." in k for k in moved)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_nonfinite_number_reaches_no_weights(fresh, bad):
    args = Args(imitation=0.0, target_kl=1e9, policy_passes=1)
    steps, buffer, critic = prepared(fresh, args), Buffer(args), Critic(fresh, (-0.5, 1.0), args)
    evaluator = StepEvaluator(fresh, (-0.5, 1.0), args)
    for step in steps:
        step.embeds, step.ret, step.targets = torch.ones(len(step.ends) + 1, 128), 0.5, [0.5] * len(step.ends)
    steps[0].advantages, steps[0].targets, steps[0].ret = [bad] * 3, [bad] * 3, bad
    buffer.add(steps)
    modules = [*evaluator.state_dict().values(), *critic.head.state_dict().values(), *fresh.peft.parameters()]
    before, policy = [v.detach().clone() for v in modules], slea_rl.Optimizer(fresh.params("policy"), 1e-2, warmup=1)
    slea_rl.update_policy(fresh, policy, buffer, 1, args, 0.0, None)
    critic.update(steps, 0.0)
    evaluator.update(steps, 0.0)
    assert [o.skipped for o in (policy, critic.optimizer, evaluator.optimizer)] == [1, 1, 1]
    assert all(torch.equal(a, b) for a, b in zip(before, modules, strict=True))


def test_best_steps_are_the_top_thoughts_of_successes():
    buffer = Buffer(Args(imitation_quantile=0.5))
    won = turn_of(4, credits=[0.1, 0.5, 0.9, 50.0], success=True)
    other = turn_of(2, credits=[0.3, 50.0], success=True)
    lost, whole = turn_of(2, credits=[9.0, 0.0]), turn_of(1, credits=[9.0], success=True)
    buffer.add([won, lost])
    buffer.add([other, whole])
    # thoughts of successes: 0.1 0.3 0.5 0.9, median 0.4
    assert [(s is won, m) for s, m in buffer.best()] == [(True, [False, True, True, False])]
    buffer.iterations = [[lost, whole]]
    assert buffer.best() == []


def test_imitation_raises_the_chosen_thoughts_only(fresh):
    args = Args(kl_coef=0.0, ent_coef=0.0)
    steps = prepared(fresh, args, texts=[THINK])
    a, b, _ = steps[0].ends
    before = policy_logp(fresh, steps, args)[0]
    optimizer = slea_rl.Optimizer(fresh.params("policy"), 1e-3, warmup=1)
    mask = [False, True, False]
    for _ in range(5):
        with fresh.adapter("policy"):
            nll = slea_rl.imitate(fresh, [(steps[0], mask)], 0.5, args)
        optimizer.step()
    assert nll < -float(before[a:b].mean())
    assert (policy_logp(fresh, steps, args)[0] - before)[a:b].mean() > 0.1
    with fresh.adapter("policy"):
        first = slea_rl.imitate(fresh, [(steps[0], mask)], 0.5, args)
    assert first == pytest.approx(-float(policy_logp(fresh, steps, args)[0][a:b].mean()), abs=1e-5)
    optimizer.zero_grad()


def test_imitation_decays_with_progress(fresh, monkeypatch):
    args, seen = Args(imitation=0.4, imitation_quantile=1.0, policy_passes=1), []
    steps, buffer = prepared(fresh, args), Buffer(args)
    for step in steps:
        step.success = True
    buffer.add(steps)
    monkeypatch.setattr(slea_rl, "imitate", lambda lm, best, beta, args: seen.append(beta) or 0.0)
    optimizer = slea_rl.Optimizer(fresh.params("policy"), 1e-3)
    for progress in (0.0, 0.75, 1.0):
        slea_rl.update_policy(fresh, optimizer, buffer, 1, args, progress, None)
    assert seen == pytest.approx([0.4, 0.1])  # at the end no more is drawn


def test_buffer_keeps_the_last_iterations():
    buffer = Buffer(Args(replay_iters=2))
    for i in range(3):
        buffer.add([turn_of(1, float(i))])
    assert [s.reward for s in buffer.steps] == [1.0, 2.0]


def test_a_turn_survives_the_checkpoint_bit_for_bit(fresh, tmp_path):
    steps = prepared(fresh, Args())
    common.embed(fresh, steps, Args())
    steps[0].values, steps[1].knowledge, steps[2].success = [1 / 3, 0.1, -1e-17], [2 / 3], True
    tensors, rows = common.pack_steps(steps)
    common.save_checkpoint(tmp_path / "ring", tensors, {"rows": rows})
    tensors, state = common.load_checkpoint(tmp_path / "ring")
    for old, new in zip(steps, common.unpack_steps(Step, tensors, state["rows"]), strict=True):
        assert {f.name for f in fields(Step)} == set(vars(old)) == set(vars(new))
        for name, value in vars(old).items():
            other = getattr(new, name)
            same = torch.equal(other, value) if isinstance(value, torch.Tensor) else other == value
            assert same and type(other) is type(value), name


# -------------------------------------------------------------------------------------------------------------- report


def test_step_patterns_mask_numbers_and_names():
    assert common.mask_names('ask "order 12" of Anna Smith on db-42 at 3.5') == 'ask "…" of NAME on # at #'
    assert common.mask_names("Check the log") == "Check the log"


def test_step_report_by_hand():
    turns = [turn_of(2, credits=[0.5, 0.0], success=True, terminated=True) for _ in range(3)]
    turns += [turn_of(2, credits=[-0.1, 0.0]), turn_of(3, -0.5, credits=[0.2, -0.7, 0.0], terminated=True)]
    words = [["get log 1", "ask"]] * 3 + [["get log 2", "a"], ["go <b>", "guess", "fix"]]
    for turn, texts in zip(turns, words, strict=True):
        turn.texts = texts
    sections = common.step_report(turns)
    assert list(sections) == ["Most frequent steps", "Ten best steps", "Ten worst steps", "A failed episode"]
    row = sections["Most frequent steps"][2]
    assert row.replace("\\", "") == "| get log # | 4 | +0.350 | 75% |"
    assert len(sections["Most frequent steps"]) == 5 and len(sections["Ten best steps"]) == 3  # three times at least
    failed = sections["A failed episode"]
    assert [("failed it" in line) for line in failed] == [False] * 5 + [True, False]
    plain = "".join(failed).replace("\\", "")
    assert "guess" in failed[5] and "-0.700" in failed[5] and "reward -0.50" in failed[6] and "<b>" not in plain
    nothing = {"Steps": ["No answer in the buffer had a thought before its action."]}
    assert common.step_report([turn_of(1, texts=["go"])]) == nothing


# ---------------------------------------------------------------------------------------------------------- whole runs


TINY = ["--env", "lights", "--model", "tiny", "--lora_rank", "32", "--lora_layers", "all", "--seed", "3"]
SMALL = [*TINY, "--demos", "40", "--demo_noise", "0", "--warmup_epochs", "2", "--warmup_minibatch", "8"]
SMALL += ["--total_env_steps", "90", "--episodes_per_iter", "10", "--temperature", "0.6"]
SMALL += ["--num_envs", "10", "--val_episodes", "4", "--eval_episodes", "6", "--minibatch", "8", "--eval_every", "2"]


def command(*argv):
    """The command line with `lights` among the environments."""
    code = "import sys; import test_slea_rl as t; t.slea_rl.make_env = t.make_env; "
    code += "t.common.run_main(lambda: t.slea_rl.main(sys.argv[1:]))"
    return [sys.executable, "-c", code, *argv]


def options():
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    return dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path})


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """An uninterrupted run, from the command line."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    done = subprocess.run(command(*SMALL, "--out", str(folder)), timeout=180, **options())
    assert done.returncode == 0, done.stderr[-3000:]
    (folder.parent / "stdout").write_text(done.stdout)
    return folder


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """The same run: kill -9 in the warm-up and again in stage slea, resumed to the end."""
    folder, log = tmp_path_factory.mktemp("runs") / "broken", []
    argv = [*SMALL, "--out", str(folder)]
    for ready in (lambda rows: any("warmup/nll" in r for r in rows),
                  lambda rows: sum("evaluator/kappa" in r for r in rows) >= 2):  # fmt: skip
        process, end = subprocess.Popen(command(*argv), **options()), time.time() + 90
        while time.time() < end and process.poll() is None and not ready(common.read_jsonl(folder / "metrics.jsonl")):
            time.sleep(0.01)
        time.sleep(0.15)
        process.kill()
        process.communicate()
        log.append((process.returncode, len(rows_of(folder))))
        argv = ["--resume", str(folder)]
    done = subprocess.run(command(*argv), timeout=180, **options())
    assert done.returncode == 0, done.stderr[-3000:]
    return folder, log


@pytest.mark.e2e
def test_run_folder_report_and_metrics(finished):
    out = (finished.parent / "stdout").read_text()
    assert "| warmup |" in out and "| slea |" in out and str(finished / "report.md") in out
    report = (finished / "report.md").read_text()
    for part in ("# slea on lights", "## Most frequent steps", "## Ten best steps", "## Ten worst steps", "credit.png"):
        assert part in report, part
    for picture in re.findall(r"\]\((plots/[^)]+)\)", report):
        assert (finished / picture).exists()
    rows = common.read_jsonl(finished / "metrics.jsonl")
    names = set().union(*rows)
    wanted = """env_steps iter stage train/success train/return train/ep_len eval/success eval/ep_len policy/pg_loss
        policy/approx_kl policy/ref_kl policy/entropy policy/clip_frac policy/first_ratio_dev policy/sampler_gap
        policy/grad_norm adv/mean adv/std score/mse_train score/mse_val rollout/invalid_rate rollout/truncated_frac
        rollout/cut_frac perf/env_steps_per_s perf/update_tokens_per_s perf/peak_rss_mb evaluator/mse_val
        evaluator/mse_constant evaluator/kappa credit/mean_credits credit/step_1 steps/think steps/per_turn""".split()
    assert set(wanted) <= names, set(wanted) - names
    assert rows[0]["env_steps"] == 0 and "eval/success" in rows[0]
    looped = [r for r in rows if "evaluator/kappa" in r]
    assert len(looped) >= 4 and all(r["stage"] == "slea" and r["evaluator/mse_val"] is not None for r in looped[1:])
    kappas = [r["evaluator/kappa"] for r in looped]
    assert kappas[0] == 1.0 and "evaluator/mse_val" not in looped[0]  # nothing was seen before
    for (before, now), row in zip(zip(kappas, kappas[1:], strict=False), looped[1:], strict=True):
        assert now == slea_rl.anneal(before, row["evaluator/mse_val"], row["evaluator/mse_constant"])
    updated = [r for r in looped if "policy/first_ratio_dev" in r]
    assert len(updated) == len(looped)
    assert max(r["policy/first_ratio_dev"] for r in updated) < 1e-3
    assert max(r["policy/sampler_gap"] for r in looped) < 1e-3
    assert max(r["steps/think"] for r in looped) > 0.5  # the clone writes think blocks


@pytest.mark.e2e
def test_resume_after_kill_equals_never_having_stopped(finished, killed):
    folder, log = killed
    assert [code for code, _ in log] == [-signal.SIGKILL] * 2, "killed while running"
    assert log[0][1] < log[1][1] < len(rows_of(finished))
    assert rows_of(folder) == rows_of(finished)
    for name in ("last", "best"):
        (a, one), (b, two) = (common.load_checkpoint(f / "checkpoints" / name) for f in (finished, folder))
        assert set(a) == set(b) and all(torch.equal(a[k], b[k]) for k in a)
        assert one["ring"] == two["ring"] and one["progress"]["kappa"] == two["progress"]["kappa"]
    a = common.load_checkpoint(finished / "checkpoints" / "last")[0]
    assert any(k.startswith("evaluator.exp_avg.") for k in a) and "ring.embeds" in a
    strip = lambda f: common.read_jsonl(f / "episodes.jsonl")  # noqa: E731
    assert strip(finished) == strip(folder)
    one, two = ((f / "report.md").read_text().split("## Most")[1] for f in (finished, folder))
    assert one == two


@pytest.mark.e2e
def test_a_resumed_run_needs_no_more_memory(finished, killed):
    peaks = [common.read_jsonl(f / "metrics.jsonl")[-1]["perf/peak_rss_mb"] for f in (finished, killed[0])]
    assert peaks[1] < 1.25 * peaks[0], peaks  # processes of their own, 7% apart at the same work; exact: correctness


@pytest.mark.e2e
def test_same_seed_same_metrics(finished, tmp_path, capfd, keep_sigint):
    code, _, err = main_here(slea_rl, [*SMALL, "--out", str(tmp_path / "again")], capfd)
    assert code == 0, err
    assert rows_of(tmp_path / "again") == rows_of(finished)


@pytest.mark.e2e
def test_eval_only_and_resume_of_a_finished_run(finished, capfd, keep_sigint):
    before = (finished / "metrics.jsonl").read_bytes()
    code, out, _ = main_here(slea_rl, ["--eval_only", str(finished), "--eval_episodes", "6"], capfd)
    result = json.loads(out.strip().splitlines()[-1])
    assert code == 0 and result == json.loads((finished / "summary.json").read_text())["test"]
    code, out, _ = main_here(slea_rl, ["--resume", str(finished)], capfd)
    assert code == 0 and "finished" in out and (finished / "metrics.jsonl").read_bytes() == before


@pytest.mark.e2e
@pytest.mark.parametrize("extra", [["--no_augment"], ["--credit", "inverse", "--hierarchical"],
                                   ["--credit", "counterfactual", "--kappa", "0"], ["--algo", "bc"]])  # fmt: skip
def test_variants(extra, tmp_path, capfd, keep_sigint):
    argv = [*SMALL, *extra, "--out", str(tmp_path / "run"), "--total_env_steps", "40"]
    code, _, err = main_here(slea_rl, argv, capfd)
    assert code == 0, err[-2000:]
    rows = common.read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert any("policy/pg_loss" in r for r in rows) == (extra != ["--algo", "bc"])
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["algo"] == {"--no_augment": "no_augment", "--algo": "bc"}.get(extra[0], "slea")
    if extra == ["--no_augment"]:
        looped = [r for r in rows if "steps/per_turn" in r]
        assert {r["steps/per_turn"] for r in looped} == {1.0} and not any("evaluator/kappa" in r for r in rows)
        assert all(r.get("policy/imitation_nll", 0.0) == 0.0 for r in rows)


@pytest.mark.e2e
def test_gridworld_without_think_blocks(tmp_path, capfd, keep_sigint):
    argv = [*SMALL, "--out", str(tmp_path / "run"), "--env", "gridworld", "--warmup_epochs", "1"]
    code, _, err = main_here(slea_rl, [*argv, "--total_env_steps", "60", "--episodes_per_iter", "3"], capfd)
    assert code == 0, err[-2000:]
    assert "No answer in the buffer had a thought" in (tmp_path / "run" / "report.md").read_text()


WRONG = {
    "unknown flag": (["--nope", "3"], "--nope"),
    "bad choice": (["--credit", "guess"], "credit"),
    "gamma": ([*TINY, "--gamma", "0"], "--gamma"),
    "kappa": ([*TINY, "--kappa", "1.5"], "--kappa"),
    "quantile": ([*TINY, "--imitation_quantile", "2"], "--imitation_quantile"),
    "passes": ([*TINY, "--evaluator_passes", "nan"], "--evaluator_passes"),
    "unknown env": (["--env", "chess", "--model", "tiny"], "chess"),
    "resume of nothing": (["--resume", "/no/such/run"], "/no/such/run"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_value_is_one_line_and_exit_code_2(name, capfd, tmp_path, monkeypatch, keep_sigint):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(slea_rl, "warm_up", lambda learner: pytest.fail("the run started"))
    argv, part = WRONG[name]
    code, _, err = main_here(slea_rl, argv, capfd)
    lines = err.strip().splitlines()
    assert code == 2 and len(lines) == 1 and lines[0].startswith("error: ") and part in err, err
    assert os.listdir(tmp_path) == []


def test_help_names_every_field(tmp_path):
    done = subprocess.run([sys.executable, str(ROOT / "slea_rl.py"), "--help"], cwd=tmp_path, timeout=60,
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0 and done.stderr == ""
    for field in fields(Args):
        assert f"--{field.name}" in done.stdout


def test_environment_errors_in_the_knowledge_base_cost_nothing(tiny, monkeypatch, capsys):
    """A broken reset while key steps are looked up leaves the episode without knowledge, not the run without it."""
    class Broken(Lights):
        def reset(self, seed=None):
            if seed == 1:
                raise RuntimeError("no such task")
            return super().reset(seed)

    monkeypatch.setattr(slea_rl, "make_env", lambda name, seed=0, split="train": Broken(seed, split))
    args = Args(env="lights", micro_tokens=8192)
    learner = type("L", (), dict(args=args, lm=tiny, scorer=Critic(tiny, (-0.5, 1.0), args)))
    prompts = [tiny.encode("Light: red\nAction:")] * 2
    steps = answered(tiny, ["<think>1. light red 2. so go</think> go"] * 2, prompts)
    traces = [dict(task=t, success=True) for t in (0, 1)]
    shares = slea_rl.augment(learner, [[s] for s in steps], traces)
    assert steps[0].knowledge == pytest.approx([0.75 / 4, 0.75 * 3 / 4, 0.0]) and steps[1].knowledge == [0.0] * 3
    assert shares["steps/think"] == 1.0 and shares["steps/per_turn"] == 3.0
    assert [s.success for s in steps] == [True, True]
    assert "no such task" in capsys.readouterr().err
