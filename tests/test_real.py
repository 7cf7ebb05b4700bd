"""Real pages, text adventures and environments of one's own. Tests marked browser or textworld need those packages."""

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT, main_here

import common
import envs
from envs import Action, Browser, Element, MiniWob, Page, make_env, read_state, render_state

TINY = """--model tiny --lora_rank 8 --demos 4 --warmup_epochs 1 --total_env_steps 40 --episodes_per_iter 4 --num_envs 3
--eval_episodes 3 --val_episodes 2 --policy_passes 1""".split()


def finish(env, obs, choose):
    """Plays to the end: (info, rewards)."""
    rewards, done = [], False
    while not done:
        obs, reward, terminated, truncated, info = env.step(choose(env))
        rewards.append(reward)
        done = terminated or truncated
    return info, rewards


def gone(leader: int, folder: str, seconds=20.0) -> bool:
    """Waits until nothing of the session is left."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not envs._session_of(leader) and not Path(folder).exists():
            return True
        time.sleep(0.1)
    return False


# ---- states, actions, experts: no browser needed ---------------------------------------------------------------------


def page_of(links="", buttons="", inputs=""):
    lists = ((Element(*item.split(" = ")[:1], "", *item.split(" = ")[1:]) for item in text.split(" | ") if text)
             for text in (links, buttons, inputs))  # fmt: skip
    return Page("form", "", "words", *map(tuple, lists))


def test_read_state_reads_what_render_state_wrote():
    page = page_of("tab #1 | more", "submit", "name = Ann | age")
    history = [("form", f"click {x}") for x in "abcde"]
    goal, read, done = read_state(render_state(page, 'click "more"', history, "1 of 3, done before"))
    assert (goal, read.title, done) == ('click "more"', "form", ["click c", "click d", "click e"])
    assert (read.links, read.buttons, read.inputs) == (page.links, page.buttons, page.inputs)
    assert read.text == "error: 1 of 3, done before. words"


@pytest.mark.parametrize("text, action", {
    'select "size" "very large"': Action("select", ("size", "very large")),
    "select size: large": Action("select", ("size", "large")),
    '```\nSelect("size", "large")\n```': Action("select", ("size", "large"), True),
    "select": Action(""),
    "select large": Action(""),
    'click "selected"': Action("click", ("selected",)),
}.items())  # fmt: skip
def test_select_is_read_like_type(text, action):
    assert envs._parse_page_action(text, page_of(inputs="size = small")) == action


TABS = "tab #1 | tab #2 | tab #3 | amet"
RESULTS = "ann | bob | eve | < | 1 | 2 | 3 | >"
PLACE = 'Use the textbox to enter "Bob" and press "Search", then find and click the {} search result.'
BOXES = "Select Ab1, cD and click Submit."
LOGIN = 'Enter the username "ann" and the password "Qz7" into the text fields and press login.'
TREE = 'Navigate through the file tree. Find and click on the folder or file named "Eve".'


@pytest.mark.parametrize("name, goal, page, done, expected", [
    ("click-button", 'Click on the "Ok" button.', page_of("", "no | ok"), [], "click ok"),
    ("click-link", 'Click on the link "Sit.".', page_of("amet | sit."), [], "click sit."),
    ("click-tab", "Click on Tab #2.", page_of(TABS), [], "click tab #2"),
    ("click-tab-2", 'click on the link "amet"', page_of(TABS), [], "click amet"),
    ("click-tab-2", 'click on the link "sit"', page_of(TABS), [], "click tab #2"),  # the page shows the first at first
    ("click-tab-2", 'click on the link "sit"', page_of(TABS), ["click tab #3", "click ut"], "click tab #1"),
    ("click-checkboxes", BOXES, page_of("", "submit", "x | ab1 | cd = on"), [], "click ab1"),
    ("click-checkboxes", BOXES, page_of("", "submit", "x = on | ab1 = on | cd = on"), [], "click x"),
    ("click-checkboxes", BOXES, page_of("", "submit", "x | ab1 = on | cd = on"), [], "click submit"),
    ("enter-text", 'Enter "Ann" and press Submit.', page_of("", "submit", "tt = Bob"), [], "type tt: Ann"),
    ("enter-text", 'Enter "Ann" and press Submit.', page_of("", "submit", "tt = Ann"), [], "click submit"),
    ("login-user", LOGIN, page_of("", "login", "username = ann | password"), [], "type password: Qz7"),
    ("search-engine", PLACE.format("2nd"), page_of("", "search", "text"), [], "type text: Bob"),
    ("search-engine", PLACE.format("2nd"), page_of("", "search", "text = Bob"), [], "click search"),
    ("search-engine", PLACE.format("2nd"), page_of(RESULTS, "search", "text = Bob"), ["click search"], "click bob"),
    ("search-engine", PLACE.format("4th"), page_of(RESULTS, "search", "text = Bob"), ["click search"], "click 2"),
    ("search-engine", PLACE.format("4th"), page_of(RESULTS, "search", "text = Bob"), ["click 2"], "click ann"),
    ("search-engine", PLACE.format("3rd"), page_of(RESULTS, "search", "text = Bob"), ["click 3"], "click 1"),
    ("navigate-tree", TREE, page_of("a", "b | c"), ["click b"], "click c"),
    ("navigate-tree", TREE, page_of("a | eve", "b | c"), ["click b"], "click eve"),
    ("click-dialog", 'Close the dialog box by clicking the "x".', page_of("", "close"), [], "click close"),
])  # fmt: skip
def test_expert_by_hand(name, goal, page, done, expected):
    assert MiniWob.EXPERTS[name](goal, page, done) == expected


def test_judge_is_the_share_of_expert_actions():
    judge = MiniWob.judge
    page = SimpleNamespace(page_name="click-tab-2", EXPERTS=MiniWob.EXPERTS)
    page._as_expert = lambda *pair: MiniWob._as_expert(page, *pair)
    obs = render_state(page_of(TABS), 'click on the link "sit"', [])
    assert judge(page, [(obs, "click tab #2"), (obs, 'Click "Tab #2"'), (obs, "click amet"), ("Goal: x", "y")]) == 0.5


# ---- a missing package or browser ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, package, hint", [
    ("miniwob/click-tab", "miniwob", "pip install miniwob==1.1.0 (and on Debian: apt-get install chromium"),
    ("textworld/cooking", "textworld", "pip install textworld==1.7.0"),
])  # fmt: skip
def test_missing_package_is_one_line_and_exit_2(name, package, hint, monkeypatch, capfd, tmp_path, keep_sigint):
    import threespo

    real = envs.importlib.util.find_spec
    monkeypatch.setattr(envs.importlib.util, "find_spec", lambda n, *a: None if n == package else real(n, *a))
    argv = ["--env", name, "--model", "tiny", "--out", str(tmp_path / "run")]
    code, _, err = main_here(threespo, argv, capfd)
    assert code == 2 and hint in err and err.count("\n") == 1
    assert envs.main([name]) == 2  # and played by hand


def test_missing_browser_names_what_to_install(monkeypatch):
    monkeypatch.setattr(envs.importlib.util, "find_spec", lambda name: SimpleNamespace(origin="/nowhere/x.py"))
    monkeypatch.setattr(envs.shutil, "which", lambda name: None if name == "chromedriver" else name)
    monkeypatch.delenv("MINIWOB_CHROMEDRIVER", raising=False)
    with pytest.raises(ValueError, match="apt-get install chromium chromium-driver"):
        make_env("miniwob/click-tab")


# ---- the worker process: a stand-in for the browser ------------------------------------------------------------------

WORKER = """
import json, os, subprocess, sys, threading, time
sys.path.insert(0, {root!r})
import envs
subprocess.Popen(["sleep", "300"], stdout=subprocess.DEVNULL)  # a browser holds no end of the pipe either
requests = []
print(json.dumps({{"ready": sys.argv[-1]}}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    if request.get("hang"):
        time.sleep(300)
    if request.get("die"):
        print("broken glass", file=sys.stderr, flush=True)
        os._exit(3)
    print(json.dumps(request), flush=True)
envs._kill_session(os.getpid())
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """Browser starts a worker without a browser; all are ended afterwards."""
    script = tmp_path / "worker.py"
    script.write_text(WORKER.format(root=str(ROOT)))
    monkeypatch.setattr(envs, "__file__", str(script))
    monkeypatch.setattr(Browser, "idle", {})
    monkeypatch.setattr(Browser, "alive", envs.weakref.WeakSet())
    yield
    for browser in list(Browser.alive):
        browser.end()


linux = pytest.mark.skipif(not Path("/proc").is_dir(), reason="reads /proc")


@linux
def test_worker_answers_and_ends_with_all_it_started(stand_in):
    browser = Browser("p")
    assert browser.ask(a=[1, "é\n"]) == {"a": [1, "é\n"]}
    leader, folder = browser.process.pid, browser.folder
    assert len(envs._session_of(leader)) == 2  # the worker and its sleep
    browser.end()
    assert gone(leader, folder, 1)


@linux
@pytest.mark.parametrize("what, seconds, message", [("die", 30, "died .broken glass"), ("hang", 0.3, "no answer in")])
def test_worker_that_dies_or_hangs_is_an_error_and_leaves_nothing(what, seconds, message, stand_in, monkeypatch):
    browser = Browser("p")
    monkeypatch.setattr(Browser, "STEP_SECONDS", seconds)
    monkeypatch.setattr(Browser, "END_SECONDS", 0.2)
    leader, folder = browser.process.pid, browser.folder
    with pytest.raises(RuntimeError, match=message):
        browser.ask(**{what: 1})
    assert gone(leader, folder, 1)


def test_browsers_are_lent_again_and_capped(stand_in, monkeypatch):
    monkeypatch.setattr(Browser, "MOST", 2)
    first, second = Browser.lend("p"), Browser.lend("p")
    with pytest.raises(RuntimeError, match="2 browsers are busy.*lower --num_envs"):
        Browser.lend("p")
    held = [first]
    Browser.take_back(held)
    assert held == [] and Browser.lend("p") is first
    Browser.take_back([first])
    other = Browser.lend("q")  # an idle one of another page makes room
    assert other not in (first, second) and not first.end.alive and second.end.alive
    other.process.kill()
    other.process.wait()
    Browser.take_back([other])
    assert Browser.lend("q") is not other  # a dead one is not lent


# ---- an environment of one's own -------------------------------------------------------------------------------------


class Echo:
    """Say the word of the task."""

    def reset(self, seed=None):
        self.seed = seed
        return f"Say {seed}.\nAction:", {}

    def step(self, text):
        won = text == str(self.seed)
        return "Again.\nAction:", float(won), won, False, {"success": won}


class Full(Echo):
    return_bounds, max_action_tokens, max_steps = (0.0, 2.0), 5, 3

    def __init__(self, seed, split):
        self.given = seed, split

    def expert(self):
        return str(self.seed)


class Silent(Echo):
    def step(self, text):
        return "Over.", 0.0, True, False, {}


def test_own_environment_gets_defaults():
    env = make_env(Echo, seed=4)
    obs, info = env.reset(seed=7)
    assert obs == "Say 21.\nAction:" and info == {"success": False, "valid": True, "cut": False, "task": "gym/Echo"}
    assert (env.return_bounds, env.max_action_tokens) == ((-1.0, 1.0), 16)
    assert not hasattr(env, "expert") and not hasattr(env, "judge")
    assert env.step("21")[1:4] == (1.0, True, False)
    env.reset()
    results = [env.step("no") for _ in range(30)]
    assert [r[3] for r in results] == [False] * 29 + [True]  # truncated after max_steps


def test_own_environment_is_told_what_it_asks_for():
    env = make_env(Full, seed=4, split="val")
    assert env.given == (4, "val") and env.reset(seed=7)[0].startswith("Say 7.")  # it knows its split: the seed is kept
    assert (env.return_bounds, env.max_action_tokens, env.expert()) == ((0.0, 2.0), 5, "7")
    assert [env.step("no")[3] for _ in range(3)] == [False, False, True]


def test_own_environment_seeds_of_the_splits_are_disjoint():
    seen = [{make_env(Echo, split=split).reset(seed=s)[0] for s in range(20)} for split in envs.SPLITS]
    assert all(len(texts) == 20 for texts in seen) and not (seen[0] & seen[1] | seen[0] & seen[2] | seen[1] & seen[2])
    first, second = make_env(Echo, seed=1), make_env(Echo, seed=1)
    assert [first.reset()[0] for _ in range(3)] == [second.reset()[0] for _ in range(3)]


def test_own_environment_must_say_whether_it_succeeded():
    env = make_env(Silent)
    env.reset(seed=1)
    with pytest.raises(ValueError, match=r'info\["success"\]'):
        env.step("x")


@pytest.mark.parametrize("name, message", {
    "gym/x": "expected gym/<module:Class>", "gym/:A": "expected gym/<module:Class>",
    "gym/no_such_module_here:A": "No module named", "gym/json:Nothing": "json has no class Nothing",
    "gym/json:dumps": "json has no class dumps",
    "gym/fractions:Fraction": "Fraction is no environment: it has no reset()",
}.items())  # fmt: skip
def test_own_environment_errors_are_one_line(name, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        make_env(name)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("flags, missing", [
    (dict(demos=3, random_episodes=0), "expert(): --demos 0"),
    (dict(demos=0, random_episodes=2), "legal_actions(): --random_episodes 0"),
])  # fmt: skip
def test_missing_method_names_the_flag_that_does_without(flags, missing):
    args = SimpleNamespace(env="gym/x:Echo", seed=1, **flags)
    with pytest.raises(common.UserError, match=re.escape(missing)):
        common.training_env(lambda name, **kw: make_env(Echo, **kw), args)
    args.demos = args.random_episodes = 0
    assert common.training_env(lambda name, **kw: make_env(Echo, **kw), args).name == "gym/Echo"


def test_defaults_of_a_family_of_environments():
    args = SimpleNamespace(env="miniwob/click-tab", num_envs=50, explicit=set())
    args.resume = args.eval_only = args.out = ""
    args.model, args.seed, args.dtype, args.device = "tiny", 1, "auto", "cpu"
    folder, _ = common.settle_args(args, {("env", "miniwob/*"): dict(num_envs=8), ("env", "mini*"): dict(num_envs=9)})
    assert args.num_envs == 8 and "miniwob-click-tab" in folder.name
    args.env, args.out, args.explicit = "gym/a:B", "", {"num_envs"}
    folder, _ = common.settle_args(args, {("env", "gym/*"): dict(num_envs=2)})
    assert args.num_envs == 8 and "gym-a-B" in folder.name


def test_reward_label_compares_what_two_segments_earned():
    reward_label = common.reward_label
    better, worse = ([SimpleNamespace(env_reward=r) for r in rewards] for rewards in ((0.0, 0.5, -0.02), (-0.02, 0.25)))
    assert reward_label(better, worse, 0.05) == (1.0, 1)  # 0.48 against 0.23; the second turn earned most
    assert reward_label(worse, better, 0.05) == (0.0, 1)
    assert reward_label(better, better[:2], 0.05) == (0.5, None)  # 0.48 against 0.5


def example() -> str:
    section = (ROOT / "README.md").read_text().split("## Your own environment in ten lines")[1]
    return re.search(r"```python\n(.*?)```", section, re.DOTALL)[1]


def run_own(tmp_path, source, name, algorithm="threespo", *flags):
    (tmp_path / "guess.py").write_text(source)
    argv = [sys.executable, str(ROOT / f"{algorithm}.py"), "--env", f"gym/guess:{name}", "--out", "run", *TINY, *flags]
    return subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=600)


def test_readme_example_plays(tmp_path, monkeypatch):
    (tmp_path / "guess.py").write_text(example())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    env = make_env("gym/guess:Guess", split="val")
    for seed in range(20):
        obs, _ = env.reset(seed=seed)
        assert obs == "Guess a number from 1 to 20.\nAction:"
        info, rewards = finish(env, obs, lambda env: env.expert())
        assert info["success"] and sum(rewards) == 1.0 and len(rewards) <= 5  # halving finds one of 20 in five
    sys.modules.pop("guess")


@pytest.mark.e2e
def test_readme_example_trains(tmp_path):
    flags = "--score_episodes 3 --random_episodes 2 --score_epochs 1".split()
    result = run_own(tmp_path, example(), "Guess", "threespo", *flags)
    assert result.returncode == 0, result.stderr[-2000:]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["env"] == "gym/guess:Guess" and summary["test"]["episodes"] == 3 and summary["env_steps"] >= 40


@pytest.mark.e2e
def test_training_without_an_expert_and_without_a_judge(tmp_path):
    source = re.sub(r"    def (expert|legal_actions).*?\n(?=\n|\Z|    def)", "", example(), flags=re.DOTALL)
    assert "expert" not in source and "legal_actions" not in source
    result = run_own(tmp_path, source, "Guess", "stepopsd", "--demos", "4")
    assert result.returncode == 2 and "no expert(): --demos 0 does without" in result.stderr
    assert result.stderr.count("error:") == 1 and "Traceback" not in result.stderr
    result = run_own(tmp_path, source, "Guess", "stepopsd", "--demos", "0", "--pairs", "12")
    assert result.returncode == 0, result.stderr[-2000:]
    assert "no demonstrations" in result.stdout


# ---- TextWorld -------------------------------------------------------------------------------------------------------

SPECS = "coin_collector-5", "coin_collector-104", "cooking", "cooking-2", "simple"


@pytest.fixture
def games(tmp_path_factory, monkeypatch):
    """A cache of games of this test session."""
    monkeypatch.setenv("LLM_AGENT_RL_CACHE", str(tmp_path_factory.getbasetemp() / "games"))


@pytest.mark.textworld
@pytest.mark.parametrize("split", envs.SPLITS)
@pytest.mark.parametrize("spec", SPECS)
def test_textworld_expert_wins_and_states_are_short(spec, split, games):
    env, lengths = make_env(f"textworld/{spec}", split=split), []
    for seed in range(4):
        obs, info = env.reset(seed=seed)
        done, total = False, 0.0
        while not done:
            lengths.append(len(obs))
            listed = re.search(r"^Actions: (.*)$", obs, re.MULTILINE)[1].split(" | ")
            assert obs.endswith("\nAction:") and listed == env.legal_actions() and env.expert() in listed
            obs, reward, terminated, truncated, info = env.step(env.expert())
            assert info["valid"] and not info["repaired"]
            total += reward
            done = terminated or truncated
        assert info["success"] and terminated and total == pytest.approx(1.0)
    assert statistics.median(lengths) <= (620 if spec == "cooking-2" else 440)  # characters, 3.7 a token: 120 tokens


@pytest.mark.textworld
def test_textworld_chain_by_hand(games):
    """Level 1 is one room with the coin in it."""
    env = make_env("textworld/coin_collector-1")
    obs, _ = env.reset(seed=0)
    room = re.search("Room: (.*)", obs)[1]
    assert obs == f"Goal: find the coin and take it\nRoom: {room}\nActions: take coin\nAction:"
    obs, reward, terminated, truncated, info = env.step("fly away")
    assert (reward, terminated, info["valid"], info["error"]) == (-0.02, False, False, "not possible here")
    assert f"Room: {room}\nText: error: 1 of 3, not possible here.\nActions" in obs
    assert env.step("look")[1] == 0.0 and env.step(" Look.")[1] == -0.01  # legal, then repeated
    obs, reward, terminated, truncated, info = env.step('Action: Action: "Take coin"\n')
    assert (reward, terminated, truncated, info["success"], info["repaired"]) == (1.0, True, False, True, True)


@pytest.mark.textworld
def test_textworld_three_fruitless_actions_and_a_lost_game_end_it(games):
    env = make_env("textworld/cooking")
    env.reset(seed=3)
    results = [env.step("dance") for _ in range(3)]
    assert [r[2] for r in results] == [False, False, True] and not results[-1][4]["success"]
    env.reset(seed=3)
    while "Carried:" not in env._observe():
        env.step(env.expert())
    food = next(c for c in env.game.admissible_commands if c.startswith("eat "))  # an ingredient the meal needs
    _, reward, terminated, _, info = env.step(food)
    assert terminated and not info["success"] and reward <= 0


@pytest.mark.textworld
def test_textworld_games_are_the_same_everywhere_and_splits_are_not(games, tmp_path):
    script = (f"import sys; sys.path.insert(0, {str(ROOT)!r})\nimport envs\n"
              "for spec in ('coin_collector-104', 'cooking-2'):\n"
              "    for split in envs.SPLITS:\n"
              "        env = envs.make_env('textworld/' + spec, split=split)\n"
              "        obs, info = env.reset(seed=5)\n"
              "        while not info['success']:\n"
              "            print(obs); obs, _, _, _, info = env.step(env.expert())\n")  # fmt: skip
    texts = []
    for number in (1, 2):
        env = {**os.environ, "PYTHONHASHSEED": str(number), "LLM_AGENT_RL_CACHE": str(tmp_path / str(number))}
        run = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=300)
        assert run.returncode == 0, run.stderr
        texts.append(run.stdout)
    assert texts[0] == texts[1]
    assert len(set(texts[0].split("Goal: ")[1:])) > 20  # and none of the six games is another


@pytest.mark.textworld
def test_textworld_saves_restores_and_caches(games):
    env = make_env("textworld/cooking")
    env.reset(seed=8)
    env.step(env.expert())
    saved = json.loads(json.dumps(env.save()))
    rest = finish(env, "", lambda env: env.expert())
    other = make_env("textworld/cooking")
    assert other.restore(saved) == env.restore(saved)
    assert finish(other, "", lambda env: env.expert()) == rest and rest[0]["success"]
    files = sorted(Path(os.environ["LLM_AGENT_RL_CACHE"]).rglob("cooking/train-*.json"))
    stamps = [f.stat().st_mtime_ns for f in files]
    make_env("textworld/cooking").reset(seed=8)
    assert files and [f.stat().st_mtime_ns for f in files] == stamps  # not made again
    seeds = {int(re.search(r"-(\d+)\.json", f.name)[1]) % 3 for f in files}
    assert seeds == {0}  # train: 3k, val: 3k + 1, test: 3k + 2


@pytest.mark.textworld
@pytest.mark.parametrize("spec, message", {
    "chess": "unknown game 'chess'", "cooking-9": "level from 1 to 3", "coin_collector-x": "level from 1 to 150",
    "simple-": "level from 1 to 1", "coin_collector-0": "level from 1 to 150",
}.items())  # fmt: skip
def test_textworld_unknown_spec(spec, message):
    with pytest.raises(ValueError, match=message):
        make_env(f"textworld/{spec}")


# ---- real pages ------------------------------------------------------------------------------------------------------


@pytest.fixture
def browsers():
    yield
    for browser in list(Browser.alive):
        browser.end()
    Browser.idle.clear()


@pytest.mark.browser
@pytest.mark.parametrize("page", list(MiniWob.EXPERTS))
def test_miniwob_expert_succeeds_on_every_split(page, browsers):
    states, lost = [], []
    for split in envs.SPLITS:
        env = make_env(f"miniwob/{page}", split=split)
        for seed in range(4):
            obs, info = env.reset(seed=seed)
            states.append(obs)
            assert obs.startswith("Goal: ") and f"\nPage: {page}\n" in obs and obs.endswith("\nAction:")
            assert env.judge([(obs, env.expert()), (obs, "click nothing")]) == 0.5
            info, rewards = finish(env, obs, lambda env: env.expert())
            lost += [] if info["success"] else [(split, seed)]
            assert rewards[-1] == float(info["success"]) and set(rewards[:-1]) <= {0.0} and info["valid"]
        first = make_env(f"miniwob/{page}", split=split).reset(seed=0)[0]
        assert first == states[-4]  # a page is its seed, in whichever browser
    # "In" and "in" are links of one page there, and a label is shown in lower case
    assert lost == ([("val", 2)] if page == "click-tab-2" else [])
    assert len(set(states)) >= (2 if page == "click-dialog" else 6)


@pytest.mark.browser
def test_miniwob_success_is_the_full_raw_reward_only(browsers):
    env = make_env("miniwob/click-checkboxes")
    for seed in range(20):
        env.reset(seed=seed)
        wanted = re.search("Select (.*) and", env.goal)[1]
        if wanted != "nothing" and len(env.page.inputs) > 2:
            break
    obs, reward, terminated, _, info = env.step("click submit")  # nothing selected: some boxes are right all the same
    assert terminated and not info["success"] and reward == 0.0


@pytest.mark.browser
def test_miniwob_illegal_repeated_and_replaced_input(browsers):
    env = make_env("miniwob/login-user")
    env.reset(seed=1)
    obs, reward, *_, info = env.step("click logout")
    assert reward == -0.02 and "error: 1 of 3, no such link or button here." in obs and not info["valid"]
    assert env.step("answer ann")[4]["error"] == "unreadable; use click, type or select"
    obs, reward, *_, info = env.step('type "Username" "ann b"')
    assert "username = ann b" in obs and reward == 0.0 and info["repaired"] and info["valid"]
    obs, *_ = env.step("type username: bob")
    assert "username = bob" in obs  # replaced, not appended
    obs, reward, *_ = env.step("type username: bob")
    assert reward == 0.0 and "done before" not in obs  # the page was another one
    obs, reward, terminated, *_ = env.step("type username: bob")
    assert reward == -0.01 and "done before" in obs and not terminated
    with pytest.raises(NotImplementedError, match="cannot be saved"):
        env.save()


@pytest.mark.browser
def test_miniwob_select(browsers):
    env = make_env("miniwob/choose-list")
    obs, _ = env.reset(seed=2)
    assert not env.expert and not env.judge  # no script for this page
    field, choice = env.page.inputs[0].label, re.search(r"Select (.*) from the list", env.goal)[1]
    assert " = " in obs and "; or " in obs
    assert env.step(f'select "{field}" "no such thing"')[4]["error"] == "no such option here"
    obs, *_, info = env.step(f'select "{field}" "{choice}"')
    assert info["valid"] and f"{field} = {choice}" in obs
    _, reward, terminated, _, info = env.step("click submit")
    assert reward == 1.0 and terminated and info["success"]


@pytest.mark.browser
def test_miniwob_dead_browser_costs_the_episode_only(browsers):
    pool = common.EnvPool(make_env, SimpleNamespace(env="miniwob/click-tab", seed=0), "train")
    episode = pool.begin(3)[0]
    leader, folder = episode.env.held[0].process.pid, episode.env.held[0].folder
    for pid in envs._session_of(leader):
        if "chromium" in Path(f"/proc/{pid}/cmdline").read_text() and pid != leader:
            os.kill(pid, signal.SIGKILL)
    assert pool.step(episode, "click tab #1", False, "eos") is None and pool.stats["env_errors"] == 1
    assert gone(leader, folder)
    again = pool.begin(3)[0]
    assert again.env.held[0].process.pid != leader and again.obs == episode.obs
    assert pool.step(again, again.env.expert(), False, "eos")[:2] == (1.0, True) and pool.stats["success"] == 1


@pytest.mark.browser
@linux
@pytest.mark.parametrize("way", ["end", "exception", "interrupt", "killed", "killed while it works"])
def test_miniwob_leaves_no_process_behind(way, tmp_path):
    script = f"""
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
sys.path.insert(0, {str(ROOT)!r})
import envs
env = envs.make_env("miniwob/click-tab")
env.reset(seed=1)
browser = env.held[0]
print(browser.process.pid, browser.folder, flush=True)
if {way!r} == "exception":
    raise KeyError("as it happens")
if {way!r} == "killed while it works":
    browser.process.stdin.write(b'{{"seed": 3}}\\n')
    browser.process.stdin.flush()
    os.kill(os.getpid(), 9)
if {way!r} != "end":
    time.sleep(100)
"""
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    leader, folder = child.stdout.readline().split()
    if way in ("interrupt", "killed"):
        assert len(envs._session_of(int(leader))) > 3  # a worker, a driver, a browser
        child.send_signal(signal.SIGINT if way == "interrupt" else signal.SIGKILL)
    child.wait(60)
    child.stdout.close()
    child.stderr.close()
    assert gone(int(leader), folder)


@pytest.mark.browser
def test_miniwob_unknown_page_suggests_known_ones():
    with pytest.raises(ValueError, match="did you mean: .*click-tab"):
        make_env("miniwob/click-tabb")


def test_labels_that_end_in_signs():
    page = page_of(links="purus. | augue. | augue | tab #1", buttons="ok!")
    for text, label, repaired in (
        ("click purus.", "purus.", False), ("click augue.", "augue.", False), ("click augue", "augue", False),
        ("Click Purus.", "purus.", True), ('click "purus."', "purus.", False), ("click tab #1", "tab #1", False),
    ):  # fmt: skip
        action = envs._parse_page_action(text, page)
        assert (action.args, action.repaired) == ((label,), repaired), text
    elements = page.links + page.buttons
    found = {text: envs._labelled(elements, text) for text in ("purus", "purus!", "augue", "augue.", "ok", "tab", ".")}
    assert {text: e and e.label for text, e in found.items()} == {
        "purus": "purus.", "purus!": "purus.", "augue": "augue", "augue.": "augue.", "ok": "ok!",
        "tab": None, ".": None,
    }  # fmt: skip
    assert envs._press(elements, "Purus.") == "click purus."


@pytest.mark.parametrize("algorithm", ["stepopsd", "slea_rl"])
@pytest.mark.parametrize("env", [pytest.param("miniwob/click-tab-2", marks=pytest.mark.browser),
                                 pytest.param("textworld/coin_collector-1", marks=pytest.mark.textworld)])  # fmt: skip
def test_the_other_algorithms_run_on_pages_and_games(tmp_path, algorithm, env):
    """From the warm-up to the test, with the whole action as a step (threespo.py is measured on both in the README)."""
    flags = ["--pairs", "12"] if algorithm == "stepopsd" else []
    argv = [sys.executable, str(ROOT / f"{algorithm}.py"), "--env", env, "--out", str(tmp_path / "run"), *TINY, *flags]
    result = subprocess.run(argv, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]
    rows = common.read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert any(row["stage"] != "warmup" and row.get("rollout/env_errors") == 0 for row in rows)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["test"]["episodes"] == 3
