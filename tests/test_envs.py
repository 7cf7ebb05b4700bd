"""envs.py: the protocol, webnav, gridworld, the extractor and the action parser."""

import copy
import pickle
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import envs
from envs import Action, Page, html_to_state, make_env, parse_action, render_history, render_state

NAMES = tuple(envs.ENVS)
INFO_KEYS = {"success", "valid", "repaired", "cut", "action", "task", "error"}
GARBAGE = (
    "",
    " ",
    "\n\n",
    "\x00\x1b[31m",
    "hello",
    "🙂" * 50,
    "x" * 10**6,
    "\ud800",
    '"',
    "click",
    'type "search"',
    "<|im_end|>",
)


def task_with(env, wanted, limit=500):
    """Resets env to the first task for which wanted(env) holds; returns the observation."""
    for seed in range(limit):
        obs, _ = env.reset(seed)
        if wanted(env):
            return obs
    raise AssertionError("no such task")


def finish(env):
    """The expert to the end; returns (steps, last step's tuple, transcript)."""
    transcript, obs = [], env._observe()
    for n in range(1, 100):
        action = env.expert()
        transcript.append((obs, action))
        result = env.step(action)
        obs = result[0]
        if result[2] or result[3]:
            return n, result, transcript
    raise AssertionError("endless")


def plain_home(env):
    """At a task without a cookie banner, whose home page links the categories and the cart."""
    return task_with(env, lambda e: e.shop.cart_link and not e.shop.cookies and not e.shop.by_search)


# ---- protocol --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_same_seed_gives_the_same_episode(name):
    first, second = make_env(name, seed=1), make_env(name, seed=2)
    for seed in (0, 7, 123456789):
        assert first.reset(seed) == second.reset(seed)
        assert [t for t in finish(first)[2]] == [t for t in finish(second)[2]]
    texts = {make_env(name, split=s).reset(0)[0] for s in envs.SPLITS}
    assert len(texts) == 3


@pytest.mark.parametrize("name", NAMES)
def test_own_sequence_depends_on_constructor_seed_only(name):
    def sequence(seed):
        env = make_env(name, seed=seed)
        return [env.reset()[0] for _ in range(4)]

    assert sequence(5) == sequence(5)
    assert sequence(5) != sequence(6)
    assert len(set(sequence(5))) == 4


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("split", envs.SPLITS)
def test_expert_solves_every_task(name, split):
    env, lengths = make_env(name, split=split), []
    for seed in range(300):
        obs, info = env.reset(seed)
        assert set(info) >= INFO_KEYS and info["success"] is False
        steps, (obs, reward, terminated, truncated, info), transcript = finish(env)
        assert (reward, terminated, truncated) == (1.0, True, False), (seed, obs)
        assert info["success"] is True and info["valid"] and not info["repaired"] and set(info) >= INFO_KEYS
        assert all(envs.parse_action(action) == envs.parse_action(action)._replace(repaired=False) or name != "webnav"
                   for _, action in transcript)  # fmt: skip
        assert obs.endswith("\nAction:")
        assert env.judge(transcript) == pytest.approx(1.0)
        lengths.append(steps)
    assert max(lengths) <= env.max_steps - 3
    if name == "webnav":
        assert 3.5 <= statistics.mean(lengths) <= 6 and min(lengths) >= 2


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("split", envs.SPLITS)
def test_expert_recovers_from_three_random_actions(name, split):
    env, solved, tried = make_env(name, split=split), 0, 0
    for seed in range(100):
        env.reset(seed)
        rng = random.Random(seed)
        for _ in range(3):
            _, reward, terminated, _, info = env.step(rng.choice(env.legal_actions()))
            assert info["valid"] and reward >= -0.5
            if terminated:
                break
        else:
            tried += 1
            solved += finish(env)[1][4]["success"]
    least = 5 if name == "troubleshoot" else 60  # every fix ends a troubleshooting: few survive three random actions
    assert tried > least and solved >= 0.99 * tried


