"""envs.py: troubleshoot and trip, and the turns `<think>1. ...</think> action` that they share."""

import itertools
import json
import os
import random
import re
import statistics
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import envs
from envs import ANSWERS, AREAS, CAUSES, SPLITS, drop_thought, make_env

NAMES = ("troubleshoot", "trip")
FIRMS = {  # trip of tue wed thu, thu within 5 km, budget 6, interest robots
    "robots": {
        "nova": (("mon", "tue"), 3, 4),
        "orbit": (("tue", "thu"), 2, 2),
        "pixel": (("wed", "fri"), 8, 3),
        "delta": (("wed", "thu"), 6, 2),
    },
    "food": {"comet": (("tue", "wed"), 1, 1), "lotus": (("tue", "thu"), 1, 1)},
}


def walk(env, limit=20):
    """The expert to the end: (transcript, last step's tuple)."""
    transcript, obs = [], env._observe()
    for _ in range(limit):
        text = env.expert()
        transcript.append((obs, text))
        result = env.step(text)
        obs = result[0]
        if result[2] or result[3]:
            return transcript, result
    raise AssertionError("endless")


def trip(plan=None, listed="robots", firms=FIRMS, budget=6, first="tue"):
    env = make_env("trip")
    env.reset(0)
    env.load(first, budget, "robots", firms, plan=plan, listed=listed)
    return env


def fault(cause, known=(), other=""):
    env = make_env("troubleshoot")
    env.reset(0)
    env.load(cause, known, other)
    return env


def weights(env, obs, text):
    """Sum of the weights of the key steps that `text`, a thought or an action, takes in the state `obs`."""
    return round(sum(w for pattern, w in env.key_steps() if re.search(pattern, f"{obs} {text}")), 6)


# ---- turns -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("turn", "action"),
    [
        ("<think>1. log timeout 2. connections first</think> ask connections", "ask connections"),
        ("ask connections", "ask connections"),
        ("<think></think>ask log\n", "ask log"),
        ("<THINK>a</Think> ask log", "ask log"),
        ("<think>\n1. fix index\n2. no\n</think>\n\nask log", "ask log"),
        ("1. fix index 2. no</think> ask log", "ask log"),  # the opening tag stood in the prompt
        ("<think>fix index</think> hm <think>fix key</think> ask log", "ask log"),
        ("<think>1. fix index\nask log", "ask log"),  # never closed, the action on its own line
        ("<think>\n1. fix index\n2. then ask users", ""),  # cut off within a numbered thought
        ("<think>1. fix index", ""),
        ("<think>1. log timeout 2. ask conn", ""),
        ("<think>1. fix index</thi", ""),
        ("ask log <think>1. fix index", "ask log"),
        ("<think>", ""),
        ("</think>", ""),
        ("", ""),
    ],
)
def test_thoughts_are_dropped(turn, action):
    assert drop_thought(turn) == action


@pytest.mark.parametrize(
    ("turn", "action", "repaired"),
    [
        ("<think>1. a 2. b</think> ask connections", "ask connections", False),
        ("<think>unnumbered, and fix index is tempting</think> ask connections", "ask connections", False),
        ("<think>连接超时，先看连接数</think> ask connections", "ask connections", False),
        ("ask about the database connections.", "ask connections", True),
        ("Action: Ask connections", "ask connections", True),
        ('I would "ask connections" first', "ask connections", True),
        ("ask connections\nfix index", "ask connections", True),  # the first action counts
        ("fix the pool limit", "fix pool limit", True),
        ("<think>1. a</think> 询问连接数", "", False),
        ("<think>1. a 2. ask connections", "", False),
        ("connections", "", False),
        ("ask", "", False),
        ("ask nothing, fix clocks", "", False),
        ("task connections", "", False),
        ("ask the firewall", "", False),  # a cause, not a question
    ],
)
def test_actions_of_a_diagnosis_are_read_or_refused(turn, action, repaired):
    env = fault("index", ("log",))
    before = env._observe()
    obs, reward, terminated, truncated, info = env.step(turn)
    assert (info["action"], info["repaired"], info["valid"]) == (action, repaired, bool(action))
    if not action:
        assert (reward, terminated, truncated) == (-0.02, False, False)
        assert obs.replace(f"Error: {info['error']}\n", "") == before


