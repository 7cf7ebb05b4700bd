"""stepopsd.py: labels, reward model, decompositions, the mixed reward, teachers that misbehave, whole runs, resume."""

import http.server
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, main_here, random_prompts, rows_of, starts_from_the_policy, tensors_of, warmed_up

import common
import stepopsd
from common import RunError, UserError, load_model
from stepopsd import Args, Progress, RewardModel, RewardNet, Step, decompose, preference_loss, shares

ADAPTERS = ("policy", "value", "ref")
HOWS = ("attention", "gradient", "td", "label", "uniform")
def turns(*actions, obs="s"):
    return [(f"{obs}{i}", a) for i, a in enumerate(actions)]


def labelled(a, b, y, turn=None, **more):
    return dict(a=[list(t) for t in a], b=[list(t) for t in b], y=y, turn=turn, **more)


class FakeEmbed:
    """Embeddings by formula: no language model. `vector(obs, action)` -> list of `size` numbers."""

    def __init__(self, size, vector):
        self.size, self.vector, self.asked = size, vector, 0

    def __getitem__(self, turn):
        return torch.tensor(self.vector(*turn), dtype=torch.float32)

    def add(self, turns):
        self.asked += len(turns)


def noise_embed(size=8):
    def vector(obs, action):
        return torch.randn(size, generator=torch.Generator().manual_seed(hash_of(obs + "|" + action))).tolist()

    return FakeEmbed(size, vector)


def hash_of(text):
    return int(common.text_key(text), 16) % 2**31


def fake_net(total, q, attention):
    """A net with the outputs given (as lists of rows): forward checks shapes only."""

    def net(x, real):
        assert x.shape[:2] == real.shape
        out = [torch.tensor(v, dtype=torch.float32) for v in (total, q, attention)]
        return out[0], out[1] * real, out[2] * real

    return net


REAL = torch.tensor([[True, True, True], [True, True, False]])
X = torch.ones(2, 3, 4)


def test_shares_by_hand():
    c = shares(torch.tensor([[1.0, 2.0, 1.0], [0.0, 0.0, 0.0]]), REAL)
    assert c.tolist() == [[0.25, 0.5, 0.25], [0.5, 0.5, 0.0]]


def test_attention_shares_out_the_total():
    net = fake_net([4.0, -6.0], [[9.0] * 3] * 2, [[0.1, 0.3, 0.1], [0.2, 0.1, 0.7]])  # 0.7 is padding
    r, total, c = decompose(net, X, REAL, "attention")
    assert torch.allclose(r, torch.tensor([[0.8, 2.4, 0.8], [-4.0, -2.0, 0.0]]))
    assert total.tolist() == [4.0, -6.0] and torch.allclose(c.sum(1), torch.ones(2))


def test_uniform_shares_equally():
    r, _, c = decompose(fake_net([3.0, -6.0], [[9.0] * 3] * 2, [[0.1, 0.3, 0.1]] * 2), X, REAL, "uniform")
    assert torch.allclose(r, torch.tensor([[1.0, 1.0, 1.0], [-3.0, -3.0, 0.0]]))
    assert torch.allclose(c, torch.tensor([[1 / 3] * 3, [0.5, 0.5, 0.0]]))


@pytest.mark.parametrize("how", ["td", "label"])
def test_td_is_the_step_values_themselves(how):
    r, total, _ = decompose(fake_net([7.0, 7.0], [[1.0, -3.0, 0.5], [2.0, 1.0, 99.0]], [[1.0] * 3] * 2), X, REAL, how)
    assert r.tolist() == [[1.0, -3.0, 0.5], [2.0, 1.0, 0.0]] and total.tolist() == [-1.5, 3.0]


def test_gradient_by_hand():
    """R = Σ_t w_t · x_t: gradient x input of step t is w_t · x_t; only what pushes R its way gets a share."""
    w = torch.tensor([[1.0, 3.0, -2.0], [-1.0, -3.0, 5.0]])

    def net(x, real):
        total = (x.sum(-1) * w * real).sum(1)
        return total, torch.zeros_like(w), torch.zeros_like(w)

    r, total, c = decompose(net, X, REAL, "gradient")
    assert total.tolist() == [8.0, -16.0]  # 4 (1 + 3 - 2), 4 (-1 - 3)
    assert torch.allclose(c, torch.tensor([[0.25, 0.75, 0.0], [0.25, 0.75, 0.0]]))
    assert torch.allclose(r, torch.tensor([[2.0, 6.0, 0.0], [-4.0, -12.0, 0.0]])) and not r.requires_grad


def random_net(size=8, seed=0):
    torch.manual_seed(seed)
    return RewardNet(size, 0.0).eval()


@pytest.mark.parametrize("how", HOWS)
def test_step_rewards_add_up_to_the_total_and_padding_changes_nothing(how):
    net = random_net()
    lengths, generator = (5, 3, 1), torch.Generator().manual_seed(1)
    rows = [torch.randn(n, 8, generator=generator) for n in lengths]
    x = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=7.0)  # padding is not zero
    real = torch.arange(5)[None] < torch.tensor(lengths)[:, None]
    r, total, c = decompose(net, x, real, how)
    assert torch.allclose(r.sum(1), total, atol=1e-5) and torch.allclose(c.sum(1), torch.ones(3), atol=1e-5)
    assert not r[~real].any() and not c[~real].any() and r[real].any()
    for i, n in enumerate(lengths):
        alone = decompose(net, rows[i][None], torch.ones(1, n, dtype=torch.bool), how)
        for together, single in zip((r[i, :n], total[i], c[i, :n]), (v[0] for v in alone), strict=True):
            assert torch.allclose(together, single, atol=1e-5)
    order = torch.tensor([2, 0, 1])
    assert torch.allclose(decompose(net, x[order], real[order], how)[0], r[order], atol=1e-5)


def batch_of(y, turn=(-1, -1), real=REAL):
    return dict(x=X, real=real, y=torch.tensor([y]), turn=torch.tensor(turn))


def test_bradley_terry_by_hand():
    net = fake_net([2.0, 0.5], [[0.0] * 3] * 2, [[1.0] * 3] * 2)
    args = Args(decompose="attention")
    p = 1 / (1 + math.exp(-1.5))
    for y, loss in ((1.0, -math.log(p)), (0.0, -math.log(1 - p)), (0.5, -0.5 * math.log(p) - 0.5 * math.log(1 - p))):
        assert float(preference_loss(net, batch_of(y), args)) == pytest.approx(loss, abs=1e-6)


def test_td_and_label_losses_by_hand():
    net = fake_net([9.0, 9.0], [[1.0, 2.0, 0.0], [1.0, -1.0, 50.0]], [[1.0] * 3] * 2)  # R: 3 and 0 (50 is padding)
    plain = -math.log(1 / (1 + math.exp(-3.0)))
    smooth = ((1 + 4) + 4) / 2  # per segment, mean over the two
    args = Args(decompose="td", smoothness=0.1)
    assert float(preference_loss(net, batch_of(1.0), args)) == pytest.approx(plain + 0.1 * smooth, abs=1e-5)
    args = Args(decompose="label", smoothness=0.1, turn_coef=2.0)
    assert float(preference_loss(net, batch_of(1.0), args)) == pytest.approx(plain + 0.1 * smooth, abs=1e-5)
    named = -(1.0 - math.log(math.e + math.e**2 + 1))  # turn 0 of segment A
    want = plain + 0.1 * smooth + 2 * named
    assert float(preference_loss(net, batch_of(1.0, (0, -1)), args)) == pytest.approx(want, abs=1e-5)
    named = -(-1.0 - math.log(math.e + math.exp(-1)))  # turn 1 of segment B: its padding is no choice
    plain = -math.log(1 - 1 / (1 + math.exp(-3.0)))
    want = plain + 0.1 * smooth + 2 * named
    assert float(preference_loss(net, batch_of(0.0, (-1, 1)), args)) == pytest.approx(want, abs=1e-5)