@pytest.mark.parametrize("name", NAMES)
def test_save_restore_and_copies(name):
    env = make_env(name)
    assert env.restore(env.save()) is None
    env.reset(3)
    env.step(env.expert())
    saved, obs = env.save(), env._observe()
    pickled = pickle.dumps(saved)
    twin = copy.deepcopy(env)
    rest = finish(env)
    assert saved == pickle.loads(pickled)  # playing on must not change what was saved
    with pytest.raises(RuntimeError):
        env.step("back")
    assert env.restore(saved) == obs
    assert finish(env) == rest == finish(twin)
    env.reset(4)
    assert env.restore(saved) == obs  # from within another task
    assert finish(env) == rest
    assert finish_of_restored(make_env(name), saved) == rest  # and in another process's environment


def finish_of_restored(env, saved):
    env.restore(saved)
    return finish(env)


def test_restore_continues_the_own_sequence():
    env = make_env("gridworld", seed=9)
    env.reset()
    saved, following = env.save(), env.reset()[0]
    env.reset()
    env.restore(saved)
    assert env.reset()[0] == following


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("text", GARBAGE)
def test_garbage_costs_a_step_and_says_why(name, text):
    env = make_env(name)
    before, _ = env.reset(0)
    obs, reward, terminated, truncated, info = env.step(text)
    assert (reward, terminated, truncated, info["valid"], info["success"]) == (-0.02, False, False, False, False)
    shown = f"error: 1 of 3, {info['error']}. " if name == "webnav" else f"Error: {info['error']}\n"
    assert info["error"] and obs.count(shown) == 1
    assert obs.replace(shown, "") == before
    obs.encode("utf-8")
    assert "error:" not in env.step(env.expert())[0].lower()


@pytest.mark.parametrize("name", NAMES)
def test_truncation_is_not_termination_and_bounds_hold(name):
    env = make_env(name)
    env.patience = 99
    env.reset(0)
    rewards = []
    for n in range(env.max_steps):
        _, reward, terminated, truncated, info = env.step("???")
        rewards.append(reward)
        assert terminated is False and truncated is (n == env.max_steps - 1) and info["success"] is False
    assert sum(rewards) >= env.return_bounds[0] - 1e-9
    with pytest.raises(RuntimeError):
        env.step("???")


@pytest.mark.parametrize("name", NAMES)
def test_random_returns_stay_in_bounds(name):
    env, low, high = make_env(name), *make_env(name).return_bounds
    for seed in range(60):
        env.reset(seed)
        rng, total, over = random.Random(seed), 0.0, False
        while not over:
            action = rng.choice([*env.legal_actions(), "nonsense", env.expert()])
            _, reward, terminated, truncated, _ = env.step(action)
            total, over = total + reward, terminated or truncated
        assert low - 1e-9 <= total <= high + 1e-9


def test_wrong_names_and_options_are_one_clear_line():
    for call in (
        lambda: make_env("shop"),
        lambda: make_env("webnav", size=3),
        lambda: make_env("webnav", split="dev"),
        lambda: make_env("gridworld", size=1),
    ):
        with pytest.raises(ValueError) as caught:
            call()
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="webnav, gridworld"):
        make_env("shop")


@pytest.mark.parametrize("name", NAMES)
def test_step_before_reset_raises(name):
    with pytest.raises(RuntimeError):
        make_env(name).step("back")


# ---- webnav ----------------------------------------------------------------------------------------------------------


def test_words_labels_and_layouts_of_the_splits_are_disjoint():
    words = {s: {w for kind in envs.WORDS[s].values() for w in kind} for s in envs.SPLITS}
    for a, b in (("train", "val"), ("train", "test"), ("val", "test")):
        assert not words[a] & words[b]
        assert not set(envs.LAYOUTS[a]) & set(envs.LAYOUTS[b])
    assert sum(len(x) for x in envs.LAYOUTS.values()) == 24 and all(envs.LAYOUTS.values())
    for split in envs.SPLITS:  # no two elements of one shop may share a label by accident
        apart = ("looks", "stuffs", "before", "after")
        labels = [w for k, kind in envs.WORDS[split].items() if k not in apart for w in kind]
        labels += [f"{noun}s" for noun in envs.WORDS[split]["nouns"]]
        for stems in envs.STEMS.values():
            labels += [f"{w} {stem}" for w in envs.WORDS[split]["before"] for stem in stems]
            labels += [f"{stem} {w}" for w in envs.WORDS[split]["after"] for stem in stems]
        assert len(labels) == len(set(labels)) and all(w == envs.clean(w).lower() and '"' not in w for w in labels)


