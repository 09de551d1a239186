"""Several processes on one run, started by torchrun: who holds what, and what they tell each other.

Each process takes its rows of every batch. Batches, and so the order of the data, do not depend on
how many processes there are, and checkpoints hold whole tensors: a run may go on with another
strategy, or with more or fewer processes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, cast, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from echo_lm.model.lm import EchoLM
from echo_lm.tasks.base import Batch
from echo_lm.train.optimiser import AdamW

Strategy = Literal["alone", "ddp", "zero1", "fsdp2"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)


class Alone:
    """One process with everything. The others are told by how they differ from it."""

    rank, ranks = 0, 1

    def prepare(self, model: EchoLM, compute: Any) -> Any:
        """What is to be called for a step in the place of `compute`: the model, maybe compiled."""
        return compute

    def optimiser(self, groups: list[dict[str, Any]]) -> Any:
        return AdamW(groups, fused=True)

    def stop_updates(self, optimiser: Any, found: Tensor) -> None:
        """Let the optimiser take no step while `found` is 1, without asking the device."""
        optimiser.found_inf = found

    def share(self, batch: Batch) -> Batch:
        """This process's rows."""
        if len(batch.tokens) % self.ranks:
            raise ValueError(
                f"A batch of {len(batch.tokens)} rows cannot be shared evenly by {self.ranks} "
                "processes; choose a multiple."
            )
        return batch if self.ranks == 1 else batch.rows(slice(self.rank, None, self.ranks))

    def gathering(self, model: Any, last: bool) -> AbstractContextManager[None]:
        """Around a backward pass; gradients are shared in the last one of a step."""
        return nullcontext()

    def total(self, value: Tensor) -> Tensor:
        """Summed over the processes."""
        return value

    def clip(self, model: nn.Module, most: float | None) -> Tensor:
        """Shorten the gradient to `most`, if there is one; returns how long it was."""
        return torch.nn.utils.clip_grad_norm_(
            model.parameters(), math.inf if most is None else most
        )

    def agree(self, wish: bool, *, now: bool) -> bool:
        """Whether a process wishes so; several of them ask each other only `now`."""
        return wish

    def whole(self, model: EchoLM) -> AbstractContextManager[None]:
        """Within it every parameter is there, to be read."""
        return nullcontext()

    def weights(self, model: EchoLM) -> dict[str, Tensor]:
        """What the main process writes of a model; all of them must ask."""
        return model.state_dict()

    def moments(self, model: EchoLM, optimiser: Any) -> dict[str, Tensor]:
        """The optimiser's state under the names of the parameters: `exp_avg.head.weight`."""
        return {
            f"{entry}.{name}": tensor
            for name, parameter in model.named_parameters()
            for entry, tensor in optimiser.state.get(parameter, {}).items()
        }

    def load_moments(self, model: EchoLM, optimiser: Any, tensors: dict[str, Tensor]) -> None:
        """The inverse of `moments`; every tensor goes to where the optimiser keeps it."""
        for name, parameter in model.named_parameters():
            entries = {
                key.removesuffix(f".{name}"): tensor
                for key, tensor in tensors.items()
                if key.partition(".")[2] == name
            }
            if entries:
                self.load_moments_of(parameter, optimiser, entries)

    def load_moments_of(
        self, parameter: nn.Parameter, optimiser: Any, entries: dict[str, Tensor]
    ) -> None:
        device = parameter.device
        optimiser.state[parameter] = {k: t.to(device) for k, t in entries.items()}


class DDP(Alone):
    """Everyone has all weights and all of the optimiser's state."""

    def __init__(self) -> None:
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()

    def prepare(self, model: EchoLM, compute: Any) -> Any:
        from torch.nn.parallel import DistributedDataParallel

        return DistributedDataParallel(compute)

    def gathering(self, model: Any, last: bool) -> AbstractContextManager[None]:
        # The bare model, which is searched for what went wrong, shares nothing in any case.
        return nullcontext() if last or isinstance(model, EchoLM) else model.no_sync()

    def total(self, value: Tensor) -> Tensor:
        summed = value.clone()
        dist.all_reduce(summed)
        return summed

    def agree(self, wish: bool, *, now: bool) -> bool:
        if not now:
            return False
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        return bool(self.total(torch.tensor(int(wish), device=device)))


