"""Tasks for LLM agents: text in, text out; procedural, deterministic, offline, no torch.

    env = make_env("webnav", seed=0, split="train")      # split: train, val or test (disjoint tasks, words and layouts)
    obs, info = env.reset(seed=7)                        # task 7, for ever the same; None: the next of its own
    obs, reward, terminated, truncated, info = env.step('click "lamps"')
    env.expert(), env.legal_actions()                    # a good action text; a finite list of legal ones
    env.save(), env.restore(state)                       # plain data, for look-ahead and for resuming

`obs` is the whole prompt and ends with "Action:".
`info` always holds success, valid, repaired, cut, action, task, error.
`python envs.py` lists the environments; `python envs.py NAME [--split S] [--seed N]` lets a person play.
"""

import argparse
import contextlib
import copy
import ctypes
import difflib
import importlib
import importlib.util
import inspect
import itertools
import json
import math
import os
import queue
import random
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
import zlib
from collections import deque
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from html import escape
from pathlib import Path
from typing import ClassVar, NamedTuple
from unittest import mock
from urllib.parse import quote_plus, unquote_plus

from bs4 import BeautifulSoup, NavigableString, Tag
from bs4.builder import ParserRejectedMarkup

SPLITS = ("train", "val", "test")

# ======================================================================================================================
# Reading a page: HTML -> Page -> prompt text
# ======================================================================================================================

MAX_RAW_CHARS = 4_000_000  # read at most this much of a page
MAX_HTML_CHARS = 150_000  # parsed at most, after scripts, styles and comments are gone
MAX_TAGS = 5_000  # "<" characters parsed at most: bounds the tree's depth and the parser's time
MAX_TEXT_CHARS = 2_000  # kept in Page.text before it is fitted to a state
MAX_STATE_CHARS = 900  # default length of a rendered state
MAX_ELEMENTS = 20  # links, buttons and inputs kept, each
MAX_LABEL_CHARS = 60
_DROP_OPEN = re.compile(r"<(script|style|svg|noscript|template|iframe)\b|<!--", re.IGNORECASE)
_SKIP_TAGS = {"script", "style", "svg", "noscript", "template", "iframe", "option", "meta", "link"}
_SPACE = re.compile(r"[\s\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\ufeff]+")


class Element(NamedTuple):
    """Something to act on: its label as shown in the state, where it leads, and an input's present value."""

    label: str
    target: str
    value: str = ""


@dataclass(frozen=True)
class Page:
    """What the extractor read. `cut` is True if any text, label or list had to be shortened."""

    title: str = ""
    url: str = ""
    text: str = ""
    links: tuple[Element, ...] = ()
    buttons: tuple[Element, ...] = ()
    inputs: tuple[Element, ...] = ()
    cut: bool = False


def clean(text: str) -> str:
    """One line: every run of white space and control characters becomes one blank; lone surrogates become '?'."""
    return _SPACE.sub(" ", text).strip().encode("utf-8", "replace").decode("utf-8")


def _without_scripts(html: str) -> str:
    """Drops scripts, styles and comments in one forward pass (an unclosed one drops the rest)."""
    kept, position = [], 0
    while (opening := _DROP_OPEN.search(html, position)) is not None:
        kept.append(html[position : opening.start()])
        closing = f"</{opening[1]}\\s*>" if opening[1] else "-->"
        end = re.compile(closing, re.IGNORECASE).search(html, opening.end())
        if end is None:
            return "".join(kept)
        position = end.end()
    kept.append(html[position:])
    return "".join(kept)


def _interactive(node: Tag) -> bool:
    if node.name == "a":
        return node.has_attr("href")
    return node.name in ("button", "input", "select", "textarea") or node.get("role") == "button"


def _label(node: Tag) -> tuple[str, list]:
    """An element's text, and the nodes that an unclosed tag had swallowed (they follow it in the page)."""
    todo, parts, budget = list(reversed(node.contents)), [], 50
    while todo and budget:
        item = todo.pop()
        budget -= 1
        if isinstance(item, Tag):
            if _interactive(item):
                todo.append(item)
                break
            if item.name == "img" and item.get("alt"):
                parts.append(str(item["alt"]))
            elif item.name not in _SKIP_TAGS:
                todo.extend(reversed(item.contents))
        elif type(item) is NavigableString:
            parts.append(item[: 4 * MAX_LABEL_CHARS])
    text = clean(" ".join(parts)) or clean(str(node.get("aria-label") or node.get("title") or ""))
    return text, todo


def _numbered(elements: list[tuple[str, str, str]]) -> tuple[tuple[Element, ...], bool]:
    """Lowercase, quote-free labels; the second of two equal ones is called `label #2`."""
    seen, result, cut = {}, [], len(elements) > MAX_ELEMENTS
    for label, target, value in elements[:MAX_ELEMENTS]:
        label = clean(label).lower().replace('"', "'").replace(" | ", " / ") or "unnamed"
        if len(label) > MAX_LABEL_CHARS:
            label, cut = label[:MAX_LABEL_CHARS].rstrip(), True
        seen[label] = seen.get(label, 0) + 1
        label = f"{label} #{seen[label]}" if seen[label] > 1 else label
        result.append(Element(label, target[:500], clean(value[:200])[:MAX_LABEL_CHARS]))
    return tuple(result), cut


def _whole_tags(body: str) -> str:
    """Makes every "<" that starts no complete tag plain text: html.parser would search the rest of the page for each.

    A "<" inside a quoted attribute is kept as "&lt;".
    """
    pieces, index = body.split("<"), 1
    parts = pieces[:1]
    while index < len(pieces):
        piece, end = pieces[index], index
        if ">" not in piece and piece[:1].isalpha() and piece.count('"') % 2:  # an attribute that holds a "<"?
            ahead = range(index + 1, min(index + 9, len(pieces)))
            end = next((i for i in ahead if '"' in pieces[i]), index)
            end = end if ">" in pieces[end].partition('"')[2] else index
            piece = "&lt;".join(pieces[index : end + 1])
        parts.append(("<" if ">" in piece else " ") + piece)
        index = end + 1
    return "".join(parts)


@lru_cache(maxsize=4096)
def _extract(html: str) -> Page:
    cut = len(html) > MAX_RAW_CHARS
    html = html[:MAX_RAW_CHARS].encode("utf-8", "replace").decode("utf-8")  # the parser raises on a lone surrogate
    body = _without_scripts(html.replace("\x00", " "))
    if len(body) > MAX_HTML_CHARS:
        body, cut = body[:MAX_HTML_CHARS], True
    pieces = body.split("<", MAX_TAGS)
    if len(pieces) > MAX_TAGS:
        body, cut = "<".join(pieces[:-1]), True
    try:
        soup = BeautifulSoup(_whole_tags(body), "html.parser")
    except ParserRejectedMarkup:  # e.g. "<![broken": keep the words, lose the structure
        return Page(text=clean(re.sub(r"<[^<>]*>?", " ", body))[:MAX_TEXT_CHARS], cut=True)
    texts, length, title, heading, named = [], 0, "", "", {}
    links, buttons, inputs, field_ids = [], [], [], []
    stack = [soup]
    while stack:  # an explicit stack: depth costs no recursion
        node = stack.pop()
        if not isinstance(node, Tag):
            if type(node) is NavigableString and length <= MAX_TEXT_CHARS:
                texts.append(clean(node[: MAX_TEXT_CHARS + 1]))
                length += len(texts[-1])
            continue
        if node.name in _SKIP_TAGS or node.has_attr("hidden") or "display:none" in str(node.get("style", "")):
            continue
        kind = str(node.get("type", "")).lower()
        if node.name == "a" and node.has_attr("href"):
            label, swallowed = _label(node)
            links.append((label, str(node["href"]), ""))
            stack.extend(swallowed)
        elif node.name == "button" or node.get("role") == "button":
            label, swallowed = _label(node)
            buttons.append((label, str(node.get("formaction") or node.get("name") or ""), ""))
            stack.extend(swallowed)
        elif node.name == "input" and kind in ("submit", "button", "reset", "image"):
            buttons.append((str(node.get("value") or kind), str(node.get("formaction") or node.get("name") or ""), ""))
        elif node.name in ("input", "select", "textarea"):
            if kind != "hidden":
                label = node.get("aria-label") or node.get("placeholder") or ""
                inputs.append((str(label), str(node.get("name") or node.get("id") or ""), str(node.get("value") or "")))
                field_ids.append(str(node.get("id") or ""))
        elif node.name == "label" and node.has_attr("for"):
            named[str(node["for"])], swallowed = _label(node)
            stack.extend(swallowed)
        elif node.name == "h1" and not heading:
            heading, swallowed = _label(node)
            stack.extend(swallowed)
        elif node.name == "title":
            title = title or _label(node)[0]
        else:
            stack.extend(reversed(node.contents))
    inputs = [
        (named.get(i) or label or name, name, value) for i, (label, name, value) in zip(field_ids, inputs, strict=True)
    ]
    if heading and heading != title:
        texts.insert(0, heading + ".")
    text = clean(" ".join(t for t in texts if t))
    title = title or heading
    lists = [_numbered(x) for x in (links, buttons, inputs)]
    cut = cut or any(c for _, c in lists) or len(text) > MAX_TEXT_CHARS or len(title) > 2 * MAX_LABEL_CHARS
    return Page(
        title[: 2 * MAX_LABEL_CHARS].lower(), "", text[:MAX_TEXT_CHARS], lists[0][0], lists[1][0], lists[2][0], cut
    )


def html_to_state(html: str, goal: str = "", url: str = "", history=(), max_chars: int = MAX_STATE_CHARS) -> Page:
    """Reads any page: title, text, links, buttons, inputs; bounded in time, depth and size on hostile HTML.

    The text is shortened so that `render_state(page, goal, history)` has at most max_chars characters (if the goal and
    the elements alone leave no room, the text goes first, and only then the element lists are shortened).
    history: (page title, action text) pairs, oldest first.
    """
    page = replace(_extract(html), url=clean(url)[:MAX_LABEL_CHARS])
    excess = len(render_state(page, goal, history)) - max_chars
    if excess <= 0:
        return page
    page = replace(page, text=page.text[: max(0, len(page.text) - excess - 3)].rstrip(), cut=True)
    page = replace(page, text=page.text + "..." if page.text else "")
    for name in ("links", "buttons", "inputs"):  # only enormous lists of foreign pages come here
        while len(render_state(page, goal, history)) > max_chars and len(getattr(page, name)) > 5:
            page = replace(page, **{name: getattr(page, name)[:-1]})
    return page


def render_history(history, keep: int = 3) -> str:
    """The last `keep` actions in full; of older ones only the pages where they happened (at most 4)."""
    older, recent = history[: max(0, len(history) - keep)], history[-keep:]
    titles = list(dict.fromkeys(title for title, _ in reversed(older)))[:4][::-1]
    return " > ".join((["visited: " + ", ".join(titles)] if titles else []) + [action for _, action in recent])


def render_state(page: Page, goal: str = "", history=(), error: str = "") -> str:
    """The prompt: one line for each part that is not empty, ending with `Action:`.

    Labels and old actions stand without quotes: for ` click red lamp` a language model copies the very tokens of
    ` red lamp`, while the `red` of `"red` is another token than ` red`.
    """
    lines = [f"Goal: {goal}"] if goal else []
    lines.append(f"Page: {page.title or 'untitled'}" + (f" | {page.url}" if page.url else ""))
    text = " ".join(([f"error: {error}."] if error else []) + ([page.text] if page.text else []))
    lines += [f"Text: {text}"] if text else []  # an error looks like any page: a small model must not lose its footing
    if page.links:
        lines.append("Links: " + " | ".join(e.label for e in page.links))
    if page.buttons:
        lines.append("Buttons: " + " | ".join(e.label for e in page.buttons))
    if page.inputs:
        lines.append("Inputs: " + " | ".join(f"{e.label} = {e.value}" if e.value else e.label for e in page.inputs))
    if history:
        lines.append("Done: " + render_history(list(history)))
    return "\n".join(lines + ["Action:"])


# ======================================================================================================================
# Reading an action
# ======================================================================================================================

MAX_ACTION_CHARS = 600  # an action text is read up to here
_STRICT = re.compile(r'back|(?:click|answer) "[^"\n]+"|type "[^"\n]+" "[^"\n]+"')
_WORD = r"[^\"\n`'(\u2018-\u201f\u00ab\u00bb\s:]"  # what an unquoted argument begins with
_PLAIN = re.compile(
    rf'(click|answer) (?!on |the |in )({_WORD}(?:[^"\n`]*[^"\n`.,;:)\s])?)'
    rf'|(type) (?!in )({_WORD}[^"\n`:]*): ({_WORD}(?:[^"\n`]*[^"\n`.,;:)\s])?)'
)
_QUOTED = re.compile(
    r'\b(click|type|answer)\b[\s:(]*(?:(?:on|the|in|into|is)\s+)*"([^"\n]+)"(?:\s*[,:=]?\s*"([^"\n]+)")?\s*(#\d+)?',
    re.IGNORECASE,
)
_BARE = re.compile(
    r"^[^\w\n]*(?:(?:next )?action\s*:)?\W*(click|type|answer|back)\b[ \t:(]*([^\n]*)", re.IGNORECASE | re.MULTILINE
)


class Action(NamedTuple):
    verb: str  # click, type, back, answer; "" if unreadable
    args: tuple[str, ...] = ()
    repaired: bool = False

    def __str__(self):
        """Without quotes (`click red lamp`, `type search: red lamp`) where that reads back the same, else with."""
        plain = f"{self.verb} {': '.join(self.args)}".strip()
        if not self.args or _read_plain(plain) == (self.verb, self.args, False):
            return plain
        return " ".join([self.verb, *(f'"{a}"' for a in self.args)])


def _read_plain(text: str) -> Action | None:
    """An action written without quotes and without anything to forgive."""
    match = _PLAIN.fullmatch(text)
    if match is None or text != clean(text):
        return None
    verb, *args = (part for part in match.groups() if part)
    return Action(verb, tuple(args))


def parse_action(text: str, fields: tuple[str, ...] = ()) -> Action:
    """Reads `click "<label>"`, `type "<field>" "<text>"`, `back` or `answer "<text>"`, or the same without quotes:
    `click <label>`, `type <field>: <text>`, `answer <text>`.

    Forgives (and reports as repaired) case, other or missing quotes, code fences, prose around the action, an `Action:`
    prefix, call style `click("x")` and `click "x" #2` for `click "x #2"`. The first action in the text counts.
    fields: labels of the page's inputs, to split an unquoted `type search red lamp`.
    """
    long = len(text) > MAX_ACTION_CHARS
    text = text[:MAX_ACTION_CHARS].encode("utf-8", "replace").decode("utf-8").strip()
    if not long and _STRICT.fullmatch(text) and text == clean(text):
        verb, *rest = text.split(" ", 1)
        return Action(verb, tuple(re.findall(r'"([^"]+)"', rest[0])) if rest else ())
    if not long and (plain := _read_plain(text)):
        return plain
    text = re.sub(r"^`{3,}[a-z]*\s*$|`{3,}", "", text, flags=re.MULTILINE | re.IGNORECASE)
    text = re.sub("[\u201c\u201d\u201e\u00ab\u00bb\u2018\u2019`\u00b4]|(?<!\\w)'|'(?!\\w)", '"', text)
    text = "\n".join(clean(line) for line in text.splitlines())
    quoted = next((m for m in _QUOTED.finditer(text) if (m[1].lower() == "type") == (m[3] is not None)), None)
    bare = _BARE.search(text)
    if quoted and not (bare and bare.start() < quoted.start() and "\n" in text[bare.start() + 1 : quoted.start()]):
        first = clean(quoted[2] + (f" {quoted[4]}" if quoted[4] and quoted[1].lower() == "click" else ""))
        args = tuple(a for a in (first, clean(quoted[3] or "")) if a)
        if len(args) == 1 + (quoted[1].lower() == "type"):
            return Action(quoted[1].lower(), args, True)
    if bare:
        verb, rest = bare[1].lower(), clean(bare[2].replace('"', " ")).strip(" .,;:()").removeprefix("on ")
        if verb == "back" and len(rest) < 20:
            return Action("back", (), True)
        if verb in ("click", "answer") and rest:
            return Action(verb, (rest,), True)
        for name in sorted(fields, key=len, reverse=True) if verb == "type" else ():
            if rest.lower().startswith(name + " "):
                return Action("type", (name, rest[len(name) :].strip(" ,:=")), True)
    if re.search(r"\bgo(ing)? back\b", text, re.IGNORECASE):
        return Action("back", (), True)
    return Action("")


# ======================================================================================================================
# The protocol
# ======================================================================================================================


class Env:
    """Common part of all environments: task seeds, the step counter, the end of an episode, save and restore.

    A subclass defines name, summary, OPTIONS, max_steps, _begin(rng), _act(text) -> (reward, terminated),
    _observe() -> text, expert, legal_actions, return_bounds, goal, task, _steps_of(goal).
    """

    name = summary = ""
    OPTIONS: ClassVar[dict] = {}
    cut = False  # was anything in the present state shortened?
    patience = 10**9  # so many fruitless actions in a row end the episode (terminated: the state shows the count)
    max_action_tokens = 16  # generation cap: the longest legal action with SmolLM2's tokenizer, and EOS

    def __init__(self, seed: int = 0, split: str = "train", **options):
        if split not in SPLITS:
            raise ValueError(f"unknown split {split!r}; use one of: {', '.join(SPLITS)}")
        for key in options:
            if key not in self.OPTIONS:
                raise ValueError(f"{self.name} has no option {key!r}; it has: {', '.join(self.OPTIONS) or 'none'}")
        self.seed, self.split, self.options = int(seed), split, {**self.OPTIONS, **options}
        self.count = 0  # tasks taken from the own sequence
        self.state = None  # plain data that changes within an episode

    def reset(self, seed: int | None = None):
        """Starts task `seed`, or the next of this environment's own sequence. Returns (obs, info)."""
        if seed is None:
            seed = random.Random(f"{self.name}/{self.split}/sequence/{self.seed}/{self.count}").randrange(2**31)
            self.count += 1
        self._make(int(seed))
        return self._observe(), self._info()

    def _make(self, seed: int):
        self.task_seed = seed
        self.state = {"steps": 0, "over": False, "success": False, "valid": True, "repaired": False, "action": ""}
        self.state |= {"error": "", "history": [], "repeat": False, "fruitless": 0}
        self._begin(random.Random(f"{self.name}/{self.split}/{seed}"))

    def step(self, text: str):
        """Takes one action text, whatever it holds. Returns (obs, reward, terminated, truncated, info)."""
        if self.state is None or self.state["over"]:
            raise RuntimeError("the episode is over or has not begun: call reset()")
        s = self.state
        s["steps"] += 1
        s.update(valid=True, repaired=False, action="", error="", repeat=False)
        reward, terminated = self._act(str(text))
        s["fruitless"] = s["fruitless"] + 1 if s["repeat"] or not s["valid"] else 0  # in a row
        terminated = terminated or s["fruitless"] >= self.patience
        truncated = not terminated and s["steps"] >= self.max_steps
        s["over"] = terminated or truncated
        return self._observe(), reward, terminated, truncated, self._info()

    def _info(self) -> dict:
        kept = {k: self.state[k] for k in ("success", "valid", "repaired", "action", "error")}
        return {**kept, "cut": self.cut, "task": self.task}

    def save(self) -> dict:
        """Everything that restore() needs, as plain data."""
        if self.state is None:
            return {"count": self.count, "task_seed": None, "state": None}
        return {"count": self.count, "task_seed": self.task_seed, "state": copy.deepcopy(self.state)}

    def restore(self, saved: dict):
        """Back to what save() saw. Returns the observation there (None before the first reset)."""
        self.count = saved["count"]
        if saved["state"] is None:
            self.state = None
            return None
        if self.state is None or self.task_seed != saved["task_seed"]:
            self._make(saved["task_seed"])
        self.state = copy.deepcopy(saved["state"])
        self._moved()
        return self._observe()

    def _moved(self):
        """Called when self.state was replaced: a place to drop what was computed from it."""

    def judge(self, segment) -> float:
        """Progress in [0, 1] over (obs text, action text) pairs, from the visible transcript alone."""
        goals = [m[1] for obs, _ in segment if (m := re.match(r"Goal: ([^\n]*)", obs))]
        if not goals:
            return 0.0
        steps = self._steps_of(goals[0])
        texts = [f"{obs} {action}" for obs, action in segment]
        total = sum(weight for _, weight in steps) or 1.0
        return sum(w for pattern, w in steps if any(re.search(pattern, t) for t in texts)) / total

    def key_steps(self) -> list[tuple[str, float]]:
        """(regular expression over `obs + " " + action`, weight) of the steps known to matter in this task."""
        return self._steps_of(self.goal)


# ======================================================================================================================
# webnav
# ======================================================================================================================