@pytest.mark.parametrize(
    ("turn", "action", "repaired"),
    [
        ("<think>1. orbit opens thu</think> visit orbit thu", "visit orbit thu", False),
        ("Visit orbit on Thursday!", "visit orbit thu", True),
        ("list food", "list food", False),
        ("list the robots firms", "list robots", True),
        ("drop tue", "drop tue", False),
        ("ask for the dates", "ask dates", True),
        ("visit orbit", "", False),
        ("visit comet tue", "", False),  # not listed
        ("visit orbit mon", "", False),  # not a day of the trip
        ("list cars", "", False),
        ("drop wed", "", False),
        ("confirmed?", "", False),
        ("访问 orbit", "", False),
    ],
)
def test_actions_of_a_trip_are_read_or_refused(turn, action, repaired):
    env = trip(plan={"tue": "nova"})
    before = env._observe()
    obs, reward, terminated, _, info = env.step(turn)
    assert (info["action"], info["repaired"], info["valid"]) == (action, repaired, bool(action))
    if not action:
        assert (reward, terminated) == (-0.02, False) and not env.decisive()
        assert obs.replace(f"Error: {info['error']}\n", "") == before


WORDS = st.sampled_from([
    "<think>", "</think>", "1. ", "2.", " ", "\n", "ask", "fix ", "log", "connections", "pool limit", "visit", "list",
    "drop", "confirm", "tue", "nova", "\x00", "é", "连接", "\ud800", "<", ">",
])  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(st.one_of(st.text(max_size=80), st.lists(WORDS, max_size=12).map("".join)), st.sampled_from(NAMES))
def test_any_turn_is_read_or_refused(text, name):
    env = make_env(name)
    env.reset(1)
    obs, reward, _, _, info = env.step(text)
    obs.encode("utf-8")
    assert info["valid"] == (info["error"] == "") == bool(info["action"])
    assert (reward == -0.02) == (not info["valid"])
    assert not info["valid"] or drop_thought(text)
    assert 0.0 <= env.judge([(obs, text)]) <= 1.0


# ---- both: measures, sizes, randomness -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("split", SPLITS)
def test_expert_turns_are_short_and_decisive(name, split):
    env, lengths, states = make_env(name, split=split), [], []
    for seed in range(200):
        env.reset(seed)
        transcript, progress, over = [], [env.progress()], False
        while not over:
            transcript.append((env._observe(), env.expert()))
            _, _, terminated, truncated, info = env.step(transcript[-1][1])
            over = terminated or truncated
            assert env.decisive() and info["valid"]
            progress.append(env.progress())
        assert 3 <= len(transcript) <= 5 and progress[-1] == 1.0 and 0 <= progress[0] < 0.5
        assert all(a < b for a, b in itertools.pairwise(progress))
        assert all(re.fullmatch(r"<think>1\. .+ 2\. .+</think> [a-z ]+", text) for _, text in transcript)
        lengths += [len(text) for _, text in transcript]
        states += [len(obs) for obs, _ in transcript]
    assert max(lengths) <= 110 and statistics.median(states) <= 300 and max(states) <= 380


@pytest.mark.smollm2
def test_turns_and_states_fit_smollm2():
    folder = Path.home() / ".cache" / "llm-agent-rl" / "smollm2-135m-instruct"
    if not folder.exists():
        pytest.skip("SmolLM2 is not in the cache")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    for name, split in itertools.product(NAMES, SPLITS):
        env, states, turns = make_env(name, split=split), [], []
        for seed in range(60):
            env.reset(seed)
            for obs, text in walk(env)[0]:
                states.append(len(tokenizer(obs).input_ids))
                turns.append(len(tokenizer(" " + text).input_ids) + 1)
        assert max(turns) <= 40 <= env.max_action_tokens and 20 <= statistics.median(turns) <= 30
        assert statistics.median(states) <= 101 and max(states) <= 130


