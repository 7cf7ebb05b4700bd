"""common.py: sampling, 4-bit gradients, adapters, the split model, optimiser, checkpoints, run folders, the report."""

import ast
import inspect
import json
import math
import os
import re
import shutil
import sys
import types
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from conftest import ROOT, plain_reference, random_prompts, randomise, reference_logprobs, top_rows

import common
import threespo
from common import (
    Optimizer,
    Run,
    UserError,
    health_report,
    load_checkpoint,
    load_model,
    md,
    rng_for,
    save_checkpoint,
    token_batches,
    torch_rng_for,
    wilson,
)

ADAPTERS = ("policy", "score", "ref")
LENGTHS = (7, 1, 23, 12, 40, 3)
BUILDS = {
    "fp32": dict(load_4bit=False),
    "fp32-all-checkpointing": dict(load_4bit=False, lora_layers="all", gradient_checkpointing=True),
    "4bit-dense": dict(load_4bit=True, dense_cache=True),
    "4bit": dict(load_4bit=True, dense_cache=False),
}


def with_dropout(patch):
    """tiny's base as a downloaded checkpoint could have it: attention dropout configured."""
    original = common.tiny_model

    def build(seed):
        model, tokenizer = original(seed)
        model.config.attention_dropout = 0.3
        for module in model.modules():
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.3
        return model, tokenizer

    patch.setattr(common, "tiny_model", build)


@pytest.fixture(scope="module", params=list(BUILDS))
def built(request):
    """(lm, plain reference) with randomised adapters and dropout configured in the base."""
    with pytest.MonkeyPatch.context() as patch:
        with_dropout(patch)
        lm = load_model("tiny", adapters=ADAPTERS, lora_rank=8, **BUILDS[request.param])
    randomise(lm, ADAPTERS)
    return lm, plain_reference(lm)


def many_eos(lm, monkeypatch):
    """A fifth of the vocabulary ends a generation, so that rows leave the batch at different moments."""
    monkeypatch.setattr(lm, "eos_ids", set(range(0, 100)))
    return lm.eos_ids


# ------------------------------------------------------------------------------------------------------------ sampling


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("adapter", [*ADAPTERS, None])
def test_sampled_logprobs_are_those_of_the_plain_model(built, adapter, temperature, monkeypatch):
    lm, reference = built
    many_eos(lm, monkeypatch)
    prompts = random_prompts(LENGTHS, seed=3)
    with lm.adapter(adapter):
        outs = lm.generate(prompts, 9, temperature, torch_rng_for("cpu", "sampling", adapter))
    assert len({len(o["ids"]) for o in outs}) > 1, "rows must finish at different lengths"
    with torch.no_grad():
        for prompt, out in zip(prompts, outs, strict=True):
            expected = reference_logprobs(reference, adapter, prompt, out["ids"], temperature)
            assert len(out["logps"]) == len(out["ids"])
            np.testing.assert_allclose(out["logps"], expected.numpy(), atol=1e-3)


def test_trunk_of_a_sample_is_the_trunk_of_its_ids(built):
    lm, _ = built
    prompts = random_prompts(LENGTHS, seed=4)
    outs = lm.generate(prompts, 6, 1.0, torch_rng_for("cpu", 1))
    expected = lm.trunk([p + o["ids"][:-1] for p, o in zip(prompts, outs, strict=True)])
    for out, trunk in zip(outs, expected, strict=True):
        assert out["trunk"].shape == trunk.shape
        torch.testing.assert_close(out["trunk"], trunk, atol=1e-4, rtol=1e-3)


def test_eos_is_kept_when_sampled_and_never_invented(tiny, monkeypatch):
    ends = many_eos(tiny, monkeypatch)
    outs = tiny.generate(random_prompts([5] * 40, seed=5), 4, 1.0, torch_rng_for("cpu", 2))
    finishes = {o["finish"] for o in outs}
    assert finishes == {"eos", "length"}
    for out in outs:
        assert not any(i in ends for i in out["ids"][:-1])
        if out["finish"] == "eos":
            assert out["ids"][-1] in ends
        else:
            assert len(out["ids"]) == 4 and out["ids"][-1] not in ends


def test_eos_as_the_last_allowed_token_counts_as_eos(tiny, monkeypatch):
    monkeypatch.setattr(tiny, "eos_ids", set(range(512)))
    outs = tiny.generate(random_prompts([5, 9]), 1, 1.0, torch_rng_for("cpu", 2))
    assert [o["finish"] for o in outs] == ["eos", "eos"] and [len(o["ids"]) for o in outs] == [1, 1]


def test_pad_is_not_eos(tiny):
    assert tiny.tokenizer.pad_token_id not in tiny.eos_ids
    assert tiny.eos_id in tiny.eos_ids


def test_greedy_is_argmax(built):
    lm, reference = built
    prompts = random_prompts((4, 17, 9), seed=6)
    outs = lm.generate(prompts, 5, 0.0)
    reference.set_adapter("policy")
    with torch.no_grad():
        for prompt, out in zip(prompts, outs, strict=True):
            text = list(prompt)
            for token in out["ids"]:
                logits = reference(input_ids=torch.tensor([text])).logits[0, -1]
                assert float(logits.max() - logits[token]) < 1e-3
                text.append(token)


def test_left_padding_changes_nothing(built):
    lm, _ = built
    prompts = random_prompts((3, 60), seed=7)
    together = lm.generate(prompts, 6, 0.0)[0]
    alone = lm.generate(prompts[:1], 6, 0.0)[0]
    assert together["ids"] == alone["ids"]
    np.testing.assert_allclose(together["logps"], alone["logps"], atol=1e-4)
    torch.testing.assert_close(together["trunk"], alone["trunk"], atol=1e-4, rtol=1e-3)


def test_same_key_same_samples(tiny):
    prompts = random_prompts(LENGTHS, seed=8)
    draw = lambda *key: [o["ids"] for o in tiny.generate(prompts, 6, 1.0, torch_rng_for("cpu", *key))]  # noqa: E731
    first = draw("a", 1)
    torch.rand(5)  # the global stream is not used
    assert draw("a", 1) == first
    assert draw("a", 2) != first


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_samples_follow_the_distribution(tiny, temperature):
    """E[log p(x)] = -H(p) for x ~ p; sampling at another temperature than the log-probs' moves it by far more."""
    n, prompt = 3000, random_prompts((5,), seed=9)[0]
    outs = tiny.generate([prompt] * n, 1, temperature, torch_rng_for("cpu", "law"))
    with torch.no_grad():
        logp = (tiny.head(top_rows(tiny, tiny.trunk([prompt]))[0, -1]).float() / temperature).log_softmax(-1)
    p = logp.exp()
    mean, second = float((p * logp).sum()), float((p * logp**2).sum())
    tolerance = 5 * math.sqrt((second - mean**2) / n)
    assert tolerance < 0.3
    assert abs(np.mean([o["logps"][0] for o in outs]) - mean) < tolerance
    counts = np.bincount([o["ids"][0] for o in outs], minlength=512)
    top = int(p.argmax())
    assert abs(counts[top] / n - float(p[top])) < 5 * math.sqrt(float(p[top]) / n)


