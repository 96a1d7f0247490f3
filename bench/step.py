"""One training step: non-private, fastdp, and Opacus in both its modes, alternating, each in a process of its own.

A step is a batch of fixed size from a loader, forward, backward and `optimizer.step()` of torch's AdamW, with clipping and
noise where the implementation has them. Where all is trained the update counts, so there the non-private step also runs
with torch's fused AdamW, and ours with `fastdp.optim.AdamW`, which fuses noise and update. Peak memory counts from after
the imports, so it holds data, model, optimizer and step.

On a processor memory is measured in processes of its own, whose C library gives freed blocks back to the system: what
it finds is what was in use at once. In the timed processes the library keeps freed blocks in a heap with holes; their
peak is reported beside it.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from . import layers
from .memory import ENVIRONMENT

IMPLEMENTATIONS = ("non-private", "fastdp", "opacus-hooks", "opacus-ghost")
FUSED = ("non-private-fused", "fastdp-fused")
LEARNING_RATE = 1e-4


@dataclass(frozen=True)
class Case:
    """A model and a batch: ``kind`` is a builder below, ``tuning`` what is trained."""

    kind: str
    layers: int
    width: int
    tuning: str
    rows: int = 8
    tokens: int = 128
    vocabulary: int = 8192
    gpu: bool = False


CASES = {
    "gpt2-6x512-lora": Case("gpt2", 6, 512, "lora"),
    "gpt2-6x512-full": Case("gpt2", 6, 512, "full"),
    "llama-6x512-lora": Case("llama", 6, 512, "lora"),
    "llama-6x512-full": Case("llama", 6, 512, "full"),
    "bert-6x384-full": Case("bert", 6, 384, "full"),
    "bert-6x384-bitfit": Case("bert", 6, 384, "bitfit"),
    "vit-6x384-full": Case("vit", 6, 384, "full", tokens=197),
    "cnn": Case("cnn", 3, 32, "full", rows=32, tokens=32),
    "cnn-gn": Case("cnn-gn", 3, 32, "full", rows=32, tokens=32),
    "cnn-in": Case("cnn-in", 3, 32, "full", rows=32, tokens=32),
    "depthwise": Case("depthwise", 3, 32, "full", rows=32, tokens=32),
    "conv3d": Case("conv3d", 3, 16, "full", rows=16, tokens=16),
    "text-cnn": Case("text-cnn", 1, 64, "full", rows=32, vocabulary=5000),
    "bags": Case("bags", 1, 128, "full", rows=32, vocabulary=5000),
    "gru": Case("gru", 1, 128, "full", rows=32, vocabulary=5000),
    "rnn": Case("rnn", 1, 128, "full", rows=32, vocabulary=5000),
    "attention": Case("attention", 1, 256, "full", rows=16, vocabulary=5000),
    "lstm": Case("lstm", 1, 128, "full", rows=32, vocabulary=5000),
    "encoder-layer": Case("encoder-layer", 2, 256, "full", rows=16, vocabulary=5000),
    "gpt2-124m-lora": Case("gpt2", 12, 768, "lora", tokens=1024, vocabulary=50257, gpu=True),
    "gpt2-124m-full": Case("gpt2", 12, 768, "full", tokens=1024, vocabulary=50257, gpu=True),
    "bert-base-full": Case("bert", 12, 768, "full", rows=32, vocabulary=30522, gpu=True),
    "llama-1b-full": Case("llama", 16, 2048, "full", rows=4, tokens=1024, vocabulary=128256, gpu=True),
    "llama-8b-lora": Case("llama", 32, 4096, "lora", rows=4, tokens=1024, vocabulary=128256, gpu=True),
}


def measure(
    case: str, steps: int = 7, warmup: int = 2, implementations: tuple[str, ...] | None = None
) -> list[dict[str, Any]]:
    """Rows of {case, implementation, seconds, peak_bytes, ratio_time, ratio_memory}, or the exception raised.

    Without a choice of implementations all, and where everything is trained those with fused optimizers too.

    Ratios are to non-private in the same run: time by the median of step-by-step ratios, so that a machine whose speed
    drifts is compared with itself. On a processor ``heap_bytes`` and ``ratio_heap`` are those of the timed processes.

    Raises ValueError for an unknown case.
    """
    if case not in CASES:
        raise ValueError(f"there is no case '{case}'; choose one of {', '.join(CASES)}")
    if implementations is None:
        # Other libraries last: what time is short of, on a GPU that is lent, is theirs.
        implementations = (*IMPLEMENTATIONS[:2], *(FUSED if CASES[case].tuning == "full" else ()), *IMPLEMENTATIONS[2:])
    on_gpu = torch.cuda.is_available()
    workers: dict[str, _Worker] = {}
    heaps: dict[str, int] = {}
    # A GPU holds one model at a time and keeps its speed; processors drift, so there implementations take turns.
    for together in [[name] for name in implementations] if on_gpu else [implementations]:
        with ExitStack() as stack:
            here = {name: stack.enter_context(_Worker(case, name, os.environ)) for name in together}
            for _ in range(warmup):
                for worker in here.values():
                    worker.ask("step")
            for _ in range(steps):
                for worker in here.values():
                    worker.times.append(worker.ask("step"))
            heaps |= {name: worker.ask("peak") for name, worker in here.items()}
        workers |= here
    peaks = heaps if on_gpu else {name: _peak_alone(case, name) for name, w in workers.items() if w.error is None}
    base = workers["non-private"]
    rows = []
    for name, worker in workers.items():
        row: dict[str, Any] = {"case": case, "implementation": name}
        if worker.error is not None:
            row["error"] = worker.error
        else:
            row["seconds"] = statistics.median(worker.times)
            row["peak_bytes"] = peaks[name]
            row["ratio_time"] = statistics.median(a / b for a, b in zip(worker.times, base.times))
            row["ratio_memory"] = peaks[name] / peaks["non-private"]
            if not on_gpu:
                row["heap_bytes"] = heaps[name]
                row["ratio_heap"] = heaps[name] / heaps["non-private"]
        rows.append(row)
    return rows


def _peak_alone(case: str, implementation: str) -> int:
    with _Worker(case, implementation, os.environ | ENVIRONMENT) as worker:
        for _ in range(3):
            worker.ask("step")
        return worker.ask("peak")


class _Worker:
    def __init__(self, case: str, implementation: str, environment: Mapping[str, str]):
        self.times: list[float] = []
        self.error: str | None = None
        self.process = subprocess.Popen(
            [sys.executable, "-m", __name__, case, implementation],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=dict(environment),
        )
        self.ask(None)

    def ask(self, word: str | None) -> Any:
        """Send a word and wait for the answer; after an error nothing is sent any more."""
        if self.error is not None:
            return 0.0
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            if word is not None:
                self.process.stdin.write(word + "\n")
                self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        answer = json.loads(line) if line else {"error": "the process ended without an answer"}
        self.error = answer.get("error")
        return answer.get("value", 0.0)

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)


def _model(case: Case) -> torch.nn.Module:
    import transformers as hf

    heads = max(1, case.width // 64)
    torch.manual_seed(0)
    if case.kind == "gpt2":
        return hf.GPT2LMHeadModel(
            hf.GPT2Config(
                n_layer=case.layers,
                n_embd=case.width,
                n_head=heads,
                vocab_size=case.vocabulary,
                n_positions=case.tokens,
                bos_token_id=0,
                eos_token_id=0,
            )
        )
    if case.kind in layers.KINDS:
        return layers.KINDS[case.kind].build(case.vocabulary, case.width, case.layers)
    if case.kind == "vit":
        return hf.ViTForImageClassification(
            hf.ViTConfig(
                num_hidden_layers=case.layers,
                hidden_size=case.width,
                intermediate_size=4 * case.width,
                num_attention_heads=heads,
                num_labels=10,
            )
        )
    shape = {
        "num_hidden_layers": case.layers,
        "hidden_size": case.width,
        "num_attention_heads": heads,
        "vocab_size": case.vocabulary,
        "max_position_embeddings": case.tokens,
    }
    if case.kind == "bert":
        return hf.BertForSequenceClassification(hf.BertConfig(intermediate_size=4 * case.width, num_labels=2, **shape))
    intermediate = -(-8 * case.width // 3 // 32) * 32 if case.width < 2048 else 4 * case.width
    return hf.LlamaForCausalLM(hf.LlamaConfig(intermediate_size=intermediate, **shape))


def _tuned(case: Case, model: torch.nn.Module) -> torch.nn.Module:
    if case.tuning == "bitfit":
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.endswith(".bias"))
    if case.tuning != "lora":
        return model
    import peft

    targets = {"gpt2": ["c_attn"], "llama": ["q_proj", "v_proj"], "bert": ["query", "value"]}[case.kind]
    config = peft.LoraConfig(r=4, target_modules=targets, fan_in_fan_out=case.kind == "gpt2", task_type="CAUSAL_LM")
    return peft.get_peft_model(model, config)


def _examples(case: Case, count: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    if case.kind == "vit":
        images = torch.randn(count, 3, 224, 224, generator=generator)
        labels = torch.randint(0, 10, (count,), generator=generator)
        return [{"pixel_values": image, "labels": label} for image, label in zip(images, labels)]
    dimensions = layers.KINDS[case.kind].dimensions if case.kind in layers.KINDS else 0
    if dimensions:
        seen = torch.randn(count, 3, *[case.tokens] * dimensions, generator=generator)
        return [{"x": image, "labels": torch.tensor(i % layers.CLASSES)} for i, image in enumerate(seen)]
    ids = torch.randint(0, case.vocabulary, (count, case.tokens), generator=generator)
    if case.kind in layers.KINDS:
        return [{"x": row, "labels": torch.tensor(i % layers.CLASSES)} for i, row in enumerate(ids)]
    if case.kind == "bert":
        labels = torch.randint(0, 2, (count,), generator=generator)
        return [{"input_ids": row, "labels": label} for row, label in zip(ids, labels)]
    return [{"input_ids": row, "labels": row.clone()} for row in ids]


def _build(case: Case, implementation: str) -> Callable[[], None]:
    """A function that takes one training step."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = _model(case)
    if case.gpu:
        model = model.to(torch.bfloat16)  # before it moves, or a GPU would have to hold it in float32
    model = _tuned(case, model.to(device))
    model.train()
    examples = _examples(case, 4 * case.rows)
    if implementation in ("fastdp", "fastdp-fused"):
        return _fastdp(case, model, examples, device, fused=implementation == "fastdp-fused")
    batches = _batches(case, examples, device)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer: Any = torch.optim.AdamW(trained, lr=LEARNING_RATE, fused=implementation == "non-private-fused" or None)
    if implementation in ("non-private", "non-private-fused"):

        def step() -> None:
            model(**next(batches)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return step
    return _opacus(case, model, optimizer, batches, examples, ghost=implementation == "opacus-ghost")


def _batches(case: Case, examples: list[Any], device: torch.device) -> Iterator[dict[str, torch.Tensor]]:
    from torch.utils.data import DataLoader

    loader: DataLoader = DataLoader(examples, batch_size=case.rows, shuffle=True)  # type: ignore[arg-type]
    while True:
        for batch in loader:
            yield {key: value.to(device) for key, value in batch.items()}


def _fastdp(
    case: Case, model: torch.nn.Module, examples: list[Any], device: torch.device, *, fused: bool
) -> Callable[[], None]:
    from torch.utils.data import DataLoader

    import fastdp

    loader: DataLoader = DataLoader(examples, batch_size=case.rows)  # type: ignore[arg-type]
    privacy: dict[str, Any] = {"noise_multiplier": 1.0, "target_delta": 1e-5, "epochs": 10_000, "sampling": "shuffled"}
    # A few of a run's later batches are checked: at most 1.25% of its time (`fastdp.engine.later`), which falls on single steps.
    privacy["self_check"] = False
    trained = [p for p in model.parameters() if p.requires_grad]
    kind = fastdp.optim.AdamW if fused else torch.optim.AdamW
    private = fastdp.make_private(model, kind(trained, lr=LEARNING_RATE), loader, **privacy)

    def batches() -> Any:
        while True:
            yield from private.data_loader

    stream = batches()

    def step() -> None:
        batch = {key: value.to(device) for key, value in next(stream).items()}
        model(**batch).loss.backward()
        private.optimizer.step()
        private.optimizer.zero_grad()

    return step


def _opacus(
    case: Case,
    model: torch.nn.Module,
    optimizer: Any,
    batches: Iterator[dict[str, torch.Tensor]],
    examples: list[Any],
    *,
    ghost: bool,
) -> Callable[[], None]:
    from opacus import PrivacyEngine
    from opacus.validators import ModuleValidator
    from torch.utils.data import DataLoader

    loader: DataLoader = DataLoader(examples, batch_size=case.rows)  # type: ignore[arg-type]
    if case.kind in layers.KINDS and layers.KINDS[case.kind].replaced:
        # Its own layer, with the weights of torch's.
        optimizer_class, model = type(optimizer), ModuleValidator.fix(model)
        optimizer = optimizer_class(model.parameters(), lr=LEARNING_RATE)
    engine = PrivacyEngine()
    criterion = torch.nn.CrossEntropyLoss()
    options = {"grad_sample_mode": "ghost", "criterion": criterion} if ghost else {}
    made = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        poisson_sampling=False,
        **options,
    )
    private, private_optimizer = made[0], made[1]

    def step() -> None:
        batch = next(batches)
        if not ghost:
            private(**batch).loss.backward()
        else:
            labels = batch.pop("labels")
            logits = private(**batch).logits
            if logits.dim() == 3:
                logits, target = logits[:, :-1].flatten(0, 1), labels[:, 1:]
                loss = made[2](logits, target.flatten(), shape=target.shape)
            else:
                loss = made[2](logits, labels)
            loss.backward()
        private_optimizer.step()
        private_optimizer.zero_grad()

    return step


def _peak(start: int) -> int:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - start


def _serve(case: str, implementation: str) -> None:
    """Answer the parent's words, a JSON line each."""
    answers = sys.stdout
    sys.stdout = sys.stderr
    warnings.simplefilter("ignore")

    def answer(**fields: Any) -> None:
        answers.write(json.dumps(fields) + "\n")
        answers.flush()

    try:
        import opacus  # noqa: F401
        import peft  # noqa: F401
        import transformers

        import fastdp  # noqa: F401

        transformers.logging.set_verbosity_error()
        gc.collect()
        start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        step = _build(CASES[case], implementation)
        answer(value=0.0)
        for line in sys.stdin:
            if line.strip() == "peak":
                answer(value=_peak(start))
                continue
            begun = time.perf_counter()
            step()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            answer(value=time.perf_counter() - begun)
    except Exception as error:
        answer(error=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300])


if __name__ == "__main__":
    _serve(sys.argv[1], sys.argv[2])