@pytest.mark.parametrize("name", NAMES)
def test_random_play_hardly_ever_succeeds(name):
    env, successes = make_env(name), 0
    for seed in range(1000):
        env.reset(seed)
        rng, over = random.Random(seed), False
        while not over:
            _, _, terminated, truncated, info = env.step(rng.choice(env.legal_actions()))
            over = terminated or truncated
            assert info["valid"] and 0.0 <= env.progress() <= 1.0
        successes += info["success"]
    assert successes < 30


@pytest.mark.parametrize("name", NAMES)
def test_judge_sees_the_transcript_alone(name):
    env, other = make_env(name, split="test"), make_env(name)
    other.reset(5)
    for seed in range(30):
        env.reset(seed)
        transcript, _ = walk(env)
        scores = [env.judge(transcript[:n]) for n in range(len(transcript) + 1)]
        assert scores[0] == 0.0 and scores == sorted(scores) and scores[-1] == pytest.approx(1.0) and scores[1] < 0.6
        assert scores == [other.judge(transcript[:n]) for n in range(len(transcript) + 1)]
        actions = [(obs, drop_thought(text)) for obs, text in transcript]  # without thoughts nothing is lost
        assert env.judge(actions) == pytest.approx(1.0)
    assert env.judge([("no goal", "ask log")]) == 0.0


@pytest.mark.parametrize("name", NAMES)
def test_saved_state_survives_json_and_loaded_tasks_are_kept(name):
    env = fault("clock", ("log",)) if name == "troubleshoot" else trip(plan={"wed": "pixel"})
    env.step(env.expert())
    twin = make_env(name)
    assert twin.restore(json.loads(json.dumps(env.save()))) == env._observe()
    assert walk(twin)[0] == walk(env)[0]


@pytest.mark.parametrize("name", NAMES)
def test_a_step_takes_less_than_a_millisecond(name):
    env, times = make_env(name), []
    for seed in range(50):
        env.reset(seed)
        over = False
        while not over:
            text = env.expert()
            begin = time.perf_counter()
            _, _, terminated, truncated, _ = env.step(text)
            times.append(time.perf_counter() - begin)
            over = terminated or truncated
    assert statistics.median(times) < 1e-3


# ---- troubleshoot ----------------------------------------------------------------------------------------------------


def test_words_of_the_splits_are_disjoint():
    texts = {split: [*envs.PRODUCTS[split], *envs.SYMPTOMS[split], *envs.COMPLAINTS[split]] for split in SPLITS}
    for question, values in ANSWERS.items():
        for wordings in values.values():
            for split in SPLITS:
                texts[split] += wordings[split]
        every = [w for wordings in values.values() for split in SPLITS for w in wordings[split]]
        assert len(every) == len(set(every)), question  # one wording means one value
        assert not any(c in w for w in every for c in ":;\n")
    words = envs.TRIP_WORDS
    for split in SPLITS:
        texts[split] += [*itertools.chain(*words[split].values()), *envs.TRIP_GOALS[split]]
    for first, second in itertools.combinations(SPLITS, 2):
        assert not set(texts[first]) & set(texts[second])


def test_every_cause_has_its_own_signs_and_its_area_asks_for_them():
    assert len(CAUSES) == 15
    signs = {tuple(envs._value(cause, q) for q in ANSWERS) for cause in CAUSES}
    assert len(signs) == 15
    for own in CAUSES.values():
        assert set(own) <= {"log", *AREAS[own["log"]]}
        assert all(value in ANSWERS[q] for q, value in own.items())


