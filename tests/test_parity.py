"""Functions repeated on purpose in the algorithm files stay the same: their syntax trees are compared."""

import ast

import pytest
from conftest import ROOT

EVERYWHERE = "token_logprobs rollout compute_gae fill_returns normalise ppo_loss evaluate clone".split()
REPEATED = {"stepopsd.py": [*EVERYWHERE, "Replay", "fill_advantages", "update_policy"],
            "slea_rl.py": [*EVERYWHERE, "test"]}  # fmt: skip


def trees(file: str) -> dict[str, str]:
    """Name -> dump of the syntax tree (docstrings included, comments and layout not)."""
    body = ast.parse((ROOT / file).read_text(encoding="utf-8")).body
    return {node.name: ast.dump(node) for node in body if hasattr(node, "name")}


@pytest.mark.parametrize("file", REPEATED)
def test_repeated_functions_have_not_drifted(file):
    first, other = trees("threespo.py"), trees(file)
    assert [name for name in REPEATED[file] if first[name] != other[name]] == []


def test_the_order_of_the_sections_is_the_same():
    order = ("last_hidden", "token_logprobs", "Step", "rollout", "compute_gae", "ppo_loss", "evaluate", "main")
    for file in ("threespo.py", "stepopsd.py", "slea_rl.py"):
        names = [name for name in trees(file) if name in order]
        assert names == [name for name in order if name in names] and len(names) >= 7, file
