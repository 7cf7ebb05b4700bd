"""Plays many browser episodes, by the expert and at random, and reports leaks: python tests/browser_soak.py

Columns: episodes, success of expert and random episodes, errors, seconds an episode, processes and resident memory (MB;
shared pages count once in PSS) of this process and its browsers. At the end: what is left when the browsers are closed.
"""

import argparse
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import envs


def memory(pids) -> float:
    """Proportional set size in MB, summed over processes."""
    total = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue  # it ended
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total / 1024


def play(env, rng, seed: int, expert: bool) -> bool:
    env.reset(seed=seed)
    done = False
    while not done:
        choose = env.expert if expert else lambda: rng.choice(env.legal_actions())
        _, _, terminated, truncated, info = env.step(choose())
        done = terminated or truncated
    return info["success"]


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--episodes", type=int, default=500)
    parser.add_argument("--pages", default=",".join(envs.MiniWob.EXPERTS))
    parser.add_argument("--every", type=int, default=50, help="episodes between two lines")
    args = parser.parse_args(argv)
    rng, wins, counts, errors = random.Random(0), [0, 0], [0, 0], 0
    pages, started, leaders = args.pages.split(","), time.monotonic(), set()
    each = -(-args.episodes // len(pages))
    for episode in range(args.episodes):
        page, expert = pages[episode // each], episode % 2 == 0
        if episode % each == 0:  # the next page
            for browser in envs.Browser.idle.pop(pages[episode // each - 1], []) if episode else []:
                browser.end()
            env = envs.make_env(f"miniwob/{page}")
        try:
            wins[expert] += play(env, rng, episode, expert)
            counts[expert] += 1
        except RuntimeError as error:
            print(f"episode {episode}: {error}", file=sys.stderr)
            errors += 1
        leaders |= {b.process.pid for b in envs.Browser.alive}
        if episode % args.every == args.every - 1:
            pids = [pid for leader in leaders for pid in envs._session_of(leader)]
            rate = (time.monotonic() - started) / (episode + 1)
            won = f"expert {wins[1]}/{counts[1]} random {wins[0]}/{counts[0]} errors {errors}"
            used = f"{len(pids)} processes {memory(pids):.0f} MB, this one {memory(['self']):.0f} MB"
            print(f"{episode + 1} {page} {won} {rate:.2f} s {used}", flush=True)
    for browser in list(envs.Browser.alive):
        browser.end()
    left = [pid for leader in leaders for pid in envs._session_of(leader)]
    print(f"left after the end: {len(left)} processes; {len(leaders)} browsers were started")
    return bool(left or errors or wins[1] < counts[1])


if __name__ == "__main__":
    sys.exit(main())