@pytest.mark.parametrize(
    ("cause", "questions"),
    [
        ("pool limit", "connections queries"),
        ("index", "connections queries"),
        ("firewall", "connections network"),
        ("address", "connections network address"),
        ("database", "connections network address"),
        ("update", "memory version"),
        ("cache", "memory version"),
        ("rate limit", "memory traffic"),
        ("upload size", "memory traffic uploads"),
        ("schedule", "memory traffic uploads"),
        ("certificate", "users certificate"),
        ("clock", "users certificate clock"),
        ("key", "users certificate clock"),
        ("role", "users roles"),
        ("password", "users roles"),
    ],
)
def test_expert_asks_what_tells_the_causes_apart(cause, questions):
    for known in ((), ("log",)):
        transcript, (_, reward, terminated, _, info) = walk(fault(cause, known))
        asked = [drop_thought(text).removeprefix("ask ") for _, text in transcript[:-1]]
        assert asked == ([] if known else ["log"]) + questions.split()
        assert (reward, terminated, info["success"], info["action"]) == (1.0, True, True, f"fix {cause}")


def test_a_fix_counts_only_when_right_and_proven():
    for turns, result, success in (
        (("fix pool limit",), "a guess without proof", False),
        (("ask connections", "fix pool limit"), "a guess without proof", False),  # a slow query looks the same
        (("ask connections", "ask queries", "fix index"), "still broken", False),
        (("ask connections", "ask queries", "fix pool limit"), "fixed", True),
    ):
        env = fault("pool limit", ("log",))
        for text in turns:
            obs, reward, terminated, _, info = env.step(text)
        assert (reward, terminated, info["success"]) == (float(success), True, success)
        assert f"Result: {result}\n" in obs and env.decisive() == success and env.progress() == float(success)
    env = fault("firewall")  # the decisive fact proves the cause by itself, even without the log
    env.step("ask network")
    assert env._left() == ["firewall"] and env.step("fix firewall")[1] == 1.0


def test_prices_of_repeated_and_illegal_questions():
    env = fault("cache", ("log",))
    assert env.step("ask memory")[1] == 0.0 and env.decisive()
    assert env.step("ask memory")[1] == -0.01 and not env.decisive()
    assert env.step("ask traffic")[1] == 0.0 and not env.decisive()  # legal, but says nothing new
    obs, reward, terminated, _, info = env.step("fix index")  # of the area that is not in the lists
    assert (reward, terminated, info["error"]) == (-0.02, False, "index is not in the list of what to fix")
    assert "Error: index is not in the list of what to fix\n" in obs


def test_symptom_alone_decides_nothing_and_the_lists_do_not_tell_the_area():
    env, positions = make_env("troubleshoot"), []
    for seed in range(200):
        obs, info = env.reset(seed)
        areas = [envs._value(c, "log") for c in env.fault["fixes"]]
        assert sorted(areas.count(a) for a in set(areas)) == [5, 5] and info["task"] in areas
        assert len(env._left()) == (5 if "\nLog: " in obs else 10)
        assert len(env.fault["asks"]) == 9 and env.fault["cause"] not in env.fault["goal"]
        positions.append(env.fault["fixes"].index(env.fault["cause"]))
    assert set(positions) == set(range(10))


def test_progress_is_the_share_of_causes_ruled_out():
    env = fault("pool limit")
    assert env.progress() == 0.0
    env.step("ask log")  # 10 causes -> 5
    assert env.progress() == pytest.approx(0.9 * 0.30103, abs=1e-4)
    env.step("ask connections")  # 5 -> 2
    assert env.progress() == pytest.approx(0.9 * (1 - 0.30103), abs=1e-4)
    env.step("ask queries")
    assert env.progress() == pytest.approx(0.9)


def test_key_steps_of_a_diagnosis_by_hand():
    env = fault("pool limit")
    start = env._observe()
    assert weights(env, start, "ask log") == 0.25
    assert weights(env, start, "ask connections") == 0.0  # aimless without the log
    assert weights(env, start, "fix pool limit") == 0.0
    env.step("ask log")
    log = env._observe()
    assert weights(env, log, "log timeout") == 0.2  # a true reading
    assert weights(env, log, "log denied") == 0.0  # a false one
    assert weights(env, log, "ask connections") == 0.25 and weights(env, log, "ask memory") == 0.0
    env.step("ask connections")
    full = env._observe()
    assert weights(env, full, "connections full") == 0.2 and weights(env, full, "connections none") == 0.0
    assert weights(env, full, "ask queries") == 0.25 and weights(env, full, "ask network") == 0.0
    assert weights(env, full, "so pool limit") == 0.0  # not proven yet
    env.step("ask queries")
    proven = env._observe()
    assert weights(env, proven, "so pool limit") == 0.5 and weights(env, proven, "so index") == 0.0
    assert weights(env, proven, "fix pool limit") == 0.5 and weights(env, proven, "fix index") == 0.0
    assert sum(w for _, w in env.key_steps()) == pytest.approx(1.0)