def test_generation_config_of_a_checkpoint_never_reaches_sampling(tmp_path):
    model, tokenizer = common.tiny_model(0)
    generation = model.generation_config
    generation.do_sample, generation.temperature, generation.top_k = True, 0.01, 1
    generation.repetition_penalty, generation.max_new_tokens = 9.0, 1
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "generation_config.json").read_text())["top_k"] == 1
    from_folder = load_model(str(tmp_path), load_4bit=False, dtype="float32")
    plain = load_model("tiny", load_4bit=False)
    prompts = random_prompts((6, 6, 11), seed=10)
    a = from_folder.generate(prompts, 8, 1.0, torch_rng_for("cpu", 3))
    b = plain.generate(prompts, 8, 1.0, torch_rng_for("cpu", 3))
    assert [o["ids"] for o in a] == [o["ids"] for o in b]
    np.testing.assert_allclose(
        np.concatenate([o["logps"] for o in a]), np.concatenate([o["logps"] for o in b]), atol=1e-4
    )


# ------------------------------------------------------------------------------------------------------ 4-bit gradients


def test_activations_are_recomputed_where_they_are_large(monkeypatch):
    """Qwen2.5-7B keeps 2.1 GiB a pass: too much for a GPU with 8 GiB free, not for one with 40."""
    from transformers import Qwen2Config

    seven = Qwen2Config(hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
                        num_key_value_heads=4, vocab_size=152064, tie_word_embeddings=False)  # fmt: skip
    for gib, expected in ((8, True), (40, False)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, g=gib: (g * 2**30, 80 * 2**30))
        assert common.large_activations(seven, "cuda:0") is expected
    assert common.large_activations(seven, "cpu") is False
    lm = load_model("tiny", load_4bit=False)
    assert lm.gradient_checkpointing is False and lm.describe()["gradient_checkpointing"] is False


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("dense_cache", [True, False])
def test_gradients_in_4bit_equal_those_of_dequantised_weights(dense_cache, checkpointing):
    """Also after sampling and after an eval-mode forward, where bitsandbytes repacks the weights on CPU."""
    lm = load_model(
        "tiny",
        load_4bit=True,
        dense_cache=dense_cache,
        gradient_checkpointing=checkpointing,
        lora_rank=8,
        lora_layers="half",
    )
    randomise(lm, ["policy"])
    reference = plain_reference(lm)
    prompts = random_prompts((9, 20, 14), seed=11)
    outs = lm.generate(prompts, 5, 1.0, torch_rng_for("cpu", 4))
    with torch.no_grad():
        top_rows(lm, [o["trunk"] for o in outs])
    hidden = top_rows(lm, [o["trunk"] for o in outs])
    expected, found = 0.0, 0.0
    for row, (prompt, out) in enumerate(zip(prompts, outs, strict=True)):
        ids = out["ids"]
        rows = lm.head(hidden[row, len(prompt) - 1 : len(prompt) - 1 + len(ids)]).float().log_softmax(-1)
        found = found + rows[torch.arange(len(ids)), torch.tensor(ids)].sum()
        expected = expected + reference_logprobs(reference, "policy", prompt, ids, 1.0).sum()
    assert abs(float(found.detach() - expected.detach())) < 1e-2
    found.backward()
    expected.backward()
    own = dict(reference.named_parameters())
    checked = 0
    for key, param in lm.params("policy").items():
        wanted = own[key].grad
        assert wanted is not None and float(wanted.norm()) > 0
        error = float((param.grad - wanted).norm() / wanted.norm())
        assert error < 5e-3, f"{key}: relative error {error:.3f}"
        checked += 1
    assert checked == 2 * 7 * 2  # A and B of seven matrices in two layers
    for name, param in lm.peft.named_parameters():
        if "lora_" not in name:
            assert param.grad is None


# ------------------------------------------------------------------------------------------------------------ adapters


def snapshot(lm):
    tensors = {k: v.detach().clone() for k, v in lm.peft.named_parameters()}
    return tensors | {f"buffer {k}": v.detach().clone() for k, v in lm.peft.named_buffers()}


