"""Random and hostile texts for everything that reads text: python tests/fuzz.py [NAME ...] [--cases 10000] [--seed 0]

NAME: one of TARGETS (left out: all). Each case must be read or refused in bounded time and without an exception, and
what was read must be in order. Needs hypothesis. The failing case is shrunk and printed; exits with 1 then.
"""

import argparse
import json
import os
import re
import sys
import tempfile
import time
from functools import cache
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from hypothesis import HealthCheck, given, seed, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

import common  # noqa: E402
import envs  # noqa: E402
import slea_rl  # noqa: E402

SECONDS = 2.0  # of processor time a case may take: far more than any needs, far less than a quadratic one
PIECES = """<a href='x'>
    </a> <button> <input value=" "> < <!-- --> <![ &# &amp; <script> </script> <title> <h1> <select>
    <p hidden> <div> <label for=a> <|im_start|> <eos> click type back answer select search confirm book ask fix visit
    list drop undo up down left right log connections tue nova Action: Goal: Page: Links: Done: ANSWER: VERDICT A B
    TIE TURN: turn <think> </think> < THINK > 1. 2. 1.1 1.1.1. 2) 3、 ( ) " ' ` ``` “ ” « » # #2 | > ? ？ . 。 !
    sorry could you understood i suggest finally 12 + 7 = 19 -3 * 99999 may 3 31st to oslo air inn cars""".split()
PIECES += [" ", "\n", "\t", "\r", "\x00", "\x1b[31m", "\ud800", "\u202e", "é", "页", "🙂", "٣", "²", "\u2028"]
PIECE = st.sampled_from(PIECES)
TEXT = st.one_of(
    st.text(st.characters(exclude_categories=()), max_size=80),
    st.lists(st.one_of(PIECE, st.text(max_size=6)), max_size=30).map("".join),
    st.lists(PIECE, max_size=20).map(" ".join),
    st.tuples(st.lists(PIECE, min_size=1, max_size=3).map("".join), st.integers(1, 3000), PIECE).map(
        lambda x: x[0] * x[1] + x[2]),  # what makes a careless pattern slow
)  # fmt: skip


def html(text):
    page = envs.html_to_state(text, goal="goal")
    state = envs.render_state(page, "goal")
    state.encode("utf-8")
    assert state.startswith("Goal: goal\nPage: ") and state.endswith("\nAction:") and len(state) <= envs.MAX_STATE_CHARS
    assert state.count("\n") <= 6 and not re.search(r"[\x00-\x09\x0b-\x1f\u202e]", state)
    goal, seen, done = envs.read_state(state)
    assert goal == "goal" and done == [] and len(seen.links) <= envs.MAX_ELEMENTS
    for label in (e.label for e in page.links + page.buttons):
        assert envs.parse_action(f'click "{label}"')[:2] == ("click", (label,))


def page_action(text):
    """webnav and MiniWoB++."""
    page = envs.Page("", "", "", inputs=(envs.Element("search", "", ""),))
    for action in (envs.parse_action(text, ("search",)), envs._parse_page_action(text, page)):
        count = {"": 0, "back": 0, "click": 1, "answer": 1, "type": 2, "select": 2}[action.verb]
        assert len(action.args) == count and not any('"' in a or "\n" in a for a in action.args)
        if action.verb not in ("", "select") and len(str(action)) <= envs.MAX_ACTION_CHARS:
            again = envs.parse_action(str(action))
            assert (again.verb, again.args, again.repaired) == (action.verb, action.args, False)
    goal, page, done = envs.read_state(text)
    assert isinstance(goal, str) and all(isinstance(a, str) for a in done)


@cache
def world(name):
    return envs.make_env(name)


def step_of(name):
    """A whole step: the action parser, and the state that shows what was read."""

    def step(text):
        env = world(name)
        env.reset(1)
        obs, reward, terminated, truncated, info = env.step(text)
        obs.encode("utf-8")
        low, high = env.return_bounds
        assert low <= reward <= high and info["valid"] == (info["error"] == "") and not truncated
        assert info["valid"] or (reward == -0.02 and not terminated and not info["success"])
        assert 0.0 <= env.judge([(obs, text)]) <= 1.0

    return step


def booking(text):
    act = envs.read_sentence(text)
    assert act.kind in ("", "ask", "search", "book", "confirm")
    if act.kind and "" not in act.args:
        assert envs.read_sentence(str(act)) == act
    envs.read_booking(text)
    step_of("booking")(text)


def thought(text):
    """troubleshoot and trip: what stands behind the thought."""
    action = envs.drop_thought(text)
    assert action == action.strip() and action in text
    assert not re.search(r"<\s*/\s*think(?:ing)?\s*>", action, re.I)
    for name in ("troubleshoot", "trip"):
        step_of(name)(text)


