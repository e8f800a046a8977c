"""Trains the embedded model: `python -m models.training.train OUT` writes a checkpoint folder.

Owns shape, initialization and schedule. Everything is counted in steps and drawn from seeds, so a second run on the same
machine gives the same weights.
"""

import argparse
import json
import random
import time
from collections.abc import Iterator
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.multiprocessing.spawn import spawn
from transformers import Gemma4ForCausalLM, Gemma4TextConfig

from models.training.corpus import make_chat
from models.training.forward import Batch, TrainingForward, make_batch
from models.training.mixes import BROAD, DRILLED, LAST, Mix
from models.training.tokenizer import STOP_IDS, Encoded, Renderer, build, save

SEED = 4
VOCABULARY = 2560
TOKENIZER_CHATS = 12_000
POOL_CHATS = 3_000
LONGEST = 600
BATCH_TOKENS = 1_000
WAIT_SECONDS = 600
WARM_UP = 150


class Stage(NamedTuple):
    """A part of the training with chats of its own; it starts from the weights that the one before has stored."""

    seed: int
    steps: int
    longest: int
    """Chats of more ids are left out."""
    mix: Mix
    peak: float = 3e-3
    zero_at: int = 10**9
    """The step at which the learning rate would reach zero, falling from the peak for `falling` steps."""
    falling: int = 1

    def rate(self, step: int) -> float:
        """Returns the learning rate of a step."""
        return self.peak * min((step + 1) / WARM_UP, 1.0, (self.zero_at - step) / self.falling)


# Copying is learned on short chats, at half the price of long ones.
STAGES = (
    Stage(5, 1500, 200, BROAD),
    Stage(15, 4000, LONGEST, DRILLED),
    Stage(25, 7000, LONGEST, LAST, zero_at=7000, falling=5500),
)


class Plan(NamedTuple):
    """How a run is made, the same in each of its workers."""

    out: Path
    save_every: int
    workers: int


SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size": 128,
    "hidden_size_per_layer_input": 16,
    "intermediate_size": 256,
    "use_double_wide_mlp": True,
    "num_hidden_layers": 10,
    "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 2,
    "num_kv_shared_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "num_global_key_value_heads": None,
    "head_dim": 32,
    "global_head_dim": 64,
    "sliding_window": 64,
    "attention_k_eq_v": False,
    "max_position_embeddings": 8192,
    "final_logit_softcapping": 30.0,
    "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": [1, 106],
    "pad_token_id": 0,
    "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0, "rope_type": "proportional"},
        "sliding_attention": {"rope_theta": 10_000.0, "rope_type": "default"},
    },
}  # fmt: skip
"""Every kind of layer E2B has, in E2B's pattern, at a size two cores can train."""


def build_model(seed: int = SEED) -> Gemma4ForCausalLM:
    """Returns an initialized model in float32.

    Gemma 4 scales attention scores by 1.0, so q_norm sets how sharp attention starts: with weights of one it is stuck on one key.
    """
    torch.manual_seed(seed)
    model = Gemma4ForCausalLM(Gemma4TextConfig(**SHAPE))
    for name, parameter in model.named_parameters():
        if name.endswith("q_norm.weight"):
            torch.nn.init.constant_(parameter, 1.5 * parameter.shape[0] ** -0.5)
        elif parameter.dim() == 2:
            per_layer = "embed_tokens_per_layer" in name
            deviation = (
                0.1 if per_layer else 0.02 if "embed" in name else parameter.shape[1] ** -0.5
            )
            torch.nn.init.normal_(parameter, std=deviation)
    return model