# Words of the shops. No word or label of one split appears in another: test shops speak differently, yet guessably.
WORDS = {
    "train": {
        "looks": (
            "red, small, round, soft, tall, heavy, plain, vintage, purple, orange, brown, short, thick, rough, "
            "smooth, fancy, cheap, tiny, matte, shiny, padded, hollow, sturdy, elegant, antique, sporty, black, "
            "white, pink, large, slim, folding, wide, light, woven, classic, gray, beige, turquoise, crimson, "
            "violet, ivory, long, huge, little, big, compact, flat, deep, sharp, warm, cool, fresh, dark, pale, "
            "quiet, strong, flexible, rigid, portable, wireless, electric, manual, royal, rural, urban, nordic, "
            "italian, french, winter, summer, spring, outdoor, indoor, travel, kids, junior, deluxe, premium, "
            "basic, standard, mini, double, single, triple, magnetic, waterproof, dusty, glossy, polished, "
            "painted, printed, curly, hooded, quilted, washable, foamy, sleek, stylish, cosy, lucky, happy, "
            "gentle, noble, grand, famous, secret"
        ),
        "stuffs": (
            "cotton, bamboo, leather, marble, birch, cedar, brass, denim, nylon, granite, stone, straw, ceramic, "
            "fleece, canvas, ebony, jute, tin, zinc, satin, pine, copper, linen, silver, cork, velvet, bronze, "
            "silk, aluminum, titanium, platinum, carbon, crystal, pearl, amber, coral, jade, ruby, slate, quartz, "
            "concrete, brick, mud, sand, wax, foam, gel, vinyl, acrylic, lace, tweed, suede, flannel, hemp, "
            "sisal, wicker, rattan, willow, beech, ash, elm, teak, mahogany, spruce, poplar, hickory, cashmere, "
            "mohair, alpaca, polyester, lycra, mesh, cardboard, horn, bone, shell, feather, fur, graphite, lead, "
            "nickel, cobalt, porcelain, enamel, resin, latex, terracotta"
        ),
        "nouns": (
            "chair, mug, kettle, blanket, clock, mirror, pillow, candle, bottle, table, kite, hamper, bucket, "
            "hammer, guitar, camera, carpet, curtain, plate, spoon, fork, bracelet, necklace, cabinet, suitcase, "
            "tent, drum, doll, robot, shirt, sweater, glove, belt, pen, pencil, eraser, folder, calendar, magnet, "
            "lantern, toaster, oven, fan, heater, speaker, keyboard, monitor, cable, charger, bicycle, rope, saw, "
            "screwdriver, desk, vase, bowl, towel, jacket, notebook, tray, scarf, sofa, ladder, armchair, "
            "bookcase, dresser, wardrobe, cushion, quilt, rug, shelf, rack, hook, hanger, basket, bin, crate, "
            "barrel, trunk, chest, safe, lock, bell, whistle, trumpet, violin, piano, harp, banjo, cello, "
            "tambourine, microphone, headphone, radio, television, laptop, tablet, printer, scanner, router, "
            "mouse, flashlight, bulb, socket, plug, cord, hose, pump, valve, pipe, bolt, nail, plier, drill, "
            "chisel, shovel, rake, wheelbarrow, planter, trowel, mower, axe, anchor, canoe, paddle, surfboard, "
            "skateboard, scooter, tricycle, sled, ski, skate, racket, bat, ball, net, dart, dice, marker, crayon, "
            "easel, stapler, ruler, globe, map, poster, frame, album, postcard, envelope, stamp, sticker, novel, "
            "magazine, comic, binder, pan, pot, skillet, wok, grater, peeler, whisk, ladle, tong, sieve, funnel, "
            "corkscrew, goblet, pitcher, saucer, tumbler, napkin, apron, mitten, sock, slipper, sandal, sneaker, "
            "loafer, coat, raincoat, vest, blouse, skirt, hoodie, cardigan, tie, bow, button, zipper, buckle, "
            "purse, backrest, briefcase, duffel, tote, locket, earring, pendant, cufflink, timer, scale, "
            "thermometer, telescope, microscope, binocular, tripod, projector"
        ),
        "users": (
            "anna, carla, david, emma, frank, grace, isabel, jack, karen, leo, nora, oscar, quentin, rachel, "
            "steve, walter, zoe, amir, maria, nick, olga, peter, rosa, simon"
        ),
        "passwords": (
            "mango, peach, olive, lemon, melon, grape, banana, apricot, papaya, walnut tree, hazel, ginger, "
            "garlic, basil, mint, saffron, vanilla, cocoa, tiger, otter, eagle, zebra, camel, rabbit"
        ),
        "topics": (
            "warranty, gift cards, refunds, store hours, lost parcels, repairs, coupons, shipping costs, password "
            "reset, account deletion, student discount, batteries, exchange, wrong item, late delivery, contact "
            "form, business accounts, payment methods, size guide, privacy, invoices, recycling, damaged items, "
            "complaints, opening hours, contact, membership, gift wrapping, gift ideas, product care, cleaning, "
            "washing, safety, first steps, accounts, email settings, notifications, reviews policy, product "
            "questions, stock alerts, back orders, preorder dates, large parcels, express delivery, weekend "
            "delivery, island delivery, customs, import fees, currencies, credit cards, bank transfer, cash "
            "payment, installments, late fees, deposits, vouchers, promo codes, bonus program, friends program, "
            "senior discount, teacher discount, wholesale, resellers, affiliates, press kit, jobs faq, "
            "sustainability, packaging, carbon footprint, data export, accessibility, languages, mobile app, "
            "store finder, events, workshops, rentals, used items, color chart, fabric samples, measuring, "
            "mounting, software updates, manuals, downloads, water damage, theft, insurance, legal notice, "
            "imprint"
        ),
        "before": (
            "see, view, show, open, check, get, our, all, more, full, latest, quick, main, this, live, go to, "
            "read, find, browse, current, daily, local, online, simple, good, official, your, web, best, real, "
            "any, discover, explore, try, use, start, begin, go, jump to, head to, load, launch, pick, choose, "
            "select, tap, press, hit, follow, continue to, new, fast, easy, free, top, smart, super, great, nice, "
            "happy, clean, clear, short, big, little, general, total, final, first, personal, private, shared, "
            "global, central, express, instant, direct, secure, verified, updated, fresh, hot, popular, common, "
            "usual, classic, original, basic, advanced"
        ),
        "after": (
            "page, info, details, tab, section, now, list, area, today, here, overview, link, menu, box, center, "
            "zone, window, line, for you, and more, please, board, desk, hub, room, view, tool, tools, bar, row, "
            "column, entry, card, file, record, note, notes, report, summary, sum, total, index, table, grid, "
            "map, path, route, step, steps, end, top, bottom, side, right here, online, offline, today only, this "
            "way, for all, for free, as usual, in full, in short, on site, right away, and go, plus, pro, basic, "
            "help desk, station, spot, place, point, stage, shelf, world"
        ),
    },
    "val": {
        "looks": "yellow, narrow, curved, dotted, square, modern",
        "stuffs": "walnut, iron, rubber, paper, felt",
        "nouns": "stool, teapot, umbrella, wallet, drawer, broom, helmet",
        "users": "ivan, julia, kevin, laura",
        "passwords": "fern, tulip, daisy, lotus",
        "topics": "assembly, loyalty points, cancellations, spare parts, newsletter, bulk buying",
        "before": "visit, inspect, display, complete, handy",
        "after": "corner, panel, screen, facts",
    },
    "test": {
        "looks": "blue, oval, thin, striped, green, golden, bright, rustic, modernist, giant",
        "stuffs": "clay, wool, chrome, oak, steel, plastic, glass, maple",
        "nouns": "bench, ring, puzzle, flute, backpack, blender, hat, jar, boot, lamp",
        "users": "victor, tina, bianca, ben, henry, paula",
        "passwords": "plum, cherry, pepper, coconut, kiwi, honey",
        "topics": (
            "price match, installation, pickup points, returns, allergies, tax receipts, order tracking"
        ),
        "before": "look at, present, extra, newest, public, customer, shop",
        "after": "sheet, space, portal, field, block, guide",
    },
}
WORDS = {split: {kind: words.split(", ") for kind, words in kinds.items()} for split, kinds in WORDS.items()}
# A label is one of these; a share MODIFIED has a word before or behind it, so that it has to be read off the page
# (the words of validation and test are their own).
STEMS = {
    "home": "home", "next": "next", "previous": "previous", "search": "search", "help": "help, faq", "login": "log in",
    "submit": "submit, send", "user": "user name, user", "password": "password",
    "orders": "orders", "cart": "cart", "add": "add to cart, put in cart", "save": "wishlist, share, compare",
    "cookies": "accept cookies, allow cookies", "dead": "press, jobs, blog, careers", "ghost": "deals, outlet, gifts",
    "price": "price", "reviews": "reviews", "shipping": "shipping",
}  # fmt: skip
STEMS = {kind: stems.split(", ") for kind, stems in STEMS.items()}
TABS = ("price", "reviews", "shipping")
# (navigation last?, tabs are buttons?, order of the tabs): 24 layouts, dealt out 3 : 1 : 2
LAYOUTS = {name: [] for name in SPLITS}
for _i, _layout in enumerate(itertools.product((False, True), (False, True), itertools.permutations(TABS))):
    LAYOUTS[["test", "train", "train", "val", "test", "train"][(_i + _i // 6) % 6]].append(_layout)
GOALS = {
    "price": ("find the price of {x}", "what is the price of {x}?"),
    "reviews": ("find the reviews of {x}", "what are the reviews of {x}?"),
    "shipping": ("find the shipping of {x}", "what is the shipping of {x}?"),
    "help": ("open the help page on {x}", "read the help about {x}"),
    "order": ("log in as {u} with password {p} and open order {x}", "open order {x} as user {u}, password {p}"),
    "cart": ("add {x} to the cart", "put {x} in the cart"),
    "cheapest": ("which {x} is the cheapest?", "find the cheapest {x}"),
}
_GOAL_PATTERNS = [
    (kind, re.compile(re.sub(r"\\\{(\w)\\\}", r"(?P<\1>.+)", re.escape(wording))))
    for kind, wordings in GOALS.items()
    for wording in wordings
]


@dataclass
class Shop:
    """One task's fixed part: the shop and the goal in it."""

    kind: str
    goal: str
    answer: str  # expected answer, "" for goals without one
    target: int  # index of the goal's product, topic, order or category
    products: list = field(default_factory=list)  # dicts: name, noun (index), price, was, reviews, shipping
    nouns: list = field(default_factory=list)
    topics: list = field(default_factory=list)
    orders: list = field(default_factory=list)
    user: str = ""
    password: str = ""
    words: dict = field(default_factory=dict)  # label of each kind
    layout: tuple = ()
    cookies: bool = False
    ghost_home: bool = False
    cart_link: bool = False
    ghost_list: bool = False
    pair: bool = False
    by_search: bool = False

    def shelf(self, noun: int) -> list[int]:
        return [i for i, p in enumerate(self.products) if p["noun"] == noun]


class WebNav(Env):
    """A simulated shop of real HTML pages, read back by `html_to_state`.

    State (empty lines are left out; `error` only after an illegal action):
        Goal: find the price of red maple lamp
        Page: lamps | /c/lamps?p=2
        Text: error: no such link or button here. page 2 of 3
        Links: home | red maple lamp | small maple lamp | next page | previous page
        Buttons: accept cookies
        Inputs: search
        Done: visited: home > click lamps > click next page
        Action:
    Actions:
        click "<label>"           a link or a button; the second of two equal labels is shown and clicked as "label #2"
        type "<field>" "<text>"   fills an input (a search box also submits)
        back                      the page before; illegal on the first page
        answer "<text>"           ends the episode
        The same without quotes is as good: click <label>, type <field>: <text>, answer <text>. The expert writes these.
    Goals: price / reviews / shipping of a product (answered), a help topic or an order (opened), a product in the
    cart, the cheapest of a category (answered).
    Traps: near-duplicate names, ghost links (broken), dead ends (only `back`), a cookie banner that blocks every click
    and input until accepted.
    Reward: 1 on success; -0.01 for an action already taken in the same page and state; -0.02 for an illegal one; with
    shaping=True +0.02 the first time each detail tab is opened.
    Ends: success, any answer, or 3 fruitless actions in a row, illegal or taken before in the same state (terminated);
    15 steps (truncated).
    `cut` in info counts shortened text, labels or lists, not the compression of old actions to `visited:`.

    By hand: find the price of a product through the shelves.
    >>> env = make_env("webnav", split="train")
    >>> obs, info = env.reset(seed=4)
    >>> while not info["success"]:
    ...     obs, reward, terminated, truncated, info = env.step(env.expert())
    >>> reward, terminated, truncated, info["valid"]
    (1.0, True, False, True)
    """

    # Difficulty: change here (or in a subclass) and measure again.
    KINDS: ClassVar[dict] = {  # shares of the goals
        "price": 21, "reviews": 20, "shipping": 20, "help": 17, "order": 2, "cart": 19, "cheapest": 1,
    }  # fmt: skip
    MODIFIED = 0.08  # share of labels with a word before or behind the usual one
    COOKIES = 0.2  # probability of a cookie banner
    CART_LINK = 0.15  # probability of a link to the cart on the home page (an empty page: a detour)
    GHOST_HOME = 0.15  # probability of a broken link on the home page
    NEAR = 0.3  # probability of a category whose products share words ("red oak lamp", "red pine lamp")
    GHOST_LIST = 0.1  # probability of a broken "<product> price" link in listings of the goal's product
    DEAD_END = 0.25  # probability of a dead-end page linked from home
    PAIR = 0.10  # probability that product pages also sell the similar product (a second, equal button)
    WAS_PRICE = 0.15  # probability of an old price beside the price
    SEARCH = 0.05  # share of product tasks whose home page links no category: the search box leads there
    CATEGORIES = 3
    PRODUCTS = (2, 5)  # products in a category, least and most
    CHEAPEST_PRODUCTS = (2, 3)  # the same for the category of a cheapest task
    PER_PAGE = 4  # products on a listing page
    TOPICS = 5  # help topics, 4 on a page
    ORDERS = 3

    name = "webnav"
    summary = "a simulated shop in HTML: find prices, open orders, fill the cart (option shaping=False)"
    OPTIONS: ClassVar[dict] = {"shaping": False}
    max_steps = 15
    patience = 3

    @property
    def return_bounds(self):
        return (-0.02 * self.max_steps, 1.0 + (0.02 * (self.max_steps - 1) if self.options["shaping"] else 0.0))

    @property
    def goal(self) -> str:
        return self.shop.goal

    @property
    def task(self) -> str:
        return self.shop.kind

    # ---- the task ----------------------------------------------------------------------------------------------------

    def _begin(self, rng: random.Random):
        words = WORDS[self.split]
        kind = rng.choices(list(self.KINDS), list(self.KINDS.values()))[0]
        shop = Shop(kind, "", "", 0)
        shop.words = {kind: self._label(rng, rng.choice(stems)) for kind, stems in STEMS.items()}
        shop.layout = rng.choice(LAYOUTS[self.split])
        shop.nouns = rng.sample(words["nouns"], self.CATEGORIES)
        prices = rng.sample(range(5, 80), 60)
        for index in range(self.CATEGORIES):
            least, most = self.CHEAPEST_PRODUCTS if kind == "cheapest" and index == 0 else self.PRODUCTS
            count = rng.randint(least, most)
            looks, stuffs = rng.sample(words["looks"], 5), rng.sample(words["stuffs"], 5)
            names = list(zip(looks, stuffs, strict=True))[:count]
            if rng.random() < self.NEAR:
                names = rng.sample(list(itertools.product(looks[:3], stuffs[:3])), count)
            for look, stuff in names:
                dollars = prices.pop()
                was = f"${dollars + rng.randint(2, 9)}.00" if rng.random() < self.WAS_PRICE else ""
                shop.products.append({
                    "name": f"{look} {stuff} {shop.nouns[index]}", "noun": index, "was": was,
                    "price": f"${dollars}.{rng.choice(('00', '25', '50', '75'))}",
                    "reviews": f"{rng.randint(2, 4)}.{rng.randint(1, 9)} stars",
                    "shipping": f"{rng.randint(2, 9)} days {rng.choice(('free', '$2', '$3', '$5'))}",
                    "votes": rng.randint(10, 99),
                })  # fmt: skip
        shop.topics = rng.sample(words["topics"], min(self.TOPICS, len(words["topics"])))
        base = rng.sample("123456789", 4)
        shop.orders = ["".join(p) for p in rng.sample(list(itertools.permutations(base)), self.ORDERS)]
        shop.user, shop.password = rng.choice(words["users"]), rng.choice(words["passwords"])
        named = {}
        if kind == "help":
            shop.target = rng.randrange(len(shop.topics))
            named = {"x": shop.topics[shop.target]}
        elif kind == "order":
            shop.target = rng.randrange(len(shop.orders))
            named = {"x": shop.orders[shop.target], "u": shop.user, "p": shop.password}
        elif kind == "cheapest":
            cheapest = min(shop.shelf(0), key=lambda i: float(shop.products[i]["price"][1:]))
            shop.answer, named = shop.products[cheapest]["name"], {"x": shop.nouns[0]}
        else:
            shop.target = rng.randrange(len(shop.products))
            named, shop.answer = {"x": shop.products[shop.target]["name"]}, shop.products[shop.target].get(kind, "")
        shop.goal = rng.choice(GOALS[kind]).format(**named)
        shop.cookies, shop.ghost_home = rng.random() < self.COOKIES, rng.random() < self.GHOST_HOME
        shop.ghost_list, shop.pair = rng.random() < self.GHOST_LIST, rng.random() < self.PAIR
        shop.by_search = kind in ("price", "reviews", "shipping", "cart") and rng.random() < self.SEARCH
        shop.cart_link = rng.random() < self.CART_LINK
        if rng.random() >= self.DEAD_END:
            shop.words["dead"] = ""
        self.home_order = rng.sample(range(self.CATEGORIES + 5), self.CATEGORIES + 5)
        self.shop = shop
        self.state |= {"url": "/", "stack": [], "note": "", "fields": {}, "cookies": shop.cookies, "user": False}
        self.state |= {"cart": [], "viewed": [], "tabs": [], "taken": []}
        self._page = None

    def _label(self, rng: random.Random, stem: str) -> str:
        words, form = WORDS[self.split], rng.random()
        if form >= self.MODIFIED:
            return stem
        before = form < self.MODIFIED / 2
        return f"{rng.choice(words['before'])} {stem}" if before else f"{stem} {rng.choice(words['after'])}"

    # ---- pages: rendered to HTML, read back ------------------------------------------------------------------------

    def _html(self) -> str:
        """The current page."""
        shop, s, w = self.shop, self.state, self.shop.words
        path, _, query = s["url"].partition("?")
        parts = path.strip("/").split("/")
        nav, main, text = [_a(w["home"], "/")], [], ""
        search = f'<input name="search" placeholder="{escape(w["search"])}">'
        if parts[0] == "":
            title, nav = w["home"], []
            items = [_a(f"{noun}s", f"/c/{noun}s?p=1") for noun in shop.nouns]
            if shop.by_search:
                items = [""] * len(items)
            items += [_a(w["help"], "/help?p=1"), _a(w["cart"], "/cart") if shop.cart_link else ""]
            items.append(_a(w["orders"], "/orders") if s["user"] else _a(w["login"], "/login"))
            items.append(_a(w["dead"], "/about") if w["dead"] else "")
            items.append(_a(w["ghost"], "#") if shop.ghost_home else "")
            main = [items[i] for i in self.home_order] + [search]
            text = "welcome to the shop"
        elif parts[0] == "c":
            title, number = parts[1], int(query[2:])
            shelf = shop.shelf(shop.nouns.index(title[:-1]))
            pages = -(-len(shelf) // self.PER_PAGE)
            text = f"page {number} of {pages}"
            for i in shelf[(number - 1) * self.PER_PAGE : number * self.PER_PAGE]:
                main.append(_a(shop.products[i]["name"], f"/p/{i}"))
                if shop.ghost_list and i == shop.target and shop.answer and shop.kind != "cheapest":
                    main.append(_a(f"{shop.products[i]['name']} {w[shop.kind]}", "#"))
            main += self._pager(path, number, pages)
        elif parts[0] == "s":
            title, found = "search results", self._find(unquote_plus(query[2:]))
            text = f"{len(found)} found" if found else "nothing found"
            main = [_a(shop.products[i]["name"], f"/p/{i}") for i in found] + [search]
        elif parts[0] == "p":
            index = int(parts[1])
            product, tab = shop.products[index], parts[2] if len(parts) > 2 else ""
            shelf = shop.shelf(product["noun"])
            similar = shelf[(shelf.index(index) + 1) % len(shelf)]
            title, text = product["name"], self._product_text(product, tab)
            nav.append(_a(f"{shop.nouns[product['noun']]}s", f"/c/{shop.nouns[product['noun']]}s?p=1"))
            make = _button if shop.layout[1] else _a
            main = [make(w[t], f"/p/{index}/{t}") for t in shop.layout[2] if t != tab]
            main += [_button(w["add"], f"add:{index}"), _button(w["save"], "save")]
            main.append(_a(shop.products[similar]["name"], f"/p/{similar}"))
            main.append(_button(w["add"], f"add:{similar}") if shop.pair else "")
        elif parts[0] == "help" and len(parts) == 1:
            title, number, pages = w["help"], int(query[2:]), -(-len(shop.topics) // 4)
            text = f"topics, page {number} of {pages}" if pages > 1 else "topics"
            main = [_a(t, f"/help/{i}") for i, t in list(enumerate(shop.topics))[number * 4 - 4 : number * 4]]
            main += self._pager(path, number, pages)
        elif parts[0] == "help":
            title, text = shop.topics[int(parts[1])], "this page explains it all"
            nav.append(_a(w["help"], "/help?p=1"))
        elif parts[0] == "login":
            title, text = w["login"], "fill in both fields"
            for name in ("user", "password"):
                value = escape(s["fields"].get(name, ""))
                main.append(f'<label for="{name}">{w[name]}</label><input id="{name}" name="{name}" value="{value}">')
            main.append(_button(w["submit"], "login"))
        elif parts[0] == "orders" and len(parts) == 1:
            title, text = w["orders"], f"{len(shop.orders)} orders"
            main = [_a(f"order {n}", f"/orders/{n}") for n in shop.orders]
        elif parts[0] == "orders":
            title, text = f"order {parts[1]}", "this order is on its way"
            nav.append(_a(w["orders"], "/orders"))
        elif parts[0] == "cart":
            title = w["cart"]
            text = ", ".join(shop.products[i]["name"] for i in s["cart"][-3:]) or "nothing here yet"
        else:
            title, text, nav = w["dead"], "there is nothing to do here", []
        alone = len(s["viewed"]) == 1 and s["url"] == f"/p/{s['viewed'][0]}/price"  # the text already says it
        if s["viewed"] and parts[0] in ("", "c", "p", "s") and not alone:
            seen = [f"{shop.products[i]['name']} {shop.products[i]['price']}" for i in s["viewed"][-4:]]
            text += ". recently viewed: " + ", ".join(seen)
        if s["cookies"]:
            text = "we use cookies. " + text
            main.append(_button(w["cookies"], "cookies"))
        note = f"<b>{escape(s['note'])}.</b>" if s["note"] else ""
        blocks = ["<nav>" + "".join(nav) + "</nav>", "<main>" + "".join(main) + "</main>"]
        blocks = "".join(reversed(blocks) if shop.layout[0] else blocks)
        return f"<!doctype html><title>{escape(title)}</title>{note}<p>{escape(text)}</p>{blocks}"

    def _product_text(self, product: dict, tab: str) -> str:
        if tab == "price":
            return f"price: {product['price']}" + (f", was {product['was']}" if product["was"] else "")
        if tab == "reviews":
            return f"rating: {product['reviews']} from {product['votes']} buyers"
        return f"shipping: {product['shipping']}" if tab else "open a tab for details"

    def _pager(self, path: str, number: int, pages: int) -> list[str]:
        words = self.shop.words
        links = [_a(words["next"], f"{path}?p={number + 1}")] if number < pages else []
        return links + ([_a(words["previous"], f"{path}?p={number - 1}")] if number > 1 else [])

    def _find(self, query: str) -> list[int]:
        """At most 4 products with the most words of the query, in the shop's order."""
        wanted = {word.rstrip("s") for word in query.lower().split()}
        hits = [len(wanted & {x.rstrip("s") for x in p["name"].split()}) for p in self.shop.products]
        floor = max(1, max(hits) - 1)
        best = sorted((i for i, n in enumerate(hits) if n >= floor), key=lambda i: -hits[i])
        return sorted(best[:4])

    @property
    def page(self) -> Page:
        if self._page is None:
            s = self.state
            self._page = html_to_state(self._html(), self.goal, s["url"], s["history"])
        return self._page

    def _moved(self):
        self._page = None

    def _observe(self):
        s = self.state
        problem = s["error"] or ("done before" if s["repeat"] else "")
        error = f"{s['fruitless']} of {self.patience}, {problem}" if problem else ""
        return render_state(self.page, self.goal, s["history"], error)

    @property
    def cut(self) -> bool:
        return self.page.cut

    # ---- acting ------------------------------------------------------------------------------------------------------

    def _act(self, text: str) -> tuple[float, bool]:
        s, page = self.state, self.page
        action = parse_action(text, tuple(e.label for e in page.inputs))
        verb, args, s["repaired"] = action
        lowered = tuple(clean(a).lower() for a in args)
        if verb in ("click", "type") and lowered[0] != args[0]:
            s["repaired"] = True
        if verb:
            action = Action(verb, (lowered[0], *args[1:]) if verb in ("click", "type") else args)
            s["action"] = str(action)
        element = None
        if verb == "click":
            element = next((e for e in page.links + page.buttons if e.label == lowered[0]), None)
        elif verb == "type":
            element = next((e for e in page.inputs if e.label == lowered[0]), None)
        s["error"] = self._why_illegal(verb, args, element)
        if s["error"]:
            s["valid"] = False
            return -0.02, False
        # the page and all that can change what the action does (how many of a product are in the cart does not)
        cart, fields = tuple(sorted(set(s["cart"]))), tuple(sorted(s["fields"].items()))
        key = (s["url"], s["cookies"], s["user"], cart, fields, str(action))
        s["repeat"] = key in s["taken"]
        reward = -0.01 if s["repeat"] else 0.0
        s["taken"].append(key)
        s["history"].append((page.title, str(action)))
        s["note"] = ""
        self._moved()
        if verb == "answer":
            s["success"] = bool(self.shop.answer) and _same(args[0], self.shop.answer)
            return (1.0 if s["success"] else reward), True
        if verb == "back":
            s["url"] = s["stack"].pop()
        elif s["cookies"] and element.target != "cookies":
            s["note"] = f"{self.shop.words['cookies']} first"
        elif verb == "type":
            self._fill(element.target, clean(args[1])[:60])
        else:
            reward += self._follow(element.target)
        s["success"] = self._reached()
        return (1.0, True) if s["success"] else (reward, False)

    def _why_illegal(self, verb: str, args: tuple, element: Element | None) -> str:
        if not verb:
            return "unreadable; use click, type, back or answer"
        if verb == "back" and not self.state["stack"]:
            return "no page to go back to"
        if verb in ("click", "type") and element is None:
            return f"no such {'link or button' if verb == 'click' else 'input'} here"
        return ""

    def _open(self, url: str):
        if url != self.state["url"]:
            self.state["stack"].append(self.state["url"])
            self.state["url"] = url

    def _fill(self, name: str, text: str):
        if name == "search":
            self._open(f"/s?q={quote_plus(text.lower())}")
        else:
            self.state["fields"][name] = text

    def _follow(self, target: str) -> float:
        """Clicks on a link or button; returns the shaping reward."""
        s, shop = self.state, self.shop
        verb, _, index = target.partition(":")
        if target == "#":
            s["note"] = "this link is broken"
        elif target == "cookies":
            s["cookies"] = False
        elif target == "save":
            s["note"] = "saved"
        elif verb == "add":
            s["cart"].append(int(index))
            s["note"] = f"{shop.products[int(index)]['name']} added"
        elif target == "login":
            s["user"] = s["fields"] == {"user": shop.user, "password": shop.password}
            if s["user"]:
                self._open("/orders")
            else:
                s["note"] = "wrong name or password"
        else:
            self._open(target)
        parts = s["url"].strip("/").split("/")
        if len(parts) == 3 and s["url"] not in s["tabs"]:
            s["tabs"].append(s["url"])
            if parts[2] == "price":
                s["viewed"].append(int(parts[1]))
            return 0.02 if self.options["shaping"] else 0.0
        return 0.0

    def _reached(self) -> bool:
        shop, s = self.shop, self.state
        if shop.kind == "help":
            return s["url"] == f"/help/{shop.target}"
        if shop.kind == "order":
            return s["url"] == f"/orders/{shop.orders[shop.target]}"
        return shop.kind == "cart" and shop.target in s["cart"]

    # ---- the expert --------------------------------------------------------------------------------------------------

    def _click(self, target: str) -> str | None:
        return next((f"click {e.label}" for e in self.page.links + self.page.buttons if e.target == target), None)

    def expert(self) -> str:
        """The action of a scripted shopper who knows the shop; works from any state."""
        shop, s = self.shop, self.state
        if s["cookies"]:
            return self._click("cookies")
        if shop.kind == "help":
            wanted = [f"/help/{shop.target}", f"/help?p={1 + shop.target // 4}", "/help?p=1"]
        elif shop.kind == "order" and s["user"]:
            wanted = [f"/orders/{shop.orders[shop.target]}", "/orders"]
        elif shop.kind == "order":
            if s["url"] == "/login":
                for name, text in (("user", shop.user), ("password", shop.password)):
                    if s["fields"].get(name) != text:
                        return f"type {shop.words[name]}: {text}"
                return self._click("login")
            wanted = ["/login"]
        else:
            return self._expert_product()
        return self._towards(wanted)

    def _towards(self, wanted: list[str]) -> str:
        """Clicks the first wanted target in sight that is not this page; else goes home; else back."""
        targets = [t for t in wanted if t != self.state["url"]] + ["/"]
        return next((c for t in targets if (c := self._click(t))), "back")

    def _expert_product(self) -> str:
        shop, s = self.shop, self.state
        if shop.kind == "cheapest":
            unseen = [i for i in shop.shelf(0) if i not in s["viewed"]]
            if not unseen:
                return f"answer {shop.answer}"
            here = [i for i in unseen if s["url"] == f"/p/{i}" or s["url"].startswith(f"/p/{i}/")]
            in_sight = [i for i in unseen if self._click(f"/p/{i}")]
            product, tab = (here or in_sight or unseen)[0], "price"
        else:
            product, tab = shop.target, shop.kind
        if s["url"] == f"/p/{product}/{tab}":
            return f"answer {shop.answer}"
        if s["url"] == f"/p/{product}" or s["url"].startswith(f"/p/{product}/"):
            return self._click(f"add:{product}" if tab == "cart" else f"/p/{product}/{tab}")
        noun = shop.products[product]["noun"]
        shelf = f"/c/{shop.nouns[noun]}s?p="
        number = 1 + shop.shelf(noun).index(product) // self.PER_PAGE
        if s["url"].startswith(shelf):  # pages are neighbours: walk towards the right one
            present = int(s["url"][len(shelf) :])
            present += (number > present) - (number < present)
            return self._towards([f"/p/{product}", f"{shelf}{present}"])
        search = next((e.label for e in self.page.inputs if e.target == "search"), None)
        if shop.by_search and shop.kind != "cheapest" and search and not self._click(f"/p/{product}"):
            return f"type {search}: {shop.products[product]['name']}"
        return self._towards([f"/p/{product}", f"{shelf}1"])

    def legal_actions(self) -> list[str]:
        """All clicks, `back` if possible, a few texts to type, and answers for the values in sight."""
        shop, page = self.shop, self.page
        actions = [f"click {e.label}" for e in page.links + page.buttons]
        for e in page.inputs:
            texts = [shop.products[shop.target % len(shop.products)]["name"], shop.nouns[-1]]
            if e.target in ("user", "password"):
                texts = [shop.user, shop.password]
            actions += [f"type {e.label}: {text}" for text in texts]
        values = re.findall(r"\$\d+\.\d\d|\d\.\d stars|\d days \S+", page.text)
        if shop.kind == "cheapest":
            values = [shop.products[i]["name"] for i in self.state["viewed"]]
        actions += [f"answer {value}" for value in dict.fromkeys(values)]
        return actions + (["back"] if self.state["stack"] else [])

    # ---- judging from the transcript -----------------------------------------------------------------------------

    def _steps_of(self, goal: str) -> list[tuple[str, float]]:
        kind, found = next(((k, m) for k, pattern in _GOAL_PATTERNS if (m := pattern.fullmatch(goal))), ("", None))
        if found is None:
            return []
        x = re.escape(found["x"])
        if kind == "help":
            return [(r"\| /help\?", 0.4), (rf'Action: click "?{x}"?$', 0.6)]
        if kind == "order":
            u, p = re.escape(found["u"]), re.escape(found["p"])
            steps = [(r"\| /login", 0.1), (rf'type .*[ "]{u}"?$', 0.2), (rf'type .*[ "]{p}"?$', 0.2)]
            return steps + [(r"\| /orders", 0.2), (rf'Action: click "?order {x}"?$', 0.3)]
        if kind == "cart":
            added = rf'Page: {x} \|[\s\S]*Action: click "?[^"#]*(cart|basket|bag)[^"#]*"?$'
            return [(rf"Page: {x} \|", 0.5), (added, 0.5)]
        if kind == "cheapest":
            steps = [(rf"Page: [^|\n]*\b{x}\b[^|\n]* \| \S+/price\n", 0.3)]
            return steps + [(rf"recently viewed: [^\n]*{x} \$[^\n]*{x} \$", 0.3), (rf'answer "?[^"]*{x}"?$', 0.4)]
        tab = rf"Page: {x} \| \S+/{kind}\n"
        return [(rf"Page: {x} \|", 0.35), (tab, 0.35), (rf"{tab}[\s\S]*Action: answer .+$", 0.3)]


def _a(label: str, href: str) -> str:
    return f'<a href="{escape(href)}">{escape(label)}</a> '


def _button(label: str, target: str) -> str:
    kind = "formaction" if target.startswith("/") else "name"
    return f'<button {kind}="{escape(target)}">{escape(label)}</button> '


def _same(given: str, expected: str) -> bool:
    """Equal but for case, blanks, "the", "$", a final full stop and the word stars."""

    def plain(text):
        return clean(text).lower().rstrip(".").replace("$", "").removeprefix("the ").removesuffix(" stars").strip()

    return plain(given) == plain(expected)


# ======================================================================================================================
# gridworld
# ======================================================================================================================

MOVES = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}


class GridWorld(Env):
    """A grid with walls and traps; option size (3 to 9).

    State (map: A agent, F flag, # wall, x trap, . free; outside the map is wall):
        Goal: reach the flag
        Map:
        .#..F
        .....
        xA.#.
        .#...
        .....
        Last: right up
        Offset: 2 up 3 right
        Up: free. Down: wall. Left: trap. Right: free.
        Action:
    Actions: up, down, left, right.
    Reward: 1 on reaching the flag; -0.5 in a trap; -0.02 for a wall or an unreadable action (no move); else -0.01.
    Ends: flag or trap (terminated); 4 * size steps (truncated).
    The wall layout's checksum modulo 5 decides its split (0 test, 1 val, else train), so no test grid is trained on.

    By hand: from A above, `up` then `right` twice meets no wall; five moves are the shortest way (2 up + 3 right).
    >>> env = make_env("gridworld", size=5)
    >>> _ = env.reset(seed=0)
    >>> env.load(["..#.F", ".....", "xA.#.", ".#...", "....."]).splitlines()[-3]
    'Offset: 2 up 3 right'
    >>> env.distance(), env.expert()
    (5, 'up')
    """

    WALLS = 0.22  # share of wall cells
    TRAPS = (1, 2)  # number of traps, least and most

    name = "gridworld"
    summary = "a text grid with walls and traps: reach the flag (option size=5)"
    OPTIONS: ClassVar[dict] = {"size": 5}
    max_action_tokens = 4
    goal = "reach the flag"
    task = "reach"

    def __init__(self, seed: int = 0, split: str = "train", **options):
        super().__init__(seed, split, **options)
        self.size = self.options["size"]
        if not isinstance(self.size, int) or not 3 <= self.size <= 9:
            raise ValueError(f"gridworld: size must be a whole number from 3 to 9, got {self.size!r}")
        self.max_steps = 4 * self.size

    @property
    def return_bounds(self):
        return (-0.02 * (self.max_steps - 1) - 0.5, 1.0)

    @staticmethod
    def split_of(walls: str) -> str:
        """The split that a wall layout ('#' and '.', rows joined) belongs to."""
        return ("test", "val", "train", "train", "train")[zlib.crc32(walls.encode()) % 5]

    def _begin(self, rng: random.Random):
        n = self.size
        while True:
            walls = "".join("#" if rng.random() < self.WALLS else "." for _ in range(n * n))
            free = [i for i, c in enumerate(walls) if c == "."]
            if self.split_of(walls) != self.split or len(free) < 5:
                continue
            traps = rng.randint(*self.TRAPS)
            agent, flag, *trap = rng.sample(free, 2 + traps)
            cells = [("x" if i in trap else c) for i, c in enumerate(walls)]
            cells[agent], cells[flag] = "A", "F"
            self.load(["".join(cells[r * n : r * n + n]) for r in range(n)])
            if self.distance() is not None and self.distance() >= 2:
                return

    def load(self, rows: list[str]) -> str:
        """Puts a given map in place of the task's (for demonstrations and tests). Returns the observation."""
        cells = {(r, c): ch for r, row in enumerate(rows) for c, ch in enumerate(row)}
        self.state |= {"agent": next(p for p, ch in cells.items() if ch == "A"), "last": []}
        self.state["map"] = [row.replace("A", ".") for row in rows]
        self._moved()
        return self._observe()

    def _moved(self):
        """Distances to the flag by breadth-first search, over free cells."""
        self.flag = next((r, row.index("F")) for r, row in enumerate(self.state["map"]) if "F" in row)
        self.distances, queue = {self.flag: 0}, deque([self.flag])
        while queue:
            r, c = queue.popleft()
            for dr, dc in MOVES.values():
                cell = (r + dr, c + dc)
                if cell not in self.distances and self._at(cell) == ".":
                    self.distances[cell] = self.distances[r, c] + 1
                    queue.append(cell)

    def _at(self, cell: tuple[int, int]) -> str:
        r, c = cell
        rows = self.state["map"]
        return rows[r][c] if 0 <= r < len(rows) and 0 <= c < len(rows[r]) else "#"

    def distance(self) -> int | None:
        """Moves left on a shortest safe way from the agent (None: there is none)."""
        return self.distances.get(self.state["agent"])

    def _text(self, agent: tuple[int, int], last=(), error: str = "") -> str:
        (r, c), (fr, fc) = agent, self.flag
        offset = [f"{abs(fr - r)} {'up' if fr < r else 'down'}"] if fr != r else []
        offset += [f"{abs(fc - c)} {'left' if fc < c else 'right'}"] if fc != c else []
        names = {".": "free", "#": "wall", "x": "trap", "F": "flag"}
        around = " ".join(f"{m.capitalize()}: {names[self._at((r + d[0], c + d[1]))]}." for m, d in MOVES.items())
        rows = [row if i != r else row[:c] + "A" + row[c + 1 :] for i, row in enumerate(self.state["map"])]
        lines = ["Goal: reach the flag", *([f"Error: {error}"] if error else [])]
        lines += ["Map:", *rows, *(["Last: " + " ".join(last)] if last else [])]
        lines += ["Offset: " + (" ".join(offset) or "none"), around]  # what matters most stands last
        return "\n".join(lines + ["Action:"])

    def _observe(self):
        return self._text(self.state["agent"], self.state["last"][-2:], self.state["error"])

    def _act(self, text: str) -> tuple[float, bool]:
        s = self.state
        plain = text[:MAX_ACTION_CHARS].strip()
        found = re.search(r"\b(up|down|left|right)\b", plain, re.IGNORECASE)
        if found is None:
            s.update(valid=False, error="unreadable; use up, down, left or right")
            return -0.02, False
        move = found[1].lower()
        s.update(action=move, repaired=plain != move or len(text) > MAX_ACTION_CHARS)
        cell = (s["agent"][0] + MOVES[move][0], s["agent"][1] + MOVES[move][1])
        if self._at(cell) == "#":
            s.update(valid=False, error=f"wall {move}")
            return -0.02, False
        s["agent"] = cell
        s["last"].append(move)
        s["success"] = self._at(cell) == "F"
        if self._at(cell) == "x":
            return -0.5, True
        return (1.0, True) if s["success"] else (-0.01, False)

    def expert(self) -> str:
        """A shortest safe way; ties: first a move that reduces the offset, then up, down, left, right."""
        r, c = self.state["agent"]

        def rank(move):
            cell = (r + MOVES[move][0], c + MOVES[move][1])
            offset = abs(self.flag[0] - cell[0]) + abs(self.flag[1] - cell[1])
            return self.distances.get(cell, 10**6), offset, list(MOVES).index(move)

        return min(MOVES, key=rank)

    def legal_actions(self) -> list[str]:
        r, c = self.state["agent"]
        return [m for m, (dr, dc) in MOVES.items() if self._at((r + dr, c + dc)) != "#"]

    def cells(self) -> list[tuple[int, int, str, int]]:
        """(row, column, observation if the agent were there, distance) of each free cell with a way to the flag."""
        return [(r, c, self._text((r, c)), d) for (r, c), d in sorted(self.distances.items()) if d > 0]

    def judge(self, segment) -> float:
        """Share of the first offset that is gone at the end of the segment (1 if the last move enters the flag)."""
        seen = []
        for obs, action in segment:
            if found := re.search(r"Offset: ([^\n]*)\n([^\n]*)", obs):
                seen.append(
                    (sum(map(int, re.findall(r"\d+", found[1]))), f"{action.strip().capitalize()}: flag." in found[2])
                )
        if not seen or not seen[0][0]:
            return 0.0
        return 1.0 if seen[-1][1] else max(0.0, 1 - seen[-1][0] / seen[0][0])

    def _steps_of(self, goal: str) -> list[tuple[str, float]]:
        return [(rf"{m.capitalize()}: flag\.[\s\S]*Action: {m}$", 1.0) for m in MOVES]


# ======================================================================================================================
# booking
# ======================================================================================================================

PARTS = {"flight": "air", "hotel": "inn", "car": "cars"}  # part of a trip: last word of its companies' names
PREPOSITIONS = {"flight": "to", "hotel": "in", "car": "in"}
# What the user may have to be asked, and the sentence that asks it: one sentence each, the decision is which.
ASKS = {
    "needs": "what else do you need?",
    "dates": "which dates suit you?",
    "budget": "what is your budget?",
    "wish": "what do you wish for?",
    "never": "what do you refuse?",
}
CONFIRM = "shall i confirm the trip?"
# No city, person, company, month, feature or user's sentence of one split appears in another.
BOOKING_WORDS = {
    "train": {
        "cities": (
            "paris, london, rome, berlin, vienna, madrid, dublin, prague, milan, warsaw, munich, boston, chicago, "
            "denver, dallas, miami, seattle, toronto, tokyo, delhi, cairo, lima, moscow, amsterdam, oxford, "
            "bristol, glasgow, lyon, nice, bordeaux, florence, venice, pisa, turin, zurich, basel, cologne, "
            "leipzig, dresden, krakow, gdansk, sofia, bucharest, belgrade, tallinn, riga, helsinki, bergen, "
            "malmo, porto, seville, valencia, houston, phoenix, atlanta, detroit, portland, orlando, ottawa, "
            "calgary, quebec, bogota, quito, santiago, nairobi, lagos, tunis, dubai, mumbai, jakarta, seoul, "
            "osaka, perth, auckland"
        ),
        "people": "frank, grace, jack, anna, david, emma, leo, maria, peter, rosa, simon, walter",
        "companies": (
            "silver, river, mountain, ocean, forest, lake, star, moon, cloud, storm, snow, stone, eagle, tiger, "
            "lion, wolf, fox, coral, amber, crystal, rose, lily, cedar, maple, pine, palm, north, west, central, "
            "royal, castle, tower, bridge, island, valley, sunset, comet, arrow, compass, blue, green, white, "
            "grand, global, alpine, delta, alpha, omega, union, metro, urban, atlas, mercury, prairie, spring, "
            "copper, velvet, jaguar, panther, leopard, badger, otter, beaver, falconer, raven, robin, swan, "
            "heron, pelican, salmon, whale, shark, turtle, zebra, camel, horse, mustang, bison, moose, elk, "
            "beetle, butterfly, spider, orchid, tulip, daisy, violet, jasmine, lavender, birch, elm, ash, "
            "willowtree, bamboo, cactus, clover, ivy, peach, lemon, cherry, mango, apple, berry, honey, pepper, "
            "ginger, vanilla, ruby, emerald, sapphire, topaz, opal, quartz, granite, marble, cobalt, nickel, "
            "titan, steel, zinc, neon, laser, pixel, matrix, vector, orbit, galaxy, nova, lunar, solar, polar, "
            "tropic, desertrose, coast, harborview, bay, peak, ridge, cliff, glacier, volcano, canal, fountain, "
            "market, temple, palace, abbey, chapel, bell, lantern, candle, mirror, ribbon, feather, pilot, "
            "captain, sailor, pioneer, ranger, knight, prince, queen, duke, baron, wizard, legend, fable, saga, "
            "echo, melody, rhythm, tango, opera, theater, gallery, museum"
        ),
        "months": "january, march, may, june, august, december",
        "flight": (
            "window, aisle, meal, blanket, pillow, movie, music, wifi, exit, upgrade, lounge, vegan, coffee, tea, "
            "water, socket, legroom, corner, left, right, back, priority, headset, magazine, juice"
        ),
        "hotel": (
            "breakfast, pool, gym, balcony, desk, beach, bar, restaurant, elevator, fireplace, safe, fridge, "
            "television, bathtub, shower, laundry, library, playground, rooftop, downtown, lakeside, massage, "
            "tennis, golf, piano"
        ),
        "car": (
            "electric, automatic, diesel, hybrid, petrol, gps, sport, van, pickup, family, luxury, small, camera, "
            "heater, trailer, sunroof, bluetooth, convertible, limousine, minibus, chains, rack, wagon, new, fast"
        ),
    },
    "val": {
        "cities": "lisbon, athens, austin, montreal, manila, bangkok",
        "people": "nick, karen, oscar, laura",
        "companies": (
            "hawk, pearl, olive, willow, crown, harbor, meadow, horizon, anchor, golden, black, arctic, liberty, "
            "prime, canyon, winter, bronze, iron"
        ),
        "months": "february, april, november",
        "flight": "front, snack, middle",
        "hotel": "view, bath, parking",
        "car": "manual, compact, radio",
    },
    "test": {
        "cities": "oslo, geneva, naples, hamburg, sydney, kyoto, havana, cork",
        "people": "ben, tina, victor, henry, paula, julia",
        "companies": (
            "falcon, bear, dolphin, diamond, lotus, oak, south, east, garden, dawn, summit, rocket, red, desert, "
            "heritage, apex, autumn, jade, ivory, sun, wind, rain, fire, magnet"
        ),
        "months": "july, september, october",
        "flight": "rear, dinner, quiet, charger",
        "hotel": "spa, kitchen, terrace, sauna",
        "car": "navigation, leather, large, truck",
    },
}
BOOKING_WORDS = {split: {kind: w.split(", ") for kind, w in kinds.items()} for split, kinds in BOOKING_WORDS.items()}
# What the user says, by occasion; {x} is what the question was about.
USER_SAYS = {
    "train": {
        "hello": ("i need a {x}", "please find me a {x}"),
        "answer": ("{x}, please", "{x} for me", "well, {x}"),
        "nothing": ("nothing special", "no, nothing"),
        "booked": ("good", "fine", "thank you"),
        "change": ("sorry, now {x}", "i changed my mind: {x}"),
        "again": ("i said that already",),
        "refused": ("oh no", "i do not like that"),
        "unneeded": ("i need no {x}",),
        "wrong": ("no, that is not right", "no, not like this"),
        "yes": ("yes, thank you",),
        "leave": ("goodbye",),
    },
    "val": {
        "hello": ("help me get a {x}",),
        "answer": ("it is {x}",),
        "nothing": ("not at all",),
        "booked": ("all right",),
        "change": ("wait, better {x}",),
        "again": ("you know that",),
        "refused": ("not this one",),
        "unneeded": ("a {x} is of no use",),
        "wrong": ("no, look again",),
        "yes": ("yes, perfect",),
        "leave": ("i give up",),
    },
    "test": {
        "hello": ("could you get me a {x}?", "i am looking for a {x}"),
        "answer": ("that would be {x}", "i think {x}"),
        "nothing": ("nothing comes to mind", "i do not mind"),
        "booked": ("nice", "sounds great"),
        "change": ("my plans are different: {x}", "oh, it must be {x}"),
        "again": ("you asked before",),
        "refused": ("what? no!",),
        "unneeded": ("what would i do with a {x}?",),
        "wrong": ("no, there is a mistake",),
        "yes": ("yes, do it",),
        "leave": ("i will ask elsewhere",),
    },
}
_MONTHS = "|".join(month for words in BOOKING_WORDS.values() for month in words["months"])
_DATE = re.compile(rf"\b({_MONTHS}) ([1-9]|[12]\d|3[01])(?:st|nd|rd|th)?\b")
_DAY_FIRST = re.compile(rf"\b([1-9]|[12]\d|3[01])(?:st|nd|rd|th)? (?:of )?({_MONTHS})\b")
_PART = re.compile(r"\b(flight|hotel|car)(?:s|\b)")
_OFFER = re.compile(r"(\d+) (\w+) (\w+ (?:air|inn|cars))")
_CITY = re.compile(rf"\b(?:to|in) (?!(?:the|a|an|my|your|search|find|look|check|show|list|{_MONTHS})\b)(\w+)")
_COMPANY = re.compile(rf"\b(?!(?:the|a|an|book|take|reserve) )(\w+ (?:{'|'.join(PARTS.values())}))\b")
_NEGATED = re.compile(r"\b(?:not|never|don't|won't|no) (?:book|reserve|take|search|confirm)")
_ACTS = {  # dialogue act: what gives it away
    "confirm": re.compile(r"\bconfirm|\b(?:is|are) (?:that|this|it|everything|all) (?:right|ok|okay|correct|fine)\b"),
    "search": re.compile(r"\b(?:search|find|look|list|show|check)\b"),
    "book": re.compile(r"\b(?:book|reserve|take)\b"),
}
_ASKED = {  # slot: what gives away a question about it
    "never": re.compile(r"\b(?:refuse|avoid|exclude|never|dislike|hate|not (?:like|want)|don't (?:like|want))"),
    "wish": re.compile(r"\b(?:wish|prefer|like)"),
    "budget": re.compile(r"\b(?:budget|spend|price|how much)"),
    "dates": re.compile(r"\b(?:dates?|day|when)\b"),
    "needs": re.compile(r"\b(?:else|more|needs?)\b"),
}


class Act(NamedTuple):
    """A dialogue act read from a sentence: ask (slot), search (part, city, date), book (company), confirm, or ""."""

    kind: str
    args: tuple[str, ...] = ()

    def __str__(self):
        """The one sentence that says it plainly: what the expert writes."""
        if self.kind == "ask":
            return ASKS[self.args[0]]
        if self.kind == "search":
            part, city, date = self.args
            return f"search {part} {PREPOSITIONS[part]} {city} on {date}"
        return CONFIRM if self.kind == "confirm" else f"book {self.args[0]}"


def read_sentence(text: str) -> Act:
    """Finds a dialogue act and its slots in one English sentence, whatever its wording; Act("") if there is none.

    search: city is the word after "to" or "in", date "<month> <day>"; either is "" where the sentence names none.
    book: the company is "" where none is named. The first of several acts or slots counts.
    """
    text = clean(re.sub(r"[^\w\s'?]|_", " ", text[:MAX_ACTION_CHARS].lower()))
    company = _COMPANY.search(text)
    if _NEGATED.search(text):
        return Act("")
    found = {kind: m.start() for kind, pattern in _ACTS.items() if (m := pattern.search(text))}
    asked = {slot: m.start() for slot, pattern in _ASKED.items() if (m := pattern.search(text))}
    question = "?" in text or re.match(r"(?:what|which|when|how|do|is|are|any|ask|tell)\b", text)
    if company and "book" in found:
        return Act("book", (company[1],))
    if asked and question and not {"confirm", "search"} & set(found):
        return Act("ask", (min(asked, key=asked.get),))
    kind = min(found, key=found.get, default="")
    if kind == "search":
        part, city = _PART.search(text), _CITY.search(text)
        date, day_first = _DATE.search(text), _DAY_FIRST.search(text)
        day = f"{date[1]} {date[2]}" if date else f"{day_first[2]} {day_first[1]}" if day_first else ""
        return Act("search", (part[1], city[1] if city else "", day)) if part else Act("")
    return Act(kind, ("",) if kind == "book" else ())


@dataclass
class Need:
    """One task's fixed part: the user, the first need, the coming change of mind and the companies."""

    person: str
    city: str
    parts: list
    dates: list  # one, or two of which `full` may be sold out
    budget: int | None  # for the whole trip
    wish: dict  # part: feature
    never: list  # companies the user refuses
    hidden: list  # slots the user has to be asked for
    change: str = ""  # slot that changes once `after` parts are booked, "" for none
    after: int = 1
    value: object = None  # the new value (a refusal is of the company just booked)
    full: str = ""
    fair: int = 0  # dearest fair price: the fair offers of all parts together stay within every budget
    low: int = 0  # the lowest budget the user will ever state
    companies: dict = field(default_factory=dict)  # part: names; the first of the refused part is the refused one

    def first(self) -> dict:
        return dict(dates=list(self.dates), budget=self.budget, wish=dict(self.wish), never=list(self.never))


@dataclass
class View:
    """What a state shows. known: slot -> values, for the slots the user has spoken about."""

    city: str
    parts: list
    known: dict
    full: list
    found: tuple = ("", "")  # part, date
    offers: list = field(default_factory=list)  # (company, price, feature)
    booked: dict = field(default_factory=dict)  # part: (company, price, feature, date)

    def fits(self, part: str, company: str, price: int, feature: str, date: str | None = None) -> bool:
        """Does this offer meet everything the user has said so far?"""
        k = self.known
        fits_date = date is None or not k.get("dates") or date in k["dates"]
        wished = [w for w in k.get("wish", ()) if any(w in words[part] for words in BOOKING_WORDS.values())]
        return (fits_date and company not in k.get("never", ()) and (not wished or feature in wished)
                and (not k.get("budget") or price <= int(k["budget"][0])))  # fmt: skip

    def done(self, part: str) -> bool:
        return part in self.booked and self.fits(part, *self.booked[part])

    def dates(self) -> list[str]:
        """Dates worth a search: that of a booked part, else those not sold out."""
        dates = [d for d in self.known.get("dates", ()) if d not in self.full]
        taken = [d for part, (*_, d) in self.booked.items() if d in dates and self.done(part)]
        return taken[:1] or dates


def read_booking(obs: str) -> View | None:
    """The View of a state's text; None if it is no booking state."""
    goal = re.match(r"Goal: book a trip to (\w+) for \w+\n", obs)
    line = re.search(r"^Known: (.*)$", obs, re.MULTILINE)
    if goal is None or line is None:
        return None
    known, full, parts = {}, [], []
    for item in line[1].split("; "):
        slot, _, text = item.partition(" ")
        values = [v for v in text.removesuffix("?").strip().split(", ") if v not in ("", "none")]
        if slot == "needs":
            parts = values
        if slot == "dates":
            full = [v.removesuffix(" full") for v in values if v.endswith(" full")]
            values = [v.removesuffix(" full") for v in values]
        if slot in ASKS and not text.endswith("?"):
            known[slot] = values
    view = View(goal[1], parts, known, full)
    if found := re.search(r"^Found: (\w+) (\w+ \d+): (.*)$", obs, re.MULTILINE):
        view.found, view.offers = (found[1], found[2]), [(c, int(p), f) for p, f, c in _OFFER.findall(found[3])]
    if booked := re.search(r"^Booked: (.*)$", obs, re.MULTILINE):
        for part, price, feature, company, date in re.findall(rf"(\w+) {_OFFER.pattern} (\w+ \d+)", booked[1]):
            view.booked[part] = (company, int(price), feature, date)
    return view


class Booking(Env):
    """A dialogue: find out what a user needs (flight, hotel, car), search, book, and have the trip confirmed.

    State (`?`: not asked yet; lines without content are left out; "annoyed" after a first annoyance):
        Goal: book a trip to oslo for ben
        Error: the trip goes to oslo
        Known: needs flight, hotel; dates july 3 full, july 6; budget 160; wish rear; never red air; annoyed
        Found: flight july 6: 70 rear red air | 66 rear jade air | 280 rear sun air
        Booked: hotel 59 spa oak inn july 6
        You: search flight to oslo on july 6
        User: nice
        Action:
    Known is all that the user has said so far, as it stands now; You and User are the last exchange. An offer's
    company stands last, so that a causal model has read what speaks for and against it when it reads the name.
    Actions: one English sentence. The expert writes these, and `read_sentence` understands many other wordings:
        what else do you need? | which dates suit you? | what is your budget? | what do you wish for? |
        what do you refuse?
        search flight to oslo on july 6     lists the offers of that day (none if it is sold out); hotel in, car in
        book jade air                       an offer of the list; a second booking of a part replaces the first
        shall i confirm the trip?           if the plan is right, the user says yes
    The hidden need: one to three parts; one or two dates; and at least two of a budget for the whole trip, a wished
    feature of some parts, a refused company. The user answers only what is asked; some users change one of these once
    something is booked.
    Right plan: every needed part booked, for one and the same date that suits, no refused company, every wish met,
    prices together within the budget. It counts as it is, whether or not the agent asked.
    The user is annoyed by a question already answered, a refused company, a part not needed, or a wrong plan to
    confirm, and leaves at the second annoyance.
    Reward: 1 on success; -0.2 for booking a company that the user refuses (also info["violation"] = 0.2, else 0.0), the
    hard constraint; -0.02 for a sentence that cannot be read or carried out.
    Ends: the user says yes or leaves (terminated); 15 turns (truncated).

    By hand: one question at a time until no `?` is left, then search, book, confirm.
    >>> env = make_env("booking", split="test")
    >>> obs, info = env.reset(seed=4)
    >>> while not info["success"]:
    ...     print(action := env.expert())
    ...     obs, reward, terminated, truncated, info = env.step(action)
    what else do you need?
    what is your budget?
    search flight to cork on september 5
    search flight to cork on september 3
    book ivory air
    search hotel in cork on september 3
    book rain inn
    shall i confirm the trip?
    >>> reward, info["violation"], env.progress()
    (1.0, 0.0, 1.0)
    """

    # Difficulty: change here (or in a subclass) and measure again.
    COUNTS: ClassVar[dict] = {1: 55, 2: 35, 3: 10}  # shares of trips with so many parts
    HIDDEN: ClassVar[dict] = {1: (2, 4), 2: (2, 3), 3: (1, 2)}  # slots to ask for, least and most, by parts
    BUDGET, WISH, NEVER = 0.75, 0.6, 0.7  # probabilities of a budget, a wish (each part), a refusal
    CHANGE = 0.4  # probability of a change of mind
    TWO_DATES, FULL = 0.35, 0.7  # probability of a second date, and that one of two is sold out
    OFFERS = (3, 4)  # offers in a list, least and most
    TWO_RIGHT = 0.25  # probability of a second right offer in a list
    ANNOYED = 2  # the user leaves at this annoyance

    name = "booking"
    summary = "a dialogue: find out what a user needs, book flight, hotel and car, get it confirmed"
    max_steps = 15

    @property
    def return_bounds(self):
        return (-0.2 * self.ANNOYED - 0.02 * (self.max_steps - self.ANNOYED), 1.0)

    @property
    def goal(self) -> str:
        return f"book a trip to {self.need.city} for {self.need.person}"

    @property
    def task(self) -> str:
        return f"new {self.need.change}" if self.need.change else "steady"

    # ---- the task ----------------------------------------------------------------------------------------------------

    def _begin(self, rng: random.Random):
        words = BOOKING_WORDS[self.split]
        count = rng.choices(list(self.COUNTS), list(self.COUNTS.values()))[0]
        parts = sorted(rng.sample(list(PARTS), count), key=list(PARTS).index)
        days = [f"{month} {day}" for month in [rng.choice(words["months"])] for day in rng.sample(range(2, 10), 3)]
        names = iter(rng.sample(words["companies"], 15))
        need = Need(rng.choice(words["people"]), rng.choice(words["cities"]), parts, days[:1], None, {}, [], [])
        need.companies = {part: [f"{next(names)} {PARTS[part]}" for _ in range(5)] for part in PARTS}
        features = {part: rng.sample(words[part], 2) for part in parts}
        need.fair = rng.randint(60, 99)
        need.low = count * need.fair
        while bool(need.budget) + bool(need.wish) + bool(need.never) < 2:
            need.budget = need.low if rng.random() < self.BUDGET else None
            need.wish = {part: features[part][0] for part in parts if rng.random() < self.WISH}
            need.never = [need.companies[rng.choice(parts)][0]] if rng.random() < self.NEVER else []
        if rng.random() < self.CHANGE:
            self._plan_change(rng, need, days, features)
        if need.change != "dates" and rng.random() < self.TWO_DATES:
            need.dates = days[:2]
            need.full = rng.choice(need.dates) if rng.random() < self.FULL else ""
        need.hidden = sorted(rng.sample(list(ASKS), rng.randint(*self.HIDDEN[count])), key=list(ASKS).index)
        self.need, s = need, self.state
        s |= {"need": need.first(), "known": [slot for slot in ASKS if slot not in need.hidden], "changed": False}
        s |= {"full": [], "found": None, "booked": {}, "annoyed": 0, "you": "", "violation": 0.0}
        s["user"] = self._says("hello", parts[0])

    def _plan_change(self, rng: random.Random, need: Need, days: list, features: dict):
        need.change = rng.choice(("dates", "budget", "wish", "never"))
        need.after = 1 if need.change == "dates" else rng.randint(1, len(need.parts))
        if need.change == "dates":
            need.value = [days[2]]
        elif need.change == "budget":  # the new budget is the low one; the first, if any, allowed dearer offers
            need.value, need.budget = need.low, need.budget and int(2.5 * need.low)
        elif need.change == "wish":
            need.value = {**need.wish, need.parts[0]: features[need.parts[0]][1]}

    def offers(self, part: str, date: str) -> list[list]:
        """The database: [company, price, feature] of each offer of that day, the same for ever in a task.

        At least one offer meets the need at any time. The others each break a single rule: the refused company, not
        the wished feature, or a price above the whole budget.
        """
        need, rng = self.need, random.Random(f"{self.name}/{self.split}/{self.task_seed}/{part}/{date}")
        refused = [c for c in need.companies[part] if c in need.never]
        wish, change = need.wish.get(part), need.change if part == need.parts[0] else ""
        kinds = ["right"] * (1 + (need.change == "never" or rng.random() < self.TWO_RIGHT))
        kinds += ["later"] * (change == "wish") + ["late"] * (change == "budget")
        traps = ["refused"] * bool(refused) + ["other"] * bool(wish) + ["dear"] * (need.budget is not None)
        traps = rng.sample(traps, len(traps))
        kinds += traps[: max(1, rng.randint(*self.OFFERS) - len(kinds))]
        kinds += ["right"] * (2 - len(kinds))
        names = iter(rng.sample([c for c in need.companies[part] if c not in refused], len(kinds)))
        new = need.value.get(part) if change == "wish" else None
        others = [f for f in BOOKING_WORDS[self.split][part] if f not in (wish, new)]
        result = []
        for kind in kinds:
            price = rng.randint(need.fair // 2, need.fair)
            if kind == "late":
                price = rng.randint(int(1.2 * need.low), int(1.5 * need.low))
            elif kind == "dear":
                price = rng.randint(int(1.3 * need.budget), int(2.2 * need.budget))
            feature = rng.choice(others) if kind == "other" or not wish else wish
            feature = new if kind == "later" else feature
            result.append([refused[0] if kind == "refused" else next(names), price, feature])
        return rng.sample(result, len(result))

    def right(self, part: str) -> bool:
        """Is this part booked as the user needs it (apart from the sum of the prices)?"""
        need, offer = self.state["need"], self.state["booked"].get(part)
        if offer is None:
            return False
        company, price, feature, date = offer
        cheap, wished = need["budget"] is None or price <= need["budget"], need["wish"].get(part, feature) == feature
        return cheap and wished and company not in need["never"] and date in need["dates"]

    def _right_plan(self) -> bool:
        booked, budget = self.state["booked"], self.state["need"]["budget"]
        total = sum(price for _, price, _, _ in booked.values())
        dates = {date for *_, date in booked.values()}
        return all(map(self.right, self.need.parts)) and len(dates) == 1 and (budget is None or total <= budget)

    # ---- the state's text --------------------------------------------------------------------------------------------

    def _value(self, slot: str) -> list[str]:
        """What the user would say of a slot now."""
        need = self.state["need"]
        if slot == "needs":
            return self.need.parts
        if slot == "budget":
            return [] if need["budget"] is None else [str(need["budget"])]
        return list(need["wish"].values()) if slot == "wish" else need[slot]

    def _known(self) -> str:
        s, items = self.state, []
        for slot in ASKS:
            values = self._value(slot) if slot in s["known"] else self.need.parts[:1] if slot == "needs" else []
            values = [f"{v} full" if v in s["full"] else v for v in values]
            text = ", ".join(values) + (" ?" if slot not in s["known"] else "")
            items.append(f"{slot} {text.strip() or 'none'}")
        return "; ".join(items + ["annoyed"] * bool(s["annoyed"]))

    def _observe(self):
        s = self.state
        lines = [f"Goal: {self.goal}", *([f"Error: {s['error']}"] if s["error"] else []), f"Known: {self._known()}"]
        if s["found"]:
            offers = " | ".join("{1} {2} {0}".format(*offer) for offer in self.offers(*s["found"]))
            lines.append("Found: {} {}: ".format(*s["found"]) + offers)
        if s["booked"]:
            booked = ["{0} {2} {3} {1} {4}".format(part, *s["booked"][part]) for part in PARTS if part in s["booked"]]
            lines.append("Booked: " + " | ".join(booked))
        lines += [f"You: {s['you']}"] if s["you"] else []
        lines += [f"User: {s['user']}"] if s["user"] else []
        return "\n".join([*lines, "Action:"])

    def _info(self) -> dict:
        return {**super()._info(), "violation": self.state["violation"]}

    # ---- the dialogue ------------------------------------------------------------------------------------------------

    def _says(self, occasion: str, x: str = "") -> str:
        rng = random.Random(f"{self.split}/{self.task_seed}/{self.state['steps']}")
        return rng.choice(USER_SAYS[self.split][occasion]).format(x=x)

    def _act(self, text: str) -> tuple[float, bool]:
        s = self.state
        s["violation"] = 0.0
        act = read_sentence(text)
        if act.kind == "search":  # the city, and a date if there is but one, may be left out
            part, city, date = act.args
            only = s["need"]["dates"][0] if "dates" in s["known"] and len(s["need"]["dates"]) == 1 else ""
            act = Act("search", (part, city or self.need.city, date or only))
        s["error"] = self._why_not(act)
        if s["error"]:
            s["valid"] = False
            return -0.02, False
        s.update(action=str(act), you=str(act), repaired=text != str(act))
        if act.kind == "confirm":
            s["success"] = self._right_plan()
            s["user"] = self._says("yes" if s["success"] else "wrong")
            return (1.0, True) if s["success"] else (0.0, self._annoy())
        return {"ask": self._ask, "search": self._search, "book": self._book}[act.kind](*act.args)

    def _why_not(self, act: Act) -> str:
        if not act.kind:
            return "unreadable; ask, search, book or confirm"
        if act.kind == "search" and act.args[1] != self.need.city:
            return f"the trip goes to {self.need.city}"
        if act.kind == "search" and not act.args[2]:
            return "search on which date?"
        offers = self.offers(*self.state["found"]) if self.state["found"] else []
        if act.kind == "book" and act.args[0] not in [company for company, _, _ in offers]:
            return "no such offer in the list"
        return ""

    def _annoy(self) -> bool:
        """One more annoyance; returns whether the user leaves."""
        s = self.state
        s["annoyed"] += 1
        if s["annoyed"] >= self.ANNOYED:
            s["user"] += ". " + self._says("leave")
        return s["annoyed"] >= self.ANNOYED

    def _ask(self, slot: str) -> tuple[float, bool]:
        s = self.state
        if slot in s["known"]:
            s["user"] = self._says("again")
            return 0.0, self._annoy()
        s["known"].append(slot)
        values = self._value(slot)[1:] if slot == "needs" else self._value(slot)
        s["user"] = self._says("answer" if values else "nothing", (" or " if slot == "dates" else " and ").join(values))
        return 0.0, False

    def _search(self, part: str, city: str, date: str) -> tuple[float, bool]:
        s = self.state
        full = date == self.need.full
        s["found"], s["user"] = (None, f"nothing left on {date}") if full else ([part, date], "")
        if full and date not in s["full"]:
            s["full"].append(date)
        return 0.0, False

    def _book(self, company: str) -> tuple[float, bool]:
        s, (part, date) = self.state, self.state["found"]
        if part not in self.need.parts:
            s["user"] = self._says("unneeded", part)
            return 0.0, self._annoy()
        s["booked"][part] = [*next(offer for offer in self.offers(part, date) if offer[0] == company), date]
        if company in s["need"]["never"]:
            s["violation"], s["user"] = 0.2, self._says("refused")  # why is for the agent to ask
            return -0.2, self._annoy()
        s["user"] = self._says("booked")
        if self.need.change and not s["changed"] and len(s["booked"]) >= self.need.after:
            self._change(company)
        return 0.0, False

    def _change(self, company: str):
        """The user's mind: a new value of one slot, said at once."""
        s, slot = self.state, self.need.change
        before = self._value(slot)
        s["need"][slot] = copy.deepcopy([*before, company] if slot == "never" else self.need.value)
        s["known"] += [slot] * (slot not in s["known"])
        s["changed"] = True
        new = [value for value in self._value(slot) if value not in before]
        text = {"never": "not {}", "budget": "at most {}"}.get(slot, "{}").format(", ".join(new))
        s["user"] = self._says("change", text)

    # ---- the expert, from what the state shows -----------------------------------------------------------------------

    def expert(self) -> str:
        """Asks what is unknown, then searches and books part by part, then asks to confirm; works from any state."""
        view = read_booking(self._observe())
        unknown = [slot for slot in ASKS if slot not in view.known]
        if unknown:
            return ASKS[unknown[0]]
        for part in sorted(view.parts, key=lambda p: p != view.found[0]):  # what is on the screen first
            if view.done(part) and view.booked[part][3] in view.dates():
                continue
            if view.found[0] == part and view.found[1] in view.dates():
                fitting = [company for company, *rest in view.offers if view.fits(part, company, *rest)]
                if fitting:
                    return f"book {fitting[0]}"
            return str(Act("search", (part, view.city, view.dates()[0])))
        return CONFIRM

    def legal_actions(self) -> list[str]:
        """Every question, searches for all parts on the dates known and on another, every offer of the list, and the
        confirmation."""
        view = read_booking(self._observe())
        dates = [*view.known.get("dates", ()), f"{BOOKING_WORDS[self.split]['months'][0]} 1"]
        searches = [str(Act("search", (part, view.city, date))) for part in PARTS for date in dates]
        return [*ASKS.values(), *searches, *(f"book {company}" for company, _, _ in view.offers), CONFIRM]

    # ---- judging -----------------------------------------------------------------------------------------------------

    def credits(self, segment) -> list[float]:
        """What each (obs, action) turn is worth to a judge who sees only the transcript, from -1 (harm) to 1 (use)."""
        return [self._credit(read_booking(obs), read_sentence(action)) for obs, action in segment]

    def _credit(self, view: View | None, act: Act) -> float:
        if view is None or not act.kind:
            return -0.5
        asked_all = all(slot in view.known for slot in ASKS)
        if act.kind == "ask":
            return -1.0 if act.args[0] in view.known else 1.0
        if act.kind == "search":
            part, _, date = act.args
            new = view.found != (part, date or view.found[1]) and (part in view.parts and not view.done(part))
            return 1.0 if new and (date in view.dates() or not date) else -0.5
        if act.kind == "confirm":
            complete = all(map(view.done, view.parts)) and len({d for *_, d in view.booked.values()}) == 1
            return 1.0 if complete and asked_all else -1.0
        part, date = view.found
        offer = next((o for o in view.offers if o[0] == act.args[0]), None)
        if offer is None or view.done(part):
            return -0.5
        if part not in view.parts or not view.fits(part, *offer, date):
            return -1.0
        return 1.0 if asked_all else 0.0  # fits what is known, by luck

    def judge(self, segment) -> float:
        """Progress in [0, 1] from the visible transcript: 0.8 for useful turns (mean credit, -1 is 0, 1 is 1) and 0.2
        for a last turn that completes the task."""
        credits = self.credits(segment)
        if not credits:
            return 0.0
        completed = credits[-1] == 1.0 and read_sentence(segment[-1][1]).kind == "confirm"
        return 0.4 * (1 + sum(credits) / len(credits)) + 0.2 * completed

    def progress(self) -> float:
        """True progress towards success in [0, 1], from hidden state; only to measure what a learned reward is worth.

        Of the turns that had to be made at the start (a question for each hidden slot, two for each part, one to
        confirm) the share whose result stands now; 0 once the user has left.
        """
        s, need = self.state, self.need
        if s["over"] and not s["success"]:
            return 0.0
        done = sum(slot in s["known"] for slot in need.hidden) + s["success"]
        for part in need.parts:
            in_sight = s["found"] and s["found"][0] == part and s["found"][1] in s["need"]["dates"]
            done += 2 if self.right(part) else 1 if in_sight else 0
        return done / (len(need.hidden) + 2 * len(need.parts) + 1)

    def key_steps(self) -> list[tuple[str, float]]:
        """A question for each hidden slot (0.3 together), a fitting booking of each part (0.5), the confirmation."""
        need = self.need
        asks = [(re.escape(f"Action: {ASKS[slot]}"), 0.3 / len(need.hidden)) for slot in need.hidden]
        books = [(rf"Found: {p} [\s\S]*Action: book \w+ {PARTS[p]}$", 0.5 / len(need.parts)) for p in need.parts]
        return [*asks, *books, (re.escape(f"Action: {CONFIRM}"), 0.2)]


# ======================================================================================================================
# arithmetic
# ======================================================================================================================

_LINE = re.compile(r"(-?\d{1,5}) ?([-+*]) ?(-?\d{1,5}) ?= ?(-?\d{1,5})")
_NUMBER = re.compile(r"\banswer\b\D{0,12}?(-?\d{1,5})\b", re.IGNORECASE)


def _compute(a: int, op: str, b: int) -> int:
    return a + b if op == "+" else a - b if op == "-" else a * b


class Arithmetic(Env):
    """A calculation, from left to right, one line a step.

    Options: terms (2 to 6 numbers), limit (10 to 999: no result is larger, no number larger than its half) and ops.

    State (Done and Error are left out when empty):
        Goal: 8 + 5 - 4
        Error: the next line begins 13 - 4 =
        Done: 8 + 5 = 13
        Rest: 13 - 4
        Action:
    Actions:
        8 + 5 = 13    works out the first operation of Rest; its result, right or wrong, takes the operation's place
        undo          takes the last line back
        answer 9      ends the episode
    Nothing says whether a line is right: only `judge`, which checks line by line, tells.
    Reward: 1 for the right answer, else 0; -0.02 for an action that cannot be read or carried out.
    Ends: any answer (terminated); 3 * terms + 1 steps (truncated).
    The goal's checksum modulo 5 decides its split (0 test, 1 val, else train). With `*` too it goes from left to right.

    By hand: 8 + 5 = 13, 13 - 4 = 9.
    >>> env = make_env("arithmetic", terms=3)
    >>> _ = env.reset(seed=0)
    >>> env.load("8 + 5 - 4").splitlines()
    ['Goal: 8 + 5 - 4', 'Rest: 8 + 5 - 4', 'Action:']
    >>> env.step("8 + 5 = 12")[0].splitlines()[1:], env.expert()
    (['Done: 8 + 5 = 12', 'Rest: 12 - 4', 'Action:'], 'undo')
    >>> [env.step(action)[1] for action in ("undo", "8 + 5 = 13", "13 - 4 = 9", "answer 9")]
    [0.0, 0.0, 0.0, 1.0]
    """

    SLIPS = (1, 2, 3, 5, 7, 10, 20)  # errors of the wrong lines in legal_actions: all upwards, so that none cancels

    name = "arithmetic"
    summary = "a calculation, line by line (options terms=4, limit=18, ops='+-')"
    OPTIONS: ClassVar[dict] = {"terms": 4, "limit": 18, "ops": "+-"}

    def __init__(self, seed: int = 0, split: str = "train", **options):
        super().__init__(seed, split, **options)
        terms, limit, ops = (self.options[key] for key in ("terms", "limit", "ops"))
        if not isinstance(terms, int) or not 2 <= terms <= 6:
            raise ValueError(f"arithmetic: terms must be a whole number from 2 to 6, got {terms!r}")
        if not isinstance(limit, int) or not 10 <= limit <= 999:
            raise ValueError(f"arithmetic: limit must be a whole number from 10 to 999, got {limit!r}")
        if not isinstance(ops, str) or not ops or set(ops) - set("+-*"):
            raise ValueError(f"arithmetic: ops must be some of the signs + - *, got {ops!r}")
        self.max_steps = 3 * terms + 1

    return_bounds = property(lambda self: (-0.02 * self.max_steps, 1.0))
    task = property(lambda self: f"{self.options['terms']} terms")
    goal = property(lambda self: self.state["goal"])

    @staticmethod
    def split_of(goal: str) -> str:
        """The split that a calculation belongs to."""
        return ("test", "val", "train", "train", "train")[zlib.crc32(goal.encode()) % 5]

    def _begin(self, rng: random.Random):
        """Draws calculations until one has all its results in 0..limit and belongs to the split."""
        terms, limit, ops = (self.options[key] for key in ("terms", "limit", "ops"))
        while True:
            numbers = [rng.randint(1, limit // 2) for _ in range(terms)]
            goal = str(numbers[0]) + "".join(f" {rng.choice(ops)} {number}" for number in numbers[1:])
            self.load(goal)
            results = [line[3] for line in self.true_lines]
            if self.split_of(goal) == self.split and min(results) >= 0 and max(results) <= limit:
                return

    def load(self, goal: str) -> str:
        """Puts a given calculation in place of the task's (for demonstrations and tests). Returns the observation."""
        self.state |= {"goal": goal, "lines": []}
        self._moved()
        return self._observe()

    def _moved(self):
        self.true_lines = self._true(self.state["goal"])

    @staticmethod
    def _true(goal: str) -> list[tuple[int, str, int, int]]:
        """(a, operation, b, result) of every line, all right."""
        first, *rest = goal.split(" ")
        value, lines = int(first), []
        for op, number in zip(rest[::2], rest[1::2], strict=True):
            lines.append((value, op, int(number), _compute(value, op, int(number))))
            value = lines[-1][3]
        return lines

    @property
    def answer(self) -> int:
        return self.true_lines[-1][3]

    def _rest(self) -> list[str]:
        """Number, then operation and number in turn: what is left, the last line's result in front."""
        words, lines = self.state["goal"].split(" "), self.state["lines"]
        return [str(lines[-1][3]), *words[2 * len(lines) + 1 :]] if lines else words

    def _observe(self):
        s = self.state
        done = ["Done: " + " > ".join("{} {} {} = {}".format(*line) for line in s["lines"])] if s["lines"] else []
        error = [f"Error: {s['error']}"] if s["error"] else []
        return "\n".join([f"Goal: {s['goal']}", *error, *done, "Rest: " + " ".join(self._rest()), "Action:"])

    def _act(self, text: str) -> tuple[float, bool]:
        s, rest = self.state, self._rest()
        plain = clean(text[:MAX_ACTION_CHARS]).strip(" .`")
        line, answer = _LINE.search(plain), _NUMBER.search(plain)
        undo = re.search(r"\bundo\b", plain, re.IGNORECASE)
        if answer and not (line and line.start() < answer.start()):
            s["action"], s["success"] = f"answer {int(answer[1])}", int(answer[1]) == self.answer
        elif line:
            a, op, b, c = int(line[1]), line[2], int(line[3]), int(line[4])
            if [str(a), op, str(b)] != rest[:3]:
                due = f"the next line begins {' '.join(rest[:3])} =" if len(rest) > 1 else "no operation is left"
                s.update(valid=False, error=due)
                return -0.02, False
            s["action"] = f"{a} {op} {b} = {c}"
            s["lines"].append([a, op, b, c])
        elif undo and s["lines"]:
            s["action"] = "undo"
            s["lines"].pop()
        else:
            s.update(valid=False, error="nothing to undo" if undo else "unreadable; use a + b = c, undo or answer n")
            return -0.02, False
        s["repaired"] = s["action"] != text
        over = s["action"].startswith("answer")
        return float(over and s["success"]), over

    def expert(self) -> str:
        """The next line, right; takes wrong lines back first; the answer when nothing is left."""
        lines = self.state["lines"]
        if any(_compute(a, op, b) != c for a, op, b, c in lines):
            return "undo"
        if len(lines) == len(self.true_lines):
            return f"answer {self.answer}"
        return "{} {} {} = {}".format(*self.true_lines[len(lines)])

    def legal_actions(self) -> list[str]:
        """The next line right and with several errors, once nothing is left several answers, and undo."""
        rest, lines = self._rest(), self.state["lines"]
        undo = ["undo"] if lines else []
        if len(rest) == 1:
            return [f"answer {int(rest[0]) + slip}" for slip in (0, *self.SLIPS)] + undo
        a, op, b = int(rest[0]), rest[1], int(rest[2])
        results = [_compute(a, op, b) + slip for slip in (0, *self.SLIPS)]
        return [f"{a} {op} {b} = {c}" for c in results] + undo

    # ---- judging -----------------------------------------------------------------------------------------------------

    def credits(self, segment) -> list[float]:
        """1 for each step that is right in view of what the state shows, else 0: a right next line, `undo` while a
        wrong line stands, the answer that all the lines, if right, lead to."""
        return [float(self._right_step(obs, action)) for obs, action in segment]

    @staticmethod
    def _right_step(obs: str, action: str) -> bool:
        rest = re.search(r"^Rest: (.*)$", obs, re.MULTILINE)
        done = re.search(r"^Done: (.*)$", obs, re.MULTILINE)
        if rest is None:
            return False
        lines = [(int(a), op, int(b), int(c)) for a, op, b, c in _LINE.findall(done[1])] if done else []
        if any(_compute(a, op, b) != c for a, op, b, c in lines):
            return bool(re.search(r"\bundo\b", action, re.IGNORECASE))
        words = rest[1].split(" ")
        if len(words) == 1:
            answer = _NUMBER.search(action)
            return answer is not None and answer[1] == words[0]
        line = _LINE.search(action)
        right = line is not None and [line[1], line[2], line[3]] == words[:3]
        return right and _compute(int(line[1]), line[2], int(line[3])) == int(line[4])

    def judge(self, segment) -> float:
        """Share of right steps, line by line, from the visible transcript."""
        credits = self.credits(segment)
        return sum(credits) / len(credits) if credits else 0.0

    def progress(self) -> float:
        """True progress in [0, 1]: right lines before the first wrong one, and the answer; 0 after a wrong answer."""
        s = self.state
        if s["over"]:
            return float(s["success"])
        right = list(itertools.takewhile(lambda x: tuple(x[0]) == x[1], zip(s["lines"], self.true_lines, strict=False)))
        return len(right) / (len(self.true_lines) + 1)

    def key_steps(self) -> list[tuple[str, float]]:
        """Every line of the calculation, right, and the answer: equal weights."""
        texts = ["{} {} {} = {}".format(*line) for line in self.true_lines] + [f"answer {self.answer}"]
        return [(rf"Action: {re.escape(text)}$", 1 / len(texts)) for text in texts]


# ======================================================================================================================
# Turns with thoughts: what troubleshoot and trip share
# ======================================================================================================================

MAX_TURN_CHARS = 4_000  # a turn is read up to here
_THINK_OPEN = re.compile(r"<\s*think(?:ing)?\s*>", re.IGNORECASE)
_THINK_CLOSE = re.compile(r"<\s*/\s*think(?:ing)?\s*>", re.IGNORECASE)
_FILL = r"\b[^\w\n]*(?:(?:about|the|for|of|to|on|in|a|their|your|user|database|server|app)\s+)*"  # forgiven words


def drop_thought(text: str) -> str:
    """The action part of a turn `<think>1. ... 2. ...</think> action`: what stands behind the last closing tag.

    A thought that is never closed may still be followed by an action on a line of its own, the last one; a turn of one
    line that was cut off inside its thought has no action: "".
    """
    closings = list(_THINK_CLOSE.finditer(text))
    text = text[closings[-1].end() :] if closings else text
    opening = _THINK_OPEN.search(text)
    if opening is None:
        return text.strip()
    lines = text[opening.end() :].strip().splitlines()
    return lines[-1].strip() if len(lines) > 1 and lines[-1][:1].isalpha() else text[: opening.start()].strip()


class Deliberation(Env):
    """A dialogue in turns of a short numbered thought and one action; the environment reads the action alone.

    A subclass defines GRAMMAR (a compiled pattern; each alternative's groups are a verb and its arguments), USAGE and
    _take(verb, *args) -> (reward, terminated), which sets state["error"] to refuse, and _decided() as described below.
    """

    GRAMMAR: ClassVar[re.Pattern] = re.compile("(?!)")
    USAGE = ""
    max_steps = 8
    max_action_tokens = 48

    @property
    def return_bounds(self):
        return (-0.02 * self.max_steps, 1.0)

    def _act(self, text: str) -> tuple[float, bool]:
        s = self.state
        given = drop_thought(text[:MAX_TURN_CHARS])
        found = self.GRAMMAR.search(clean(given).lower())
        s["decisive"] = False
        if found is None:
            s.update(valid=False, error=f"unreadable; {self.USAGE}")
            return -0.02, False
        parts = [part for part in found.groups() if part]
        reward, terminated = self._take(*parts)
        s["valid"] = not s["error"]
        if s["valid"]:
            s["action"] = " ".join(parts)
            s["repaired"] = given != s["action"] or len(text) > MAX_TURN_CHARS
        return reward, terminated

    def _refuse(self, error: str) -> tuple[float, bool]:
        self.state["error"] = error
        return -0.02, False

    def decisive(self) -> bool:
        """Did the last action bring the solution nearer? Knows the hidden truth: for measuring credits only."""
        return self.state["decisive"]


def _turn(action: str, *thoughts: str) -> str:
    """`<think>1. ... 2. ...</think> action`."""
    return "<think>" + " ".join(f"{i}. {t}" for i, t in enumerate(thoughts, 1)) + f"</think> {action}"


# ======================================================================================================================
# troubleshoot
# ======================================================================================================================

# Cause (what `fix` names) -> what differs from a healthy system. The first key names the kind of log line.
CAUSES = {
    "pool limit": {"log": "timeout", "connections": "full"},
    "index": {"log": "timeout", "connections": "full", "queries": "slow"},
    "firewall": {"log": "timeout", "connections": "none", "network": "blocked"},
    "address": {"log": "timeout", "connections": "none", "address": "old"},
    "database": {"log": "timeout", "connections": "none"},
    "update": {"log": "memory", "memory": "grows", "version": "new"},
    "cache": {"log": "memory", "memory": "grows"},
    "rate limit": {"log": "memory", "memory": "jumps", "traffic": "high"},
    "upload size": {"log": "memory", "memory": "jumps", "uploads": "huge"},
    "schedule": {"log": "memory", "memory": "jumps"},
    "certificate": {"log": "denied", "certificate": "expired"},
    "clock": {"log": "denied", "clock": "wrong"},
    "key": {"log": "denied"},
    "role": {"log": "denied", "users": "some", "roles": "missing"},
    "password": {"log": "denied", "users": "some"},
}
AREAS = {  # kind of log line -> its questions, in the order in which they narrow the causes down
    "timeout": ("connections", "queries", "network", "address"),
    "memory": ("memory", "version", "traffic", "uploads"),
    "denied": ("users", "roles", "certificate", "clock"),
}
# question -> value -> wordings for train / val / test. The last value of a question (but log) is a healthy system's.
# Training has a dozen of each: a reader has to learn what they mean. Validation and test use other words.
ANSWERS = {
    "log": {
        "timeout": "connection timeout, database timed out, no answer from the database, database is not answering,"
        " query to the database timed out, lost the server while waiting, server did not answer in time, waited # s for"
        " the database, timeout reading from the server, database gave no reply, no response from the database"
        " / database wait too long, timeout waiting for the database, the server gave no answer"
        " / database did not respond, gave up waiting for the server, no database reply after # s",
        "memory": "out of memory, worker killed for memory, memory exhausted, no memory left, memory is full, process"
        " died of low memory, heap is full, heap allocation failed, killed as memory ran out, cannot allocate # mb,"
        " memory limit hit, no free ram, ram is full"
        " / heap full and worker died, memory ran out, not enough ram"
        " / memory allocation failed, stopped as no ram was left, worker died with memory full",
        "denied": "access denied, request not allowed, login rejected, permission denied, not permitted, user may not"
        " do this, unauthorized user, sign-in refused, login forbidden, no right to enter, login refused, token"
        " rejected / permission error, sign-in rejected, request refused"
        " / unauthorized request, sign-in forbidden, access not permitted",
    },
    "connections": {
        "full": "all # in use, # of # taken, no free slot, every one is busy, all slots used, limit of # hit, maximum"
        " reached, none spare, no spare connection, all taken, nothing free, # used and none free"
        " / every slot busy, all # busy, no slot free / limit of # reached, # used and 0 spare, every slot taken",
        "none": "none open, 0 established, not one succeeds, nothing connects, zero open, every try fails, all attempts"
        " fail, no open session, not a single one active, cannot connect, none works, 0 open"
        " / no session at all, zero established, all fail / zero active, every attempt fails, no session open",
        "few": "a few in use, plenty free, a third used, most are free, many idle, low use, # free, few busy, only two"
        " taken, lots of spare slots, hardly any used, half are idle"
        " / most are idle, few taken, plenty spare / many spare, a few busy, most slots free",
    },
    "queries": {
        "slow": "some take # s, one scans all rows, very slow, take minutes, much too long, they crawl along, one runs"
        " for # minutes, slower than ever, wait # s each, a long scan, hang for minutes, # minutes long"
        " / minutes each, slow ones, # s each / they crawl, far too long, one takes # minutes",
        "fast": "all under # ms, quick, finish at once, done in # ms, instant, no waiting, very fast, few ms for each,"
        " no delays, done in no time, # ms each, all quick"
        " / a few ms each, very quick, all done at once / done instantly, no delay, fast as ever",
    },
    "network": {
        "blocked": "port closed, packets dropped, traffic blocked, a rule blocks it, port is shut, stopped by a filter,"
        " filtered, a rule refused it, no packet gets through, blocked on the way, closed by a rule, path is blocked"
        " / port filtered, packets blocked, the way is closed / a rule stops it, port shut, no traffic gets through",
        "open": "port open, ping works, packets arrive, path is open, all packets get through, route is fine, no"
        " filter, host answers ping, traffic flows, way is clear, nothing blocked, server is reachable"
        " / reachable, packets get through, ping is fine / path is clear, route works, port is open",
    },
    "address": {
        "old": "an old server, a retired host, from before the move, an outdated entry, old host, of the former server,"
        " no longer the right host, a machine that is gone, not the new server, wrong machine, out of date"
        " / outdated host, old machine, the wrong server / a former machine, not the new, an old entry",
        "right": "matches the server, correct, up to date, the right host, the new server, current, is right, the"
        " proper server, the present machine, checked and correct, same as the server"
        " / as it should be, right server, is correct / current entry, the proper host, the right machine",
    },
    "memory": {
        "grows": "climbs all day, more every hour, rises without end, grows slowly, higher every day, creeps up hour by"
        " hour, keeps rising, goes up and up, never goes down, # mb more an hour, growing each day"
        " / creeps up, rises all day, more each day / keeps growing, higher day by day, climbs without end",
        "jumps": "sudden peaks, leaps in seconds, spikes, jumps up suddenly, low and then a peak, surges now and then,"
        " sudden leaps, bursts, sharp spikes, jumps in a second, sudden bursts"
        " / abrupt surges, spikes in seconds, sudden jumps / jumps at once, fine then bursts, sharp peaks",
        "flat": "low and flat, half free, stable, does not move, steady, always the same, constant, enough room, calm,"
        " flat all day, never changes"
        " / never moves, stable all day, steady and low / flat as always, plenty of room, does not change",
    },
    "version": {
        "new": "new since monday, updated this week, just upgraded, changed yesterday, a fresh version, released today,"
        " upgraded last night, new release, installed this morning, days old, a new build"
        " / released yesterday, new today, upgraded this morning / changed today, fresh release, just updated",
        "same": "same for a year, not touched, no change, old, unchanged, as before, months old, not new, never"
        " updated, nothing new, last changed long ago, the old build"
        " / old and proven, not changed, same as before / months without change, as ever, not updated",
    },
    "traffic": {
        "high": "# times normal, flooded, far above normal, a flood of requests, very heavy, a great rush, way too"
        " much, # times as many, huge, a storm of requests, much higher than usual, very high"
        " / a huge rush, heavy flood, far too much / extremely heavy, # times more, much above normal",
        "usual": "as usual, ordinary, average, normal, like every day, a typical week, nothing special, as always, no"
        " rush, the usual amount, quiet, same as always"
        " / a typical day, normal amount, nothing unusual / same as last week, as on every day, no flood",
    },
    "uploads": {
        "huge": "files of # gb, giant videos, very large files, huge images, # gb archives, enormous files, massive"
        " files, big videos, scans of # gb, too large, very big, giant documents"
        " / enormous archives, big files, huge videos / massive scans, # gb images, very large videos",
        "small": "tiny files, a few kb, short texts, small images, little files, only small files, # kb each, short"
        " documents, tiny notes, very small, just kb, little texts"
        " / small notes, tiny texts, few kb each / little documents, only kb, small files",
    },
    "users": {
        "some": "only new staff, a few people, two accounts, some users, just one person, certain people only, a single"
        " team, only some, a few accounts, several persons, one group only"
        " / one team, some accounts, a few users / certain persons, just some, only one group",
        "all": "everyone, all users, the whole company, all staff, every user, all people, the entire company,"
        " everybody, all of them, all accounts, all teams"
        " / every account, the whole staff, each user / each person, the entire staff, all the company",
    },
    "roles": {
        "missing": "none assigned, missing, left empty, not set, no role given, nobody set any, not given, empty,"
        " nothing assigned, without any role, never set"
        " / not granted, none set, role is missing / absent, nobody set them, not assigned",
        "set": "all set, complete, assigned, given to all, present, granted to them, fully assigned, all there, set for"
        " everyone, complete and correct, as they should be"
        " / granted, all given, set and complete / in place, given to them, all assigned",
    },
    "certificate": {
        "expired": "ended yesterday, expired, past its date, not valid any more, ran out last week, out of date, too"
        " old, invalid since monday, over its date, expired # days ago, has run out, ended"
        " / ran out, expired last week, past the date / no longer valid, lapsed last week, ended # days ago",
        "valid": "valid for a year, good until may, in date, still valid, not expired, fine for months, # days left,"
        " valid, months to go, runs until june, not over"
        " / not yet due, good for a year, valid until june / months left, still fine, in date until may",
    },
    "clock": {
        "wrong": "# minutes late, runs ahead, wrong by hours, an hour behind, shows yesterday, off by # minutes, too"
        " fast, too slow, shows the wrong day, a day ahead, not in step, minutes ahead"
        " / off by a day, # minutes behind, wrong day / hours behind, shows last week, runs too late",
        "right": "exact, in step, right to the second, correct, on time, shows the right time, no drift seen, in sync,"
        " precise, correct to the second, keeps time"
        " / accurate, exact to the second, right on time / correct time, no drift, is in step",
    },
}
ANSWERS = {  # question -> value -> split -> wordings
    question: {
        value: dict(zip(SPLITS, (part.split(", ") for part in wordings.split(" / ")), strict=True))
        for value, wordings in values.items()
    }
    for question, values in ANSWERS.items()
}
PRODUCTS = {
    "train": "kite shop, atlas mail, ruby bank, delta cloud, lotus wiki, pixel forum, cobra chat, amber store, nova "
    "radio, comet tickets, harbor maps, cobalt school, raven press, summit hotel, ember taxi, willow clinic",
    "val": "zebra news, maple desk",
    "test": "orion travel, falcon games, tulip health, cedar music",
}
PRODUCTS = {split: names.split(", ") for split, names in PRODUCTS.items()}
SYMPTOMS = {  # every cause shows any of them: the symptom alone decides nothing
    "train": "pages do not load, orders fail, users see an error, reports stay empty, the app is down, every page "
    "hangs, lists are empty, nothing is sent, the site is gone, forms fail",
    "val": "the screen is blank, forms hang",
    "test": "nothing opens, saving fails, it stopped working, people complain",
}
SYMPTOMS = {split: texts.split(", ") for split, texts in SYMPTOMS.items()}
COMPLAINTS = {
    "train": ("fix {product}: {symptom}", "{product} has a fault: {symptom}"),
    "val": ("trouble with {product}: {symptom}",),
    "test": ("repair {product}: {symptom}", "help with {product}: {symptom}"),
}


def _value(cause: str, question: str) -> str:
    """What `question` reveals if `cause` is the fault: its own sign, else a healthy system's value."""
    return CAUSES[cause].get(question) or list(ANSWERS[question])[-1]


def _evidence(question: str, value: str) -> str:
    """Pattern of the line or entry by which a state shows that `question` was answered with `value`, in any split."""
    wordings = [w for texts in ANSWERS[question][value].values() for w in texts]
    texts = "|".join(re.escape(w).replace(r"\#", r"\d+") for w in wordings)
    return rf"\nLog: (?:{texts})\n" if question == "log" else rf"[ ;]{question}: (?:{texts})[;\n]"


def _aimed(causes: list[str], known: dict[str, str]) -> str | None:
    """The question that narrows `causes` down best: the log first, then the first of its area that tells some apart."""
    if "log" not in known and len({_value(c, "log") for c in causes}) > 1:
        return "log"
    questions = (q for q in AREAS[_value(causes[0], "log")] if q not in known)
    return next((q for q in questions if len({_value(c, q) for c in causes}) > 1), None)


@lru_cache(maxsize=1)
def _diagnosis_steps() -> list[tuple[str, float]]:
    """Key steps of every diagnosis as patterns: aimed first and following questions, true readings, the proven cause.

    Each asks for evidence in the state and for words behind "Action:": it holds for a thought as well as for an action.
    """
    first, later, proofs = [r"(?!.*\nLog: ).*\nAction:.*\bask log\b"], [], []
    for cause in CAUSES:
        known, left = {"log": _value(cause, "log")}, [c for c in CAUSES if _value(c, "log") == _value(cause, "log")]
        while (question := _aimed(left, known)) is not None:
            last = _evidence(*list(known.items())[-1])
            (later if len(known) > 1 else first).append(rf"(?=.*{last}).*\nAction:.*\bask {question}\b")
            known[question] = _value(cause, question)
            left = [c for c in left if _value(c, question) == known[question]]
        own = {q: v for q, v in CAUSES[cause].items() if q != "log"}
        own = {q: v for q, v in own.items() if sum(_value(c, q) == v for c in CAUSES) == 1} or known
        facts = "".join(rf"(?=.*{_evidence(q, v)})" for q, v in own.items() if q != "log" or len(CAUSES[cause]) == 1)
        proofs.append(rf"{facts}.*\nAction:.*\b(?:so|fix) {cause}\b")
    readings = [
        rf"(?=.*{_evidence(question, value)}).*\nAction:.*\b{question} {value}\b"
        for question, values in ANSWERS.items()
        for value in values
    ]
    groups = ((first, 0.25), (later, 0.25), (readings + proofs, 0.2), (proofs, 0.3))
    return [(rf"(?s)\A(?:{'|'.join(dict.fromkeys(patterns))})", weight) for patterns, weight in groups]


class Troubleshoot(Deliberation):
    """A product with one of 15 hidden faults: find the cause by questions, then fix it.

    State (Log, Known, Error and Result only where there is something to say):
        Goal: fix kite shop: orders fail
        Log: connection timeout
        Known: connections: 50 of 50 taken; queries: quick
        Ask: log, network, connections, users, queries, address, clock, certificate, roles
        Fix: key, index, pool limit, clock, database, address, certificate, role, firewall, password
        Action:
    Turn: `<think>1. connections full 2. queries fast 3. so pool limit</think> fix pool limit`; the thought is free
    text and not looked at.
    Actions: ask <question>, fix <cause>, with the words of the two lists.
    The symptom decides nothing, and a log line is shared by five causes: the article's database time-out may be too
    small a connection pool, a slow query, a firewall rule, an old address or a database that is down. In half of the
    tasks the user gives the log line at once, otherwise it has to be asked for. A question reveals one fact. The lists
    hold the questions and causes of the true area and of one other, mixed.
    Reward: 1 for fixing the true cause once the facts in sight leave no other; -0.01 for a question already answered;
    -0.02 for an illegal or unreadable action.
    Ends: any fix (a wrong one, or one that was a guess, is a failure; terminated); 8 steps (truncated).
    Products, symptoms and the wordings of log lines and answers differ between the splits; causes and questions do not.

    By hand: connections and queries tell the five causes of the time-out apart.
    >>> env = make_env("troubleshoot")
    >>> _ = env.reset(seed=0)
    >>> print(env.load("pool limit", known=("log",)))
    Goal: fix kite shop: pages do not load
    Log: connection timeout
    Ask: log, connections, queries, network, address, memory, version, traffic, uploads
    Fix: pool limit, index, firewall, address, database, update, cache, rate limit, upload size, schedule
    Action:
    >>> env.step("<think>1. log timeout 2. connections first</think> ask connections")[0].splitlines()[2]
    'Known: connections: all 50 in use'
    >>> env.expert()
    '<think>1. connections full 2. pool limit or index 3. queries decide</think> ask queries'
    >>> env.step(env.expert())[0].splitlines()[2]
    'Known: connections: all 50 in use; queries: all under 50 ms'
    >>> env.expert()
    '<think>1. connections full 2. queries fast 3. so pool limit</think> fix pool limit'
    >>> env.step(env.expert())[1:4]
    (1.0, True, False)
    """

    LOG_GIVEN = 0.5  # share of the tasks whose user gives the log line at once

    name = "troubleshoot"
    summary = "find a product's hidden fault by well-aimed questions, then fix it; turns hold a thought"
    GRAMMAR = re.compile(
        rf"\b(ask){_FILL}({'|'.join(ANSWERS)})\b|\b(fix){_FILL}({'|'.join(CAUSES)})\b"
    )
    USAGE = "use ask or fix with a word of the lists"

    @property
    def fault(self) -> dict:
        """The task's fixed part: cause, goal, the lists `asks` and `fixes`, and what each question reveals."""
        return self.state["fault"]

    @property
    def task(self) -> str:
        return _value(self.fault["cause"], "log")

    @property
    def goal(self) -> str:
        return self.fault["goal"]

    def _begin(self, rng: random.Random):
        cause = rng.choice(list(CAUSES))
        area = _value(cause, "log")
        areas = [area, rng.choice([a for a in AREAS if a != area])]
        asks = ["log", *(q for a in areas for q in AREAS[a])]
        fixes = [c for c in CAUSES if _value(c, "log") in areas]
        complaint = rng.choice(COMPLAINTS[self.split])
        goal = complaint.format(product=rng.choice(PRODUCTS[self.split]), symptom=rng.choice(SYMPTOMS[self.split]))
        answers = {q: rng.choice(ANSWERS[q][_value(cause, q)][self.split]) for q in ANSWERS}
        number = str(rng.randint(2, 9) * 10)
        answers = {q: text.replace("#", number) for q, text in answers.items()}
        rng.shuffle(asks)
        rng.shuffle(fixes)
        self.state["fault"] = {"cause": cause, "goal": goal, "asks": asks, "fixes": fixes, "answers": answers}
        self.state |= {"known": ["log"] if rng.random() < self.LOG_GIVEN else [], "result": "", "decisive": False}

    def load(self, cause: str, known: tuple[str, ...] = (), other: str = "") -> str:
        """Puts a given fault in place of the task's (for demonstrations and tests): first wordings, lists in order.

        known: questions already answered; other: the area that supplies the wrong words (default: the next one).
        """
        area, names = _value(cause, "log"), list(AREAS)
        areas = (area, other or names[(names.index(area) + 1) % len(names)])
        goal = COMPLAINTS[self.split][0].format(product=PRODUCTS[self.split][0], symptom=SYMPTOMS[self.split][0])
        answers = {q: ANSWERS[q][_value(cause, q)][self.split][0].replace("#", "50") for q in ANSWERS}
        asks = ["log", *(q for a in areas for q in AREAS[a])]
        fixes = [c for a in areas for c in CAUSES if _value(c, "log") == a]
        self.state["fault"] = {"cause": cause, "goal": goal, "asks": asks, "fixes": fixes, "answers": answers}
        self.state |= {"known": list(known), "result": "", "decisive": False}
        return self._observe()

    def _observe(self) -> str:
        s, answers = self.state, self.fault["answers"]
        facts = "; ".join(f"{q}: {answers[q]}" for q in s["known"] if q != "log")
        lines = [f"Goal: {self.goal}", *([f"Error: {s['error']}"] if s["error"] else [])]
        lines += [f"Log: {answers['log']}"] if "log" in s["known"] else []
        lines += [f"Known: {facts}"] if facts else []
        lines += ["Ask: " + ", ".join(self.fault["asks"]), "Fix: " + ", ".join(self.fault["fixes"])]
        lines += [f"Result: {s['result']}"] if s["result"] else []
        return "\n".join(lines + ["Action:"])

    def _left(self) -> list[str]:
        """The causes of the list that agree with all facts in sight."""
        true, known = self.fault["cause"], self.state["known"]
        return [c for c in self.fault["fixes"] if all(_value(c, q) == _value(true, q) for q in known)]

    def _take(self, verb: str, word: str) -> tuple[float, bool]:
        s = self.state
        if word not in self.fault["asks" if verb == "ask" else "fixes"]:
            return self._refuse(f"{word} is not in the list of what to {verb}")
        before = self._left()
        if verb == "fix":
            right, proven = word == self.fault["cause"], len(before) == 1
            s["success"] = s["decisive"] = right and proven
            s["result"] = "fixed" if right and proven else "a guess without proof" if right else "still broken"
            return float(right and proven), True
        if word in s["known"]:
            return -0.01, False
        s["known"].append(word)
        s["decisive"] = len(self._left()) < len(before)
        return 0.0, False

    def progress(self) -> float:
        """True progress in [0, 1]: how far the possible causes are narrowed down; 1 fixed, 0 failed. For measuring."""
        if self.state["over"]:
            return float(self.state["success"])
        return 0.9 * (1 - math.log(len(self._left())) / math.log(len(self.fault["fixes"])))

    def expert(self) -> str:
        """Reads the facts, then names the causes left, asks what tells them apart; fixes when one is left.

        Always in this order: a model that writes word by word shall not have to decide before it has read.
        """
        true, left = self.fault["cause"], sorted(self._left(), key=list(CAUSES).index)
        known = {q: _value(true, q) for q in self.state["known"]}
        area = AREAS[_value(true, "log")] if "log" in known else known
        readings = [f"{q} {value}" for q, value in known.items() if q in area and q != "log"][-3:]
        readings = readings or [f"{q} {value}" for q, value in known.items()][-1:] or ["nothing known"]
        if len(left) == 1:
            return _turn(f"fix {left[0]}", *readings, f"so {left[0]}")
        question = _aimed(left, known)
        if question == "log":
            return _turn("ask log", readings[-1], "many causes", "the log shows the area")
        s = "" if question in ("connections", "queries", "uploads", "users", "roles") else "s"
        if len(left) > 3:
            return _turn(f"ask {question}", readings[-1], "many causes", f"{question} come{s} first")
        causes = ", ".join(left[:-1]) + f" or {left[-1]}"
        return _turn(f"ask {question}", *readings, causes, f"{question} decide{s}")

    def legal_actions(self) -> list[str]:
        """Every question and every fix of the two lists, without thoughts."""
        return [f"ask {q}" for q in self.fault["asks"]] + [f"fix {c}" for c in self.fault["fixes"]]

    def _steps_of(self, goal: str) -> list[tuple[str, float]]:
        return _diagnosis_steps()


# ======================================================================================================================
# trip
# ======================================================================================================================

DAYS = ("mon", "tue", "wed", "thu", "fri")
NEEDS = ("dates", "budget", "interest")
NEAR = 5  # km: how far a firm of the last day may lie from the station
TRIP_WORDS = {
    "train": {
        "cities": "porto, lyon, bergen, turin, leeds, malmo, ghent, gdansk, basel, zagreb",
        "topics": "energy, health, robots, banking, food, chips, steel, trains",
        "firms": "nova, orbit, pixel, delta, falcon, cobalt, ember, summit, harbor, raven, vector, prism, aurora, "
        "beacon, cedar, comet, granite, jasper, lotus, river",
    },
    "val": {
        "cities": "vienna, riga",
        "topics": "water, games, paper, ships",
        "firms": "zenith, meadow, anchor, bishop, canyon, marble, copper, saddle, willow, temple, ladder, pepper",
    },
    "test": {
        "cities": "oslo, seville, dresden, nantes",
        "topics": "space, security, music, cars, fashion",
        "firms": "atlas, breeze, crystal, dragon, engine, forest, glacier, horizon, island, jungle, lantern, mirror, "
        "needle, oyster",
    },
}
TRIP_WORDS = {s: {kind: words.split(", ") for kind, words in kinds.items()} for s, kinds in TRIP_WORDS.items()}
TRIP_GOALS = {
    "train": ("plan 3 days in {city} with 2 visits", "a 3 day trip to {city}, visit 2 firms"),
    "val": ("3 days in {city}, see 2 companies",),
    "test": ("arrange a trip to {city} for 3 days and 2 firms", "travel to {city} for 3 days: 2 meetings"),
}


@lru_cache(maxsize=1)
def _trip_steps() -> list[tuple[str, float]]:
    """Key steps of every trip, as patterns over a state and what was thought or done in it."""
    day = "|".join(DAYS)
    asked = "|".join(rf"(?=.*\n{need.capitalize()}: unknown\n).*\nAction:.*\bask {need}\b" for need in NEEDS)
    listed = r"(?!.*\nInterest: unknown)(?=.*\nInterest: (?P<t>\w+)\n).*\nAction:.*\blist (?P=t)\b"

    def fits(firm: str, on: str) -> str:
        """Lookaheads: group `firm` is listed, opens on group `on`, and is near if that is the last day."""
        opens = rf"(?=.*\b(?P={firm}): (?:(?:{day}) )?(?P={on})\b)"
        return opens + rf"(?!.*, (?P={on}) within .*\b(?P={firm}): [^,;\n]*, [{NEAR + 1}-9] km)"

    visit = rf"(?=.*\nAction:.*\bvisit (?P<f>\w+) (?P<d>{day})\b)(?=.*\nDates: [^,\n]*\b(?P=d)\b){fits('f', 'd')}"
    opens = rf"(?=.*\nAction:.*\b(?P<g>\w+) opens (?P<e>{day})\b)(?=.*\b(?P=g): (?:(?:{day}) )?(?P=e)\b)"
    plan = rf"(?=.*\nPlan: (?P<d>{day}) (?P<f>\w+), (?P<e>{day}) (?P<g>\w+), \$\d+\n)"
    affordable = "|".join(rf"(?=.*\nBudget: \${b}\n)(?=.*\nPlan: [^\n]*, \$[1-{b}]\n)" for b in range(2, 10))
    interest = r"(?=.*\nInterest: (?P<t>\w+)\n)(?=.*\nFirms for (?P=t): )"
    confirmed = rf"(?=.*\nAction:.*\bconfirm\b){interest}{plan}(?:{affordable}){fits('f', 'd')}{fits('g', 'e')}"
    steps = ((rf"{asked}|(?!.*: unknown\n){listed}", 0.15), (listed, 0.15), (f"{opens}|{visit}", 0.15))
    return [(rf"(?s)\A(?:{pattern})", weight) for pattern, weight in (*steps, (visit, 0.2), (confirmed, 0.35))]


class Trip(Deliberation):
    """Plan a three-day business trip: two visits to firms of the traveller's interest.

    State (a line for firms, plan, error and result only where there is one):
        Goal: plan 3 days in porto with 2 visits
        Dates: tue wed thu, thu within 5 km
        Budget: $6
        Interest: robots
        Firms for robots: nova: mon tue, 3 km, $4; orbit: tue thu, 2 km, $2; pixel: wed fri, 8 km, $3
        Plan: tue nova, $4
        Action:
    Turn: `<think>1. orbit opens thu, 2 km 2. with nova $6 of $6</think> visit orbit thu`; the thought is free text
    and not looked at.
    Actions:
        ask dates, ask budget, ask interest   in three of four tasks one of them is unknown
        list <topic>                          shows a topic's four firms: opening days, distance, cost; empties the plan
        visit <firm> <day>                    puts a listed firm on a day (once; what stood on that day goes)
        drop <day>                            empties a day
        confirm                               ends the episode
    Success: the confirmed plan holds exactly two firms of the interest on days of the trip on which they open, on the
    last day only one within 5 km (the train home), and costs no more than the budget.
    Reward: 1 on success; -0.01 for asking, listing or planning the same again; -0.02 for an unreadable action or an
    illegal one (a visit without known dates, on another day or to a firm not listed; a topic without firms; dropping
    what is not planned; a confirmation with something unknown).
    Ends: confirm (terminated); 8 steps (truncated). Cities, topics, firms and goal wordings differ between the splits.

    By hand: orbit on thursday is near enough, pixel on wednesday would leave $3 of $6: not enough for nova.
    >>> env = make_env("trip")
    >>> _ = env.reset(seed=0)
    >>> firms = {"nova": (("mon", "tue"), 3, 4), "orbit": (("tue", "thu"), 2, 2), "pixel": (("wed", "fri"), 8, 3)}
    >>> print(env.load("tue", 6, "robots", {"robots": firms}, plan={"tue": "nova"}, listed="robots").splitlines()[4])
    Firms for robots: nova: mon tue, 3 km, $4; orbit: tue thu, 2 km, $2; pixel: wed fri, 8 km, $3
    >>> env.expert()
    '<think>1. orbit opens thu, 2 km 2. with nova $6 of $6</think> visit orbit thu'
    >>> env.step(env.expert())[0].splitlines()[5]
    'Plan: tue nova, thu orbit, $6'
    >>> env.step("<think>1. all fits</think> confirm")[1:4]
    (1.0, True, False)
    """

    ASKED = 0.75  # share of the tasks in which dates, budget or interest have to be asked for
    TOPICS = 3  # topics of a city
    FIRMS = 4  # firms of a topic
    PLANS = (1, 4)  # number of right plans, least and most

    name = "trip"
    summary = "plan a three-day business trip: ask, list firms, schedule two visits, confirm; turns hold a thought"
    GRAMMAR = re.compile(
        rf"\b(ask){_FILL}({'|'.join(NEEDS)})\b|\b(list){_FILL}(\w+)|"
        rf"\b(visit){_FILL}(\w+)\W+(?:on\W+)?({'|'.join(DAYS)})[a-z]*\b|"
        rf"\b(drop){_FILL}({'|'.join(DAYS)})[a-z]*\b|\b(confirm)\b"
    )
    USAGE = "use ask, list, visit, drop or confirm"

    @property
    def task(self) -> str:
        return self.state["trip"]["unknown"] or "all given"

    @property
    def goal(self) -> str:
        return self.state["trip"]["goal"]

    # ---- the task ----------------------------------------------------------------------------------------------------

    def _begin(self, rng: random.Random):
        words = TRIP_WORDS[self.split]
        topics = rng.sample(words["topics"], self.TOPICS)
        goal = rng.choice(TRIP_GOALS[self.split]).format(city=rng.choice(words["cities"]))
        unknown = rng.choice(NEEDS) if rng.random() < self.ASKED else ""
        while True:
            names = iter(rng.sample(words["firms"], self.TOPICS * self.FIRMS))
            firms = {}
            for topic in topics:
                firms[topic] = {next(names): self._firm(rng) for _ in range(self.FIRMS)}
            first, budget = rng.randrange(3), rng.randint(3, 7)
            self.load(DAYS[first], budget, topics[0], firms)
            if self.PLANS[0] <= len(self.right_plans()) <= self.PLANS[1]:
                break
        self.state["trip"] |= {"goal": goal, "topics": sorted(topics), "unknown": unknown}
        self.state["unknown"] = unknown

    @staticmethod
    def _firm(rng: random.Random) -> tuple:
        opening = sorted(rng.sample(range(len(DAYS)), 2))
        return tuple(DAYS[i] for i in opening), rng.randint(1, 9), rng.randint(1, 4)

    def load(self, first: str, budget: int, interest: str, firms: dict, plan: dict | None = None, listed="") -> str:
        """Puts a given trip in place of the task's (for demonstrations and tests). Returns the observation.

        first: first day; firms: topic -> name -> (two opening days, km from 1 to 9, cost); plan: day -> firm; listed:
        the topic in sight.
        """
        days = DAYS[DAYS.index(first) :][:3]
        goal = TRIP_GOALS[self.split][0].format(city=TRIP_WORDS[self.split]["cities"][0])
        trip = {"goal": goal, "dates": days, "budget": budget, "interest": interest, "firms": firms, "unknown": ""}
        self.state["trip"] = trip | {"topics": sorted(firms)}
        self.state |= {"unknown": "", "plan": dict(plan or {}), "listed": listed, "result": "", "decisive": False}
        return self._observe()

    def right_plans(self) -> list[dict[str, str]]:
        """Every plan (day -> firm, two of them) that meets all constraints, the cheapest first."""
        trip = self.state["trip"]
        firms, last = trip["firms"][trip["interest"]], trip["dates"][-1]
        visits = [
            (day, firm)
            for day in trip["dates"]
            for firm, (opening, km, _) in firms.items()
            if day in opening and (day != last or km <= NEAR)
        ]
        pairs = [dict(pair) for pair in itertools.combinations(visits, 2) if len(set(sum(pair, ()))) == 4]
        costs = [sum(firms[firm][2] for firm in pair.values()) for pair in pairs]
        order = sorted(range(len(pairs)), key=costs.__getitem__)
        return [pairs[i] for i in order if costs[i] <= trip["budget"]]

    def _cost(self, firm: str) -> int:
        return next(firms[firm][2] for firms in self.state["trip"]["firms"].values() if firm in firms)

    # ---- acting ------------------------------------------------------------------------------------------------------

    def _observe(self) -> str:
        s, trip = self.state, self.state["trip"]
        days = " ".join(trip["dates"]) + f", {trip['dates'][-1]} within {NEAR} km"
        told = {"dates": days, "budget": f"${trip['budget']}", "interest": trip["interest"]}
        lines = [f"Goal: {self.goal}", *([f"Error: {s['error']}"] if s["error"] else [])]
        lines += [f"{need.capitalize()}: {'unknown' if need == s['unknown'] else told[need]}" for need in NEEDS]
        if s["listed"]:
            firms = trip["firms"][s["listed"]].items()
            texts = [f"{name}: {' '.join(days)}, {km} km, ${cost}" for name, (days, km, cost) in firms]
            lines.append(f"Firms for {s['listed']}: " + "; ".join(texts))
        if s["plan"]:
            visits = [f"{day} {s['plan'][day]}, " for day in DAYS if day in s["plan"]]
            lines.append(f"Plan: {''.join(visits)}${sum(map(self._cost, s['plan'].values()))}")
        lines += [f"Result: {s['result']}"] if s["result"] else []
        return "\n".join(lines + ["Action:"])

    def _take(self, verb: str, *words: str) -> tuple[float, bool]:
        s, before = self.state, self._remaining()
        if verb == "confirm":
            if s["unknown"]:
                return self._refuse(f"cannot confirm while {s['unknown']} unknown")
            s["success"] = s["decisive"] = s["plan"] in self.right_plans()
            s["result"] = "booked" if s["success"] else "the plan does not fit"
            return float(s["success"]), True
        reward = getattr(self, f"_{verb}")(*words)
        s["decisive"] = self._remaining() < before
        return reward, False

    def _ask(self, need: str) -> float:
        if need != self.state["unknown"]:
            return -0.01
        self.state["unknown"] = ""
        return 0.0

    def _list(self, topic: str) -> float:
        s = self.state
        if topic not in s["trip"]["firms"]:
            return self._refuse(f"no firms for {topic[:MAX_LABEL_CHARS]}")[0]
        if s["listed"] == topic:
            return -0.01
        s["listed"], s["plan"] = topic, {}
        return 0.0

    def _visit(self, firm: str, day: str) -> float:
        s, trip = self.state, self.state["trip"]
        if s["unknown"] == "dates":
            return self._refuse("cannot visit while dates unknown")[0]
        if firm not in trip["firms"].get(s["listed"], ()):
            return self._refuse(f"{firm[:MAX_LABEL_CHARS]} is not listed")[0]
        if day not in trip["dates"]:
            return self._refuse(f"{day} is not a day of the trip")[0]
        if s["plan"].get(day) == firm:
            return -0.01
        s["plan"] = {d: f for d, f in s["plan"].items() if f != firm} | {day: firm}
        return 0.0

    def _drop(self, day: str) -> float:
        if self.state["plan"].pop(day, None) is None:
            return self._refuse(f"nothing planned on {day}")[0]
        return 0.0

    def legal_actions(self) -> list[str]:
        """Questions, topics of the city, every listed firm on every day of the trip, planned days, `confirm`."""
        s, trip = self.state, self.state["trip"]
        actions = [f"ask {need}" for need in NEEDS] + [f"list {topic}" for topic in trip["topics"]]
        if s["unknown"] != "dates":
            actions += [f"visit {f} {d}" for f in trip["firms"].get(s["listed"], ()) for d in trip["dates"]]
        return actions + [f"drop {day}" for day in s["plan"]] + ([] if s["unknown"] else ["confirm"])

    # ---- the oracle and the measures ---------------------------------------------------------------------------------

    def _changes(self, target: dict[str, str]) -> list[tuple[str, ...]]:
        """The actions that turn the present plan into `target`: visits in the order of days, then days to drop."""
        s = self.state
        plan = s["plan"] if s["listed"] == s["trip"]["interest"] else {}  # listing the interest will empty it
        visits = [("visit", target[d], d) for d in DAYS if d in target and plan.get(d) != target[d]]
        return visits + [("drop", d) for d, f in plan.items() if d not in target and f not in target.values()]

    def _best(self) -> tuple[dict, list[tuple[str, ...]]]:
        """The right plan that needs the fewest changes (the cheapest of these), and the changes."""
        options = [(plan, self._changes(plan)) for plan in self.right_plans()]
        return min(options, key=lambda option: len(option[1]))

    def _remaining(self) -> int:
        """Turns that the expert still needs."""
        s, changes = self.state, self._best()[1]
        return bool(s["unknown"]) + (s["listed"] != s["trip"]["interest"]) + len(changes) + 1

    def progress(self) -> float:
        """True progress in [0, 1]: share of an expert's five turns that are done; 1 booked, 0 failed. For measuring."""
        if self.state["over"]:
            return float(self.state["success"])
        return max(0.0, 1 - self._remaining() / 5)

    def expert(self) -> str:
        """Asks for what is unknown, lists the interest, reaches the nearest right plan, confirms."""
        s, trip = self.state, self.state["trip"]
        if s["unknown"]:
            return _turn(f"ask {s['unknown']}", f"{s['unknown']} unknown", f"no plan without {s['unknown']}")
        plan, changes = self._best()
        firms = trip["firms"][trip["interest"]]
        cost = f"${sum(firms[f][2] for f in plan.values())} of ${trip['budget']}"
        if not changes:
            return _turn("confirm", *(f"{plan[d]} opens {d}" for d in DAYS if d in plan), cost)
        verb, *words = changes[0]
        if verb == "drop":
            return _turn(f"drop {words[0]}", "two visits are enough", f"{words[0]} goes")
        if s["listed"] != trip["interest"]:
            return _turn(f"list {trip['interest']}", "dates, budget, interest known", f"which {trip['interest']} firms")
        firm, day = words
        other = next(f for f in plan.values() if f != firm)
        reading = f"{firm} opens {day}, {firms[firm][1]} km"
        return _turn(f"visit {firm} {day}", reading, f"with {other} {cost}")

    def _steps_of(self, goal: str) -> list[tuple[str, float]]:
        return _trip_steps()


# ======================================================================================================================
# miniwob/<page>: real pages in a real browser (optional: pip install miniwob, Debian's chromium and chromium-driver)
# ======================================================================================================================

# Runs in every page before its own scripts: remembers which elements listen for clicks, takes the page's own clock and
# animations away (a language model is slower than the ten seconds that most pages allow).
_WATCH_JS = """
const add = EventTarget.prototype.addEventListener;
window.listening = new WeakSet();
EventTarget.prototype.addEventListener = function (kind, ...rest) {
  if (kind === 'click') window.listening.add(this);
  return add.call(this, kind, ...rest);
};
add.call(document, 'DOMContentLoaded', () => {
  core.EPISODE_MAX_TIME = 2 ** 31 - 1;
  if (window.jQuery) jQuery.fx.off = true;
});
"""
# The visible part of the live page as HTML: what can be acted on carries a number (window.marks finds the element
# again), fields their present value and their name, wherever the page keeps it. Folders of a tree become buttons.
_READ_JS = """
const marks = window.marks = [], named = new Map();
const ours = new Set(['query', 'reward-display', 'sync-task-cover', 'click-canvas']);
const plain = t => t.replace(/&/g, '&amp;').replace(/</g, '&lt;').replace(/>/g, '&gt;').replace(/"/g, '&quot;');
const words = e => (e.innerText || e.textContent || '').trim();
const field = e => e.matches('select, textarea, input:not([type=submit], [type=button], [type=reset], [type=image])');
const kind = e => e.matches('[type=checkbox], [type=radio]') ? 'check' : e.matches('select') ? 'select' : 'text';
const press = e => !field(e) && (e.matches('a, button, input, [role=button]') || e.onclick || window.listening.has(e)
  || getComputedStyle(e).cursor === 'pointer' && getComputedStyle(e.parentElement).cursor !== 'pointer');
for (const e of document.querySelectorAll('input, select, textarea')) {
  const beside = e.previousElementSibling;
  const label = e.labels && e.labels[0] || (beside && beside.matches('label:not([for])') ? beside : null);
  if (label && field(e) && words(label)) named.set(e, words(label)).set(label, e);
}
function act(e, tag, key, label, value) {
  marks.push(e);
  const id = `${tag === 'input' ? kind(e) : 'press'}:${marks.length - 1}`;
  if (tag === 'input') return ` <input name="${id}" aria-label="${plain(label)}" value="${plain(value)}"> `;
  return ` <${tag} ${key}="${id}">${plain(label)}</${tag}> `;
}
function value(e) {
  if (kind(e) === 'check') return e.checked ? 'on' : '';
  if (kind(e) === 'text') return e.value;
  const all = [...e.options], at = e.selectedIndex, rest = all.filter((_, i) => i !== at).map(o => words(o));
  return (at < 0 ? 'nothing' : words(all[at])) + '; or ' + rest.join(', ');
}
function read(e) {
  if (e.nodeType === 3) return plain(e.data);
  if (e.nodeType !== 1 || ours.has(e.id) || e.matches('script, style, canvas, .hitarea') || !e.checkVisibility())
    return '';
  if (field(e)) {
    const label = named.get(e) || e.ariaLabel || e.placeholder || e.title || e.name || e.id || 'field';
    return e.type === 'hidden' ? '' : act(e, 'input', 'name', label, value(e));
  }
  const inside = [...e.querySelectorAll('*')].some(x => (press(x) || field(x)) && x.checkVisibility());
  if (press(e) && !inside) {
    const label = words(e) || e.value || e.ariaLabel || e.title || e.alt || e.id || e.classList[0] || '';
    const button = e.matches('button, input, [role=button], .folder');
    if (label) return act(e, ...(button ? ['button', 'formaction'] : ['a', 'href']), label);
  }
  if (named.has(e)) return e.contains(named.get(e)) ? read(named.get(e)) : '';
  const text = [...e.childNodes].map(read).join('');
  return getComputedStyle(e).display === 'inline' ? text : `<div>${text}</div>`;
}
const query = core.getUtterance();
return {goal: query.utterance || query, html: read(document.body)};
"""


def serve_page(page: str):
    """The worker process of one browser: a request in JSON on each line of stdin, an answer on each line of stdout.

    It leads a session of its own, which is ended with all that it started when stdin closes, however the parent died.
    On Linux it also inherits the browser's orphans, so that they do not stay as zombies of a container's first process.
    """
    answers, requests = os.fdopen(os.dup(1), "w"), queue.Queue()
    os.dup2(2, 1)  # what a library prints must not look like an answer

    def listen():
        for line in sys.stdin:
            requests.put(json.loads(line))
        _kill_session(os.getpid())
        shutil.rmtree(os.environ["TMPDIR"], ignore_errors=True)
        os._exit(0)

    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
    threading.Thread(target=listen).start()  # no daemon: a worker that fails below waits here until stdin closes
    try:
        _serve(page, requests, answers)
    finally:
        with contextlib.suppress(BrokenPipeError):
            answers.close()  # tells the parent


def _serve(page: str, requests: queue.Queue, answers):
    """Opens the page, then carries out requests for ever."""
    import gymnasium
    import miniwob
    from selenium.common import exceptions

    gymnasium.register_envs(miniwob)
    name = f"miniwob/{page}-v1"
    env = gymnasium.make(name, disable_env_checker=True, refresh_freq=1).unwrapped  # a fresh page for every episode
    driver = env.instance.driver
    driver.implicitly_wait(0)
    driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": _WATCH_JS})
    refused = exceptions.InvalidElementStateException, exceptions.StaleElementReferenceException
    reply = {}
    while True:
        print(json.dumps(reply), file=answers, flush=True)
        request, reply = requests.get(), {"error": "", "done": False, "raw": 0.0, "goal": "", "html": ""}
        if "seed" in request:
            env.reset(seed=request["seed"], options={"record_screenshots": False})
        else:
            try:
                reply["error"] = _act_on(driver, **request)
            except refused as error:  # covered, not interactable, gone
                reply["error"] = "that element cannot be used now"
                print(error, file=sys.stderr)
            _, _, reply["done"], _, info = env.step(None)
            reply["raw"] = float(info["raw_reward"]) if reply["done"] else 0.0
        if not reply["done"]:
            reply |= driver.execute_script(_READ_JS)


def _act_on(driver, mark: int, verb: str, text: str = "") -> str:
    """Clicks, types or selects in the real page; returns what was wrong, "" if nothing."""
    element = driver.execute_script("return window.marks[arguments[0]]", mark)
    if verb == "type":
        element.clear()
        element.send_keys(text)
    elif verb == "select":
        from selenium.webdriver.support.select import Select

        options = [o for o in Select(element).options if clean(o.text).lower() == clean(text).lower()]
        if not options:
            return "no such option here"
        options[0].click()
    else:
        element.click()
    return ""


def _session_of(leader: int) -> list[int]:
    """Process ids of the session that `leader` began (Linux; elsewhere none: its process group is ended then)."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # ended while we looked
        if fields[0] != "Z" and int(fields[3]) == leader:
            found.append(int(stat.parent.name))
    return found


def _kill_session(leader: int):
    """Kills everything a worker started, and the worker unless it is us."""
    for _ in range(100):  # a process may start another while we look
        others = [pid for pid in _session_of(leader) if pid != os.getpid()]
        for pid in others:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # it was faster
        if not others:
            break
        time.sleep(0.05)
        while leader == os.getpid() and _reap():
            pass
    if not Path("/proc").is_dir() and leader != os.getpid():
        os.killpg(leader, signal.SIGKILL)


def _reap() -> bool:
    """Collects one dead child; False if there is none."""
    try:
        return os.waitpid(-1, os.WNOHANG)[0] > 0
    except ChildProcessError:
        return False


def _end_worker(process: subprocess.Popen, folder: str):
    """Closes the worker's stdin, which ends it with its session; a worker that does not is killed, and its session."""
    try:
        process.stdin.close()
    except BrokenPipeError:
        pass  # a request the worker never read
    try:
        process.wait(Browser.END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    _kill_session(process.pid)
    shutil.rmtree(folder, ignore_errors=True)
    process.stdout.close()


class Browser:
    """One page in one headless browser, in a worker process of its own. `lend` takes an idle one, or starts one."""

    MOST = 16  # at once
    START_SECONDS = 300
    STEP_SECONDS = 60
    END_SECONDS = 10
    idle: ClassVar[dict[str, list]] = {}  # page -> browsers waiting for their next episode
    alive: ClassVar[weakref.WeakSet] = weakref.WeakSet()

    def __init__(self, page: str):
        self.page, self.folder, self.rest = page, tempfile.mkdtemp(prefix="miniwob-"), b""
        env = {**os.environ, "SE_OFFLINE": "true", "TMPDIR": self.folder}
        with open(Path(self.folder) / "log", "w") as log:
            self.process = subprocess.Popen(
                [sys.executable, __file__, "--serve", page], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                env=env, start_new_session=True,
            )  # fmt: skip
        self.end = weakref.finalize(self, _end_worker, self.process, self.folder)  # also at exit
        self.alive.add(self)
        self._answer(self.START_SECONDS)

    @classmethod
    def lend(cls, page: str) -> "Browser":
        """Raises RuntimeError if MOST of them are busy."""
        idle = cls.idle.setdefault(page, [])
        while idle:
            browser = idle.pop()
            if browser.process.poll() is None:
                return browser
            browser.end()
        running = [b for b in cls.alive if b.end.alive]
        for others in cls.idle.values() if len(running) >= cls.MOST else ():
            while others:
                others.pop().end()
        if sum(b.end.alive for b in running) >= cls.MOST:
            raise RuntimeError(f"{cls.MOST} browsers are busy, and no more are started: lower --num_envs")
        return cls(page)

    @classmethod
    def take_back(cls, held: list):
        """Empties `held`, a list of at most one browser."""
        while held:
            browser = held.pop()
            if browser.end.alive:
                cls.idle.setdefault(browser.page, []).append(browser)

    def ask(self, **request) -> dict:
        """The worker's answer. Raises RuntimeError, and ends it, if it does not answer in time."""
        try:
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()
        except OSError:
            pass  # it died: the answer says so
        return self._answer(self.STEP_SECONDS)

    def _answer(self, seconds: float) -> dict:
        deadline, pipe = time.monotonic() + seconds, self.process.stdout.fileno()
        while b"\n" not in self.rest:
            ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
            more = os.read(pipe, 65536) if ready else b""
            if not more:
                log = (Path(self.folder) / "log").read_text(errors="replace").strip().splitlines()
                why = f"the browser died ({log[-1] if log else 'no message'})" if ready else f"no answer in {seconds} s"
                self.end()
                raise RuntimeError(f"miniwob/{self.page}: {why}")
            self.rest += more
        line, _, self.rest = self.rest.partition(b"\n")
        return json.loads(line)


def read_state(obs: str) -> tuple[str, Page, list[str]]:
    """Goal, page (without targets) and the last actions of a state text that `render_state` wrote."""
    found = dict(re.findall(r"^(Goal|Page|Text|Links|Buttons|Inputs|Done): (.*)$", obs, re.MULTILINE))
    lists = {}
    for kind in ("Links", "Buttons", "Inputs"):
        pairs = (item.partition(" = ") for item in found.get(kind, "").split(" | ") if item)
        lists[kind.lower()] = tuple(Element(label, "", value) for label, _, value in pairs)
    done = [action for action in found.get("Done", "").split(" > ") if action and not action.startswith("visited: ")]
    return found.get("Goal", ""), Page(found.get("Page", ""), "", found.get("Text", ""), **lists), done


def _press(elements, text: str) -> str:
    """The click on the element of that label; "" if there is none."""
    label = clean(text).lower()
    return next((_written(Action("click", (e.label,))) for e in elements if e.label == label), "")


def _written(action: Action) -> str:
    """The action's text. A click needs no quotes, whatever its label: `_parse_page_action` looks for it on the page."""
    return f"click {action.args[0]}" if action.verb == "click" else str(action)


def _labelled(elements, label: str):
    """The element of that label, else the first whose label differs in the signs around it alone; None without one."""
    label, signs = clean(label).lower(), " .,;:!?"
    bare = [e for e in elements if e.label.strip(signs) == label.strip(signs) != ""]
    return next((e for e in elements if e.label == label), bare[0] if bare else None)


def _quoted(goal: str) -> list[str]:
    return [clean(text) for text in re.findall(r'"([^"]*)"', goal)]


def _fill_in(page: Page, texts: list[str]) -> str:
    """Types the first of the texts that is not yet in its field (fields and texts in the same order); else ""."""
    for element, text in zip(page.inputs, texts, strict=False):
        if element.value != clean(text)[:MAX_LABEL_CHARS]:
            return str(Action("type", (element.label, text)))
    return ""


def _expert_link(goal, page, done):
    return _press(page.links + page.buttons, _quoted(goal)[0])


def _expert_tab(goal, page, done):
    return _press(page.links, re.search(r"Tab #\d", goal)[0])


def _expert_tab_2(goal, page, done):
    tabs = [e.label for e in page.links if re.fullmatch(r"tab #\d", e.label)]
    opened = next((a.removeprefix("click ") for a in reversed(done) if a.removeprefix("click ") in tabs), tabs[0])
    other = tabs[(tabs.index(opened) + 1) % len(tabs)]
    return _press([e for e in page.links if e.label not in tabs], _quoted(goal)[0]) or _press(page.links, other)


def _expert_checkboxes(goal, page, done):
    wanted = re.search(r"Select (.*) and click Submit", goal)[1].lower().split(", ")
    wrong = [e for e in page.inputs if (e.label in wanted) != (e.value == "on")]
    return _written(Action("click", (wrong[0].label,))) if wrong else _press(page.buttons, "submit")


def _expert_form(goal, page, done):
    return _fill_in(page, _quoted(goal)) or _written(Action("click", (page.buttons[0].label,)))


def _expert_search(goal, page, done):
    place = int(re.search(r"the (\d+)\w\w search result", goal)[1]) - 1
    results = [e for e in page.links if not re.fullmatch(r"[<>\d]|first|last", e.label)]
    if typed := _fill_in(page, _quoted(goal)[:1]):
        return typed
    if not results:
        return _press(page.buttons, "search")
    sheet = str(place // 3 + 1)
    turned = next((a.removeprefix("click ") for a in reversed(done) if re.fullmatch(r"click (\d|search)", a)), "search")
    if {"search": "1"}.get(turned, turned) != sheet:
        return _press(page.links, sheet)
    return _written(Action("click", (results[place % 3].label,)))


def _expert_tree(goal, page, done):
    shut = [e for e in page.buttons if f"click {e.label}" not in done] or page.buttons
    return _press(page.links + page.buttons, _quoted(goal)[0]) or _written(Action("click", (shut[0].label,)))


def _expert_dialog(goal, page, done):
    return _written(Action("click", (page.buttons[0].label,)))


class MiniWob(Env):
    """A page of MiniWoB++ (miniwob.farama.org) in headless Chromium; the state is read from its live DOM.

    State: webnav's (see there), from the elements that are visible now. Folders of a tree are listed as buttons, check
    boxes and radio buttons as inputs (`apple = on`), drop-down lists with what they offer (`size = small; or large`).
        Goal: Switch between the tabs to find and click on the link "massa".
        Page: click-tab-2
        Links: tab #1 | tab #2 | tab #3 | lectus | sit
        Done: click tab #2
        Action:
    Actions: click "<label>", type "<field>" "<text>" (replaces what is there), select "<field>" "<option>"; the same
    without quotes is as good. They are carried out on the element itself, with the browser's own events.
    Reward: 1 on success; -0.01 for an action already taken on the very same page; -0.02 for an illegal one.
    Ends: when the page says so (success only if its raw reward is 1: some pay a little for a wrong answer), or after 3
    fruitless actions in a row (terminated); 10 steps (truncated).
    Pages of train, val and test come from disjoint seeds; the words are the page's own and shared.
    expert and judge (share of the actions that are the expert's) exist for the pages in EXPERTS, else they are None.
    A browser that dies or takes too long costs the episode: step() raises RuntimeError, the next reset starts another.

    By hand (needs the browser): a wrong tab, then the right one.
    >>> env = make_env("miniwob/click-tab")                                                         # doctest: +SKIP
    >>> env.reset(seed=1)[0].splitlines()[:3]                                                       # doctest: +SKIP
    ['Goal: Click on Tab #3.', 'Page: click-tab', 'Links: tab #1 | tab #2 | tab #3']
    >>> env.step("click tab #3")[1:4]                                                               # doctest: +SKIP
    (1.0, True, False)
    """

    EXPERTS: ClassVar[dict] = {
        "click-button": _expert_link, "click-link": _expert_link, "click-tab": _expert_tab,
        "click-tab-2": _expert_tab_2, "click-checkboxes": _expert_checkboxes, "enter-text": _expert_form,
        "login-user": _expert_form, "search-engine": _expert_search, "navigate-tree": _expert_tree,
        "click-dialog": _expert_dialog,
    }  # fmt: skip
    STATE_CHARS = 500
    INSTALL = "pip install miniwob==1.1.0 (and on Debian: apt-get install chromium chromium-driver)"

    name = "miniwob"
    summary = "pages of MiniWoB++ in headless Chromium, as miniwob/click-tab-2 (optional packages)"
    max_steps = 10
    patience = 3
    most_envs = Browser.MOST - 2  # at once, in training: one plays demonstrations, one is replaced
    max_action_tokens = 24
    goal = ""

    def __init__(self, page: str, seed: int = 0, split: str = "train", **options):
        self.name = f"miniwob/{page}"
        super().__init__(seed, split, **options)
        package = importlib.util.find_spec("miniwob")
        browsers = "chromium", "chromium-browser", "google-chrome", "chrome"
        installed = any(map(shutil.which, browsers)) and shutil.which("chromedriver")
        if not package or not (installed or os.environ.get("MINIWOB_CHROMEDRIVER")):
            raise ValueError(f"{self.name} needs a package and a browser: {self.INSTALL}")
        pages = sorted(p.stem for p in Path(package.origin).parent.glob("html/miniwob/*.html"))
        if page not in pages:
            close = difflib.get_close_matches(page, pages, 3) or list(self.EXPERTS)[:3]
            raise ValueError(f"unknown page {page!r} of {len(pages)} in miniwob; did you mean: {', '.join(close)}?")
        self.page_name, self.held = page, []
        self._abandoned = weakref.finalize(self, Browser.take_back, self.held)  # in the middle of an episode
        self._abandoned.atexit = False
        if page not in self.EXPERTS:
            self.expert = self.judge = None

    @property
    def return_bounds(self):
        return (-0.02 * self.max_steps, 1.0)

    @property
    def task(self) -> str:
        return self.page_name

    def _begin(self, rng: random.Random):
        self.state |= {"taken": [], "over": True}  # until the browser has answered
        self.page_seed = 3 * rng.randrange(2**28) + SPLITS.index(self.split)
        if not self.held:
            self.held.append(Browser.lend(self.page_name))
        self._see(self._ask(seed=self.page_seed))
        self.state["over"] = False

    def _ask(self, **request) -> dict:
        try:
            return self.held[0].ask(**request)
        except RuntimeError:
            self.held.clear()
            self.state["over"] = True
            raise

    def _see(self, reply: dict):
        self.goal, self.html = clean(reply["goal"]) or self.goal, reply["html"]
        html = f"<title>{self.page_name}</title>{self.html}"
        self.page = html_to_state(html, self.goal, "", self.state["history"], self.STATE_CHARS)

    @property
    def cut(self) -> bool:
        return self.page.cut

    def _observe(self):
        s = self.state
        problem = s["error"] or ("done before" if s["repeat"] else "")
        return render_state(self.page, self.goal, s["history"], f"{s['fruitless']} of 3, {problem}" if problem else "")

    def step(self, text: str):
        result = super().step(text)
        if self.state["over"]:
            Browser.take_back(self.held)
        return result

    def _act(self, text: str) -> tuple[float, bool]:
        s, page = self.state, self.page
        action = _parse_page_action(text, page)
        verb, args, s["repaired"] = action
        elements = page.links + page.buttons + page.inputs if verb == "click" else page.inputs
        element = _labelled(elements, args[0]) if args else None
        kinds = {"click": ("press", "check", "text", "select"), "type": ("text",), "select": ("select",)}
        if element is None or element.target.partition(":")[0] not in kinds.get(verb, ()):
            what = {"click": "link or button", "type": "text field", "select": "list"}.get(verb)
            s["error"] = f"no such {what} here" if what else "unreadable; use click, type or select"
            s["valid"] = False
            return -0.02, False
        action = Action(verb, (element.label, *args[1:]))
        s["repaired"] = s["repaired"] or element.label != args[0]
        s["action"] = written = _written(action)
        s["repeat"] = (self.html, written) in s["taken"]
        s["taken"].append((self.html, written))
        reply = self._ask(mark=int(element.target.partition(":")[2]), verb=verb, text=" ".join(args[1:]))
        if not reply["error"]:
            s["history"].append((page.title, written))
        self._see(reply)
        s["error"], s["valid"] = reply["error"], not reply["error"]
        if reply["done"]:
            s["success"] = reply["raw"] >= 1.0
            return float(s["success"]), True
        return (-0.02 if s["error"] else -0.01 if s["repeat"] else 0.0), False

    def expert(self) -> str:
        """The action of a script that sees the page and the goal; None for pages without one."""
        return self.EXPERTS[self.page_name](self.goal, self.page, [a for _, a in self.state["history"]])

    def judge(self, segment) -> float:
        """Share of the (obs, action) pairs in which the action is what the expert would do; None without an expert."""
        right = sum(self._as_expert(obs, action) for obs, action in segment)
        return right / max(len(segment), 1)

    def _as_expert(self, obs: str, action: str) -> bool:
        goal, page, done = read_state(obs)
        try:
            wanted = self.EXPERTS[self.page_name](goal, page, done)
        except (IndexError, TypeError):  # a state that was cut, or is of another page
            return False
        return bool(wanted) and _written(_parse_page_action(action, page)).lower() == wanted.lower()

    def legal_actions(self) -> list[str]:
        """Clicks on everything, the goal's quoted words into every text field, what each list offers."""
        page = self.page
        check = [e for e in page.inputs if e.target.startswith("check")]
        actions = [Action("click", (e.label,)) for e in (*page.links, *page.buttons, *check)]
        for e in page.inputs:
            texts = _quoted(self.goal) or [clean(self.goal.split()[-1])] if e.target.startswith("text") else []
            if e.target.startswith("select"):
                texts = [t for t in re.split(r"; or |, ", e.value)[1:] if t]
            verb = e.target.partition(":")[0].replace("text", "type")
            actions += [Action(verb, (e.label, text)) for text in texts if text]
        return [_written(a) for a in actions] or ["click nothing"]

    def key_steps(self) -> list[tuple[str, float]]:
        return []

    def save(self) -> dict:
        raise NotImplementedError(f"{self.name}: a page in a browser cannot be saved; look-ahead needs another task")

    def restore(self, saved: dict):
        self.save()

    def __deepcopy__(self, memo):
        raise NotImplementedError(f"{self.name}: a page in a browser cannot be copied; look-ahead needs another task")


def _parse_page_action(text: str, page: Page) -> Action:
    """`parse_action`, and `select "<field>" "<option>"`, which reads like `type`, and `click <label>` with any label of
    the page, whatever signs it ends in (`click aliquet.`)."""
    fields = tuple(e.label for e in page.inputs)
    verb, _, label = clean(text).partition(" ")
    if verb.lower() == "click" and any(e.label == label.lower() for e in page.links + page.buttons + page.inputs):
        return Action("click", (label.lower(),), f"{verb} {label}" != f"click {label.lower()}")
    if re.match(r"\W*select\b", text, re.IGNORECASE):
        action = parse_action(re.sub("select", "type", text, count=1, flags=re.IGNORECASE), fields)
        return action._replace(verb="select") if action.verb == "type" else Action("")
    return parse_action(text, fields)


# ======================================================================================================================
# textworld/<spec>: text adventures (optional: pip install textworld)
# ======================================================================================================================


def _read_command(text: str) -> str:
    """A game's command, without an `Action:` before it and signs around it."""
    text = clean(text[:MAX_ACTION_CHARS])
    return re.sub(r"^\W*(?:action\s*:\W*)*|\W+$", "", text, flags=re.IGNORECASE).lower()


class TextWorld(Env):
    """A text adventure made by TextWorld's own generator (arXiv 1806.11532) from the task's seed, kept in a cache.

    Specs: coin_collector-LEVEL (1 to 100: so many rooms in a chain; 101 to 150 with dead ends), cooking-N (a recipe of
    1 to 3 ingredients, in one kitchen; states of 2 and 3 have more than 120 tokens), simple (a snack for dinner, from
    another room). Without a number: 1.
    State (empty lines are left out):
        Goal: find the coin and take it
        Room: bathroom
        Text: error: 1 of 3, not possible here.
        Carried: white onion (raw)
        Recipe: white onion (roasted)                         once the cookbook was read
        Actions: go east | go south | take coin
        Done: visited: attic > go east > go north
        Action:
    Actions: any admissible command. The list leaves out those that win nothing (looking, dropping, putting, closing,
    eating an ingredient); they are legal all the same.
    Reward: the game's own points, over the most it pays (1 for a won game that pays once); -0.01 for a command already
    given in the very same situation; -0.02 for an illegal one.
    Ends: won (success), lost, 3 fruitless actions in a row (terminated); STEPS, or twice the quest and 5 (truncated).
    Games of train, val and test come from disjoint seeds (cooking: also from disjoint food).
    The expert reads the cookbook, then follows TextWorld's winning policy. It knows the map, which the transcript does
    not show: there is no judge (judge is None).

    By hand (needs the package):
    >>> env = make_env("textworld/coin_collector-1")                                                # doctest: +SKIP
    >>> env.reset(seed=0)[0].splitlines()[::2]                                                      # doctest: +SKIP
    ['Goal: find the coin and take it', 'Actions: take coin']
    >>> env.step("take coin")[1:4]                                                                  # doctest: +SKIP
    (1.0, True, False)
    """

    STEPS: ClassVar[dict] = {"cooking": 20, "simple": 20}
    LEVELS: ClassVar[dict] = {"coin_collector": 150, "cooking": 3, "simple": 1}  # highest
    GOALS: ClassVar[dict] = {
        "coin_collector": "find the coin and take it", "cooking": "read the cookbook, cook its recipe and eat the meal",
    }  # fmt: skip
    UNLISTED: ClassVar[dict] = {  # commands left out of the state's list, by challenge
        "coin_collector": r"examine|look|inventory|drop",
        "cooking": r"examine (?!cookbook)|take (?:cookbook|knife)|eat (?!meal)|cook meal"
        r"|look|inventory|drop|put|insert|close",
        "simple": r"examine|look|inventory|drop|close|lock|insert|put (?!.* on stove)",
    }
    INSTALL = "pip install textworld==1.7.0"

    name = "textworld"
    summary = "generated text adventures, as textworld/coin_collector-5 (optional package)"
    patience = 3
    max_action_tokens = 16
    judge = None

    def __init__(self, spec: str, seed: int = 0, split: str = "train", **options):
        self.name = f"textworld/{spec}"
        super().__init__(seed, split, **options)
        self.challenge, dash, level = spec.partition("-")
        highest = self.LEVELS.get(self.challenge)
        if highest is None:
            raise ValueError(f"unknown game {spec!r} of textworld; there are: {', '.join(self.LEVELS)} (-LEVEL)")
        if (dash or level) and not (level.isascii() and level.isdigit() and 1 <= int(level) <= highest):
            raise ValueError(f"textworld/{spec}: expected a level from 1 to {highest}")
        if importlib.util.find_spec("textworld") is None:
            raise ValueError(f"{self.name} needs a package: {self.INSTALL}")
        self.spec, self.level = spec, int(level or 1)
        self.max_steps = self.STEPS.get(self.challenge, 2 * ((self.level - 1) % 100 + 1) + 5)

    @property
    def return_bounds(self):
        return (-0.02 * self.max_steps, 1.0)

    @property
    def task(self) -> str:
        return self.spec

    def _begin(self, rng: random.Random):
        import textworld

        path = self.game_file(3 * rng.randrange(2**28) + SPLITS.index(self.split))
        infos = textworld.EnvInfos(admissible_commands=True, policy_commands=True, objective=True, max_score=True)
        self.game_env = textworld.start(str(path), infos)
        self.state |= {"commands": [], "taken": [], "score": 0, "read": False}
        self._moved()
        self.goal = self.GOALS.get(self.challenge) or clean(self.game.objective)[:200]

    def game_file(self, seed: int) -> Path:
        """The game of that seed, from the cache or made now (under a tenth of a second, the first one some seconds)."""
        home = Path(os.environ.get("LLM_AGENT_RL_CACHE") or Path.home() / ".cache" / "llm-agent-rl")
        path = home / "textworld" / "1.7.0" / self.spec / f"{self.split}-{seed}.json"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_suffix(f".{os.getpid()}.part")
            _make_game(self.challenge, self.level, self.split, seed).save(str(part))
            os.replace(part, path)
        return path

    def _moved(self):
        """Plays the commands of self.state again: a game is its seed and what was done in it."""
        self.game = self.game_env.reset()
        for command in self.state["commands"]:
            self.game, _, _ = self.game_env.step(command)

    def _listed(self) -> list[str]:
        """The admissible commands that the state shows."""
        unlisted = re.compile(self.UNLISTED[self.challenge])
        return [c for c in self.game.admissible_commands if not unlisted.match(c)]

    def _carried(self) -> str:
        """What the player holds, with what was done to food."""
        facts, infos = self.game["_facts"], self.game.game.infos
        held = sorted(f.arguments[0].name for f in facts if f.name == "in" and f.arguments[1].name == "I")
        return ", ".join(infos[x].name + self._done_to(x) for x in held)

    def _done_to(self, thing: str) -> str:
        kinds = "raw", "roasted", "grilled", "fried", "burned", "sliced", "diced", "chopped"
        found = [f.name for f in self.game["_facts"] if len(f.arguments) == 1 and f.arguments[0].name == thing]
        return f" ({', '.join(k for k in kinds if k in found)})" if set(kinds) & set(found) else ""

    def _recipe(self) -> str:
        facts, infos = self.game["_facts"], self.game.game.infos
        pairs = sorted((f.arguments[1].name, f.arguments[0].name) for f in facts if f.name == "base")
        return ", ".join(infos[food].name + self._done_to(ingredient) for ingredient, food in pairs)

    def _observe(self):
        s, facts = self.state, self.game["_facts"]
        room = next(f.arguments[1].name for f in facts if f.name == "at" and f.arguments[0].name == "P")
        self.room = self.game.game.infos[room].name or room
        problem = s["error"] or ("done before" if s["repeat"] else "")
        lines = {"Goal": self.goal, "Room": self.room, "Carried": self._carried(), "Done": render_history(s["history"])}
        lines["Text"] = f"error: {s['fruitless']} of {self.patience}, {problem}." if problem else ""
        lines["Recipe"] = self._recipe() if s["read"] else ""
        lines["Actions"] = " | ".join(self._listed())
        order = "Goal", "Room", "Text", "Carried", "Recipe", "Actions", "Done"
        return "\n".join([f"{name}: {lines[name]}" for name in order if lines[name]] + ["Action:"])

    def _act(self, text: str) -> tuple[float, bool]:
        s = self.state
        command = _read_command(text)
        s["repaired"] = command != text
        if command not in self.game.admissible_commands:
            s.update(valid=False, error="not possible here")
            return -0.02, False
        s["action"] = command
        key = (self.room, self._carried(), tuple(self.game.admissible_commands), command)
        s["repeat"] = key in s["taken"]
        s["taken"].append(key)
        s["history"].append((self.room, command))
        s["commands"].append(command)
        s["read"] = s["read"] or command == "examine cookbook"
        self.game, score, over = self.game_env.step(command)
        gain, s["score"] = score - s["score"], score
        s["success"] = bool(self.game["won"])
        return gain / self.game["max_score"] - 0.01 * s["repeat"], bool(over)

    def expert(self) -> str:
        commands = self.game.admissible_commands
        if "examine cookbook" in commands and not self.state["read"]:
            return "examine cookbook"
        policy = self.game["policy_commands"]
        return policy[0] if policy else self._listed()[0]  # no policy: the game cannot be won any more

    def legal_actions(self) -> list[str]:
        return self._listed() or ["look"]

    def key_steps(self) -> list[tuple[str, float]]:
        return []


def _make_game(challenge: str, level: int, split: str, seed: int):
    """A game of TextWorld's generator, the same for the same arguments.

    The generator compiles every game with Inform to play its solution through (5 to 10 s); it is played from JSON here,
    which needs no compiler and takes a tenth of a second. The generator's own files are parsed only once.
    """
    import textworld
    from textworld.challenges import CHALLENGES
    from textworld.generator.data import KnowledgeBase
    from textworld.generator.maker import GameMaker

    settings = {"level": level}
    if challenge == "cooking":
        food = {"train": "train", "val": "valid", "test": "test"}[split]
        settings = dict(recipe=level, take=level, go=1, open=True, cook=True, cut=False, drop=False, split=food,
                        recipe_seed=seed)  # fmt: skip
    elif challenge == "simple":
        settings = dict(rewards="dense", goal="brief", test=split == "test")
    options = textworld.GameOptions()
    options.seeds = seed

    def save_as_json(maker, path):
        path = str(Path(path).with_suffix(".json"))
        maker.build().save(path)
        return path

    def play_through(maker, commands, play=GameMaker.set_walkthrough):  # cooking opens the fridge for each ingredient
        play(maker, [c for i, c in enumerate(commands) if not c.startswith("open ") or c not in commands[:i]])

    load_once = partial(_knowledge, KnowledgeBase.load)
    with (mock.patch.object(GameMaker, "compile", save_as_json), mock.patch.object(KnowledgeBase, "load", load_once),
          mock.patch.object(GameMaker, "set_walkthrough", play_through)):  # fmt: skip
        return CHALLENGES[f"tw-{challenge}"][1](settings, options)


@lru_cache
def _knowledge(load, *args, **kwargs):
    return load(*args, **kwargs)


# ======================================================================================================================
# gym/<module:Class>: your own environment
# ======================================================================================================================


class Own:
    """A text environment of yours behind the protocol above. Its class needs only, as in Gymnasium,

        reset(seed=) -> (text, info)
        step(text) -> (text, reward, terminated, truncated, info), with info["success"] when the episode ends

    The text is the whole prompt (end it with "Action:"). All else is optional, and used where it is there: expert(),
    legal_actions(), judge(segment), key_steps(), progress(), return_bounds (default (-1, 1)), max_action_tokens (16),
    max_steps (30, then the episode is truncated); info: valid (default True), cut (False), task, violation.
    A constructor with a parameter `split` gets train, val or test; without one the seeds are kept apart instead.
    """

    name = "gym"
    summary = "a text environment of your own, as gym/module:Class (README)"
    return_bounds = (-1.0, 1.0)
    max_action_tokens = 16
    max_steps = 30

    def __init__(self, cls: type, seed: int = 0, split: str = "train", **options):
        if split not in SPLITS:
            raise ValueError(f"unknown split {split!r}; use one of: {', '.join(SPLITS)}")
        for method in ("reset", "step"):
            if not callable(getattr(cls, method, None)):
                raise ValueError(f"{getattr(cls, '__name__', cls)} is no environment: it has no {method}()")
        takes = inspect.signature(cls).parameters
        self.own_split = "split" in takes
        given = {k: v for k, v in (("seed", seed), ("split", split)) if k in takes}
        try:
            self.env = cls(**given, **options)
        except TypeError as error:
            raise ValueError(f"{cls.__name__}: {error}") from None
        self.name, self.seed, self.split, self.count, self.steps = f"gym/{cls.__name__}", int(seed), split, 0, 0
        for attribute in ("return_bounds", "max_action_tokens", "max_steps"):
            setattr(self, attribute, getattr(self.env, attribute, getattr(type(self), attribute)))

    def __getattr__(self, attribute: str):
        if attribute == "env" or attribute.startswith("__"):
            raise AttributeError(attribute)  # not constructed yet (copy)
        return getattr(self.env, attribute)

    def reset(self, seed: int | None = None):
        if seed is None:
            seed = random.Random(f"{self.name}/{self.split}/sequence/{self.seed}/{self.count}").randrange(2**28)
            self.count += 1
        self.steps = 0
        obs, info = self.env.reset(seed=seed if self.own_split else 3 * seed + SPLITS.index(self.split))
        return str(obs), self._info(info, False)

    def step(self, text: str):
        obs, reward, terminated, truncated, info = self.env.step(text)
        self.steps += 1
        truncated = bool(truncated or self.steps >= self.max_steps) and not terminated
        return str(obs), float(reward), bool(terminated), truncated, self._info(info, terminated or truncated)

    def _info(self, info: dict, over: bool) -> dict:
        if over and "success" not in info:
            raise ValueError('step() must put info["success"] (True or False) when the episode ends')
        return {"success": False, "valid": True, "cut": False, "task": self.name, **info}


def _class_at(path: str) -> type:
    """The class at `module:Class`, also of a module in the present folder. Raises ValueError in one line."""
    module, _, name = path.partition(":")
    if not module or not name.isidentifier():
        raise ValueError(f"gym/{path}: expected gym/<module:Class>, for example gym/my_game:Game")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ImportError as error:
        raise ValueError(f"gym/{path}: {error}") from None
    if not isinstance(found, type):
        raise ValueError(f"gym/{path}: {module} has no class {name}")
    return found


# ======================================================================================================================
# Registry and terminal play
# ======================================================================================================================

ENVS = {cls.name: cls for cls in (WebNav, GridWorld, Booking, Arithmetic, Troubleshoot, Trip)}
FAMILIES = {cls.name: cls for cls in (MiniWob, TextWorld, Own)}  # optional: <family>/<which>


def make_env(name: str | type, seed: int = 0, split: str = "train", **options) -> Env | Own:
    """The environment `name`, or one of your own class.

    Raises ValueError with one clear line for an unknown name, split or option, or a package that is not installed.
    """
    if isinstance(name, type):
        return Own(name, seed=seed, split=split, **options)
    family, slash, which = name.partition("/")
    if slash and family in FAMILIES:
        return FAMILIES[family](_class_at(which) if family == "gym" else which, seed=seed, split=split, **options)
    if name not in ENVS:
        families = ", ".join(f"{family}/..." for family in FAMILIES)
        raise ValueError(f"unknown environment {name!r}; there are: {', '.join(ENVS)}, {families}")
    return ENVS[name](seed=seed, split=split, **options)


def play(env: Env, seed: int | None):
    """A person plays one task: q quits, e shows the expert's action."""
    obs, info = env.reset(seed)
    total = 0.0
    while True:
        try:
            text = input(f"\n{obs} ")
        except (EOFError, KeyboardInterrupt):
            return print()
        if text.strip() == "q":
            return
        if text.strip() == "e":
            print(f"(expert: {env.expert()})")
            continue
        obs, reward, terminated, truncated, info = env.step(text)
        total += reward
        if terminated or truncated:
            end = "success" if info["success"] else "out of steps" if truncated else "failed"
            return print(f"\n{end}; return {total:.2f}")


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description="Lists the environments, or lets a person play one in the terminal.")
    parser.add_argument("name", nargs="?", help="environment to play; left out: list them")
    parser.add_argument("--split", default="train", help="train, val or test")
    parser.add_argument("--seed", type=int, default=0, help="task index")
    parser.add_argument("--serve", help=argparse.SUPPRESS)  # a browser's worker process
    args = parser.parse_args(argv)
    if args.serve:
        return serve_page(args.serve)
    if args.name is None:
        for name, cls in ENVS.items():
            print(f"{name}: {cls.summary}")
        for name, cls in FAMILIES.items():
            print(f"{name}/...: {cls.summary}")
        return 0
    try:
        env = make_env(args.name, split=args.split)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    play(env, args.seed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