def test_names_topics_and_worded_labels_of_test_and_validation_shops_are_never_seen_in_training():
    seen = {}
    for split in envs.SPLITS:
        env = make_env("webnav", split=split)
        seen[split] = set()
        for task in range(150):
            env.reset(task)
            shop = env.shop
            seen[split] |= {p["name"] for p in shop.products} | set(shop.nouns) | set(shop.topics) | {shop.user}
            seen[split] |= set(shop.words.values()) - {""} - {stem for stems in envs.STEMS.values() for stem in stems}
    assert not seen["train"] & (seen["val"] | seen["test"]) and not seen["val"] & seen["test"]
    assert min(len(names) for names in seen.values()) > 150


def test_repeated_action_costs_a_hundredth():
    env = make_env("webnav")
    plain_home(env)
    cart = f'click "{env.shop.words["cart"]}"'
    assert [env.step(a)[1] for a in (cart, "back", cart, cart)] == [0.0, 0.0, -0.01, -0.02]  # no cart link on the cart


def test_ghost_link_says_so_and_leads_nowhere():
    env = make_env("webnav")
    task_with(env, lambda e: e.shop.ghost_home and not e.shop.cookies)
    ghost = f'click "{env.shop.words["ghost"]}"'
    obs, reward, *_, info = env.step(ghost)
    assert "this link is broken" in obs and info["valid"] and reward == 0.0 and f"{env.shop.words['home']} | /\n" in obs
    assert env.step(ghost)[1] == -0.01


def test_dead_end_leaves_only_back():
    env = make_env("webnav")
    home = task_with(env, lambda e: e.shop.words["dead"] and not e.shop.cookies)
    obs = env.step(f'click "{env.shop.words["dead"]}"')[0]
    assert env.legal_actions() == ["back"] == [env.expert()] and "Links:" not in obs
    obs, reward, *_ = env.step("back")
    assert reward == 0.0 and obs.startswith(home.removesuffix("Action:"))
    assert env.step("back")[4]["error"] == "no page to go back to"


def test_cookie_banner_blocks_until_accepted():
    env = make_env("webnav")
    task_with(env, lambda e: e.shop.cookies and e.shop.kind == "cart" and not e.shop.by_search)
    first, accept = f'click "{env.shop.nouns[0]}s"', f'click "{env.shop.words["cookies"]}"'
    obs, reward, _, _, info = env.step(first)
    assert f"{env.shop.words['cookies']} first" in obs and info["valid"] and reward == 0.0
    assert env.step(first)[1] == -0.01
    assert env.expert() == accept.replace('"', "")
    assert "Buttons" not in env.step(accept)[0]
    assert f"Page: {env.shop.nouns[0]}s |" in env.step(first)[0]


@pytest.mark.parametrize("kind", ["price", "help", "cart"])
def test_wrong_answer_ends_without_success(kind):
    env = make_env("webnav", split="test")
    task_with(env, lambda e: e.shop.kind == kind)
    _, reward, terminated, truncated, info = env.step('answer "$0.01"')
    assert (reward, terminated, truncated, info["success"], info["valid"]) == (0.0, True, False, False, True)


def test_answers_are_compared_without_fuss():
    for given_text in ("$12.50", "12.50", " $12.50. "):
        assert envs._same(given_text, "$12.50")
    assert envs._same("4.5", "4.5 stars") and envs._same("The Red Oak Lamp", "red oak lamp")
    assert (
        not envs._same("$12.5", "$12.50") and not envs._same("4.5 stars", "4.6 stars") and not envs._same("", "$1.00")
    )


def test_cheapest_is_cheapest_and_in_sight_at_the_end():
    env = make_env("webnav", split="test")
    task_with(env, lambda e: e.shop.kind == "cheapest")
    prices = {env.shop.products[i]["name"]: float(env.shop.products[i]["price"][1:]) for i in env.shop.shelf(0)}
    assert len(prices) in (2, 3) and min(prices, key=prices.get) == env.shop.answer
    last_obs, last_action = finish(env)[2][-1]
    assert all(f"{name} ${price:.2f}" in last_obs for name, price in prices.items())
    assert last_action == f"answer {env.shop.answer}"


