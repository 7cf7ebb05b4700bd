"""envs.py: booking (the reader, the user, the database, the reward, the judge) and arithmetic."""

import doctest
import json
import random
import re
import statistics
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import envs
from envs import ASKS, BOOKING_WORDS, CONFIRM, Act, make_env, read_booking, read_sentence

# ---- helpers ---------------------------------------------------------------------------------------------------------


def task_with(env, wanted, first=0):
    """Resets env to the first task, from `first` on, for which wanted(env) holds; returns the observation."""
    for seed in range(first, first + 1000):
        obs, _ = env.reset(seed)
        if wanted(env):
            return obs
    raise AssertionError("no such task")


def play(env, stop=lambda env, action: False):
    """The expert until it would take an action for which `stop` holds, or to the end; returns (transcript, last)."""
    transcript, obs, last = [], env._observe(), None
    while not env.state["over"] and not stop(env, action := env.expert()):
        transcript.append((obs, action))
        last = env.step(action)
        obs = last[0]
    return transcript, last


def ask_all(env):
    """Asks until nothing is unknown."""
    play(env, lambda env, action: action not in ASKS.values())


def line(obs, label):
    found = re.search(rf"^{label}: (.*)$", obs, re.MULTILINE)
    return found and found[1]


def offer(env, **wanted):
    """Searches the first needed part and returns the first company that fits (`wanted`: fits=..., never=...)."""
    need, part = env.state["need"], env.need.parts[0]
    date = next(d for d in need["dates"] if d != env.need.full)
    env.step(str(Act("search", (part, env.need.city, date))))
    for company, price, feature in env.offers(part, date):
        refused = company in need["never"]
        ok = need["budget"] is None or price <= need["budget"]
        ok = ok and need["wish"].get(part, feature) == feature and not refused
        if wanted.get("refused", refused) == refused and wanted.get("fits", ok) == ok:
            return company
    return None


# ---- reading sentences -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "act"),
    [
        ("what else do you need?", ("ask", "needs")),
        ("Is there anything else I should book?", ("ask", "needs")),
        ("which dates suit you?", ("ask", "dates")),
        ("When would you like to travel?", ("ask", "dates")),
        ("what is your budget?", ("ask", "budget")),
        ("How much would you like to spend?", ("ask", "budget")),
        ("what do you wish for?", ("ask", "wish")),
        ("do you have any preferences?", ("ask", "wish")),
        ("what do you refuse?", ("ask", "never")),
        ("Is there any airline you would not like?", ("ask", "never")),
        ("ask dates", ("ask", "dates")),
        ("search flight to oslo on may 3", ("search", "flight", "oslo", "may 3")),
        ("Please find flights to Oslo on the 3rd of May!", ("search", "flight", "oslo", "may 3")),
        ("let me look for a hotel in kyoto, october 12th", ("search", "hotel", "kyoto", "october 12")),
        ("show me cars", ("search", "car", "", "")),
        ("i want to search a hotel in july", ("search", "hotel", "", "")),
        ("book nordic air", ("book", "nordic air")),
        ("I will take the nordic air flight, please.", ("book", "nordic air")),
        ("shall i reserve oak inn?", ("book", "oak inn")),
        ("book", ("book", "")),
        ("shall i confirm the trip?", ("confirm",)),
        ("Is everything right?", ("confirm",)),
        ("do not book nordic air", ("",)),
        ("never confirm", ("",)),
        ("hello", ("",)),
        ("search something", ("",)),
        ("may i?", ("",)),
    ],
)
def test_sentences_by_hand(text, act):
    assert read_sentence(text) == Act(act[0], act[1:])


