"""Trainer, gradient checkpointing, adapters."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from echo_lm.hf import EchoForCausalLM
from echo_lm.model import EchoLM

from .small import SOME, both, close, random_tokens

# The name that the oldest version we support knows, and that peft still uses.
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing. is dep:FutureWarning")

PROJECTIONS = {
    "echo-50m": ["q_proj", "k_proj", "v_proj", "in_proj", "out_proj", "lift_proj"],
    "echo-50m-paper": ["q_proj", "k_proj", "v_proj", "out_proj"],
    "mamba2-attention-50m": ["q_proj", "k_proj", "v_proj", "in_proj", "gate_proj"],
    "mamba3-50m": ["in_proj", "out_proj"],
}


def sentences(rows: int = 16, length: int = 12) -> list[dict[str, Tensor]]:
    """Each counts on from somewhere."""
    starts = torch.randint(40, (rows, 1)) + torch.arange(length)
    return [{"input_ids": row, "labels": row} for row in starts]


def trainer(model: Any, folder: Path, **options: Any) -> Trainer:
    how = dict(max_steps=6, per_device_train_batch_size=4, learning_rate=0.01, logging_steps=1)
    how |= dict(save_steps=3, report_to=[], use_cpu=True, disable_tqdm=True, seed=0)
    how |= dict(dataloader_pin_memory=False)
    arguments = TrainingArguments(output_dir=str(folder), **(how | options))
    return Trainer(model=model, args=arguments, train_dataset=sentences())


def losses(run: Trainer) -> list[float]:
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry]


def fresh(folder: Path) -> EchoForCausalLM:
    return AutoModelForCausalLM.from_pretrained(folder)


def test_a_trainer_trains_and_goes_on_where_it_was(tmp_path: Path) -> None:
    both("echo-50m", tmp_path / "model", torch.float32)
    torch.manual_seed(1)
    run = trainer(fresh(tmp_path / "model"), tmp_path / "run")
    run.train()
    told = losses(run)
    assert told[-1] < told[0] - 0.3
    torch.manual_seed(1)
    again = trainer(fresh(tmp_path / "model"), tmp_path / "again")
    again.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))
    assert losses(again) == told
    ended = EchoLM.from_pretrained(tmp_path / "run" / "checkpoint-6")
    for name, weight in again.model.state_dict().items():
        assert torch.equal(weight, ended.state_dict()[name]), name


def test_accumulated_gradients_are_those_of_the_whole_batch(tmp_path: Path) -> None:
    both("echo-50m", tmp_path / "model", torch.float32)
    told = []
    for size, pieces in ((4, 1), (2, 2)):
        torch.manual_seed(1)
        how = dict(per_device_train_batch_size=size, gradient_accumulation_steps=pieces)
        run = trainer(fresh(tmp_path / "model"), tmp_path / str(size), max_steps=3, **how)
        run.train()
        told.append(losses(run))
    assert told[0] == pytest.approx(told[1], rel=1e-3)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", SOME)
def test_checkpointed_gradients_are_the_same(name: str, reentrant: bool, tmp_path: Path) -> None:
    _, model = both(name, tmp_path)
    model.train()
    tokens = random_tokens(model.lm, 2, 14)

    def gradients() -> list[Tensor | None]:
        model.zero_grad()
        model(tokens, labels=tokens).loss.backward()
        return [p.grad for p in model.parameters()]

    wanted = gradients()
    model._set_gradient_checkpointing(True, partial(checkpoint, use_reentrant=reentrant))
    assert all(block.checkpoint is not None for block in model.blocks)
    assert all(torch.equal(a, b) for a, b in zip(gradients(), wanted, strict=True))
    model._set_gradient_checkpointing(False)
    assert all(block.checkpoint is None for block in model.blocks)


def test_a_trainer_may_ask_for_checkpointing(tmp_path: Path) -> None:
    both("echo-50m", tmp_path / "model", torch.float32)
    told = []
    for on in (False, True):
        torch.manual_seed(1)
        model = fresh(tmp_path / "model")
        run = trainer(model, tmp_path / str(on), max_steps=2, gradient_checkpointing=on)
        run.train()
        assert all((block.checkpoint is not None) == on for block in model.blocks)
        told.append(losses(run))
    assert told[0] == told[1]


@pytest.mark.parametrize("name", SOME)
def test_lora_on_the_projections(name: str, tmp_path: Path) -> None:
    ours, model = both(name, tmp_path / "model", torch.float32)
    tokens = random_tokens(ours, 2, 10)
    lora = LoraConfig(task_type="CAUSAL_LM", target_modules=PROJECTIONS[name], r=2)
    adapted = get_peft_model(model, lora)
    torch.testing.assert_close(adapted(tokens).logits, ours(tokens).logits)
    trained = [n for n, p in adapted.named_parameters() if p.requires_grad]
    assert trained
    assert all("lora_" in n for n in trained)
    adapted.train()
    run = trainer(adapted, tmp_path / "run", max_steps=4, per_device_train_batch_size=16)
    run.train()
    assert losses(run)[-1] < losses(run)[0]
    adapted.eval()
    adapted.save_pretrained(tmp_path / "adapter")
    again = PeftModel.from_pretrained(fresh(tmp_path / "model"), tmp_path / "adapter").eval()
    wanted = adapted(tokens).logits
    assert torch.equal(again(tokens).logits, wanted)
    written = adapted.generate(tokens, max_new_tokens=4, do_sample=False)
    assert written.shape == (2, 14)
    merged = again.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    plain = EchoLM.from_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(plain(tokens).logits, wanted, rtol=1e-3, atol=1e-4)


def test_the_parts_may_be_replaced(tmp_path: Path) -> None:
    """The model within reads through whatever has taken a part's place."""
    ours, model = both("echo-50m", tmp_path)
    tokens = random_tokens(ours, 2, 7)
    model.set_input_embeddings(torch.nn.Embedding(61, 32).double())
    model.set_output_embeddings(torch.nn.Linear(32, 5).double())
    got = model(tokens).logits
    x = ours.read(model.get_input_embeddings()(tokens)).hidden
    close(got, model.get_output_embeddings()(x))