def test_wrong_product_or_password_is_no_success():
    env = make_env("webnav")
    task_with(env, lambda e: e.shop.kind == "cart" and not e.shop.cookies and not e.shop.pair)
    other = (env.shop.target + 1) % len(env.shop.products)
    env._open(f"/p/{other}")
    env._moved()
    _, reward, terminated, _, info = env.step(f'click "{env.shop.words["add"]}"')
    assert (reward, terminated, info["success"]) == (0.0, False, False)
    task_with(env, lambda e: e.shop.kind == "order" and not e.shop.cookies)
    w = env.shop.words
    for action in (f'click "{w["login"]}"', f'type "{w["user"]}" "{env.shop.user}"', f'type "{w["password"]}" "no"'):
        env.step(action)
    assert "wrong name or password" in env.step(f'click "{w["submit"]}"')[0]
    assert finish(env)[1][4]["success"]


def test_second_equal_button_is_numbered_and_adds_the_other_product():
    env = make_env("webnav")
    task_with(env, lambda e: e.shop.pair and not e.shop.cookies and e.shop.kind == "price")
    env._open("/p/0")
    env._moved()
    add = env.shop.words["add"]
    env.step(f'click "{add} #2"')
    assert env.state["cart"] == [1]
    _, _, _, _, info = env.step(f'click "{add}" #2')
    assert env.state["cart"] == [1, 1] and info["repaired"]


def test_shaping_pays_each_tab_once():
    env = make_env("webnav", shaping=True)
    task_with(env, lambda e: e.shop.kind == "price" and not e.shop.cookies)
    env._open(f"/p/{env.shop.target}")
    env._moved()
    tab = f'click "{env.shop.words["reviews"]}"'
    assert [env.step(a)[1] for a in (tab, "back", tab)] == [0.02, 0.0, -0.01]
    plain = make_env("webnav")
    task_with(plain, lambda e: e.shop.kind == "price" and not e.shop.cookies)
    plain._open(f"/p/{plain.shop.target}")
    plain._moved()
    assert plain.step(tab)[1] == 0.0


def test_case_is_forgiven_and_reported():
    env = make_env("webnav")
    plain_home(env)
    label = f"{env.shop.nouns[0]}s"
    _, _, _, _, info = env.step(f'CLICK "{label.upper()}"')
    assert info["valid"] and info["repaired"] and info["action"] == f"click {label}"


def test_search_finds_the_product_among_near_duplicates():
    env = make_env("webnav")
    for seed in range(100):
        env.reset(seed)
        for i, product in enumerate(env.shop.products):
            assert i in env._find(product["name"]) and len(env._find(product["name"])) <= 4
    assert env._find("zzz") == []