def model_of(embed=None, **options):
    options = {"rm_ensemble": 2, "rm_dropout": 0.0} | options
    return RewardModel(embed or noise_embed(), Args(**options))


def test_pairs_name_the_winners_turn_only():
    model = model_of()
    rows = [labelled(turns("x", "y"), turns("z"), 1, 1), labelled(turns("x"), turns("y", "z", "w"), 0, 2)]
    rows.append(labelled(turns("x"), turns("y"), 0.5))
    batch = model.pairs(rows)
    assert batch["turn"].tolist() == [1, -1, -1, -1, 2, -1] and batch["y"].tolist() == [1.0, 0.0, 0.5]
    assert batch["real"].sum(1).tolist() == [2, 1, 1, 1, 3, 1]
    assert torch.equal(batch["x"][4, 2], model.embed[("s2", "w")])


def test_combine_by_hand():
    raw = np.array([[1.0, 3.0, 5.0], [10.0, 10.0, 40.0]])  # means 3 and 20, std sqrt(8/3) and sqrt(200)
    z = np.array([[-1.224745, 0.0, 1.224745], [-0.707107, -0.707107, 1.414214]])
    spread = np.abs(z[0] - z[1]) / 2
    for merge, merged in (("mean", z.mean(0)), ("min", z.min(0))):
        model = model_of(rm_combine=merge, kappa=2.0, reward_clip=0.6)
        got, got_spread = model.combine(raw, measure=True)
        assert got_spread == pytest.approx(spread, abs=1e-5)
        assert got == pytest.approx(np.clip(merged / (1 + 2 * spread), -0.6, 0.6), abs=1e-5)
    assert abs(got).max() == pytest.approx(0.6)  # something was clipped


def test_normalisation_has_no_mean_unit_std_and_forgets_a_members_offset_and_scale():
    rng = np.random.default_rng(0)
    raw = rng.normal(size=(2, 400))
    model = model_of(kappa=0.0, reward_clip=100.0, rm_combine="mean")
    r, _ = model.combine(raw[:1].repeat(2, 0), measure=True)
    assert r.mean() == pytest.approx(0, abs=1e-9) and r.std() == pytest.approx(1)
    r, spread = model.combine(raw, measure=True)
    shifted = raw * [[5.0], [0.1]] + [[100.0], [-3.0]]
    again, again_spread = model.combine(shifted, measure=True)
    assert again == pytest.approx(r) and again_spread == pytest.approx(spread)


def test_a_constant_model_gives_zero_reward():
    model = model_of()
    raw = np.full((2, 5), 3.3)
    reward, spread = model.combine(raw, measure=True)
    assert not reward.any() and not spread.any()


def test_overlapping_windows_by_hand():
    """Windows of 2 over 3 steps: the middle one lies in two. r_t of the fake net is 10 * obs number + window place."""
    model = model_of(FakeEmbed(1, lambda obs, action: [float(obs[1:])]), segment_len="1-3", rm_ensemble=1)
    assert model.window == 2
    model.args.decompose = "td"
    model.nets = [lambda x, real: (x.sum((1, 2)), (10 * x[..., 0] + torch.arange(x.shape[1])) * real, real.float())]
    raw, c = model.raw([turns("a", "b", "c"), turns("d")])
    assert raw.tolist() == [[0.0, 10.5, 21.0, 0.0]]  # middle: (10 + 1 and 10 + 0) / 2
    assert c.shape == (4,) and c[3] == 1.0


@pytest.mark.parametrize("how", ["attention", "td"])
def test_reward_model_learns_which_action_is_good(how):
    """Segments with more `good` actions win; unseen segments of the same kind are ranked right, good steps get more."""
    rng = np.random.default_rng(1)
    embed = FakeEmbed(4, lambda obs, action: [1.0, float(action == "good"), float(action == "bad"), float(len(obs))])

    def pair():
        two = [[("o", "good" if rng.random() < 0.5 else "bad") for _ in range(4)] for _ in range(2)]
        a, b = (sum(x == "good" for _, x in s) for s in two)
        return labelled(*two, 1.0 if a > b else 0.0 if b > a else 0.5)

    model = model_of(embed, decompose=how, rm_lr=3e-3, rm_passes=10.0, augment=0.0)
    before = [p.clone() for net in model.nets for p in net.parameters()]
    logs = model.fit([pair() for _ in range(60)], ("test",))
    assert logs["reward/loss"] < 0.65 and logs["reward/grad_norm"] > 0
    assert model.accuracy([pair() for _ in range(60)]) > 0.9
    raw, _ = model.raw([[("o", "good")] * 2 + [("o", "bad")] * 2])
    if how == "td":
        assert (raw[:, :2].mean(1) > raw[:, 2:].mean(1)).all()
    assert any(not torch.equal(a, b) for a, b in zip(before, model.optimizer.params.values(), strict=True))
    assert model.accuracy([labelled(turns("x"), turns("y"), 0.5)]) is None


def test_fit_is_repeatable_and_members_differ():
    rows = [labelled(turns("a", "b"), turns("c", "d"), 1), labelled(turns("e"), turns("f"), 0)] * 4
    one, two = model_of(rm_dropout=0.3), model_of(rm_dropout=0.3)
    torch.manual_seed(5)
    state = torch.random.get_rng_state()
    one.fit(rows, (1,))
    assert torch.equal(torch.random.get_rng_state(), state)  # nobody else's randomness is used up
    torch.manual_seed(6)
    two.fit(rows, (1,))
    for a, b in zip(one.optimizer.params.values(), two.optimizer.params.values(), strict=True):
        assert torch.equal(a, b)
    raw, _ = one.raw([turns("a", "b", "c")])
    assert np.abs(raw[0] - raw[1]).max() > 1e-4


def test_augmentation_adds_reworded_copies():
    rows = [labelled([(f"Goal: x\nPage: Goal: y {i}\nAction:", "up")], turns("b"), 1) for i in range(200)]
    more = common.augmented(rows, 0.25)
    assert more[:200] == rows and 25 < len(more) - 200 < 75 and common.augmented(rows, 0.25) == more
    assert more[200]["a"][0][0].startswith("Task: x\nNow at: Goal: y") and more[200]["a"][0][0].endswith("Next action:")
    assert more[200]["a"][0][1] == "up" and more[200]["y"] == 1
    assert common.augmented(rows, 0.0) == rows


# ---------------------------------------------------------------------------------------------------- embeddings


def test_embeddings_do_not_depend_on_the_batch_or_the_adapter(tiny):
    texts = [("Goal: reach the flag\nAction:", "up"), ("x", ""), ("a longer state " * 9, "down left"), ("x", "up")]
    every, single = common.Embeddings(tiny, 4096, 8), common.Embeddings(tiny, 16, 8)
    every.add(texts)
    with tiny.adapter("policy"):
        for turn in texts[::-1]:
            single.add([turn])
    assert every.size == 2 * tiny.hidden_size and len(every.cache) == 4
    for turn in texts:
        key = every.key(turn)
        assert torch.allclose(every.cache[key], single.cache[key], atol=1e-4)
    halves = [every.cache[every.key(t)].split(tiny.hidden_size) for t in texts]
    assert torch.allclose(halves[1][0], halves[3][0], atol=1e-4)  # the same state
    assert not torch.allclose(halves[1][1], halves[3][1], atol=1e-2)  # another action


