"""Shared by the tests: markers, one torch thread, tiny models, and a reference model without common.py's tricks."""

import importlib.util
import os
import shutil
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: a tiny model is faster on one thread
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("MPLBACKEND", "Agg")
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

OPTIONAL = {  # marker -> packages, programs (the first needed, or one of several)
    "browser": (("miniwob",), (("chromedriver",), ("chromium", "chromium-browser", "google-chrome", "chrome"))),
    "textworld": (("textworld",), ()),
}


def pytest_runtest_setup(item):
    """Tests of optional packages are skipped, with what is missing, where these are not installed."""
    for marker, (packages, programs) in OPTIONAL.items():
        if item.get_closest_marker(marker):
            missing = [name for name in packages if importlib.util.find_spec(name) is None]
            missing += [" or ".join(names) for names in programs if not any(map(shutil.which, names))]
            if missing:
                pytest.skip(f"not installed: {', '.join(missing)}")


def pytest_configure(config):
    config.addinivalue_line("markers", "browser: real pages; needs miniwob, chromium and chromedriver")
    config.addinivalue_line("markers", "textworld: text adventures; needs textworld")
    config.addinivalue_line("markers", "smollm2: needs the real SmolLM2-135M in the cache (4-bit, bf16; about 20 s)")
    config.addinivalue_line("markers", "e2e: whole runs of the command line (about a minute)")


@pytest.fixture
def keep_sigint():
    """main() installs a Ctrl-C handler: put pytest's own back."""
    import signal

    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


def randomise(lm, names, std=0.05, seed=0):
    """LoRA weights away from zero, different for each adapter (a fresh adapter has B = 0 and does nothing)."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name in names:
            for param in lm.params(name).values():
                param.copy_(torch.randn(param.shape, generator=generator) * std)


def random_prompts(lengths, seed=0, vocab=512):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, vocab, (n,), generator=generator).tolist() for n in lengths]


def plain_reference(lm, seed=0):
    """The tiny model as a plain peft model in fp32: full forward from input ids, no trunk, no padding, no 4-bit layer.

    4-bit weights of `lm` are dequantised into ordinary Linear layers; all adapters are copied.
    """
    import bitsandbytes as bnb
    from peft import LoraConfig, get_peft_model

    import common

    model, _ = common.tiny_model(seed)
    model.set_attn_implementation("eager")
    for name, module in lm.peft.base_model.model.named_modules():
        if isinstance(module, bnb.nn.Linear4bit):
            weight = bnb.functional.dequantize_4bit(module.weight.data, module.weight.quant_state)
            model.get_submodule(name.removesuffix(".base_layer")).weight.data = weight.float().clone()
    rank = next(p for k, p in lm.params(lm.adapters[0]).items() if "lora_A" in k).shape[0]
    config = LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        lora_dropout=0.0,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        layers_to_transform=list(range(lm.first_layer, model.config.num_hidden_layers)),
    )
    reference = get_peft_model(model, config, adapter_name=lm.adapters[0])
    for name in lm.adapters[1:]:
        reference.add_adapter(name, config)
    own = dict(reference.named_parameters())
    with torch.no_grad():
        for name in lm.adapters:
            for key, param in lm.params(name).items():
                own[key].copy_(param)
    return reference.eval()


def reference_logprobs(reference, adapter, prompt, action, temperature):
    """log π(action tokens) of one sequence, alone in its batch, by the plain model -> (n,)."""
    if adapter is None:
        with reference.disable_adapter():
            logits = reference(input_ids=torch.tensor([prompt + action[:-1]])).logits[0]
    else:
        reference.set_adapter(adapter)
        logits = reference(input_ids=torch.tensor([prompt + action[:-1]])).logits[0]
    rows = (logits[len(prompt) - 1 :].float() / temperature).log_softmax(-1)
    return rows[torch.arange(len(action)), torch.tensor(action)]


def top_rows(lm, trunks):
    """`lm.top` with one row a sequence, zeros behind it: (B, T, D). The ids are made up and share no prefix."""
    hidden, rows = lm.top([[-1 - i] * len(h) for i, h in enumerate(trunks)], trunks)
    assert np.concatenate(rows).tolist() == list(range(len(hidden)))
    return torch.nn.utils.rnn.pad_sequence(hidden.split([len(h) for h in trunks]), batch_first=True)


@pytest.fixture(scope="module")
def tiny(request):
    """A tiny model with the module's ADAPTERS away from zero. Shared; a test that trains one takes `fresh` instead."""
    return _tiny(request.module.ADAPTERS)


@pytest.fixture
def fresh(request):
    return _tiny(request.module.ADAPTERS)


def _tiny(adapters):
    import common

    lm = common.load_model("tiny", adapters=adapters, load_4bit=False, lora_rank=8)
    randomise(lm, adapters)
    return lm


def main_here(module, argv, capfd):
    """An algorithm file's main() in this process -> (exit code, stdout, stderr)."""
    import common

    capfd.readouterr()
    with pytest.raises(SystemExit) as stopped:
        common.run_main(lambda: module.main(argv))
    out = capfd.readouterr()
    return stopped.value.code, out.out, out.err


def warmed_up(module, tmp_path):
    """A learner of an algorithm file behind a very short warm-up."""
    argv = """--env gridworld --model tiny --demos 4 --warmup_epochs 1 --eval_episodes 2 --val_episodes 2 --lora_rank 8
        --lora_layers 1""".split()
    learner = module.Learner([*argv, "--out", str(tmp_path / "run")])
    module.warm_up(learner)
    return learner


def starts_from_the_policy(lm, name, optimizer):
    """Adapter `name` is a copy of the cloned policy, and so are the weights its optimiser goes on from."""
    copy = lm.params(name)
    pairs = [(p, copy[k.replace(".policy.", f".{name}.")]) for k, p in lm.params("policy").items()]
    moved = any(bool(p.any()) for k, p in copy.items() if "lora_B" in k)  # a fresh adapter's B is zero
    return moved and all(torch.equal(a, b) for a, b in pairs) and all(
        torch.equal(optimizer.master[k], p.float()) for k, p in copy.items())  # fmt: skip


def steady(row):
    """A metrics row without what depends on the clock or the machine."""
    return {k: v for k, v in row.items() if not k.startswith(("perf/", "time/")) and "wall" not in k}


def rows_of(folder):
    import common

    return [steady(r) for r in common.read_jsonl(folder / "metrics.jsonl")]


def tensors_of(folder, name="last"):
    import common

    return common.load_checkpoint(folder / "checkpoints" / name)[0]