def test_states_are_short():
    for split in envs.SPLITS:
        env, lengths = make_env("webnav", split=split), []
        for seed in range(100):
            env.reset(seed)
            lengths += [len(obs) for obs, _ in finish(env)[2]]
        lengths.sort()  # about 3.8 characters a token: 85 tokens in the median, 130 at the 95th percentile
        assert lengths[len(lengths) // 2] <= 323 and lengths[int(0.95 * len(lengths))] <= 494
        assert all(len(e) <= 8 for e in (env.page.links, env.page.buttons, env.page.inputs))


def test_goal_shares_follow_the_knob():
    env, kinds = make_env("webnav"), []
    for seed in range(600):
        kinds.append(env.reset(seed)[1]["task"])
    total = sum(env.KINDS.values())
    for kind, share in env.KINDS.items():
        assert abs(kinds.count(kind) / 600 - share / total) < 0.06


def test_judge_grows_with_the_transcript():
    env = make_env("webnav", split="test")
    for seed in range(40):
        env.reset(seed)
        transcript = finish(env)[2]
        scores = [env.judge(transcript[:n]) for n in range(len(transcript) + 1)]
        assert scores[0] == 0.0 and scores == sorted(scores) and scores[-1] == pytest.approx(1.0) and scores[1] < 1.0
    assert env.judge([("no goal", "back")]) == 0.0
    assert env.key_steps() and all(w > 0 for _, w in env.key_steps())


# ---- gridworld -------------------------------------------------------------------------------------------------------


def test_three_illegal_actions_in_a_row_end_the_episode_in_failure():
    env = make_env("webnav")
    env.reset(3)
    for text, over in (("???", False), ("click nowhere", False), (env.expert(), False), ("???", False), ("???", False)):
        _, _, terminated, truncated, _ = env.step(text)
        assert (terminated, truncated) == (False, over)
    saved = env.save()
    for _ in range(2):  # the count is part of the saved state
        env.restore(saved)
        _, reward, terminated, truncated, info = env.step("type nowhere: x")
        assert (reward, terminated, truncated, info["success"]) == (-0.02, True, False, False)


def test_the_same_action_in_the_same_state_is_fruitless_and_counted():
    env = make_env("webnav")
    task = next(t for t in range(200) if env.reset(t) and env.shop.kind == "price" and not env.shop.cookies)
    env.reset(task)
    while not env.page.url.startswith("/p/"):
        env.step(env.expert())
    add = env._click(f"add:{env.shop.target}")
    ends = [env.step(add)[1:4] for _ in range(2)]  # into an empty cart, then into one that holds it: two states
    assert ends == [(0.0, False, False)] * 2 and "done before" not in env._observe()
    ends = [env.step(add)[1:4] for _ in range(3)]  # from now on nothing changes
    assert ends == [(-0.01, False, False), (-0.01, False, False), (-0.01, True, False)]
    assert "3 of 3, done before" in env._observe()


def test_shortest_way_by_hand():
    env = make_env("gridworld", size=3)
    env.reset(0)
    obs = env.load(["A#F", ".#.", "..."])
    assert obs == (
        "Goal: reach the flag\nMap:\nA#F\n.#.\n...\n"
        "Offset: 2 right\nUp: wall. Down: free. Left: wall. Right: wall.\nAction:"
    )
    assert env.distance() == 6
    assert [(r, c, d) for r, c, _, d in env.cells()] == [
        (0, 0, 6), (1, 0, 5), (1, 2, 1), (2, 0, 4), (2, 1, 3), (2, 2, 2),
    ]  # fmt: skip
    assert env.cells()[0][2] == obs
    steps, (_, reward, terminated, _, info), transcript = finish(env)
    assert [a for _, a in transcript] == ["down", "down", "right", "right", "up", "up"]
    assert (steps, reward, terminated, info["success"]) == (6, 1.0, True, True)


def test_walls_traps_and_steps_are_priced():
    env = make_env("gridworld", size=3)
    env.reset(0)
    env.load(["A.x", "#..", "..F"])
    _, reward, terminated, _, info = env.step("down")
    assert (reward, terminated, info["valid"], info["error"]) == (-0.02, False, False, "wall down")
    assert env.step("up")[4]["error"] == "wall up"  # the edge
    _, reward, _, _, info = env.step("I go RIGHT!")
    assert (reward, info["valid"], info["repaired"], info["action"]) == (-0.01, True, True, "right")
    assert env.expert() == "down"  # not into the trap
    _, reward, terminated, truncated, info = env.step("right")
    assert (reward, terminated, truncated, info["success"]) == (-0.5, True, False, False)


@pytest.mark.parametrize("size", [3, 5, 8])
def test_grids_of_the_splits_are_disjoint_and_solvable(size):
    layouts = {}
    for split in envs.SPLITS:
        env = make_env("gridworld", split=split, size=size)
        for seed in range(60):
            obs, _ = env.reset(seed)
            assert 2 <= env.distance() <= env.max_steps
            if size == 5:
                assert len(obs) <= 220
            walls = "".join("#" if c == "#" else "." for row in env.state["map"] for c in row)
            layouts.setdefault(split, set()).add(walls)
            assert env.split_of(walls) == split
    assert not layouts["train"] & layouts["test"] and not layouts["val"] & layouts["test"]


# ---- parser and extractor --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "canonical", "repaired"),
    [
        ('click "lamps"', 'click lamps', False),
        (' click "lamps"\n', 'click lamps', False),
        ('type "search" "red lamp"', 'type search: red lamp', False),
        ("back", "back", False),
        ('answer "$12.50"', 'answer $12.50', False),
        ('click "buyer\'s guide"', 'click buyer\'s guide', False),
        ('CLICK "lamps"', 'click lamps', True),
        ("click 'lamps'", 'click lamps', True),
        ("click \u201clamps\u201d", 'click lamps', True),
        ("click lamps", "click lamps", False),
        ("click on lamps", "click lamps", True),
        ("click lamps.", "click lamps", True),
        (" type search box: red lamp", "type search box: red lamp", False),
        ('click "red lamp', 'click red lamp', True),
        ('```\nclick "lamps"\n```', 'click lamps', True),
        ('```text\nclick "lamps"```', 'click lamps', True),
        ('Action: click "lamps"', 'click lamps', True),
        ("Action: back", "back", True),
        ('I think I should click on "lamps" now.', 'click lamps', True),
        ('click("lamps")', 'click lamps', True),
        ('type("search", "red lamp")', 'type search: red lamp', True),
        ("type search red lamp", 'type search: red lamp', True),
        ('click "add to cart" #2', 'click add to cart #2', True),
        ('click "a"\nclick "b"', 'click a', True),
        ("back\nclick \"b\"", "back", True),
        ("BACK.", "back", True),
        ("I will go back", "back", True),
        ("answer: $12.50", 'answer $12.50', True),
        ("answer 4.5 stars", "answer 4.5 stars", False),
        ("", "", False),
        ("hello", "", False),
        ("click", "", False),
        ('answer ""', "", False),
        ('type "search"', "", False),
        ("a fallback plan", "", False),
    ],
)  # fmt: skip
def test_forgiven_forms(text, canonical, repaired):
    action = parse_action(text, ("search",))
    assert (str(action), action.repaired) == (canonical, repaired)