def test_embedding_is_the_mean_over_tokens(tiny):
    obs, action = "Goal: find the lamp\nAction:", "click lamp"
    embed = common.Embeddings(tiny, 4096, 8)
    embed.add([(obs, action)])
    state, tail = tiny.encode(obs), tiny.encode(" " + action)
    with torch.no_grad(), tiny.adapter(None):
        hidden, _ = tiny.top([state + tail], tiny.trunk([state + tail]))
    want = torch.cat([hidden[: len(state)].mean(0), hidden[len(state) :].mean(0)])
    assert torch.allclose(embed.cache[embed.key((obs, action))], want, atol=1e-5)


def test_embeddings_of_sampled_steps_equal_those_of_their_texts(tiny):
    obs, action = "Goal: reach\nAction:", "up"
    ids = tiny.encode(obs)
    (out,) = common.demonstrated(tiny, [ids], [action])
    step = Step(ids, out["trunk"], out["ids"], obs=obs, text=action)
    one, two = common.Embeddings(tiny, 4096, 8), common.Embeddings(tiny, 4096, 8)
    one.add([(obs, action)])
    two.add_steps([step])
    assert torch.allclose(one.cache[one.key((obs, action))], two.cache[two.key((obs, action))], atol=1e-5)


def test_embeddings_are_standardised_once_kept_and_saved(tiny):
    texts = [(f"state {i}", "up") for i in range(6)]
    embed = common.Embeddings(tiny, 4096, 8)
    embed.add(texts)
    embed.standardise()
    values = torch.stack([embed[t] for t in texts])
    assert values.mean(0).abs().max() < 1e-3 and values.std(0, correction=0).max() < 1.001
    before = embed[texts[0]].clone()
    embed.add([("another", "down")])
    embed.standardise()
    assert torch.equal(embed[texts[0]], before)
    embed.keep(texts[:2])
    assert len(embed.cache) == 2
    other = common.Embeddings(tiny, 4096, 8)
    other.load({**embed.state(), "policy.master.x": torch.ones(1)})
    assert set(other.cache) == set(embed.cache) and torch.equal(other[texts[1]], embed[texts[1]])
    with pytest.raises(KeyError):
        other[texts[3]]


# ------------------------------------------------------------------------------------------------------ labels


def test_rule_label_by_hand():
    judge = lambda s: min(1.0, sum(a == "good" for _, a in s) / 4)  # noqa: E731
    a, b = turns("bad", "good", "bad"), turns("good", "good", "bad")
    assert common.rule_label(judge, a, b, 0.05) == (0.0, 0)
    assert common.rule_label(judge, b, a, 0.05) == (1.0, 0)
    assert common.rule_label(judge, a, turns("bad", "bad", "bad"), 0.05) == (1.0, 1)
    assert common.rule_label(judge, a, turns("good"), 0.05) == (0.5, None)
    assert common.rule_label(judge, b, a, 0.3) == (0.5, None)  # within the margin


def teacher_of(p, turn=None):
    """A teacher whose answer is p(first, second); it notes what it was asked."""
    asked = []

    def ask(first, second, wording):
        asked.append((first, second, wording))
        value = p(first, second, wording)
        return None if value is None else (value, turn)

    return ask, asked


A, B = turns("a1", "a2"), turns("b1", "b2", "b3")


def test_position_bias_cancels():
    for first_wins in (1.0, 0.0, 0.93):
        ask, asked = teacher_of(lambda first, second, w, p=first_wins: p)
        assert common.teacher_label(ask, A, B, 1, 0.05) == (0.5, None)
        assert asked == [(A, B, 0), (B, A, 0)]
    # a biased teacher (+0.3 for whatever comes first) that still knows better
    ask, _ = teacher_of(lambda first, second, w: min(1.0, 0.3 + (0.6 if first is B else 0.4)))
    assert common.teacher_label(ask, A, B, 1, 0.05) == (0.0, None)
    assert common.teacher_label(ask, B, A, 1, 0.05) == (1.0, None)


def test_votes_take_the_majority_and_failures_are_no_ties():
    sure = lambda winner: lambda first, second, w: float(first is winner[w]) if winner[w] else None  # noqa: E731
    assert common.teacher_label(teacher_of(sure([A, B, A]))[0], A, B, 3, 0.05)[0] == 1.0
    assert common.teacher_label(teacher_of(sure([B, B, A]))[0], A, B, 3, 0.05)[0] == 0.0
    assert common.teacher_label(teacher_of(sure([A, B]))[0], A, B, 2, 0.05)[0] == 0.5  # one each
    assert common.teacher_label(teacher_of(sure([None, B, None]))[0], A, B, 3, 0.05)[0] == 0.0
    assert common.teacher_label(teacher_of(sure([None, None]))[0], A, B, 2, 0.05) is None
    half = lambda first, second, w: 1.0 if first is A else None  # noqa: E731  # one order answered: bias would stay
    assert common.teacher_label(teacher_of(half)[0], A, B, 1, 0.05) is None


def test_the_winners_turn_is_kept_if_it_exists():
    best = lambda first, second, w: float(first is B)  # noqa: E731
    assert common.teacher_label(teacher_of(best, 2)[0], A, B, 1, 0.05) == (0.0, 2)
    assert common.teacher_label(teacher_of(best, 3)[0], A, B, 1, 0.05) == (0.0, None)  # B has three turns
    assert common.teacher_label(teacher_of(lambda *_: 1.0, 1)[0], A, B, 1, 0.05) == (0.5, None)


@pytest.mark.parametrize(
    "reply, want",
    [
        ("ANSWER: A\nTURN: 2", (1.0, 1)),
        ("answer: b", (0.0, None)),
        ("**B**\n", (0.0, None)),
        ("TIE\nTURN: 1", (0.5, None)),
        ("Both act.\nFinal answer: A (turn 3)", (1.0, 2)),
        ("A good segment is B", None),
        ("A\nB", None),
        ("ANSWER: A or B", None),
        ("ANSWER: A\nTURN: 1\nTURN: 2", (1.0, None)),
        ("ANSWER: A\nTURN: 0", (1.0, None)),
        ("", None),
        ("I cannot tell.", None),
        ("ANSWER: C", None),
    ],
)
def test_parse_verdict(reply, want):
    assert common.parse_verdict(reply) == want


def test_segment_text_repeats_no_old_line():
    first, second = ("Goal: g\nUser: hi\nAction:", "ask"), ("Goal: g\nUser: hi\nUser: Rome\nAction:", "book")
    shown = common.show_segment([first, second])
    assert shown == "Goal: g\nUser: hi\nTurn 1, the agent: ask\nUser: Rome\nTurn 2, the agent: book"
    prompt = common.teacher_prompt(A, B, 1)
    assert prompt.startswith(common.TEACHER_WORDINGS[1])
    assert prompt.index("a2") < prompt.index("Segment B") < prompt.index("b1")


def test_local_teacher_is_a_probability_and_leaves_the_adapter_alone(tiny):
    ask = common._local_teacher(tiny)
    with tiny.adapter("policy"):
        one = ask(A, B, 0)
        assert tiny._active == "policy"
    assert one == ask(A, B, 0) and 0 < one[0] < 1 and one[1] is None
    assert ask(B, A, 0) != one and ask(A, B, 1) != one
    y, turn = common.teacher_label(ask, A, A, 1, 0.0)
    assert turn is None and y in (0.0, 0.5, 1.0)


class Server:
    """A teacher endpoint on this machine that answers by script: each entry is a status, a body or "sleep"."""

    def __init__(self, script, always=None):
        self.seen, self.script, self.always = [], list(script), always
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.seen.append((self.path, dict(self.headers), body))
                answer = outer.script.pop(0) if outer.script else outer.always(body)
                if answer == "sleep":
                    time.sleep(0.6)
                    answer = 500
                status, data, more = (answer, b"no", {}) if isinstance(answer, int) else (200, answer, {})
                if status == 302:
                    more = {"Location": "http://127.0.0.1:1/elsewhere"}
                self.send_response(status)
                for key, value in more.items():
                    self.send_header(key, value)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                try:
                    self.wfile.write(data)
                except OSError:
                    pass  # the client has given up

            def log_message(self, *_):
                pass

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.http.shutdown()
        self.http.server_close()