def batches(renderer: Renderer, stage: Stage, rank: int) -> Iterator[Batch]:
    """Yields batches without end; chats of a pool are sorted by length so that little is padding."""
    rng = random.Random(stage.seed + rank)
    while True:
        pool: list[Encoded] = []
        while len(pool) < POOL_CHATS:
            encoded = renderer.encode(make_chat(rng, score=False, mix=stage.mix))
            if len(encoded.ids) <= stage.longest:
                pool.append(encoded)
        pool.sort(key=lambda e: (len(e.ids) // 4, sum(e.said)))
        groups: list[list[Encoded]] = [[]]
        for encoded in pool:
            if groups[-1] and len(encoded.ids) * (len(groups[-1]) + 1) > BATCH_TOKENS:
                groups.append([])
            groups[-1].append(encoded)
        rng.shuffle(groups)
        for group in groups:
            yield make_batch([(e.ids, e.said) for e in group])


def write_checkpoint(model: Gemma4ForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Writes the folder as a Hugging Face download has it: hub-style config, bf16 weights, tokenizer, template."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: tensor.detach().to(torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    config = {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "dtype": "bfloat16",
        **SHAPE,
    }
    generation = {
        "bos_token_id": 2,
        "pad_token_id": 0,
        "eos_token_id": STOP_IDS,
        "do_sample": False,
    }
    for name, content in (("config.json", config), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
    save(tokenizer, folder)


def make_tokenizer(seed: int = SEED) -> Tokenizer:
    """Trains the tokenizer on chats of their own seed."""
    rng, renderer = random.Random(seed), Renderer()
    return build(
        [renderer.chat(make_chat(rng, score=False)) for _ in range(TOKENIZER_CHATS)], VOCABULARY
    )


def work(rank: int, plan: Plan, number: int, shared: Tensor, barrier: Barrier) -> None:
    """One of the worker processes: each has a replica, a thread and its own chats; gradients meet in `shared`.

    Workers wait for each other twice a step instead of at every operation, which matters on a machine that others use too.
    """
    torch.set_num_threads(1)
    tokenizer = Tokenizer.from_file(str(plan.out / "tokenizer.json"))
    stage, model = STAGES[number], build_model()
    if number > 0:
        model.load_state_dict(load_file(plan.out / "model.safetensors"), strict=False)
    forward = TrainingForward(model, LONGEST)
    parameters = list(model.parameters())
    sizes = [p.numel() for p in parameters]
    optimizer = torch.optim.AdamW(
        parameters, lr=stage.peak, betas=(0.9, 0.98), weight_decay=0.01, fused=True
    )
    drawn = batches(Renderer(tokenizer), stage, rank)
    began, tokens, average = time.monotonic(), 0, 0.0
    for step in range(stage.steps):
        for group in optimizer.param_groups:
            group["lr"] = stage.rate(step)
        batch = next(drawn)
        loss = forward.loss(batch)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        shared[rank] = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])
        barrier.wait(WAIT_SECONDS)
        mean = shared.mean(0)
        barrier.wait(WAIT_SECONDS)
        for parameter, part in zip(parameters, torch.split(mean, sizes), strict=True):
            parameter.grad = part.view_as(parameter)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        tokens += batch.real * plan.workers
        average = loss.item() if step == 0 else 0.98 * average + 0.02 * loss.item()
        done = step + 1
        if rank == 0 and done % 100 == 0:
            seconds = time.monotonic() - began
            print(
                f"stage {number} step {done} loss {average:.4f}, {tokens:,} tokens, {tokens / seconds:.0f}/s, {seconds:.0f} s",
                flush=True,
            )
        if rank == 0 and (done % plan.save_every == 0 or done == stage.steps):
            write_checkpoint(model, tokenizer, plan.out)


def train(plan: Plan, first: int = 0) -> None:
    """Builds the tokenizer, then trains and writes the checkpoint every `save_every` steps and at the end."""
    plan.out.mkdir(parents=True, exist_ok=True)
    if first == 0:
        save(make_tokenizer(), plan.out)
    count = sum(p.numel() for p in build_model().parameters())
    print(f"{count:,} parameters", flush=True)
    shared = torch.zeros(plan.workers, count).share_memory_()  # type: ignore[no-untyped-call]
    barrier = torch.multiprocessing.get_context("spawn").Barrier(plan.workers)
    for number in range(first, len(STAGES)):
        spawn(work, (plan, number, shared, barrier), nprocs=plan.workers)  # type: ignore[no-untyped-call]


def main() -> None:
    """Reads the command line and trains."""
    parser = argparse.ArgumentParser(description="Train the embedded model.")
    parser.add_argument("out", type=Path, help="folder to write the checkpoint to")
    parser.add_argument("--save-every", type=int, default=500)
    parser.add_argument(
        "--workers", type=int, default=2, help="processes; another number gives another model"
    )
    parser.add_argument("--from-stage", type=int, default=0, help="go on from the weights in OUT")
    arguments = parser.parse_args()
    train(Plan(arguments.out, arguments.save_every, arguments.workers), arguments.from_stage)


if __name__ == "__main__":
    main()