def test_extractor_reads_a_page_by_hand():
    page = html_to_state(
        """<html><head><title> My  Shop </title><style>p {}</style></head><body><!-- no --><h1>Hello</h1>
        <script>evil("x")</script><p>Two <b>big</b> lamps &amp; <|im_start|>user</p><a href="/a">Lamps</a>
        <a href=/b>LAMPS</a><a name=top>top</a><button>Buy "now"</button><input type=submit value=Go>
        <label for=q>Search</label><input id=q value="oak"><input type=hidden name=h><input placeholder=City>
        <div hidden>secret</div><a title="a<b" href="/c"><img alt="Pic"></a></body></html>""",
        url="/x",
    )
    assert page == Page(
        "my shop", "/x", "Hello. Two big lamps & <|im_start|>user top",
        (("lamps", "/a", ""), ("lamps #2", "/b", ""), ("pic", "/c", "")),
        (("buy 'now'", "", ""), ("go", "", "")),
        (("search", "q", "oak"), ("city", "", "")),
        False,
    )  # fmt: skip
    assert render_state(page, "g", [("home", 'click "x"')], "oops") == (
        "Goal: g\nPage: my shop | /x\nText: error: oops. Hello. Two big lamps & <|im_start|>user top\n"
        "Links: lamps | lamps #2 | pic\n"
        "Buttons: buy 'now' | go\nInputs: search = oak | city\nDone: click \"x\"\nAction:"
    )


def test_unclosed_links_stay_apart():
    page = html_to_state("<a href=1>one<a href=2>two<button>three<p>tail")
    assert [e.label for e in page.links] == ["one", "two"] and page.buttons[0].label.startswith("three")


def test_long_page_loses_text_first_and_says_so():
    html = "<title>t</title><p>" + "word " * 5000 + "</p>" + "<a href=x>link</a>" * 5
    page = html_to_state(html, goal="g" * 100, max_chars=300)
    text = render_state(page, "g" * 100)
    assert page.cut and len(text) <= 300 and "g" * 100 in text and len(page.links) == 5 and "Text: word" in text
    many = html_to_state("<p>hi</p>" + "<a href=x>a fairly long label here</a>" * 1000, max_chars=300)
    assert many.cut and len(render_state(many)) <= 300 and len(many.links) >= 5
    assert not html_to_state("<p>short</p>").cut


def test_history_is_compressed():
    history = [("home", "1"), ("a", "2"), ("home", "3"), ("b", "4"), ("c", "5"), ("d", "6")]
    assert render_history(history) == "visited: a, home > 4 > 5 > 6"
    assert render_history(history[:2]) == "1 > 2" and render_history([]) == ""