def says(text):
    return json.dumps({"choices": [{"message": {"content": text}}]}).encode()


@pytest.fixture
def no_pause(monkeypatch):
    monkeypatch.setattr(common, "RETRY_PAUSES", (0.0, 0.0, 0.0))
    monkeypatch.setenv("TEACHER_API_KEY", "sk-secret")


def test_chat_tries_again_after_timeouts_errors_and_nonsense(no_pause):
    bad = ["sleep", 500, b"<html>not json", says("fine")]
    with Server(bad) as server:
        assert common.chat(server.url, "m", "hello", 0.2) == "fine"
        assert len(server.seen) == 4
        path, headers, body = server.seen[0]
    assert path == "/v1/chat/completions" and headers["Authorization"] == "Bearer sk-secret"
    assert body["model"] == "m" and body["messages"] == [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize("body", [b"[]", b'{"choices": []}', says(None), says(3), b"\xff", b""])
def test_chat_gives_up_after_four_useless_replies(no_pause, body):
    with Server([body] * 5) as server:
        assert common.chat(server.url, "m", "q", 5) is None
        assert len(server.seen) == 4


def test_chat_without_a_server_and_with_a_refused_question(no_pause):
    with Server([]) as server:
        gone = server.url
    assert common.chat(gone, "m", "q", 1) is None
    with Server([400]) as server:
        assert common.chat(server.url, "m", "q", 5) is None and len(server.seen) == 1


@pytest.mark.parametrize("status", [401, 403, 404, 302])
def test_useless_to_ask_again(no_pause, status):
    with Server([status]) as server, pytest.raises(UserError) as caught:
        common.chat(server.url, "m", "q", 5)
    assert str(status) in str(caught.value) and "sk-secret" not in str(caught.value)


def url_teacher(server):
    args = SimpleNamespace(teacher="url", teacher_url=server.url, teacher_model="m", teacher_timeout=5)
    return common._url_teacher(args)


def test_an_endpoint_that_always_prefers_the_first_place_gives_ties(no_pause):
    with Server([], always=lambda body: says("ANSWER: A\nTURN: 1")) as server:
        assert common.teacher_label(url_teacher(server), A, B, 3, 0.05) == (0.5, None)
        assert len(server.seen) == 6
        prompts = [body["messages"][0]["content"] for _, _, body in server.seen]
    assert len(set(prompts)) == 6  # three wordings, two orders


def test_an_honest_endpoint_is_believed(no_pause):
    def always(body):
        text = body["messages"][0]["content"]
        return says(f"ANSWER: {'A' if text.index('b1') < text.index('a1') else 'B'}\nTURN: 3")

    with Server([], always) as server:
        assert common.teacher_label(url_teacher(server), A, B, 1, 0.05) == (0.0, 2)


def test_a_silent_endpoint_stops_the_run_and_an_unreadable_one_does_not(no_pause):
    with Server([], always=lambda body: 503) as server:
        ask = url_teacher(server)
        assert all(ask(A, B, 0) is None for _ in range(9))
        with pytest.raises(RunError, match="ten times"):
            ask(A, B, 0)
    with Server([], always=lambda body: says("hm")) as server:
        ask = url_teacher(server)
        assert all(ask(A, B, 0) is None for _ in range(12))


# ---------------------------------------------------------------------------------------- the store, cleaning, a person


def test_store_keeps_every_label_at_once_and_mends_a_torn_line(tmp_path):
    store = common.PreferenceStore(tmp_path / "p.jsonl")
    store.add(A, B, 1.0, 1, labeler="rule")
    store.add(B, A, 0.5, None, labeler="rule")
    with open(tmp_path / "p.jsonl", "a") as file:
        file.write('{"a": [["x"')
    again = common.PreferenceStore(tmp_path / "p.jsonl")
    assert again.rows == store.rows and again.imported == 0 and again.rows[0]["labeler"] == "rule"
    again.add(A, A[:1], 0.0, 0)
    assert len(common.read_jsonl(tmp_path / "p.jsonl")) == 3
    assert again.holds(A, B, 0) and not again.holds(A, B, 1) and again.holds(B, A, 1) and not again.holds(B, B, 0)


def test_labels_of_another_file_are_read_and_it_grows(tmp_path):
    other = common.PreferenceStore(tmp_path / "mine.jsonl")
    other.add(A, B, 1.0, None)
    store = common.PreferenceStore(tmp_path / "run.jsonl", str(tmp_path / "mine.jsonl"))
    assert store.imported == 1 and store.rows[0]["y"] == 1.0
    store.add(B, A, 1.0, None)
    assert [r["y"] for r in common.read_jsonl(tmp_path / "mine.jsonl")] == [1.0, 1.0]
    back = common.PreferenceStore(tmp_path / "run.jsonl", str(tmp_path / "mine.jsonl"))  # a resumed run
    assert len(back.rows) == 2 and back.imported == 1


@pytest.mark.parametrize(
    "line",
    [
        "nonsense",
        "[]",
        '{"a": [], "b": [["o", "x"]], "y": 1}',
        '{"a": [["o", "x"]], "b": [["o", "x"]], "y": 2}',
        '{"a": [["o", 3]], "b": [["o", "x"]], "y": 1}',
        '{"a": [["o", "x"]], "b": [["o", "x"]], "y": 1, "turn": 1}',
        '{"a": [["o", "x"]], "b": [["o", "x"]], "y": 0.5, "turn": 0}',
        '{"a": [["o", "x"]], "b": [["o", "x"]]}',
    ],
)
def test_a_bad_preference_line_is_named(tmp_path, line):
    (tmp_path / "p.jsonl").write_text(json.dumps(labelled(A, B, 1)) + "\n" + line + "\n")
    with pytest.raises(UserError, match="line 2"):
        common.read_preferences(tmp_path / "p.jsonl")


def test_cleaning_drops_contradictions_and_cycles():
    s = [turns(f"x{i}") for i in range(9)]
    good = [labelled(s[0], s[1], 1), labelled(s[2], s[1], 0.5), labelled(s[5], s[0], 1)]
    rows = [good[0], labelled(s[1], s[0], 0), good[1], labelled(s[1], s[2], 0.5)]  # repeats that agree
    rows += [labelled(s[3], s[4], 1), labelled(s[4], s[3], 1), labelled(s[3], s[4], 1)]  # both ways
    rows += [labelled(s[3], s[5], 1), labelled(s[3], s[5], 0.5)]  # better and equal
    rows += [labelled(s[6], s[7], 1), labelled(s[8], s[7], 0), labelled(s[8], s[6], 1), good[2]]  # 6 > 7 > 8 > 6
    rows += [labelled(s[0], s[0], 1)]  # against itself
    kept, contradictions, cycles = common.clean_preferences(rows)
    assert kept == good and contradictions == 5 and cycles == 3
    assert common.clean_preferences([]) == ([], 0, 0)
    chain = [labelled(s[i], s[i + 1], 1) for i in range(8)] + [labelled(s[0], s[4], 1)]
    assert common.clean_preferences(chain) == (chain, 0, 0)  # a long way down is no cycle


def test_held_out_pairs_do_not_depend_on_the_order():
    rows = [labelled(turns(f"a{i}"), turns(f"b{i}"), 1) for i in range(300)]
    swapped = [labelled(r["b"], r["a"], 0) for r in rows]
    held = [common.chosen(r, 0.2, "held out") for r in rows]
    assert held == [common.chosen(r, 0.2, "held out") for r in swapped] and 35 < sum(held) < 85
    store = SimpleNamespace(rows=rows + [labelled(turns("a"), turns("b"), 0.5)], keys=[], count=301)
    train, out, fresh, logs = common.PreferenceStore.usable(store, 1000, since=299)
    assert len(train) + len(out) == 301
    assert [r for r in rows if r in out] == [r for r, h in zip(rows, held, strict=True) if h]
    assert fresh == store.rows[299:] and logs["pref/tie_frac"] == 0.5 and logs["pref/labels"] == 301


def typed(monkeypatch, text):
    """Let `input` read from a pseudo-terminal in which `text` was typed."""
    master, slave = os.openpty()
    os.write(master, text.encode())
    monkeypatch.setattr(sys, "stdin", os.fdopen(slave, "r"))
    return master


@pytest.mark.parametrize(
    "text, want",
    [
        ("a\n", (1.0, None)),
        ("B\n", (0.0, None)),
        ("t\n", (0.5, None)),
        ("s\n", None),
        ("q\n", "quit"),
        ("x\n\nyes\na\n", (1.0, None)),  # asked again
        ("b 3\n", (0.0, 2)),
        ("a 3\na2\n", (1.0, 1)),  # A has two turns
        ("\x04", "quit"),  # end of input
    ],
)
def test_a_person_labels(monkeypatch, capsys, text, want):
    master = typed(monkeypatch, text)
    assert common.human_label(A, [("evil \x1b]0;title\x07 state", "x")] * 3, named=True) == want
    os.close(master)
    out = capsys.readouterr().out
    assert "\x1b" not in out and "a1" in out and "evil" in out


def stub_learner(tmp_path, **options):
    args = Args(**{"labeler": "human"} | options)
    stop = type("Stop", (), {"asked": False, "__bool__": lambda self: self.asked})()
    return SimpleNamespace(args=args, stop=stop, p=Progress(), store=common.PreferenceStore(tmp_path / "p.jsonl"),
                           ask=common.human_label, replay=SimpleNamespace(steps=[]))  # fmt: skip


def segment(*actions, obs="s", **more):
    return [Step([1], torch.zeros(1, 1), obs=f"{obs}{i}", text=a, **more) for i, a in enumerate(actions)]


def test_quitting_in_the_middle_loses_no_label_and_asks_nothing_twice(tmp_path, monkeypatch):
    pairs = [(segment(f"a{i}"), segment(f"b{i}")) for i in range(4)]
    learner = stub_learner(tmp_path)
    master = typed(monkeypatch, "a\nb\nq\n")
    assert stepopsd.label_pairs(learner, pairs, 1) == 0
    os.close(master)
    assert learner.stop and [r["y"] for r in common.read_jsonl(tmp_path / "p.jsonl")] == [1.0, 0.0]
    learner = stub_learner(tmp_path)  # the run is resumed: the same pairs are drawn again
    master = typed(monkeypatch, "t\ns\n")
    assert stepopsd.label_pairs(learner, pairs, 1) == 1  # the skipped one
    os.close(master)
    rows = common.read_jsonl(tmp_path / "p.jsonl")
    assert [(r["y"], r["a"][0][1]) for r in rows] == [(1.0, "a0"), (0.0, "a1"), (0.5, "a2")]
    assert {r["labeler"] for r in rows} == {"human"}


def test_failed_answers_are_counted_and_not_stored(tmp_path):
    learner = stub_learner(tmp_path, labeler="llm")

    def ask(first, second, wording):
        names = first[0][1], second[0][1]
        return None if "a1" in names else (float(names[0] == "a0"), None)

    learner.ask = lambda a, b: common.teacher_label(ask, a, b, 1, 0.05)
    pairs = [(segment(f"a{i}"), segment(f"b{i}")) for i in range(2)] + [(segment("c"), segment("c"))]
    assert stepopsd.label_pairs(learner, pairs, 7) == 1
    assert [(r["y"], r["iteration"]) for r in learner.store.rows] == [(1.0, 7)]  # equal segments are not asked about


# ---------------------------------------------------------------------------------------------------------- pairs


def episode(n, name, version=1, kind="k", success=False):
    steps = segment(*[f"{name}{i}" for i in range(n)], obs=name, version=version, kind=kind, success=success)
    steps[-1].terminated = True
    return steps


def test_pairs_are_new_against_old_of_the_same_kind_with_enough_successes():
    kinds = ("book", "ask", "find")
    episodes = [episode(5 + i % 7, f"n{i}", 2, kinds[i % 3], i in (4, 9)) for i in range(12)]
    episodes += [episode(5 + i % 7, f"o{i}", 1, kinds[i % 3], i == 7) for i in range(12)]
    args = Args(pairs=60, pos_frac=0.6, segment_len="3-5")
    pairs = stepopsd.draw_pairs(episodes, 2, args)
    assert len(pairs) == 60
    whole = {tuple(s.obs for s in e): e for e in episodes}
    for a, b in pairs:
        assert {a[0].version, b[0].version} == {1, 2} and a[0].kind == b[0].kind and 3 <= len(a) == len(b) <= 5
        for part in (a, b):
            assert any(part == e[i : i + len(part)] for e in whole.values() for i in range(len(e)))
    assert sum(a[0].success or b[0].success for a, b in pairs) >= 36
    assert {len(a) for a, _ in pairs} == {3, 4, 5}
    assert 10 < sum(a[0].version == 2 for a, _ in pairs) < 50  # which is A is chance
    assert stepopsd.draw_pairs(episodes, 2, args) == pairs
    assert stepopsd.draw_pairs(episodes, 2, Args(pairs=60, pos_frac=0.6, segment_len="3-5", seed=2)) != pairs


def test_pairs_take_what_there_is():
    args = Args(pairs=10, pos_frac=1.0)
    short = [episode(1, "a"), episode(2, "b", success=True), episode(9, "c")]
    pairs = stepopsd.draw_pairs(short, 1, args)
    assert len(pairs) == 10 and all(a[0].success or b[0].success for a, b in pairs)  # the only success is always there
    assert all(len(a) == len(b) <= 2 for a, b in pairs)
    lost = stepopsd.draw_pairs([episode(4, "a"), episode(4, "b", kind="z")], 1, args)
    assert len(lost) == 10 and all(a[0].kind != b[0].kind for a, b in lost)
    assert stepopsd.draw_pairs([episode(4, "a")], 1, args) == []
    old = [episode(4, "o", version=1), episode(4, "n", version=2), episode(4, "win", version=1, success=True)]
    assert all(any(s[0].success for s in pair) for pair in stepopsd.draw_pairs(old, 2, args))  # an old success


# --------------------------------------------------------------------------------------------------- the new reward


def ring_learner(steps, trained=True, **options):
    args = Args(**options)
    reward = SimpleNamespace(optimizer=SimpleNamespace(steps=int(trained)))
    reward.raw = lambda episodes: (np.array([[0.0, 2.0, 4.0]]), np.array([0.2, 0.3, 0.5]))
    reward.combine = lambda raw, measure: (np.array([-0.5, 0.0, 1.0]), np.array([0.1, 0.2, 0.3])) if measure else None
    return SimpleNamespace(args=args, p=Progress(), reward=reward, replay=SimpleNamespace(steps=steps))


def test_relabel_by_hand():
    steps = episode(3, "e")
    for step, (reward, violation) in zip(steps, [(-0.02, 0.0), (-0.5, 0.5), (0.7, 0.3)], strict=True):
        step.env_reward, step.violation = reward, violation
    learner = ring_learner(steps, lam=0.4, curiosity=0.6)
    learner.p.visits = {common.text_key("e0"): 4, common.text_key("e1"): 9}
    spread = stepopsd.relabel(learner)
    assert spread.tolist() == [0.1, 0.2, 0.3]
    bonus = [0.3, 0.2, 0.6]  # a state not counted yet has been seen once
    want = [0.4 * -0.5 + 0.6 * -0.02 + bonus[0], 0.6 * 0.0 + bonus[1] - 0.5, 0.4 * 1.0 + 0.6 * 1.0 + bonus[2] - 0.3]
    assert [s.reward for s in steps] == pytest.approx(want)
    assert [s.step_reward for s in steps] == [-0.5, 0.0, 1.0] and [s.share for s in steps] == [0.2, 0.3, 0.5]
    stepopsd.relabel(learner)  # again from the same facts: the same
    assert [s.reward for s in steps] == pytest.approx(want) and steps[2].env_reward == 0.7


def test_lam_0_is_the_environments_reward_and_an_untrained_model_is_not_asked():
    for options in (dict(lam=0.0), dict(lam=0.5, trained=False)):
        steps = episode(3, "e")
        steps[2].env_reward, steps[2].violation = 0.75, 0.25
        learner = ring_learner(steps, **options)
        learner.reward.raw = lambda episodes: pytest.fail("asked")
        assert len(stepopsd.relabel(learner)) == 0
        terminal = (1 - options["lam"]) * 1.0 - 0.25
        assert [s.reward for s in steps] == pytest.approx([0.0, 0.0, terminal])


def test_the_reward_model_cannot_buy_off_a_violation():
    """The penalty is subtracted whole, whatever λ and however large the step reward."""
    for lam in (0.0, 0.3, 1.0):
        one, two = episode(3, "e"), episode(3, "e")
        two[1].violation, two[1].env_reward = 0.8, -0.8
        for steps in (one, two):
            stepopsd.relabel(ring_learner(steps, lam=lam))
        assert one[1].reward - two[1].reward == pytest.approx(0.8)


def test_hacking_alarm():
    def ring(rewards, successes):
        out = []
        for version in (1, 2):
            for i in range(10):
                e = episode(2, f"{version}{i}", version, success=i < 10 * successes[version - 1])
                e[0].step_reward = e[1].step_reward = rewards[version - 1]
                out.append(e)
        return out

    assert common.hacking_alarm(ring((0.0, 0.4), (0.8, 0.4)), 2) is True
    assert not common.hacking_alarm(ring((0.0, 0.4), (0.4, 0.8)), 2)  # both better
    assert not common.hacking_alarm(ring((0.4, 0.0), (0.8, 0.4)), 2)  # both worse
    assert not common.hacking_alarm(ring((0.0, 0.05), (0.8, 0.4)), 2)  # hardly more reward
    assert not common.hacking_alarm(ring((0.0, 0.4), (0.8, 0.8)), 3)  # nothing new
    assert not common.hacking_alarm([e for e in ring((0.0, 0.4), (0.8, 0.4)) if e[0].version == 2], 2)


def test_every_fifth_episode_is_held_out():
    parts = [episode(1 + i % 2, f"e{i}") for i in range(11)]
    kept, held = common.hold_out([s for e in parts for s in e])
    assert held == parts[4] + parts[9] and kept == [s for i, e in enumerate(parts) if i not in (4, 9) for s in e]


def test_split_episodes_is_the_inverse_of_laying_end_to_end():
    two = episode(3, "b")
    two[-1].terminated, two[-1].truncated = False, True
    parts = [episode(2, "a"), two, episode(1, "c")]
    assert common.split_episodes([s for e in parts for s in e]) == parts and common.split_episodes([]) == []


# ----------------------------------------------------------------------------------------------------- value model


def test_value_model_reads_v_and_success_and_pads_nothing(tiny):
    value = stepopsd.ValueModel(tiny, Args())
    torch.manual_seed(0)
    torch.nn.init.normal_(value.head.weight)
    prompts = random_prompts((7, 1, 23, 12))
    steps = [Step(p, h) for p, h in zip(prompts, tiny.trunk(prompts), strict=True)]
    together = value.predict(steps)
    for i, step in enumerate(steps):
        step.feature_at = -1  # not from the features kept
        assert value.predict([step])[0] == pytest.approx(together[i], abs=1e-4)
    assert together.shape == (4, 2) and (np.ptp(together, axis=0) > 0.1).all()


def test_value_update_moves_only_the_value_adapter_and_learns():
    lm = load_model("tiny", adapters=ADAPTERS, load_4bit=False, lora_rank=8)
    prompts = random_prompts((7, 9, 23, 12))
    goals = 3.0, -2.0, 0.5, 1.0
    steps = [Step(p, h, ret=r, success=r > 0) for p, h, r in zip(prompts, lm.trunk(prompts), goals, strict=True)]
    before = {k: p.clone() for k, p in lm.peft.named_parameters()}
    value = stepopsd.ValueModel(lm, Args(value_lr=1e-2, labeler="model"))
    assert not value.predict(steps).any()
    for _ in range(60):
        assert value.update(steps, 0.0) > 0
    values, logits = value.predict(steps).T
    assert values == pytest.approx(goals, abs=0.3) and [x > 0 for x in logits] == [True, False, True, True]
    moved = {k for k, p in lm.peft.named_parameters() if not torch.equal(p, before[k])}
    assert moved and all(".value." in k for k in moved)


def test_the_value_head_is_least_squares_with_a_ridge(tiny):
    value = stepopsd.ValueModel(tiny, Args(value_l2=4.0))
    steps = [Step([5], None, ret=r) for r in (0.0, 0.2, 1.0, 0.8)]
    for step, x in zip(steps, (1.0, 1.0, 5.0, 5.0), strict=True):  # mean 3, σ 2: z = -1, -1, 1, 1
        step.feature, step.feature_at = torch.zeros(tiny.hidden_size), 0
        step.feature[7] = x
    value.fit_head(steps)  # w = Σ z (G - 0.5) / (Σ z² + 4) = 1.6 / 8
    assert value.predict(steps)[:, 0] == pytest.approx([0.3, 0.3, 0.7, 0.7], abs=1e-5)
    assert not value.predict(steps)[:, 1].any() and torch.equal(value.optimizer.master["head.bias"], value.head.bias)
    before, value.args = value.head.weight.clone(), Args(value_l2=0.0)
    value.fit_head([replace(s, ret=9.0) for s in steps])
    assert torch.equal(value.head.weight, before)


def test_the_value_starts_from_the_cloned_policy(tmp_path, keep_sigint):
    learner = warmed_up(stepopsd, tmp_path)
    assert starts_from_the_policy(learner.lm, "value", learner.value.optimizer)


def test_outlook_is_the_state_after_the_step():
    steps = episode(3, "a", success=True) + episode(2, "b")
    steps[-1].terminated, steps[-1].truncated, steps[-1].final_state = False, True, [9]
    logit = lambda p: math.log(p / (1 - p))  # noqa: E731
    row = lambda x: (7.0, logit(0.9)) if x.state == [9] else (int(x.obs[1]), logit((int(x.obs[1]) + 1) / 10))  # noqa: E731
    stepopsd.fill_values(SimpleNamespace(predict=lambda xs: np.array([row(x) for x in xs]).reshape(-1, 2)), steps)
    assert [s.outlook for s in steps] == pytest.approx([0.2, 0.3, 1.0, 0.2, 0.9])
    assert [s.value for s in steps] == [0, 1, 2, 0, 1] and [s.final_value for s in steps] == [0, 0, 0, 0, 7]


def test_model_labels_compare_the_ends(tmp_path):
    learner = stub_learner(tmp_path, labeler="model", tie_margin=0.1)
    a, b, c = (segment("x", obs=o) for o in "abc")
    a[-1].outlook, b[-1].outlook, c[-1].outlook = 0.8, 0.3, 0.75
    learner.value = SimpleNamespace(predict=lambda xs: np.zeros((len(xs), 2)))
    stepopsd.label_pairs(learner, [(a, b), (b, c), (a, c)], 1)
    assert [r["y"] for r in learner.store.rows] == [1.0, 0.0, 0.5]


# ------------------------------------------------------------------------------ violations and progress from the env


class Strict:
    """Three steps; task 1 breaks a constraint in its second step. progress() is known."""

    max_action_tokens = 3
    return_bounds = (-1.0, 1.0)

    def __init__(self, name, seed=0, split="train"):
        pass

    def reset(self, seed=None):
        self.task, self.t = seed, 0
        return "begin", self.info()

    def info(self, **more):
        return {"success": self.task == 0, "valid": True, "cut": False, "task": f"kind {self.task}"} | more

    def progress(self):
        return (0.0, 0.25, 0.25, 1.0)[self.t]

    def step(self, text):
        self.t += 1
        broken = 0.5 if (self.task, self.t) == (1, 2) else 0.0
        more = {"violation": broken} if broken else {}
        return f"step {self.t}", float(self.t == 3) - broken, self.t == 3, False, self.info(**more)


def played(tiny, monkeypatch, env):
    monkeypatch.setattr(stepopsd, "make_env", lambda name, seed=0, split="train": env(name, seed, split))
    args = Args(env="strict", num_envs=2)
    result = stepopsd.rollout(tiny, args, "train", range(3), temperature=1.0, key=("t",), version=4)
    common.annotate(result[0], result[2])
    return result


def test_violations_and_true_progress_reach_the_steps(tiny, monkeypatch):
    episodes, stats, traces = played(tiny, monkeypatch, Strict)
    assert [[s.violation for s in e] for e in episodes] == [[0, 0, 0], [0, 0.5, 0], [0, 0, 0]]
    assert [[s.progress for s in e] for e in episodes] == [[0.25, 0.0, 0.75]] * 3
    assert [[s.env_reward for s in e] for e in episodes] == [[0, 0, 1], [0, -0.5, 1], [0, 0, 1]]
    assert [e[0].kind for e in episodes] == ["kind 0", "kind 1", "kind 2"]
    assert [s.success for e in episodes for s in e] == [True] * 3 + [False] * 6
    assert [s.obs for s in episodes[2]] == ["begin", "step 1", "step 2"]
    assert [s.text for e in episodes for s in e] == [r["action"] for t in traces for r in t["steps"]]


@pytest.mark.parametrize("bad", [-0.1, math.nan, "much"])
def test_a_violation_that_is_no_penalty_drops_the_episode(tiny, monkeypatch, bad, capsys):
    class Wrong(Strict):
        def step(self, text):
            obs, reward, terminated, truncated, info = super().step(text)
            return obs, reward, terminated, truncated, info | ({"violation": bad} if self.task == 2 else {})

    episodes, stats, _ = played(tiny, monkeypatch, Wrong)
    assert len(episodes) == 2 and stats["env_errors"] == 1


def test_an_environment_without_progress(tiny, monkeypatch):
    class Plain(Strict):
        progress = property(lambda self: (_ for _ in ()).throw(AttributeError))

    episodes, _, _ = played(tiny, monkeypatch, Plain)
    assert all(s.progress is None for e in episodes for s in e)
    assert common.progress_correlation(episodes[0], [1.0, 2.0, 3.0]) is None
    known = [SimpleNamespace(progress=x) for x in (0.0, 0.2, 0.9)]
    assert common.progress_correlation(known, [-1.0, 5.0, 6.0]) == pytest.approx(1.0)


# ------------------------------------------------------------------------------------------------------ command line


TINY = ["--env", "gridworld", "--model", "tiny"]
WRONG = {
    "labeler": (["--labeler", "cat"], "labeler"),
    "decompose": (["--decompose", "magic"], "decompose"),
    "lam": ([*TINY, "--lam", "1.5"], "--lam"),
    "segments": ([*TINY, "--segment_len", "7-3"], "--segment_len"),
    "segment words": ([*TINY, "--segment_len", "three"], "--segment_len"),
    "no pairs": ([*TINY, "--pairs", "0"], "--pairs"),
    "teacher without url": ([*TINY, "--labeler", "llm", "--teacher", "url"], "--teacher_url"),
    "teacher url": ([*TINY, *"--labeler llm --teacher url --teacher_url ftp://x --teacher_model m".split()], "http"),
    "no terminal": ([*TINY, "--labeler", "human"], "terminal"),
    "no preferences": ([*TINY, "--preferences", "/no/such/file"], "/no/such/file"),
    "ensemble": ([*TINY, "--rm_ensemble", "0"], "--rm_ensemble"),
    "unknown env": (["--env", "chess", "--model", "tiny"], "chess"),
    "resume of nothing": (["--resume", "/no/such/run"], "/no/such/run"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_value_is_one_line_and_exit_code_2(name, capfd, tmp_path, monkeypatch, keep_sigint):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(stepopsd, "warm_up", lambda learner: pytest.fail("the run started"))
    monkeypatch.setattr(sys, "stdin", open(os.devnull))
    argv, part = WRONG[name]
    code, _, err = main_here(stepopsd, [*argv, *(["--out", "run"] if "--env" in argv else [])], capfd)
    lines = err.strip().splitlines()
    assert code == 2 and len(lines) == 1 and lines[0].startswith("error: ") and part in err, err
    assert os.listdir(tmp_path) == []


def test_a_teacher_url_alone_means_that_teacher():
    argv = [*TINY, *"--labeler llm --teacher_url http://localhost:1/v1 --teacher_model m".split()]
    args = common.parse_args(Args, argv)
    common.check_labeler(args, resumed=False)
    assert args.teacher == "url"
    args = common.parse_args(Args, [*argv, "--teacher", "local"])
    common.check_labeler(args, resumed=False)
    assert args.teacher == "local"


def test_preferences_inside_a_folder_to_be_replaced_are_refused(capfd, tmp_path, keep_sigint):
    run = tmp_path / "run"
    stepopsd.Learner([*SMALL, "--out", str(run)])
    common.PreferenceStore(run / "preferences.jsonl").add(A, B, 1.0, None)
    argv = [*SMALL, "--out", str(run), "--overwrite", "--preferences", str(run / "preferences.jsonl")]
    code, _, err = main_here(stepopsd, argv, capfd)
    assert code == 2 and "--preferences" in err and (run / "preferences.jsonl").exists()


def command(*argv):
    return [sys.executable, str(ROOT / "stepopsd.py"), *argv]


def test_help_names_every_field(tmp_path):
    done = subprocess.run(command("--help"), capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.returncode == 0 and done.stderr == "" and os.listdir(tmp_path) == []
    assert all(f"--{field.name}" in done.stdout for field in fields(Args))


# -------------------------------------------------------------------------------------------------------- whole runs

SMALL = [*TINY, *"""--demos 60 --warmup_epochs 3 --total_env_steps 250 --episodes_per_iter 8 --num_envs 8
    --val_episodes 4 --eval_episodes 8
    --lora_rank 8 --lora_layers 2 --eval_every 2 --minibatch 16 --warmup_minibatch 8 --pairs 16
    --rm_ensemble 2 --rm_passes 2 --curiosity 0.01 --seed 3 --segment_len 2-4""".split()]  # fmt: skip


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "whole"
    done = subprocess.run(command(*SMALL, "--out", str(folder)), capture_output=True, text=True, cwd=ROOT, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    (folder.parent / "stdout").write_text(done.stdout)
    return folder


@pytest.fixture(scope="session")
def warmed(tmp_path_factory):
    """The same run, stopped at once when the warm-up was over; tests go on in a copy of it."""
    folder = tmp_path_factory.mktemp("runs") / "warmed"

    def dies(*_, **__):
        raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(common, "annotate", dies)
        stepopsd.main([*SMALL, "--out", str(folder)])
    signal.signal(signal.SIGINT, before)
    return folder


@pytest.fixture
def going_on(warmed, tmp_path):
    return Path(shutil.copytree(warmed, tmp_path / "r"))


@pytest.fixture(scope="session")
def interrupted(warmed, tmp_path_factory):
    """Killed after two iterations, then resumed: the third one labels again."""
    folder, log = Path(shutil.copytree(warmed, tmp_path_factory.mktemp("runs") / "broken")), {}
    go_on = command("--resume", str(folder))
    process = subprocess.Popen(go_on, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT)
    end, rows = time.time() + 600, []
    while time.time() < end and process.poll() is None and sum("policy/pg_loss" in r for r in rows) < 2:
        rows = common.read_jsonl(folder / "metrics.jsonl")
        time.sleep(0.01)
    log["alive"] = process.poll() is None
    process.kill()
    process.wait()
    log["code"], log["rows"] = process.returncode, len(rows)
    done = subprocess.run(go_on, capture_output=True, text=True, cwd=ROOT, timeout=600)
    log["end"], log["err"] = done.returncode, done.stderr
    return folder, log


@pytest.mark.e2e
def test_a_run_leaves_everything(finished):
    for name in ("config.json", "metrics.jsonl", "episodes.jsonl", "summary.json", "report.md", "preferences.jsonl"):
        assert (finished / name).stat().st_size > 0, name
    pictures = {p.name for p in (finished / "plots").glob("*.png")}
    assert {"curves.png", "step_rewards.png", "decompositions.png"} <= pictures
    rows = common.read_jsonl(finished / "metrics.jsonl")
    names = set().union(*rows)
    want = """train/success train/return train/ep_len eval/success policy/approx_kl policy/ref_kl policy/entropy
        policy/grad_norm value/grad_norm reward/grad_norm reward/loss reward/step_mean reward/step_std reward/hist
        reward/spread reward/hacking_alarm reward/progress_corr pref/accuracy pref/accuracy_new pref/labels pref/failed
        pref/contradictions pref/cycles pref/pos_frac score/mse_val score/mse_train""".split()
    assert set(want) <= names, set(want) - names
    updates = [r for r in rows if "policy/pg_loss" in r]
    assert len(updates) >= 2 and all(r["policy/first_ratio_dev"] < 1e-3 for r in updates)
    assert ["pref/labels" in r for r in updates[:3]] == [True, False, True][: len(updates)]  # --rm_every 2
    assert all(sum(r["reward/hist"]) > 0 for r in updates)
    report = (finished / "report.md").read_text()
    assert "Spot check" in report and "**Highest" in report and "**Lowest" in report and "| uniform |" in report
    table = json.loads((finished / "decompositions.json").read_text())
    assert set(table) == set(HOWS)
    last = common.read_jsonl(finished / "episodes.jsonl")[-1]
    assert last["stage"] == "stepopsd" and all("step_reward" in s and "share" in s for s in last["steps"])
    summary = json.loads((finished / "summary.json").read_text())
    assert summary["algo"] == "stepopsd" and set(summary["stages"]) == {"warmup", "stepopsd"}
    labels = common.read_jsonl(finished / "preferences.jsonl")
    assert {r["labeler"] for r in labels} == {"rule"} and all(len(r["a"]) == len(r["b"]) <= 4 for r in labels)


@pytest.mark.e2e
def test_resume_equals_never_having_stopped(finished, interrupted):
    folder, log = interrupted
    assert log["alive"] and log["code"] == -signal.SIGKILL and log["end"] == 0, log["err"][-2000:]
    assert rows_of(folder) == rows_of(finished) and log["rows"] < len(rows_of(finished))
    for name in ("last", "best"):
        a, b = tensors_of(finished, name), tensors_of(folder, name)
        assert set(a) == set(b) and [k for k in a if not torch.equal(a[k], b[k])] == []
    assert any(k.startswith("embedding.at.") for k in tensors_of(folder)) and any(k.startswith("reward.") for k in a)
    for name in ("preferences.jsonl", "episodes.jsonl", "decompositions.json"):
        assert (folder / name).read_text() == (finished / name).read_text()


@pytest.mark.e2e
def test_a_resumed_run_needs_no_more_memory(finished, interrupted):
    peaks = [common.read_jsonl(f / "metrics.jsonl")[-1]["perf/peak_rss_mb"] for f in (finished, interrupted[0])]
    assert peaks[1] < 1.25 * peaks[0], peaks  # processes of their own, 7% apart at the same work; exact: correctness


@pytest.mark.e2e
def test_a_run_killed_in_its_last_test_ends_the_same(finished, going_on, capfd, keep_sigint, monkeypatch):
    """Nothing of the last iteration is in memory then: the ring is measured anew before step rewards are shown."""
    original = stepopsd.test

    def dies(learner, stage):
        if stage == "stepopsd":
            raise KeyboardInterrupt
        original(learner, stage)

    monkeypatch.setattr(stepopsd, "test", dies)
    assert main_here(stepopsd, ["--resume", str(going_on)], capfd)[0] == 130
    monkeypatch.setattr(stepopsd, "test", original)
    assert main_here(stepopsd, ["--resume", str(going_on)], capfd)[0] == 0
    assert rows_of(going_on) == rows_of(finished)
    for name in ("episodes.jsonl", "preferences.jsonl", "decompositions.json"):
        assert (going_on / name).read_text() == (finished / name).read_text()


@pytest.mark.e2e
def test_labels_newer_than_the_checkpoint_are_used_again(finished, going_on, capfd, keep_sigint, monkeypatch):
    """Stopped inside the labelling of iteration 1: the labels given are kept, the others asked, the end is the same."""
    stop_after, asked = 5, []
    original = common.rule_label

    def dies(*args):
        asked.append(1)
        if len(asked) > stop_after:
            raise KeyboardInterrupt
        return original(*args)

    monkeypatch.setattr(common, "rule_label", dies)
    code, _, _ = main_here(stepopsd, ["--resume", str(going_on)], capfd)
    assert code == 130 and len(common.read_jsonl(going_on / "preferences.jsonl")) == stop_after
    asked.clear()
    stop_after = 10**6
    code, _, err = main_here(stepopsd, ["--resume", str(going_on)], capfd)
    assert code == 0, err[-2000:]
    assert rows_of(going_on) == rows_of(finished)
    assert (going_on / "preferences.jsonl").read_text() == (finished / "preferences.jsonl").read_text()
    assert len(asked) == len(common.read_jsonl(finished / "preferences.jsonl")) - 5


@pytest.mark.e2e
def test_the_baseline_asks_for_no_labels(tmp_path, capfd, keep_sigint, monkeypatch):
    monkeypatch.setattr(stepopsd, "label_pairs", lambda *_: pytest.fail("asked"))
    more = "--lam 0 --total_env_steps 60 --demos 10 --curiosity 0".split()
    argv = [*SMALL, *more, "--out", str(tmp_path / "r")]
    code, _, err = main_here(stepopsd, argv, capfd)
    assert code == 0, err[-2000:]
    rows = common.read_jsonl(tmp_path / "r" / "metrics.jsonl")
    assert any("policy/pg_loss" in r for r in rows) and not any("reward/hist" in r for r in rows)
    assert not (tmp_path / "r" / "preferences.jsonl").exists()
    summary = json.loads((tmp_path / "r" / "summary.json").read_text())
    assert summary["algo"] == "lam_0" and set(summary["stages"]) == {"warmup", "lam_0"}  # apart in the pictures
