"""Functions repeated on purpose in the algorithm files stay the same: their syntax trees are compared."""

import ast
import itertools

import pytest
from conftest import ROOT

EVERYWHERE = "token_logprobs rollout compute_gae fill_returns normalise ppo_loss evaluate clone".split()
REPEATED = {"stepopsd.py": [*EVERYWHERE, "Replay", "fill_advantages", "update_policy"],
            "slea_rl.py": [*EVERYWHERE, "test"]}  # fmt: skip
ALGORITHMS = ("threespo.py", *REPEATED)
OWN = "Args Step Progress Learner warm_up finish main fill_values fill_advantages update_policy test".split()


def trees(file: str) -> dict[str, str]:
    """Name -> dump of the syntax tree (docstrings included, comments and layout not)."""
    body = ast.parse((ROOT / file).read_text(encoding="utf-8")).body
    return {node.name: ast.dump(node) for node in body if hasattr(node, "name")}


@pytest.mark.parametrize("file", REPEATED)
def test_repeated_functions_have_not_drifted(file):
    first, other = trees("threespo.py"), trees(file)
    assert [name for name in REPEATED[file] if first[name] != other[name]] == []


def test_no_other_name_means_two_things():
    """A new function of one name in two files is either the same in both or named in OWN."""
    for a, b in itertools.combinations(ALGORITHMS, 2):
        one, two = trees(a), trees(b)
        assert [name for name in one if name in two and name not in OWN and one[name] != two[name]] == [], (a, b)


def test_an_algorithm_needs_make_env_and_common_only():
    """A copier swaps one import; the algorithms know nothing of each other."""
    own = {"common", "envs", "plots", *(file.removesuffix(".py") for file in ALGORITHMS)}
    for file in ALGORITHMS:
        found = set()
        for node in ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module in own - {"common"}:
                found |= {(node.module, alias.name) for alias in node.names}
            if isinstance(node, ast.Import):
                found |= {(alias.name, "") for alias in node.names if alias.name in own - {"common"}}
        assert found == {("envs", "make_env")}, file


def test_the_order_of_the_sections_is_the_same():
    order = ("last_hidden", "token_logprobs", "Step", "rollout", "compute_gae", "ppo_loss", "evaluate", "main")
    for file in ("threespo.py", "stepopsd.py", "slea_rl.py"):
        names = [name for name in trees(file) if name in order]
        assert names == [name for name in order if name in names] and len(names) >= 7, file
