"""Tools of the tests on CUDA: a test on ranks, the job around a rank's body, batches, a step."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from cuda_ranks import marked, run_processes
from torch import nn

import syncengine


def deterministic() -> None:
    torch.backends.cudnn.deterministic = True
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False


@contextlib.contextmanager
def job(timeout: float = 60.0) -> Iterator[None]:
    """syncengine and Gloo, which is the oracle: it takes CUDA tensors over the host. Or the group that is there."""
    deterministic()
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    syncengine.init(timeout=timeout)
    yield
    torch.cuda.synchronize()
    syncengine.shutdown()
    dist.destroy_process_group()


def on_gpus(
    world: int = 2, hosts: str = "", in_job: bool = True
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Makes a function of a rank into a test, which passes if it returns on every rank, and nothing or an empty list.

    Its other parameters are those of the test, by `pytest.mark.parametrize`; one that is called `world` is the number
    of ranks, one that is called `hosts` says on which they live (run_processes). `in_job`: the function runs in `job`.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., None]:
        @functools.wraps(function)
        def test(**arguments: Any) -> None:
            letters = arguments.get("hosts", hosts)
            ranks = len(letters) or arguments.get("world", world)
            results = run_processes(ranks, functools.partial(_on_rank, test, in_job, arguments), hosts=letters)
            assert results == ["good"] * ranks, results

        _, *parameters = inspect.signature(function).parameters.values()
        test.__signature__ = inspect.Signature(parameters)
        return marked(test)

    return decorate


def _on_rank(test: Callable[..., None], in_job: bool, arguments: dict[str, Any], rank: int) -> Any:
    """The result of the function of `test`; "good" in place of nothing."""
    with job() if in_job else contextlib.nullcontext():
        return test.__wrapped__(rank, **arguments) or "good"


def batch(step: int, rank: int | None = None, size: int = 6) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + (dist.get_rank() if rank is None else rank))
    return torch.randn(size, 24, generator=generator).cuda()


def graph_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    """The loss, without its graph, which a capture must not meet."""
    optimizer.zero_grad(set_to_none=True)
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()