# ---- trip ------------------------------------------------------------------------------------------------------------


def test_right_plans_by_hand():
    # Days tue wed thu, thu within 5 km, $6. tue: nova $4, orbit $2; wed: pixel $3, delta $2; thu: orbit (delta is far).
    assert trip().right_plans() == [
        {"tue": "orbit", "wed": "delta"},  # $4
        {"wed": "delta", "thu": "orbit"},  # $4
        {"tue": "orbit", "wed": "pixel"},  # $5
        {"wed": "pixel", "thu": "orbit"},  # $5
        {"tue": "nova", "wed": "delta"},  # $6
        {"tue": "nova", "thu": "orbit"},  # $6; nova and pixel would cost $7
    ]


@pytest.mark.parametrize(
    ("plan", "right"),
    [
        ({"tue": "nova", "thu": "orbit"}, True),
        ({"tue": "orbit", "wed": "delta"}, True),
        ({"tue": "nova", "wed": "pixel"}, False),  # $7 of $6
        ({"tue": "nova", "thu": "delta"}, False),  # far on the last day
        ({"tue": "delta", "thu": "orbit"}, False),  # delta is closed on tuesday
        ({"tue": "nova"}, False),  # one visit
        ({}, False),
        ({"tue": "orbit", "wed": "delta", "thu": "lotus"}, False),  # three
        ({"tue": "comet", "thu": "lotus"}, False),  # another interest
    ],
)
def test_confirmed_plans_must_meet_every_constraint(plan, right):
    env = trip(plan=plan)
    obs, reward, terminated, _, info = env.step("<think>1. it fits</think> confirm")
    assert (reward, terminated, info["success"], env.decisive()) == (float(right), True, right, right)
    assert f"Result: {'booked' if right else 'the plan does not fit'}\n" in obs and env.progress() == float(right)


def test_right_plans_of_random_tasks_equal_a_search_through_the_text():
    env = make_env("trip", split="test")
    for seed in range(60):
        env.reset(seed)
        env.state["unknown"] = ""
        obs = env.step(f"list {env.state['trip']['interest']}")[0]
        dates = re.search(r"Dates: (\w+) (\w+) (\w+), \3 within 5 km", obs).groups()
        budget = int(re.search(r"Budget: \$(\d)", obs)[1])
        found = re.findall(r"(\w+): (\w+) (\w+), (\d) km, \$(\d)", obs)
        assert len(found) == 4
        plans = []
        for (a, x), (b, y) in itertools.combinations(itertools.product(dates, found), 2):
            days_open = a in x[1:3] and b in y[1:3] and a != b and x[0] != y[0]
            near = all(day != dates[2] or int(firm[3]) <= 5 for day, firm in ((a, x), (b, y)))
            if days_open and near and int(x[4]) + int(y[4]) <= budget:
                plans.append({a: x[0], b: y[0]})
        assert 1 <= len(plans) <= 4
        assert sorted(map(str, plans)) == sorted(map(str, env.right_plans()))


def test_visits_move_replace_and_are_dropped():
    env = trip()
    assert env.step("visit nova tue")[1] == 0.0 and env.decisive()
    assert env.step("visit nova tue")[1] == -0.01 and not env.decisive()
    assert "\nPlan: wed nova, $4\n" in env.step("visit nova wed")[0] and not env.decisive()
    assert "\nPlan: tue orbit, wed nova, $6\n" in env.step("visit orbit tue")[0]
    assert "\nPlan: tue orbit, wed pixel, $5\n" in env.step("visit pixel wed")[0] and env.decisive()
    assert "\nPlan: wed pixel, $3\n" in env.step("drop tue")[0] and not env.decisive()
    assert "\nPlan:" not in env.step("drop wed")[0]