class Zero1(DDP):
    """Everyone has all weights; each keeps the optimiser's state of some (ZeRO stage 1)."""

    def optimiser(self, groups: list[dict[str, Any]]) -> Any:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return ZeroRedundancyOptimizer(groups, AdamW, fused=True)

    def stop_updates(self, optimiser: Any, found: Tensor) -> None:
        optimiser.optim.found_inf = found

    def moments(self, model: EchoLM, optimiser: Any) -> dict[str, Tensor]:
        """Who has none of a parameter adds zeros to those who do."""
        moments: dict[str, Tensor] = {}
        for name, parameter in model.named_parameters():
            mine = optimiser.optim.state.get(parameter, {})
            for entry in ("step", "exp_avg", "exp_avg_sq"):
                like = parameter.detach() if entry != "step" else parameter.new_zeros(())
                moments[f"{entry}.{name}"] = self.total(mine.get(entry, torch.zeros_like(like)))
        return moments

    def load_moments_of(
        self, parameter: nn.Parameter, optimiser: Any, entries: dict[str, Tensor]
    ) -> None:
        mine = [p for group in optimiser.optim.param_groups for p in group["params"]]
        if any(parameter is p for p in mine):
            super().load_moments_of(parameter, optimiser.optim, entries)


class FSDP2(DDP):
    """Each has a part of every weight, and of the optimiser's state of it."""

    def prepare(self, model: EchoLM, compute: Any) -> Any:
        from torch.distributed.fsdp import fully_shard

        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        return compute

    def gathering(self, model: Any, last: bool) -> AbstractContextManager[None]:
        model.set_requires_gradient_sync(last)
        return nullcontext()

    def clip(self, model: nn.Module, most: float | None) -> Tensor:
        return whole_tensor(super().clip(model, most))

    @contextmanager
    def whole(self, model: EchoLM) -> Iterator[None]:
        parts = [*model.blocks, model]
        for part in parts:
            cast(Any, part).unshard()
        try:
            yield
        finally:
            for part in parts:
                cast(Any, part).reshard()

    def weights(self, model: EchoLM) -> dict[str, Tensor]:
        return {name: whole_tensor(t) for name, t in super().weights(model).items()}

    def moments(self, model: EchoLM, optimiser: Any) -> dict[str, Tensor]:
        return {k: whole_tensor(t) for k, t in super().moments(model, optimiser).items()}

    def load_moments_of(
        self, parameter: nn.Parameter, optimiser: Any, entries: dict[str, Tensor]
    ) -> None:
        from torch.distributed.tensor import distribute_tensor

        held = cast(Any, parameter)
        optimiser.state[parameter] = {
            entry: distribute_tensor(t.to(held.device), held.device_mesh, held.placements)
            if t.dim()
            else t.to(held.device)
            for entry, t in entries.items()
        }


KINDS: dict[Strategy, type[Alone]] = {"alone": Alone, "ddp": DDP, "zero1": Zero1, "fsdp2": FSDP2}


def whole_tensor(tensor: Any) -> Tensor:
    """All of what the processes hold together."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


@contextmanager
def processes(strategy: Strategy, device: str) -> Iterator[tuple[Alone, str]]:
    """Join the processes torchrun has started; yields the strategy and this one's device."""
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy must be one of {', '.join(STRATEGIES)}, got {strategy!r}.")
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if strategy == "alone":
        if started > 1:
            raise ValueError(
                f'torchrun has started {started} processes and strategy is "alone"; choose '
                "ddp, zero1 or fsdp2, or start one process."
            )
        yield Alone(), device
        return
    if "RANK" not in os.environ:
        raise ValueError(
            f"strategy {strategy!r} needs processes to share the work: start it with torchrun, "
            'such as torchrun --nproc-per-node 2 -m echo_lm.cli train ..., or choose "alone".'
        )
    if device == "cuda":
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.startswith("cuda") else "gloo")
    try:
        yield KINDS[strategy](), device
    finally:
        dist.destroy_process_group()