def test_plain_sentences_read_back_as_themselves():
    acts = [Act("ask", (slot,)) for slot in ASKS] + [Act("confirm")]
    for words in BOOKING_WORDS.values():
        for city, month in zip(words["cities"], words["months"] * 9, strict=False):
            acts += [Act("search", (part, city, f"{month} 7")) for part in envs.PARTS]
        acts += [Act("book", (f"{word} {last}",)) for word in words["companies"] for last in envs.PARTS.values()]
    assert len(acts) > 350
    for act in acts:
        assert read_sentence(str(act)) == act and str(act) == str(act).lower() and '"' not in str(act)


@settings(max_examples=300, deadline=None)
@given(st.one_of(
    st.text(max_size=80),
    st.lists(st.sampled_from("book search confirm ? not which dates flight to oslo on may 3 air inn the 31st ' budget "
                             "never else \x00 🙂".split(" ")), max_size=12).map(" ".join),
))  # fmt: skip
def test_any_sentence_is_read_or_refused(text):
    act = read_sentence(text)
    assert act.kind in ("", "ask", "search", "book", "confirm")
    if act.kind and "" not in act.args:
        assert read_sentence(str(act)) == act
    env = make_env("booking")
    env.reset(0)
    obs, reward, _, _, info = env.step(text)
    obs.encode("utf-8")
    assert info["valid"] == (info["error"] == "") and (reward == -0.02) == (not info["valid"])


# ---- tasks -----------------------------------------------------------------------------------------------------------


def test_words_and_sentences_of_the_splits_are_disjoint():
    seen = {}
    for split, kinds in BOOKING_WORDS.items():
        for kind, words in kinds.items():
            assert len(set(words)) == len(words)
            for word in words:
                group = "features" if kind in envs.PARTS else kind  # a feature belongs to one part only
                assert seen.setdefault((group, word), (split, kind)) == (split, kind)
                assert re.fullmatch(r"[a-z]+", word)
    for occasion in envs.USER_SAYS["train"]:
        said = [t for split in envs.SPLITS for t in envs.USER_SAYS[split][occasion]]
        assert len(set(said)) == len(said)


@pytest.mark.parametrize("split", envs.SPLITS)
def test_a_right_plan_exists_before_and_after_the_change(split):
    """By brute force over all combinations of offers, with the written rules, for both the first and the last need."""
    env, changes = make_env("booking", split=split), set()
    for seed in range(150):
        env.reset(seed)
        need = env.need
        changes.add(need.change)
        assert (need.budget is not None) + bool(need.wish) + bool(need.never) >= 2
        first = need.first()
        last = first | ({need.change: need.value} if need.change not in ("", "never") else {})
        for wanted in (first, last):
            refused = [set(wanted["never"])]
            open_dates = [d for d in wanted["dates"] if d != need.full]
            assert open_dates
            for date in open_dates:
                lists = [env.offers(part, date) for part in need.parts]
                assert all(2 <= len(offers) <= 4 for offers in lists)
                assert all(len({c for c, _, _ in offers}) == len(offers) for offers in lists)
                if need.change == "never":  # whichever company is refused
                    refused += [set(wanted["never"]) | {c} for offers in lists for c, _, _ in offers]
                assert all(has_plan(need.parts, lists, wanted, never) for never in refused)
    assert changes == {"", "dates", "budget", "wish", "never"}


def has_plan(parts, lists, wanted, never):
    cheapest = 0
    for part, offers in zip(parts, lists, strict=True):
        prices = [p for c, p, f in offers if c not in never and wanted["wish"].get(part, f) == f]
        if not prices:
            return False
        cheapest += min(prices)
    return wanted["budget"] is None or cheapest <= wanted["budget"]