def test_expert_repairs_a_spoilt_plan():
    # nova is closed on wed; delta on thu is far: nearest right plans replace one and drop nothing.
    env = trip(plan={"wed": "nova", "thu": "orbit"})
    assert drop_thought(env.expert()) == "visit delta wed"  # the cheapest of the plans one change away
    env = trip(plan={"tue": "nova", "wed": "delta", "thu": "lotus"})
    assert drop_thought(env.expert()) == "drop thu"
    assert [drop_thought(t) for _, t in walk(env)[0]] == ["drop thu", "confirm"]


def test_what_is_unknown_must_be_asked():
    for need, shown in (("dates", "tue wed thu, thu within 5 km"), ("budget", "$6"), ("interest", "robots")):
        env = trip(plan={"tue": "nova", "thu": "orbit"})
        env.state["unknown"] = need
        assert f"{need.capitalize()}: unknown\n" in env._observe() and "confirm" not in env.legal_actions()
        _, reward, terminated, _, info = env.step("confirm")
        assert (reward, terminated, info["error"]) == (-0.02, False, f"cannot confirm while {need} unknown")
        if need == "dates":
            assert env.step("visit orbit wed")[4]["error"] == "cannot visit while dates unknown"
        assert env.expert().endswith(f"</think> ask {need}")
        obs, reward, *_ = env.step(env.expert())
        assert f"{need.capitalize()}: {shown}\n" in obs and reward == 0.0 and env.decisive()
        assert env.step(f"ask {need}")[1] == -0.01
        assert env.step("confirm")[1] == 1.0


def test_kinds_of_tasks_and_wrong_topics():
    env, kinds = make_env("trip"), []
    for seed in range(400):
        obs, info = env.reset(seed)
        kinds.append(info["task"])
        assert obs.count("unknown") == (info["task"] != "all given")
    assert {k: abs(kinds.count(k) / 400 - 0.25) < 0.07 for k in kinds} == dict.fromkeys(
        ("dates", "budget", "interest", "all given"), True
    )
    env = trip(plan={"tue": "nova"})
    assert env.step("list robots")[1] == -0.01 and env.state["plan"] == {"tue": "nova"}
    assert "\nPlan:" not in env.step("list food")[0]  # another topic, another plan
    env = trip(listed="")
    assert env.step("list food")[1] == 0.0 and not env.decisive() and env.step("list food")[1] == -0.01
    assert "Firms for robots: nova: mon tue, 3 km, $4; orbit" in env.step("list robots")[0] and env.decisive()


def test_key_steps_of_a_trip_by_hand():
    env = trip(listed="")
    env.state["unknown"] = "budget"
    obs = env._observe()
    assert weights(env, obs, "ask budget") == 0.15 and weights(env, obs, "ask dates") == 0.0
    assert weights(env, obs, "list robots") == 0.15
    env.step("ask budget")
    obs = env._observe()
    assert weights(env, obs, "list robots") == 0.3 and weights(env, obs, "list food") == 0.0
    env.step("list robots")
    obs = env._observe()
    assert weights(env, obs, "nova opens tue") == 0.15 and weights(env, obs, "nova opens wed") == 0.0
    assert weights(env, obs, "visit nova tue") == 0.35 and weights(env, obs, "visit pixel wed") == 0.35
    assert weights(env, obs, "visit nova wed") == 0.0 and weights(env, obs, "visit delta thu") == 0.0  # closed; far
    for plan, weight in (
        ({"tue": "nova", "thu": "orbit"}, 0.35),
        ({"tue": "nova", "wed": "pixel"}, 0.0),  # too expensive
        ({"wed": "pixel", "thu": "delta"}, 0.0),  # far
        ({"tue": "nova"}, 0.0),
        ({"tue": "delta", "thu": "orbit"}, 0.0),  # closed
    ):
        env = trip(plan=plan)
        assert weights(env, env._observe(), "confirm") == weight, plan
    assert sum(w for _, w in env.key_steps()) == pytest.approx(1.0)