def flags(lm):
    return {k for k, p in lm.peft.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("load_4bit", [False, True])
@pytest.mark.parametrize("name", ["policy", "score"])
def test_an_update_moves_only_the_trained_adapter(name, load_4bit):
    lm = load_model("tiny", load_4bit=load_4bit, adapters=ADAPTERS, lora_rank=4)
    before = snapshot(lm)
    optimizer = Optimizer(lm.params(name), 1e-2, warmup=1)
    trunks = lm.trunk(random_prompts((6, 9)))
    for _ in range(2):  # A has no gradient while B is zero
        with lm.adapter(name):
            top_rows(lm, trunks)[:, 5].square().mean().backward()
        assert optimizer.step() > 0
    moved = {k for k, v in snapshot(lm).items() if not torch.equal(v, before[k])}
    assert moved == set(lm.params(name))
    assert all(f".{name}." in k for k in moved)


def test_the_reference_is_never_trainable(tiny):
    with tiny.adapter("ref"):
        assert flags(tiny) == set()
    with tiny.adapter(None):
        assert flags(tiny) == set()


@pytest.mark.parametrize("name", ["score", "ref", None, "policy"])
def test_active_adapter_and_flags_come_back_after_an_exception(tiny, name):
    trunks = tiny.trunk(random_prompts((5, 8)))
    before, trainable = top_rows(tiny, trunks).detach(), flags(tiny)
    assert trainable == set(tiny.params("policy"))
    with pytest.raises(ZeroDivisionError), tiny.adapter(name):
        assert torch.equal(top_rows(tiny, trunks), before) == (name == "policy")
        raise ZeroDivisionError
    assert torch.equal(top_rows(tiny, trunks), before)
    assert flags(tiny) == trainable
    with pytest.raises(KeyError), tiny.adapter(None), tiny.adapter("score"):
        raise KeyError
    assert torch.equal(top_rows(tiny, trunks), before) and flags(tiny) == trainable


def test_no_adapter_is_the_bare_base(tiny):
    base, _ = common.tiny_model(0)
    prompts = random_prompts((9, 4), seed=12)
    trunks = tiny.trunk(prompts)
    with torch.no_grad():
        with tiny.adapter(None):
            logits = tiny.head(top_rows(tiny, trunks))
        adapted = tiny.head(top_rows(tiny, trunks))
        for row, prompt in enumerate(prompts):
            expected = base(input_ids=torch.tensor([prompt])).logits[0]
            torch.testing.assert_close(logits[row, : len(prompt)], expected, atol=1e-3, rtol=1e-3)
            assert float((adapted[row, : len(prompt)] - expected).abs().max()) > 0.05


def test_copy_adapter_copies_and_does_not_alias():
    lm = load_model("tiny", load_4bit=False, adapters=ADAPTERS, lora_rank=4)
    randomise(lm, ADAPTERS)
    score = {k: v.clone() for k, v in lm.params("score").items()}
    lm.copy_adapter("policy", "ref")
    pairs = list(zip(lm.params("policy").values(), lm.params("ref").values(), strict=True))
    assert all(torch.equal(a, b) for a, b in pairs)
    with torch.no_grad():
        pairs[0][0].add_(1.0)
    assert not torch.equal(*pairs[0])
    assert all(torch.equal(v, score[k]) for k, v in lm.params("score").items())


# ---------------------------------------------------------------------------------------------------------- trunk / top


@pytest.mark.parametrize("layers, first", [("half", 2), ("all", 0), ("1", 3), ("9", 0)])
def test_trunk_and_top_are_the_whole_model(layers, first):
    lm = load_model("tiny", load_4bit=False, lora_layers=layers, lora_rank=4)
    assert lm.first_layer == first
    assert {int(k.split(".layers.")[1].split(".")[0]) for k in lm.params("policy")} == set(range(first, 4))
    base, _ = common.tiny_model(0)
    prompts = random_prompts((31, 2, 13), seed=13)
    trunks = lm.trunk(prompts, 40)
    assert [tuple(h.shape) for h in trunks] == [(31, 128), (2, 128), (13, 128)]
    with torch.no_grad():
        logits = lm.head(top_rows(lm, trunks))
        for row, prompt in enumerate(prompts):
            expected = base(input_ids=torch.tensor([prompt])).logits[0]
            torch.testing.assert_close(logits[row, : len(prompt)], expected, atol=1e-3, rtol=1e-3)


def shared_sequences():
    """Ids that go on from those before them, branch off, come again, begin anew, and are a prefix of earlier ones."""
    a, b, c, d = random_prompts((20, 9, 15, 6), seed=21)
    return [a, a + b, a[:12] + c, a[:12] + c, [*d, 1], a[:12], [*a[:12], *c, 5]]


@pytest.mark.parametrize("order", ["as given", "of token_batches"])
@pytest.mark.parametrize("build", [*BUILDS, "bf16"])
def test_prefixes_in_common_are_computed_once_and_change_nothing(build, order):
    """Hidden states and gradients equal those of the sequences one by one, however often a token is shared."""
    options = BUILDS.get(build, dict(load_4bit=True, dtype="bfloat16"))
    lm = load_model("tiny", lora_rank=4, **options)
    randomise(lm, ["policy"])
    sequences = shared_sequences()
    if order == "of token_batches":
        (batch,) = token_batches(sequences, 1000)
        sequences = [sequences[i] for i in batch]
    distinct = {tuple(s[: n + 1]) for s in sequences for n in range(len(s))}
    generator = torch.Generator().manual_seed(3)
    weights = [torch.randn(len(s), 128, generator=generator) for s in sequences]
    trunks = [lm.trunk([s])[0] for s in sequences]
    close = dict(atol=0.06, rtol=0.06) if build == "bf16" else dict(atol=1e-5, rtol=1e-4)
    for together, alone in zip(lm.trunk(sequences), trunks, strict=True):
        torch.testing.assert_close(together, alone, **close)

    def gradients(groups):
        found = []
        for group in groups:
            hidden, rows = lm.top([sequences[i] for i in group], [trunks[i] for i in group])
            found += [(hidden[own].detach().float(), len(hidden)) for own in rows]
            sum((hidden[own].float() * weights[i]).sum() for i, own in zip(group, rows, strict=True)).backward()
        grads = torch.cat([p.grad.float().flatten() for p in lm.params("policy").values()])
        for param in lm.params("policy").values():
            param.grad = None
        return found, grads

    every = range(len(sequences))
    one_by_one, wanted = gradients([i] for i in every)
    together, grads = gradients([every])
    for (hidden, count), (alone, _) in zip(together, one_by_one, strict=True):
        torch.testing.assert_close(hidden, alone, **close)
        assert count == len(distinct) + (order == "as given") * 27  # 12 of them behind d, 15 in the last one
    assert float((grads - wanted).norm() / wanted.norm()) < (0.02 if build == "bf16" else 1e-4)


def test_prompts_that_begin_alike_are_sampled_as_if_alone(tiny):
    prompts = shared_sequences()
    with torch.no_grad():
        together = tiny.generate(prompts, 5, 0.0)
        for prompt, out in zip(prompts, together, strict=True):
            (alone,) = tiny.generate([prompt], 5, 0.0)
            assert out["ids"] == alone["ids"] and out["logps"] == pytest.approx(alone["logps"], abs=1e-4)
            torch.testing.assert_close(out["trunk"], alone["trunk"], atol=1e-4, rtol=1e-4)


def test_no_gradient_reaches_the_trunk(tiny):
    assert all(not h.requires_grad for h in tiny.trunk(random_prompts((4, 5))))


@pytest.mark.parametrize("bad", ["x", "0", "-1", "1.5", ""])
def test_bad_lora_layers(bad):
    with pytest.raises(UserError, match="lora_layers"):
        load_model("tiny", load_4bit=False, lora_layers=bad)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_bad_devices():
    for name in ("cuda", "cuda:0", "gpu", "cpu:x"):
        with pytest.raises(UserError, match="device"):
            common.resolve_device(name)
    assert common.resolve_device("auto") == "cpu"


@pytest.mark.parametrize("fast", [True, False])
def test_auto_dtype_is_bf16_only_where_it_is_fast(fast, monkeypatch):
    monkeypatch.setattr(common, "fast_bf16", lambda device: fast)
    assert common.resolve_dtype("auto", "smollm2", "cpu") == ("bfloat16" if fast else "float32")
    assert common.resolve_dtype("auto", "tiny", "cpu") == "float32"
    assert common.resolve_dtype("bfloat16", "tiny", "cpu") == "bfloat16"
    assert load_model("tiny", load_4bit=False).compute == torch.float32


def test_a_processor_without_bf16_functions_in_torch_is_not_fast(monkeypatch):
    monkeypatch.setattr(torch.ops, "mkldnn", object())
    assert common.fast_bf16("cpu") is False


@pytest.mark.parametrize(
    "argv, fast, dtype, line",
    [
        (["--model", "smollm2"], False, "float32", "--dtype auto: float32 ("),
        (["--model", "smollm2"], True, "bfloat16", ""),
        (["--model", "tiny"], False, "float32", ""),
        (["--model", "smollm2", "--dtype", "bfloat16"], False, "bfloat16", ""),
        (["--model", "smollm2", "--dtype", "float32"], False, "float32", ""),
    ],
)
def test_a_run_records_the_dtype_it_uses_and_says_why(argv, fast, dtype, line, monkeypatch, capsys):
    monkeypatch.setattr(common, "fast_bf16", lambda device: fast)
    args = common.parse_args(threespo.Args, [*argv, "--device", "cpu", "--out", "x"])
    common.settle_args(args, threespo.TUNED)
    out, err = capsys.readouterr()
    assert args.dtype == dtype and (out + err).count("\n") == bool(line) and (out + err).startswith(line)


@pytest.mark.parametrize("fast", [True, False])
def test_slow_bf16_is_warned_of_where_the_model_is_loaded(fast, monkeypatch, capsys):
    """A resumed run and a test of another machine's run get there too."""
    monkeypatch.setattr(common, "fast_bf16", lambda device: fast)
    load_model("tiny", load_4bit=False, dtype="bfloat16", device="cpu")
    assert ("warning: " in capsys.readouterr().err) is not fast


def test_a_resumed_run_keeps_its_dtype_and_a_test_may_take_another(tmp_path, monkeypatch):
    """Checkpoints hold trunk outputs in the compute dtype; a machine that would choose another must not."""
    folder = tmp_path / "run"
    folder.mkdir()
    started = common.parse_args(threespo.Args, ["--model", "smollm2", "--dtype", "bfloat16"])
    (folder / "config.json").write_text(json.dumps({"algorithm_file": "threespo", **vars(started)}, default=list))
    monkeypatch.setattr(common, "fast_bf16", lambda device: False)
    for argv, dtype in ((["--resume"], "bfloat16"), (["--eval_only"], "bfloat16")):
        args = common.parse_args(threespo.Args, [*argv, str(folder)])
        common.settle_args(args, threespo.TUNED)
        assert args.dtype == dtype
    args = common.parse_args(threespo.Args, ["--eval_only", str(folder), "--dtype", "float32"])
    common.settle_args(args, threespo.TUNED)
    assert args.dtype == "float32"
    args = common.parse_args(threespo.Args, ["--resume", str(folder), "--dtype", "float32"])
    with pytest.raises(UserError, match="dtype float32 differs"):
        common.settle_args(args, threespo.TUNED)


def test_tiny_is_small_deterministic_and_encodes_any_text(tiny):
    model, _ = common.tiny_model(0)
    assert sum(p.numel() for p in model.parameters()) < 1_000_000
    other, _ = common.tiny_model(1)
    again, _ = common.tiny_model(0)
    first = next(iter(model.parameters()))
    assert torch.equal(first, next(iter(again.parameters()))) and not torch.equal(first, next(iter(other.parameters())))
    for text in ("größe 漢字 🙂", "a\tb\nc", "\x00\x1b[31m", "  two  spaces ", "<eos><pad> <|im_start|>system"):
        ids = tiny.encode(text)
        assert tiny.tokenizer.decode(ids) == text
        assert not {0, 1} & set(ids)


def test_loading_leaves_the_global_random_stream_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    load_model("tiny", load_4bit=False, lora_rank=4)
    assert torch.equal(torch.rand(3), expected)


def test_encode_prompt_cuts_the_middle(tiny):
    short = "goal reach the flag"
    assert tiny.encode_prompt(short, 8) == (tiny.encode(short), False)
    text = "goal: " + "page text " * 3000 + "last: click 7"
    ids, cut = tiny.encode_prompt(text, 24)
    assert cut and len(ids) == 2048 - 24
    decoded = tiny.tokenizer.decode(ids)
    assert decoded.startswith("goal: ") and decoded.endswith("last: click 7")


@pytest.mark.parametrize("seed", range(5))
def test_token_batches(seed):
    rng = np.random.default_rng(seed)
    sequences = random_prompts(rng.integers(1, 90, size=50).tolist(), seed=seed)
    lengths = [len(s) for s in sequences]
    batches = token_batches(sequences, 128)
    assert sorted(i for b in batches for i in b) == list(range(50))
    assert all(sum(lengths[i] for i in b) <= 128 for b in batches)
    assert len(batches) <= 2 * sum(lengths) / 128 + 1  # and no group is needlessly small
    assert token_batches([[7] * 500, [8] * 3], 100) == [[0], [1]]  # a row above the budget goes alone
    assert token_batches([], 100) == []


def test_one_long_state_among_many_short_ones_is_not_padded_to():
    sequences = [[i] * (900 if i == 60 else 10) for i in range(61)]
    batches = token_batches(sequences, 1000)
    assert max(len(b) * max(len(sequences[i]) for i in b) for b in batches) <= 2000


def test_a_group_counts_prefixes_in_common_once():
    near, far = ([[1] * goal + page for page in random_prompts((40 - goal,) * 6, seed=5)] for goal in (20, 36))
    assert sorted(map(len, token_batches([*near, [2] * 40], 150))) == [1, 6]  # 20 + 6 x 20 tokens; 6 x 40 would not fit
    assert list(map(len, token_batches(far, 60))) == [3, 3]  # 3 x 40 slots are twice the budget


def test_doctor_runs(capsys):
    common.doctor([])
    assert "4-bit (NF4)  works" in capsys.readouterr().out


def test_rng_depends_on_the_whole_key():
    draws = [rng_for(*k).random() for k in ((1, "a"), (1, "b"), (2, "a"), (1,), ("1", "a"))]
    assert len(set(draws)) == 5 and rng_for(1, "a").random() == draws[0]
    assert not torch.equal(
        torch.rand(3, generator=torch_rng_for("cpu", 1)), torch.rand(3, generator=torch_rng_for("cpu", 2))
    )


def test_minibatches_cover_the_passes():
    steps = list(range(10))
    chunks = list(common.minibatches(steps, 4, 2.5, "key"))
    flat = [x for c in chunks for x in c]
    assert [len(c) for c in chunks] == [4, 4, 4, 4, 4, 4, 1]
    assert sorted(flat[:10]) == steps and sorted(flat[10:20]) == steps and len(set(flat[20:])) == 5
    assert list(common.minibatches(steps, 4, 2.52, "key")) == chunks != list(common.minibatches(steps, 4, 2.5, "other"))
    assert [len(c) for c in common.minibatches(steps, 4, 0.01, "key")] == [1]
    assert list(common.minibatches(steps, 4, 0.0, "key")) == []


# ----------------------------------------------------------------------------------------------------------- optimiser


def parameter(*values, dtype=torch.float32):
    return torch.nn.Parameter(torch.tensor(values, dtype=dtype))


def test_masters_keep_updates_that_bf16_would_lose():
    p = parameter(1.0, dtype=torch.bfloat16)
    optimizer = Optimizer({"w": p}, 1e-4, warmup=1)
    for _ in range(100):  # each Adam step is the rate: 1e-4, far below half of bf16's spacing at 1 (0.004)
        p.grad = torch.ones_like(p)
        optimizer.step(0.0)
    assert float(optimizer.master["w"].detach()) == pytest.approx(0.99, abs=1e-4)
    assert p.dtype == torch.bfloat16 and float(p.detach()) == pytest.approx(0.99, abs=0.002)


def test_nonfinite_gradients_are_skipped_counted_and_stop_the_run_after_five():
    p = parameter(1.0, 2.0)
    optimizer = Optimizer({"w": p}, 0.1, warmup=1)
    for bad in (math.nan, math.inf, -math.inf, math.nan):
        p.grad = torch.tensor([bad, 1.0])
        assert optimizer.step() is None
    assert p.tolist() == [1.0, 2.0] and optimizer.skipped == 4 and optimizer.steps == 0 and p.grad is None
    p.grad = torch.ones(2)
    assert optimizer.step() == pytest.approx(math.sqrt(2))  # a good one ends the row
    assert optimizer.steps == 1 and all(math.isfinite(x) for x in p.tolist())
    after = p.tolist()
    with pytest.raises(RuntimeError, match="checkpoint"):
        for _ in range(5):
            p.grad = torch.full((2,), math.nan)
            optimizer.step()
    assert optimizer.skipped == 9 and p.tolist() == after


def test_gradient_norm_is_clipped_over_all_parameters():
    a, b = parameter(0.0), parameter(0.0)
    optimizer = Optimizer({"a": a, "b": b}, 0.1, warmup=1, max_grad_norm=1.0)
    a.grad, b.grad = torch.tensor([3.0]), torch.tensor([4.0])
    assert optimizer.step() == pytest.approx(5.0)
    moments = [float(optimizer.adam.state[m]["exp_avg"]) for m in optimizer.master.values()]
    assert moments == pytest.approx([0.06, 0.08], rel=1e-4)  # (1 - 0.9) x (3, 4) / 5
    a.grad, b.grad = torch.tensor([0.3]), torch.tensor([0.4])
    assert optimizer.step() == pytest.approx(0.5)
    moments = [float(optimizer.adam.state[m]["exp_avg"]) for m in optimizer.master.values()]
    assert moments == pytest.approx([0.9 * 0.06 + 0.03, 0.9 * 0.08 + 0.04], rel=1e-4)  # below the limit: not scaled


def test_rate_warms_up_and_decays_to_its_floor():
    optimizer = Optimizer({"w": parameter(0.0)}, 2.0, warmup=4)
    assert optimizer.rate(0.0) == pytest.approx(0.5)  # the first of four updates: a quarter, whatever the progress
    optimizer.steps = 1
    assert optimizer.rate(0.5) == pytest.approx(2.0 * 0.5 * 0.55)
    optimizer.steps = 3
    assert optimizer.rate(0.0) == pytest.approx(2.0)
    optimizer.steps = 30
    assert optimizer.rate(0.5) == pytest.approx(2.0 * 0.55)
    assert optimizer.rate(1.0) == pytest.approx(0.2) and optimizer.rate(7.0) == pytest.approx(0.2)
    optimizer.scale = 0.5
    assert optimizer.rate(1.0) == pytest.approx(0.1)
    optimizer.restart(1.0, 0.5)
    assert optimizer.rate(0.0) == pytest.approx(0.125)  # a new stage warms up again (the scale of a rollback stays)
    optimizer.steps = 30
    assert [optimizer.rate(x) for x in (0.0, 0.5, 1.0)] == pytest.approx([0.5, 0.5 * 0.75, 0.25])
    other = Optimizer({"w": parameter(0.0)}, 3.0)
    other.load("w", *optimizer.state("w"))  # a resumed run goes on at the same rate
    assert other.rate(0.3) == optimizer.rate(0.3)


def trained(dtype, steps=3):
    p, q = parameter(0.5, -0.25, dtype=dtype), parameter(1.5, dtype=dtype)
    optimizer = Optimizer({"p": p, "q": q}, 0.03, weight_decay=0.01)
    for i in range(steps):
        p.grad, q.grad = torch.full_like(p, 0.3 + i), None
        optimizer.step(i / 10)
    return optimizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_optimizer_round_trip_through_a_checkpoint_is_exact(tmp_path, dtype):
    one = trained(dtype)
    one.scale, one.skipped = 0.5, 2
    tensors, numbers = one.state("policy")
    save_checkpoint(tmp_path / "last", tensors, {"numbers": numbers})
    tensors, state = load_checkpoint(tmp_path / "last")
    two = Optimizer({"p": parameter(9.0, 9.0, dtype=dtype), "q": parameter(9.0, dtype=dtype)}, 0.03, weight_decay=0.01)
    two.load("policy", tensors, state["numbers"])
    assert (two.scale, two.skipped, two.steps) == (0.5, 2, 3)
    for i in range(3):
        for optimizer in (one, two):
            for param in optimizer.params.values():
                param.grad = torch.full_like(param, math.sin(i + 1))
            optimizer.step(0.3)
        for key in one.params:
            assert torch.equal(one.params[key], two.params[key]) and torch.equal(one.master[key], two.master[key])


def test_loading_over_a_used_optimizer_forgets_its_moments():
    fresh = Optimizer({"p": parameter(0.5, -0.25), "q": parameter(1.5)}, 0.03, weight_decay=0.01)
    tensors, numbers = fresh.state("x")
    tensors = {k: v.clone() for k, v in tensors.items()}
    used = trained(torch.float32)
    used.load("x", tensors, numbers)
    for optimizer in (fresh, used):
        optimizer.params["p"].grad = torch.tensor([0.2, -0.4])
        optimizer.step(0.3)
    assert torch.equal(fresh.params["p"], used.params["p"])


def test_restart_forgets_moments_and_keeps_weights():
    optimizer = trained(torch.float32)
    before = optimizer.params["p"].detach().clone()
    optimizer.restart(0.5, 0.1)
    assert torch.equal(optimizer.params["p"], before) and optimizer.lr == 0.5
    optimizer.warmup, optimizer.adam.param_groups[0]["weight_decay"] = 1, 0.0
    optimizer.params["p"].grad = torch.tensor([1e-3, -1e-3])
    optimizer.step(0.0)
    torch.testing.assert_close(optimizer.params["p"].detach(), before + torch.tensor([-0.5, 0.5]), atol=1e-3, rtol=0)


# --------------------------------------------------------------------------------------------------------- checkpoints


def checkpoint(value):
    return {"w": torch.tensor([float(value), -0.0]), "n": torch.tensor(value)}, {"value": value, "list": [1, "ü", None]}


def test_checkpoint_round_trip(tmp_path):
    tensors = {"a": torch.randn(3, 4).T, "b": torch.randn(2).bfloat16(), "c": torch.tensor(3.0)}
    save_checkpoint(tmp_path / "last", tensors, {"x": [1.5, math.inf]})
    loaded, state = load_checkpoint(tmp_path / "last")
    assert state == {"x": [1.5, math.inf]} and set(loaded) == set(tensors)
    for key in tensors:
        assert loaded[key].dtype == tensors[key].dtype and torch.equal(loaded[key], tensors[key])
    save_checkpoint(tmp_path / "last", *checkpoint(2))
    assert load_checkpoint(tmp_path / "last")[1]["value"] == 2
    assert load_checkpoint(tmp_path / "last.prev")[1] == {"x": [1.5, math.inf]}


def damage(folder, how):
    path = folder / "tensors.safetensors"
    data = bytearray(path.read_bytes())
    if how == "truncated":
        path.write_bytes(data[: len(data) // 2])
    elif how == "flipped byte":
        data[-3] ^= 1
        path.write_bytes(data)
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "missing":
        path.unlink()
    elif how == "torn state":
        state = (folder / "state.json").read_text()
        (folder / "state.json").write_text(state[: len(state) // 2])


@pytest.mark.parametrize("how", ["truncated", "flipped byte", "empty", "missing", "torn state"])
def test_damaged_checkpoint_falls_back_to_the_one_before(tmp_path, how, capsys):
    save_checkpoint(tmp_path / "last", *checkpoint(1))
    save_checkpoint(tmp_path / "last", *checkpoint(2))
    damage(tmp_path / "last", how)
    tensors, state = load_checkpoint(tmp_path / "last")
    assert state["value"] == 1 and tensors["w"].tolist() == [1.0, 0.0]
    assert "warning" in capsys.readouterr().err
    damage(tmp_path / "last.prev", how)
    with pytest.raises(UserError, match="no usable checkpoint"):
        load_checkpoint(tmp_path / "last")


def test_crash_between_the_two_renames(tmp_path, capsys):
    """last was moved to last.prev, last.new not yet to last: the complete new one is taken."""
    save_checkpoint(tmp_path / "last", *checkpoint(1))
    save_checkpoint(tmp_path / "last", *checkpoint(2))
    os.replace(tmp_path / "last", tmp_path / "last.new")
    assert load_checkpoint(tmp_path / "last")[1]["value"] == 2
    assert "warning" in capsys.readouterr().err
    save_checkpoint(tmp_path / "last", *checkpoint(3))  # and saving goes on from this state
    assert load_checkpoint(tmp_path / "last")[1]["value"] == 3


def test_crash_while_writing_leaves_the_last_one_in_place(tmp_path, capsys):
    save_checkpoint(tmp_path / "last", *checkpoint(1))
    shutil.copytree(tmp_path / "last", tmp_path / "last.new")
    damage(tmp_path / "last.new", "truncated")
    assert load_checkpoint(tmp_path / "last")[1]["value"] == 1
    assert capsys.readouterr().err == ""


def test_only_the_previous_one_is_left(tmp_path, capsys):
    save_checkpoint(tmp_path / "last", *checkpoint(1))
    os.replace(tmp_path / "last", tmp_path / "last.prev")
    (tmp_path / "last.new").mkdir()
    assert load_checkpoint(tmp_path / "last")[1]["value"] == 1
    assert "warning" in capsys.readouterr().err


def test_a_save_that_crashes_anywhere_keeps_a_loadable_checkpoint(tmp_path, monkeypatch):
    """Fail in turn at each rename, directory removal and write of a save."""
    for name in ("replace", "rmtree", "write_atomic"):
        owner = {"replace": os, "rmtree": shutil, "write_atomic": common}[name]
        original = getattr(owner, name)
        for moment in range(1, 5):
            folder = tmp_path / f"{name}{moment}" / "last"
            save_checkpoint(folder, *checkpoint(1))
            save_checkpoint(folder, *checkpoint(2))
            calls = 0

            def crash(*args, _original=original, _moment=moment, **kwargs):
                nonlocal calls
                calls += 1
                if calls == _moment:
                    raise KeyboardInterrupt
                return _original(*args, **kwargs)

            with monkeypatch.context() as patch:
                patch.setattr(owner, name, crash)
                try:
                    save_checkpoint(folder, *checkpoint(3))
                except KeyboardInterrupt:
                    pass
            assert load_checkpoint(folder)[1]["value"] in (2, 3)


def test_nothing_there(tmp_path):
    with pytest.raises(UserError, match="no usable checkpoint"):
        load_checkpoint(tmp_path / "last")


def sources():
    return sorted(ROOT.glob("*.py"))


def test_no_source_file_unpickles_or_executes_text():
    found, seen = [], set()
    forbidden_modules = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
    for path in sources():
        seen.add(path.name)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            at = f"{path.name}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Import):
                found += [at for a in node.names if a.name.split(".")[0] in forbidden_modules]
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in forbidden_modules:
                found.append(at)
            if isinstance(node, ast.Name) and node.id in ("eval", "exec", "__import__"):
                found.append(at)
            if isinstance(node, ast.Attribute) and ast.unparse(node) in (
                "torch.load",
                "os.system",
                "os.popen",
                "np.load",
            ):
                found.append(at)
            if isinstance(node, ast.keyword) and node.arg in ("shell", "trust_remote_code", "allow_pickle"):
                if not (isinstance(node.value, ast.Constant) and node.value.value is False):
                    found.append(at)
    assert {"common.py", "threespo.py", "envs.py", "plots.py"} <= seen
    assert not found


# ---------------------------------------------------------------------------------------------------------- run folder


CONFIG = {"algorithm_file": "threespo.py", "algo": "3spo", "env": "gridworld", "model": "tiny", "seed": 1}


def test_overwrite_never_deletes_a_downloaded_model(tmp_path):
    """A model's folder has a config.json, too."""
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}')
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    with pytest.raises(UserError):
        Run(tmp_path, CONFIG, overwrite=True)
    assert (tmp_path / "model.safetensors").read_bytes() == b"weights"


def test_existing_out_is_refused(tmp_path):
    (tmp_path / "keep.txt").write_text("mine")
    for overwrite in (False, True):  # --overwrite replaces runs only
        with pytest.raises(UserError, match=re.escape(str(tmp_path))):
            Run(tmp_path, {}, overwrite=overwrite)
        assert (tmp_path / "keep.txt").read_text() == "mine"
    with pytest.raises(UserError):
        Run(tmp_path / "keep.txt", {}, overwrite=True)
    assert (tmp_path / "keep.txt").read_text() == "mine"


def test_overwrite_replaces_a_run_and_only_when_asked(tmp_path):
    run = Run(tmp_path / "run", {**CONFIG, "a": 1})
    run.log({"x": 1})
    with pytest.raises(UserError, match="--overwrite"):
        Run(tmp_path / "run", {**CONFIG, "a": 2})
    assert run.metrics() == [{"x": 1}]
    run = Run(tmp_path / "run", {**CONFIG, "a": 2}, overwrite=True)
    assert run.metrics() == [] and json.loads((tmp_path / "run" / "config.json").read_text()) == {**CONFIG, "a": 2}
    (tmp_path / "empty").mkdir()
    Run(tmp_path / "empty", {})


def test_resume_keeps_config_and_logs(tmp_path):
    Run(tmp_path / "run", {**CONFIG, "a": 1}).log({"x": 1})
    run = Run(tmp_path / "run", {**CONFIG, "a": 2}, resume=True)
    assert run.metrics() == [{"x": 1}] and json.loads((tmp_path / "run" / "config.json").read_text()) == {
        **CONFIG,
        "a": 1,
    }


def test_log_lines(tmp_path):
    run = Run(tmp_path / "run", {})
    run.log({"a": math.nan, "b": math.inf, "c": -math.inf, "d": 1.5, "e": "ü\n", "f": None, "g": 3, "h": True})
    raw = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    assert raw.count(b"\n") == 1 and raw.endswith(b"\n") and b"\r" not in raw
    row = json.loads(raw, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert row == {"a": None, "b": None, "c": None, "d": 1.5, "e": "ü\n", "f": None, "g": 3, "h": True}


def test_numpy_nonfinite_becomes_null_too(tmp_path):
    run = Run(tmp_path / "run", {})
    run.log({"a": np.float64("nan")})
    assert run.metrics() == [{"a": None}]


def test_torn_last_line_is_ignored(tmp_path):
    run = Run(tmp_path / "run", {})
    run.log({"x": 1})
    run.log({"x": 2})
    path = tmp_path / "run" / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-4])
    assert run.metrics() == [{"x": 1}]
    path.write_bytes(path.read_bytes() + b"\xff\xfe")
    assert run.metrics() == [{"x": 1}]


def test_rewind_drops_what_came_after_the_marks(tmp_path):
    run = Run(tmp_path / "run", {})
    assert run.marks() == {"metrics.jsonl": 0, "episodes.jsonl": 0}
    run.log({"x": 1})
    run.episodes([{"task": 1}])
    marks = run.marks()
    run.log({"x": 2})
    run.episodes([{"task": 2}])
    run.rewind(marks)
    assert run.metrics() == [{"x": 1}] and common.read_jsonl(tmp_path / "run" / "episodes.jsonl") == [{"task": 1}]
    run.log({"x": 3})
    assert run.metrics() == [{"x": 1}, {"x": 3}]
    run.rewind({"metrics.jsonl": 10**9, "episodes.jsonl": 0})
    assert run.metrics() == [{"x": 1}, {"x": 3}] and common.read_jsonl(tmp_path / "run" / "episodes.jsonl") == []


@pytest.mark.parametrize("kind", ["wandb", "trackio"])
def test_missing_tracker_names_the_install_command(tmp_path, kind, monkeypatch):
    monkeypatch.setitem(sys.modules, kind, None)
    with pytest.raises(UserError, match=f"pip install {kind}"):
        Run(tmp_path / "run", {}, track=kind)


def test_write_atomic_leaves_no_other_file(tmp_path):
    common.write_atomic(tmp_path / "a.json", "one\n")
    common.write_atomic(tmp_path / "a.json", "zwei ü\n")
    assert (tmp_path / "a.json").read_bytes() == "zwei ü\n".encode() and os.listdir(tmp_path) == ["a.json"]


# -------------------------------------------------------------------------------------------------------------- report


@pytest.mark.parametrize(
    "wins, n, low, high",
    [(0, 10, 0.0, 0.278), (5, 10, 0.237, 0.763), (10, 10, 0.722, 1.0), (50, 100, 0.404, 0.596), (0, 0, 0, 1)],
)
def test_wilson(wins, n, low, high):
    assert wilson(wins, n) == pytest.approx([low, high], abs=6e-4)


def test_md_escapes_what_pages_and_models_may_write():
    page = '<script>alert("x")</script> a|b `code` [l](javascript:x) ![i](http://x) **b** $x$ a&b\n| --- |\r\n# title'
    text = md(page + " ~~s~~")
    assert "<" not in text and ">" not in text and "\n" not in text and "\r" not in text
    assert "&lt;script&gt;" in text and "a&amp;b" in text
    for character in "|`*[]()!$#~":
        assert not re.search(rf"(?<!\\)(\\\\)*{re.escape(character)}", text), character
    assert md("\\`").endswith("\\\\\\`")  # a backslash of the text cannot undo the escape
    assert md("plain words, 3.5!") == "plain words, 3.5\\!"
    assert md(None) == "None"


def test_md_shortens_before_it_escapes():
    assert md("x" * 50, 10) == "x" * 9 + "…"
    assert md("<" * 50, 10) == "&lt;" * 9 + "…"
    assert len(md("ok", 10)) == 2


HEALTHY = [
    {
        "eval/success": 0.3 + 0.1 * i,
        "eval/ep_len": 8.0 - 0.5 * i,
        "train/success": 0.3 + 0.1 * i,
        "policy/approx_kl": 0.02,
        "policy/entropy": 0.4,
        "score/mse_val": 0.2 - 0.01 * i,
        "score/mse_constant": 0.5,
        "policy/first_ratio_dev": 0.0001,
        "policy/sampler_gap": 0.01,
        "rollout/invalid_rate": 0.02,
        "rollout/cut_frac": 0.0,
    }
    for i in range(7)
]
SICK = {
    "falling success, large steps": (
        {"eval/success": [0.4, 0.9, 0.6], "policy/approx_kl": [0.02, 0.3, 0.02]},
        "--target_kl",
    ),
    "falling success, score overfits": (
        {"eval/success": [0.9, 0.5], "score/mse_val": [0.3, 0.1, 0.15, 0.2]},
        "--score_epochs",
    ),
    "falling success, old data": ({"eval/success": [0.9, 0.7]}, "--replay_iters"),
    "stuck length": ({"eval/success": [0.5], "eval/ep_len": [9, 6.0, 6.0, 6.0, 6.05]}, "--gamma"),
    "score error": ({"score/mse_val": [0.45], "score/mse_constant": [0.5]}, "--lora_rank"),
    "swings": ({"train/success": [0.2, 0.8, 0.2, 0.8, 0.2, 0.8]}, "--gae_lambda"),
    "entropy": ({"policy/entropy": [0.3, 0.001]}, "--ent_coef"),
    "first ratio": ({"policy/first_ratio_dev": [0.06]}, "--dtype float32"),
    "sampler gap": ({"policy/sampler_gap": [0.06]}, "--dtype float32"),
    "illegal actions": ({"rollout/invalid_rate": [0.2]}, "--demos"),
    "cut": ({"rollout/cut_frac": [0.1]}, "context"),
}


def test_health_report_is_silent_on_a_healthy_run():
    for rows in (HEALTHY, [], [{"eval/success": None, "policy/entropy": None}]):
        assert len(health_report(rows)) == 1 and "No symptom" in health_report(rows)[0]


@pytest.mark.parametrize("name", SICK)
def test_health_report_names_the_symptom_and_the_flag(name):
    columns, flag = SICK[name]
    rows = [{k: v} for k, values in columns.items() for v in values] + [{"eval/success": None, "policy/entropy": None}]
    lines = health_report(rows)
    assert len(lines) == 1 and flag in lines[0] and "No symptom" not in lines[0]


# -------------------------------------------------------------------------------------------------------- command line


@dataclass
class Args:
    model: str = "a"  # which model (100% plain text)
    rank: int = 4  # rank [units]
    fast: bool = True  # be fast
    rate: float = 1e-3  # a rate


def test_parse_args(monkeypatch):
    args = common.parse_args(Args, ["--model", "b", "--no_fast", "--rate=0.5"])
    assert (args.model, args.rank, args.fast, args.rate) == ("b", 4, False, 0.5)
    assert args.explicit == {"model", "fast", "rate"}
    assert common.apply_defaults(args, {"rank": 8, "rate": 9.0, "fast": True}) == {"rank": 8}
    assert (args.rank, args.rate, args.fast) == (8, 0.5, False)  # a flag given by hand wins
    monkeypatch.setattr(sys, "argv", ["x.py", "--rank", "7"])
    assert common.parse_args(Args).rank == 7


@pytest.mark.parametrize("argv", [["--nope"], ["--rank", "x"], ["--ran", "3"], ["stray"], ["--rank"]])
def test_parse_errors_are_one_line(argv, capsys):
    with pytest.raises(SystemExit) as error:
        common.parse_args(Args, argv)
    out = capsys.readouterr()
    assert error.value.code == 2 and out.err.startswith("error: ") and out.err.count("\n") == 1


def test_help_explains_every_field(capsys):
    with pytest.raises(SystemExit) as error:
        common.parse_args(Args, ["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert error.value.code == 0
    for part in ("--model", "which model (100% plain text)", "rank [units]", "be fast", "a rate", "(default: 0.001)"):
        assert part in text


def test_run_main_turns_errors_into_lines(capsys):
    def fail(error):
        def main():
            raise error

        return main

    for error, code in ((UserError("mend this"), 2), (OSError(28, "No space left on device", "runs/x"), 2)):
        with pytest.raises(SystemExit) as stopped:
            common.run_main(fail(error))
        out = capsys.readouterr().err
        assert stopped.value.code == code and out.startswith("error: ") and out.count("\n") == 1
    with pytest.raises(ZeroDivisionError):  # a bug keeps its traceback
        common.run_main(fail(ZeroDivisionError()))
    with pytest.raises(SystemExit) as stopped:
        common.run_main(lambda: 0)
    assert stopped.value.code == 0


def test_common_does_not_import_the_environments():
    """Neither at the top nor inside a function."""
    for node in ast.walk(ast.parse(inspect.getsource(common))):
        if isinstance(node, ast.Import):
            assert all(a.name != "envs" for a in node.names)
        if isinstance(node, ast.ImportFrom):
            assert node.module != "envs"


def test_estimated_memory_by_hand():
    config = types.SimpleNamespace(hidden_size=4, intermediate_size=8, num_hidden_layers=2, vocab_size=10,
                                   num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=False)  # fmt: skip
    parts = common.estimate_memory(config, adapters=3, rank=2, states=5, tokens=7, micro=11)
    # q, o 4 x 4; k, v 4 x 2; gate, up, down 4 x 8
    assert parts["4-bit matrices"] == pytest.approx(2 * (2 * 16 + 2 * 8 + 3 * 32) * 0.516)
    assert parts["embeddings, bf16"] == 2 * 10 * 4 * 2
    lora = 2 * (2 * (4 + 4) + 2 * (4 + 2) + 3 * (4 + 8))  # one adapted layer, rank 2
    assert parts["adapters"] == 3 * 2 * lora and parts["fp32 masters, moments, gradients"] == 2 * 14 * lora
    assert parts["KV cache while sampling"] == 5 * 7 * 2 * 2 * 2 * 2  # states, tokens, layers, k and v, width, bytes
    assert parts["activations, checkpointed"] == parts["activations"] + 11 * 2 * 4  # of one layer: nothing is saved