def test_states_and_dialogues_are_short_and_fast():
    steps, lengths, seconds = [], [], 0.0
    for split in envs.SPLITS:
        env = make_env("booking", split=split)
        for seed in range(100):
            env.reset(seed)
            start = time.process_time()
            transcript, _ = play(env)
            seconds += time.process_time() - start
            steps.append(len(transcript))
            lengths += [len(obs) for obs, _ in transcript]
            assert all(len(action) <= 46 for _, action in transcript)
    lengths.sort()  # about 4 characters a token
    assert lengths[len(lengths) // 2] <= 320 and lengths[int(0.95 * len(lengths))] <= 480
    assert 5 <= statistics.median(steps) <= 8 and max(steps) <= 12
    assert seconds / sum(steps) < 0.002  # the expert reads the state, too


@pytest.mark.parametrize(("name", "most"), [("booking", 0.02), ("arithmetic", 0.02)])
def test_random_actions_rarely_succeed(name, most):
    env, successes = make_env(name), 0
    for seed in range(300):
        env.reset(seed)
        rng = random.Random(seed)
        while not env.state["over"]:
            env.step(rng.choice(env.legal_actions()))
        successes += env.state["success"]
    assert successes / 300 < most


def test_saved_states_are_plain_data():
    for name in ("booking", "arithmetic"):
        env = make_env(name, split="test")
        env.reset(5)
        env.step(env.expert())
        assert json.loads(json.dumps(env.save())) == env.save()
    env = make_env("booking")
    for seed in range(40):  # some with a need that changes in between
        env.reset(seed)
        saved = env.save()
        first, _ = play(env)
        env.restore(saved)
        assert play(env)[0] == first


# ---- the user --------------------------------------------------------------------------------------------------------


def test_the_user_answers_only_what_is_asked():
    env = make_env("booking", split="test")
    for seed in range(60):
        obs, _ = env.reset(seed)
        for slot in env.need.hidden:
            assert f"{slot} ?" in line(obs, "Known") or slot == "needs" and " ?; dates" in line(obs, "Known")
        slot = env.need.hidden[-1]
        after, reward, terminated, _, info = env.step(ASKS[slot])
        assert (reward, terminated, info["valid"]) == (0.0, False, True)
        assert set(read_booking(after).known) - set(read_booking(obs).known) == {slot}
        values = {"needs": env.need.parts, "dates": env.need.dates, "never": env.need.never}
        values |= {"wish": list(env.need.wish.values()), "budget": [str(env.need.budget)] * bool(env.need.budget)}
        assert read_booking(after).known[slot] == values[slot]
        assert all(value in line(after, "User") for value in values[slot][slot == "needs" :])


def test_a_repeated_question_annoys_and_the_second_ends_the_dialogue():
    env = make_env("booking")
    task_with(env, lambda e: "budget" not in e.need.hidden)
    obs, reward, terminated, truncated, info = env.step(ASKS["budget"])
    assert (reward, terminated, truncated, info["valid"]) == (0.0, False, False, True)
    assert line(obs, "Known").endswith("; annoyed") and line(obs, "User") == "i said that already"
    obs, reward, terminated, truncated, info = env.step(ASKS["budget"])
    assert (reward, terminated, truncated, info["success"]) == (0.0, True, False, False)
    assert line(obs, "User") == "i said that already. goodbye" and env.progress() == 0.0


def test_a_refused_company_costs_at_once_and_every_time():
    env = make_env("booking", split="test")
    task_with(env, lambda e: e.need.never and e.need.never[0] in e.need.companies[e.need.parts[0]]
              and "never" in e.need.hidden and offer(e, refused=True))  # fmt: skip
    company = env.need.never[0]
    obs, reward, terminated, _, info = env.step(f"book {company}")
    assert (reward, terminated, info["violation"], info["valid"]) == (-0.2, False, 0.2, True)
    assert line(obs, "User") == "what? no!" and company not in line(obs, "Known")  # why: only when asked
    env_before = env.save()
    _, reward, _, _, info = env.step(ASKS["never"])
    assert (reward, info["violation"]) == (0.0, 0.0)
    _, last = play(env)
    assert last[4]["success"] and last[1] == 1.0  # it can be replaced
    env.restore(env_before)
    _, reward, terminated, _, info = env.step(f"book {company}")
    assert (reward, terminated, info["violation"], info["success"]) == (-0.2, True, 0.2, False)
    assert -0.4 - 0.02 * 13 == pytest.approx(env.return_bounds[0])


def test_a_part_that_is_not_needed_is_not_booked():
    env = make_env("booking")
    task_with(env, lambda e: e.need.parts == ["flight"])
    date = env.need.dates[-1] if env.need.full != env.need.dates[-1] else env.need.dates[0]
    env.step(f"search hotel in {env.need.city} on {date}")
    company = env.offers("hotel", date)[0][0]
    obs, reward, terminated, _, info = env.step(f"book {company}")
    assert (reward, terminated, info["valid"], info["violation"]) == (0.0, False, True, 0.0)
    assert line(obs, "User") == "i need no hotel" and line(obs, "Booked") is None and "annoyed" in line(obs, "Known")


def after_change(env, company, price, feature, date):
    """What is known of the changed slot now, and whether the booking happens to be right even so."""
    value = env.need.value
    if env.need.change == "dates":
        return value, date in value
    if env.need.change == "budget":
        return [str(value)], price <= value
    if env.need.change == "wish":
        return list(value.values()), feature in value.values()
    return [*env.need.never, company], False


@pytest.mark.parametrize("slot", ["dates", "budget", "wish", "never"])
def test_a_changed_mind_is_said_and_counts(slot):
    env, first = make_env("booking", split="test"), 0
    for _ in range(12):
        task_with(env, lambda e: e.need.change == slot and len(e.need.parts) == 1, first)
        first = env.task_seed + 1
        play(env, lambda env, action: bool(env.state["booked"]))
        expected, still_right = after_change(env, *env.state["booked"][env.need.parts[0]])
        known = read_booking(env._observe()).known
        assert known[slot] == expected and expected[-1] in line(env._observe(), "User")
        assert env.right(env.need.parts[0]) is still_right
        saved = env.save()
        _, _, _, _, info = env.step(CONFIRM)  # without booking anew
        assert info["success"] is still_right
        env.restore(saved)
        assert play(env)[1][4]["success"] is True


def test_a_sold_out_date_is_remembered():
    env = make_env("booking")
    task_with(env, lambda e: e.need.full and "dates" not in e.need.hidden)
    part = env.need.parts[0]
    obs, reward, _, _, info = env.step(str(Act("search", (part, env.need.city, env.need.full))))
    assert reward == 0.0 and info["valid"] and line(obs, "Found") is None
    assert line(obs, "User") == f"nothing left on {env.need.full}" and f"{env.need.full} full" in line(obs, "Known")
    assert env.need.full not in read_booking(obs).dates() and len(read_booking(obs).dates()) == 1


# ---- success ---------------------------------------------------------------------------------------------------------


def test_only_a_confirmed_right_plan_is_a_success():
    """Every rule broken alone: unconfirmed, incomplete, wrong date, refused, unwished, over the budget together."""
    env = make_env("booking")
    task_with(env, lambda e: len(e.need.parts) == 2 and e.need.budget and not e.need.change and e.need.wish
              and e.need.never)  # fmt: skip
    play(env, lambda env, action: action == CONFIRM)
    assert env._right_plan() and not env.state["success"] and env.progress() == pytest.approx(1 - 1 / (
        len(env.need.hidden) + 5))  # fmt: skip
    good = env.save()
    part = next(iter(env.need.wish))
    company, price, feature, date = env.state["booked"][part]
    other = "desk" if feature != "desk" else "pool"
    for wrong in (
        None,
        [company, price, feature, "may 30"],
        [env.need.never[0], price, feature, date],
        [company, price, other, date],
        [company, env.need.budget, feature, date],  # alone within the budget, but not with the other part
    ):
        env.restore(good)
        if wrong:
            env.state["booked"][part] = wrong
        else:
            del env.state["booked"][part]
        _, reward, terminated, _, info = env.step(CONFIRM)
        assert (reward, terminated, info["success"], info["valid"]) == (0.0, False, False, True)
    env.restore(good)
    _, reward, terminated, truncated, info = env.step("Is everything right?")
    assert (reward, terminated, truncated, info["success"], info["repaired"]) == (1.0, True, False, True, True)
    assert info["action"] == CONFIRM


def test_a_second_booking_replaces_the_first():
    env = make_env("booking")
    task_with(env, lambda e: len(e.offers(e.need.parts[0], e.need.dates[0])) == 4 and not e.need.full)
    part, date = env.need.parts[0], env.need.dates[0]
    env.step(str(Act("search", (part, env.need.city, date))))
    names = [c for c, _, _ in env.offers(part, date) if c not in env.need.never]
    env.step(f"book {names[0]}")
    obs = env.step(f"book {names[1]}")[0]
    booked = line(obs, "Booked")
    assert booked.startswith(f"{part} ") and f" {names[1]} {date}" in booked and names[0] not in booked


def test_impossible_sentences_say_why():
    env = make_env("booking", split="test")
    obs, _ = task_with(env, lambda e: "dates" in e.need.hidden), None
    city = env.need.city
    for text, why in (
        ("search flight to atlantis on may 3", f"the trip goes to {city}"),
        (f"search flight to {city}", "search on which date?"),
        ("book nordic air", "no such offer in the list"),
        ("good morning", "unreadable; ask, search, book or confirm"),
    ):
        seen, reward, terminated, _, info = env.step(text)
        assert (reward, terminated, info["error"], line(seen, "Error")) == (-0.02, False, why, why)
        assert seen.replace(f"Error: {why}\n", "") == obs


def test_city_and_the_only_date_may_be_left_out():
    env = make_env("booking")
    task_with(env, lambda e: "dates" not in e.need.hidden and len(e.need.dates) == 1)
    _, _, _, _, info = env.step("please show me hotels")
    assert info["valid"] and info["repaired"]
    assert info["action"] == f"search hotel in {env.need.city} on {env.need.dates[0]}"


# ---- judging ---------------------------------------------------------------------------------------------------------

STATE = """Goal: book a trip to oslo for ben
Known: needs flight, hotel; dates july 3 full, july 6; budget 160; wish rear; never red air{annoyed}
Found: flight july 6: 70 rear red air | 66 rear jade air | 280 rear sun air | 60 quiet oak air
Booked: hotel 59 spa oak inn july 6
You: what do you refuse?
User: i think red air
Action:"""


def test_a_state_is_read_by_hand():
    view = read_booking(STATE.format(annoyed="; annoyed"))
    assert (view.city, view.parts, view.full) == ("oslo", ["flight", "hotel"], ["july 3"])
    assert view.found == ("flight", "july 6")
    assert view.known == {"needs": ["flight", "hotel"], "dates": ["july 3", "july 6"], "budget": ["160"],
                          "wish": ["rear"], "never": ["red air"]}  # fmt: skip
    assert view.offers[1] == ("jade air", 66, "rear") and view.booked == {"hotel": ("oak inn", 59, "spa", "july 6")}
    assert [view.fits("flight", *o) for o in view.offers] == [False, True, False, False]
    assert view.done("hotel") and not view.done("flight") and view.dates() == ["july 6"]
    assert read_booking("Goal: reach the flag\nAction:") is None
    known = "Known: needs car ?; dates ?; budget none; wish ?; never ?"
    half = read_booking(f"Goal: book a trip to oslo for ben\n{known}\nAction:")
    assert half.parts == ["car"] and half.known == {"budget": []}


@pytest.mark.parametrize(
    ("action", "credit"),
    [
        ("book jade air", 1.0),
        ("book red air", -1.0),
        ("book sun air", -1.0),
        ("book oak air", -1.0),
        ("book blue air", -0.5),
        ("what is your budget?", -1.0),
        ("search flight to oslo on july 6", -0.5),  # already on the screen
        ("search hotel in oslo on july 6", -0.5),  # already booked
        ("shall i confirm the trip?", -1.0),
        ("hm", -0.5),
    ],
)
def test_credits_by_hand(action, credit):
    env, state = make_env("booking"), STATE.format(annoyed="")
    assert env.credits([(state, action)]) == [credit]
    assert env.judge([(state, action)]) == pytest.approx(0.4 * (1 + credit))
    unknown = state.replace("never red air", "never ?")
    assert env.credits([(unknown, "what do you refuse?")]) == [1.0]
    assert env.credits([(unknown, "book jade air")]) == [0.0]


def test_judge_reads_the_transcript_only():
    """The same verdict from an environment that has never seen the task; experts get 1, spoiled segments less."""
    env, stranger = make_env("booking"), make_env("booking", split="val")
    assert stranger.judge([]) == 0.0 and stranger.judge([("", "back")]) == pytest.approx(0.2)
    for seed in range(60):
        env.reset(seed)
        transcript, _ = play(env)
        assert stranger.judge(transcript) == pytest.approx(1.0)
        assert stranger.judge(transcript[:-1]) == pytest.approx(0.8)
        spoiled = [*transcript[:-2], (transcript[-2][0], "good morning"), transcript[-1]]
        assert stranger.judge(spoiled) < stranger.judge(transcript)


def test_progress_is_true_progress():
    env = make_env("booking")
    for seed in range(60):
        env.reset(seed)
        values = [env.progress()]
        while not env.state["over"]:
            env.step(env.expert())
            values.append(env.progress())
        assert values[0] == 0.0 and values[-1] == 1.0 and all(0 <= v <= 1 for v in values)
        if not env.need.change and not env.need.full:
            gains = [b - a for a, b in zip(values, values[1:], strict=False)]
            assert all(gain == pytest.approx(1 / len(gains)) for gain in gains)  # every expert turn counts the same


def test_progress_sees_what_the_judge_cannot():
    """Booking by luck before asking: the judge cannot know, progress does."""
    env = make_env("booking")
    task_with(env, lambda e: "never" in e.need.hidden and not e.need.change and offer(e, fits=True))
    before, company = env.progress(), offer(env, fits=True)
    assert env.credits([(env._observe(), f"book {company}")]) == [0.0]
    env.step(f"book {company}")
    assert env.progress() > before


def test_key_steps_are_hit_by_the_expert():
    for name in ("booking", "arithmetic"):
        env = make_env(name, split="test")
        for seed in range(40):
            env.reset(seed)
            steps = env.key_steps()
            transcript, _ = play(env)
            assert sum(w for _, w in steps) == pytest.approx(1.0) and all(w > 0 for _, w in steps)
            assert all(any(re.search(p, f"{obs} {action}") for obs, action in transcript) for p, _ in steps)
            assert not any(re.search(p, f"{transcript[0][0]} nothing") for p, _ in steps)


# ---- arithmetic ------------------------------------------------------------------------------------------------------


def test_lines_answers_and_undo_by_hand():
    env = make_env("arithmetic", terms=3)
    env.reset(0)
    obs = env.load("8 + 5 - 4")
    assert obs == "Goal: 8 + 5 - 4\nRest: 8 + 5 - 4\nAction:" and env.answer == 9
    steps = [  # action, valid, what the state then shows as the rest, progress
        ("5 - 4 = 1", False, "8 + 5 - 4", 0.0),
        ("8 + 5 = 14", True, "14 - 4", 0.0),
        ("14 - 4 = 10", True, "10", 0.0),
        ("10 - 4 = 6", False, "10", 0.0),
        ("undo", True, "14 - 4", 0.0),
        ("Undo!", True, "8 + 5 - 4", 0.0),
        ("undo", False, "8 + 5 - 4", 0.0),
        ("8+5=13", True, "13 - 4", 1 / 3),
        ("13 - 4 = 9", True, "9", 2 / 3),
    ]
    for action, valid, rest, progress in steps:
        obs, reward, terminated, _, info = env.step(action)
        assert (info["valid"], line(obs, "Rest"), env.progress()) == (valid, rest, pytest.approx(progress)), action
        assert (reward, terminated) == (0.0 if valid else -0.02, False) and bool(line(obs, "Error")) is not valid
    assert line(obs, "Done") == "8 + 5 = 13 > 13 - 4 = 9"
    _, reward, terminated, truncated, info = env.step("so the answer is 9.")
    assert (reward, terminated, truncated, info["success"], info["repaired"]) == (1.0, True, False, True, True)
    assert env.progress() == 1.0


def test_a_wrong_answer_ends_without_reward():
    env = make_env("arithmetic")
    env.reset(1)
    _, reward, terminated, _, info = env.step(f"answer {env.answer + 1}")
    assert (reward, terminated, info["success"], info["valid"], env.progress()) == (0.0, True, False, True, 0.0)


def test_lines_are_judged_one_by_one():
    env = make_env("arithmetic")
    start = "Goal: 8 + 5 - 4\nRest: 8 + 5 - 4\nAction:"
    wrong = "Goal: 8 + 5 - 4\nDone: 8 + 5 = 14\nRest: 14 - 4\nAction:"
    last = "Goal: 8 + 5 - 4\nDone: 8 + 5 = 13 > 13 - 4 = 9\nRest: 9\nAction:"
    for obs, action, credit in (
        (start, "8 + 5 = 13", 1.0), (start, "8 + 5 = 14", 0.0), (start, "5 - 4 = 1", 0.0), (start, "answer 9", 0.0),
        (wrong, "14 - 4 = 10", 0.0), (wrong, "undo", 1.0), (last, "answer 9", 1.0), (last, "undo", 0.0),
        (last, "answer 8", 0.0), (start, "", 0.0),
    ):  # fmt: skip
        assert env.credits([(obs, action)]) == [credit], (obs, action)
    assert env.judge([(start, "8 + 5 = 14"), (wrong, "undo"), (start, "8 + 5 = 13"), (last, "answer 9")]) == 0.75
    assert env.judge([]) == 0.0


@pytest.mark.parametrize(
    "options", [{}, dict(terms=2), dict(terms=6, limit=99), dict(ops="+-*", limit=200), dict(ops="*")]
)
def test_calculations_are_disjoint_bounded_and_right(options):
    goals = {}
    for split in envs.SPLITS:
        env = make_env("arithmetic", split=split, **options)
        for seed in range(60):
            env.reset(seed)
            words, value = env.goal.split(" "), 0
            assert len(words) == 2 * env.options["terms"] - 1
            for op, number in zip(["", *words[1::2]], map(int, words[::2]), strict=True):
                value = {"": number, "+": value + number, "-": value - number, "*": value * number}[op]
                assert 0 <= value <= env.options["limit"]
            assert value == env.answer
            assert goals.setdefault(env.goal, split) == split == env.split_of(env.goal)
            if seed < 10:
                assert play(env)[1][4]["success"] and env.state["steps"] == env.options["terms"]


@pytest.mark.parametrize(
    "options", [dict(terms=1), dict(terms=7), dict(terms="4"), dict(limit=9), dict(ops="/"), dict(ops="")]
)
def test_bad_options_are_one_clear_line(options):
    with pytest.raises(ValueError, match="arithmetic: ") as caught:
        make_env("arithmetic", **options)
    assert "\n" not in str(caught.value)


def test_examples_in_the_docstrings():
    for cls in (envs.Booking, envs.Arithmetic):
        examples = doctest.DocTestFinder(recurse=False).find(cls, globs={"make_env": make_env})
        assert len(examples) == 1 and len(examples[0].examples) >= 4
        runner = doctest.DocTestRunner()
        runner.run(examples[0])
        assert runner.summarize(verbose=False) == (0, len(examples[0].examples))