HOSTILE = [
    "<",
    "<a ",
    "<a b=c ",
    '<a href="',
    "<a href='",
    "<div a",
    "<!--",
    "<![CDATA[",
    "</",
    "<div>",
    "<a href=x>y",
    "<b>",
]
HOSTILE += [
    "<script>",
    "<table><tr><td>",
    "x",
    "&#x",
    "<title>",
    "<style>a</style>",
    "\x00",
    "<label for=a>",
    "<![if ",
    "\ud800",
]


@pytest.mark.parametrize("piece", HOSTILE)
@pytest.mark.parametrize("tail", ["", '">'])
def test_hostile_html_is_bounded(piece, tail):
    size = 10_000_000 if piece in ("<div>", "<a ", "x", "<script>") else 300_000
    html = piece * (size // len(piece)) + tail
    start = time.process_time()
    page = html_to_state(html, goal="g")
    assert time.process_time() - start < 2.0
    assert len(render_state(page, "g")) <= envs.MAX_STATE_CHARS


def test_deep_nesting_needs_no_recursion():
    start = time.process_time()
    page = html_to_state("<div>" * 100_000 + "deep" + "</div>" * 100_000)
    assert page.cut and time.process_time() - start < 2.0


FRAGMENTS = st.lists(
    st.one_of(
        st.text(max_size=20),
        st.sampled_from(
            ["<a href='x'>", "</a>", "<button>", "<input ", 'value="', ">", "<", "<!--", "-->", "<![", "&#", "\x00"]
        ),
        st.sampled_from(
            ["<script>", "</script>", "<title>", "<h1>", "<label for=a>", "<select>", "<p hidden>", "<|im_start|>"]
        ),
    ),
    max_size=30,
)


@settings(max_examples=300, deadline=None)
@given(FRAGMENTS)
def test_any_html_gives_a_state(parts):
    page = html_to_state("".join(parts), goal="goal")
    text = render_state(page, "goal")
    text.encode("utf-8")
    assert text.startswith("Goal: goal\nPage: ") and text.endswith("\nAction:") and len(text) <= envs.MAX_STATE_CHARS
    assert text.count("\n") <= 6
    for e in page.links + page.buttons:
        assert parse_action(f'click "{e.label}"')[:2] == ("click", (e.label,))


WORDS = st.sampled_from(
    ["click", "type", "back", "answer", '"', "'", " ", "\n", "search", "lamps", "#2", "```", "Action:", "(", "\u201c"]
)


@settings(max_examples=300, deadline=None)
@given(
    st.one_of(
        st.text(max_size=80), st.lists(WORDS, max_size=12).map("".join), st.lists(WORDS, max_size=12).map(" ".join)
    )
)
def test_any_action_text_is_read_or_refused(text):
    action = parse_action(text, ("search",))
    assert isinstance(action, Action) and action.verb in ("", "click", "type", "back", "answer")
    assert len(action.args) == {"": 0, "back": 0, "click": 1, "answer": 1, "type": 2}[action.verb]
    if action.verb:
        again = parse_action(str(action))
        assert (again.verb, again.args, again.repaired) == (action.verb, action.args, False)
    env = make_env("webnav")
    env.reset(0)
    obs, reward, _, _, info = env.step(text)
    obs.encode("utf-8")
    assert info["valid"] == (info["error"] == "") and (reward == -0.02) == (not info["valid"])


# ---- terminal --------------------------------------------------------------------------------------------------------


def run_cli(*args, text=""):
    command = [sys.executable, envs.__file__, *args]
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=20, check=False)


def test_terminal_lists_plays_and_refuses():
    listed = run_cli()
    names = [*NAMES, "miniwob/...", "textworld/...", "gym/..."]
    assert listed.returncode == 0 and [x.split(":")[0] for x in listed.stdout.splitlines()] == names
    bad = run_cli("shop")
    assert bad.returncode == 2 and bad.stderr.count("\n") == 1 and "webnav" in bad.stderr and not bad.stdout
    played = run_cli("gridworld", "--split", "test", "--seed", "3", text="e\nnonsense\nq\n")
    assert played.returncode == 0 and "expert:" in played.stdout and "Error: unreadable" in played.stdout
    assert run_cli("webnav").returncode == 0  # end of input
    assert run_cli("webnav", "--split", "dev").returncode == 2


def test_no_torch_is_imported():
    code = "import sys, envs; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(envs.__file__).parent, check=False).returncode == 0