def textworld(text):
    """Its action parser; the rest of a step needs a game."""
    command = envs._read_command(text)
    assert not re.search(r"[\x00-\x1f]", command) and len(command) <= 3 * envs.MAX_ACTION_CHARS  # lower() may lengthen
    assert not re.match(r"\W", command)
    if len(command) < envs.MAX_ACTION_CHARS - len("Action: ."):  # a longer one is cut elsewhere
        assert envs._read_command(f"Action: {command}.") == envs._read_command(command)


@cache
def tokenizer():
    """`encode` and `decode` of the tiny model, which needs no model."""
    lm = common.LM.__new__(common.LM)
    lm.tokenizer, lm.eos_ids = common.tiny_model(0)[1], {1}
    return lm


def steps(text):
    """slea_rl.py: every token of an answer belongs to one micro-step, whatever the model wrote."""
    for kind_known in (True, False):
        marks, kind = slea_rl.split_answer(text) if kind_known else ([(0, "")], "whole")
        places = [start for start, _ in marks]
        assert places[0] == 0 and places == sorted(set(places)) and places[-1] <= len(text)
        assert kind in ("think", "unnumbered", "cut_off", "rules", "whole", "empty")
    lm = tokenizer()
    ids = lm.encode(text)[:48] or [1]  # as many as an answer has
    ends, numbers, texts, _ = slea_rl.parse_steps(lm, ids)
    assert len(ends) == len(numbers) == len(texts) >= 1 and ends[-1] == len(ids)
    assert all(a < b for a, b in zip([0, *ends], ends, strict=False))
    numbered = [n for n in numbers if re.fullmatch(r"[\d.]+", n)]
    assert all(slea_rl.follows([*map(int, n.split("."))], [*map(int, b.split("."))])
               for b, n in zip(numbered, numbered[1:], strict=False)) or len(numbered) < len(numbers) - 1  # fmt: skip
    assert "\n" not in common.mask_names(text) and all(0 <= start < max(len(text), 1) for start, _ in
                                                       common.sentences(text))  # fmt: skip


def verdict(text):
    """What a teacher wrote."""
    answer = common.parse_verdict(text)
    assert answer is None or (answer[0] in (0.0, 0.5, 1.0) and (answer[1] is None or answer[1] >= 0))
    assert answer is None or answer[0] != 0.5 or answer[1] is None
    assert common.parse_verdict("ANSWER: B\nTURN: 3\n") == (0.0, 2)


def preferences(text):
    """A line of a preferences.jsonl: a labelled pair, or one clear line that names it."""
    rows = [text, json.dumps({"a": [[text, "x"]], "b": [["s", text]], "y": 1, "turn": 0}), f'{{"a": {text}}}']
    with tempfile.TemporaryDirectory() as folder:
        for row in rows:
            path = Path(folder) / "p.jsonl"
            path.write_bytes(row.encode("utf-8", "replace") + b"\n")
            try:
                read = common.read_preferences(path)
                assert all(r["y"] in (0, 0.5, 1) and r["a"] and r["b"] for r in read)
            except common.UserError as error:
                assert "p.jsonl" in str(error) and "\n" not in str(error)
    shown = common.show_segment([(text, text), (text, "x")])
    assert "Turn 2, the agent: x" in shown


def markdown(text):
    """Foreign text in a report: one line, no HTML, no table cell or link of its own."""
    shown = common.md(text)
    assert "<" not in shown and ">" not in shown and len(shown.splitlines()) <= 1
    assert not re.search(r"(?<!\\)(?:\\\\)*[|`\[\]]", shown)


TARGETS = {
    "html": html, "page_action": page_action, "booking": booking, "thought": thought, "textworld": textworld,
    "steps": steps, "verdict": verdict, "preferences": preferences, "markdown": markdown,
    **{name: step_of(name) for name in ("webnav", "gridworld", "arithmetic")},
}  # fmt: skip


def fuzz(name: str, cases: int, number: int = 0):
    """`cases` random texts for a target; raises what the shrunk failing case raises."""
    slowest = [0.0]
    TARGETS[name]("")  # imports, caches

    @seed(number)
    @settings(max_examples=cases, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(TEXT)
    def search(text):
        begun = time.process_time()
        TARGETS[name](text)
        seconds = time.process_time() - begun
        slowest[0] = max(slowest[0], seconds)
        assert seconds < SECONDS, f"{seconds:.1f} s for {len(text)} characters"

    search()
    return slowest[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(TARGETS), help="targets")
    parser.add_argument("--cases", type=int, default=10_000, help="texts a target")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    bad = 0
    for name in args.names:
        begun = time.time()
        try:
            slowest = fuzz(name, args.cases, args.seed)
            print(f"{name}: {args.cases} cases in {time.time() - begun:.0f} s, the slowest {slowest:.2f} s", flush=True)
        except Exception as error:  # the next target is tried all the same
            bad += 1
            print(f"{name}: {type(error).__name__}: {error}\n{''.join(getattr(error, '__notes__', []))}", flush=True)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
