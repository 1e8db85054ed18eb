"""syncengine's engine: collectives, communicators and the gradient reducer (csrc/bindings/).

Calls that may wait release the GIL and react to Ctrl-C within about 50 ms. Errors are those of `syncengine.errors`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C._distributed_c10d import Backend as _Backend
from torch._C._distributed_c10d import ProcessGroup

has_cuda: bool
"""Whether this build has a CUDA side. Without one, asking for CUDA raises InvalidUsage."""

has_test_hooks: bool
"""Whether this build has the fault-injection hooks that the tests use."""

def instruction_set() -> str:
    """The instruction set of the reduction kernels: "scalar", "avx2" or "avx512" (SYNCENGINE_ISA chooses)."""

def solo(options: dict[str, Any]) -> Communicator:
    """The communicator of a job of one rank: no thread, no shared memory. `options` as for LocalBootstrap."""

def backend_communicators() -> list[Communicator]:
    """The communicators below all backends of this process that have not been shut down."""

def end_backends() -> None:
    """Closes these, and completes what futures they still owe. Before the interpreter ends."""

class Work:
    """The future of one asynchronous collective. Dropping it does not cancel the collective."""

    def wait(self, timeout: float | None = None) -> None:
        """Blocks until the collective has ended; raises its error.

        `timeout` in seconds: past it Timeout is raised and the communicator fails, since the tensor is in use.
        """

    def is_completed(self) -> bool:
        """Whether it has ended, well or not.

        Where a tensor is copied to be reduced (one that is not contiguous, say), the result is in it only after wait().
        """

    def exception(self) -> Exception | None:
        """The error it ended with; None if it ended well or has not ended."""

class Communicator:
    """A group of ranks that run collectives together.

    Made by `syncengine.init` and `split`. May be used from any thread; all ranks must make the same calls in the same
    order. After an error out of a collective (but for InvalidUsage, which is told before it begins) it stays
    failed: each later call raises the first error.
    """

    @property
    def rank(self) -> int:
        """This process's rank in the group."""

    @property
    def size(self) -> int:
        """The number of ranks in the group."""

    @property
    def global_ranks(self) -> list[int]:
        """Of each member, its rank in the whole job."""

    @property
    def numerics(self) -> str:
        """The order of summation: "rank_order", "ring" or "fast"."""

    @property
    def timeout(self) -> float:
        """Seconds after which a collective gives up."""

    @property
    def links(self) -> str:
        """Between hosts: which way collectives take, and what was measured. Empty on one host."""

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum", async_op: bool = False) -> Work | None:
        """Reduces `tensor` in place over all ranks: the same shape, strides and dtype on each.

        `op`: "sum", "avg" (floating dtypes), "product", "min", "max". A Work if `async_op`, else waits.
        """

    def broadcast(self, tensor: torch.Tensor, src: int, async_op: bool = False) -> Work | None:
        """Overwrites `tensor` on every rank by that of rank `src` of the group."""

    def reduce_scatter(
        self, output: torch.Tensor, input: torch.Tensor, op: str = "sum", async_op: bool = False
    ) -> Work | None:
        """Reduces `input` (size * output.numel() elements) over all ranks; rank r keeps its part r in `output`."""

    def all_gather(self, output: torch.Tensor, input: torch.Tensor, async_op: bool = False) -> Work | None:
        """Collects every rank's `input` in `output` (size * input.numel() elements), in rank order."""

    def barrier(self, async_op: bool = False, device: torch.device | None = None) -> Work | None:
        """Returns when every rank has called it; with a CUDA `device`, its current stream waits instead."""

    def split(self, ranks: Sequence[int]) -> Communicator | None:
        """A communicator of `ranks` of this one, this rank among them; None for an empty list.

        Every rank must call it, and all members must name the same ranks. New ranks are in the order of the old ones.
        """

    def empty(self, sizes: Sequence[int], dtype: torch.dtype, device: torch.device | None = None) -> torch.Tensor:
        """An uninitialized tensor in memory that the local peers read and write: collectives on it copy nothing.

        On a CUDA `device` a collective call: all ranks make the same tensors in the same order.
        """

    def abort(self, text: str) -> None:
        """Fails everything pending, here and on all peers, which raise Aborted with `text`."""

    def close(self) -> None:
        """Leaves in good order; a peer that still waits for this rank gets PeerLost. Later calls raise InvalidUsage."""

    def counters(self) -> dict[str, int]:
        """What this rank did so far.

        `operations`; with several ranks also `staged_bytes`, `direct_bytes` and `one_shot_bytes` (of inputs, by path),
        `messages` that have ended well, `direct_messages` received straight out of the sender's arena,
        `interhost_bytes` (sent to other hosts, without the transport's own) and `sleeps` (of all communicators of this
        process). What concerns CUDA tensors begins with `cuda_`.
        """

class LocalBootstrap:
    """How the ranks of a job find each other: exchange addresses, then, if there are several hosts, what listen()
    gives, then connect.

    `options`: `numerics`, `algorithm` and `gradient_memory` (str), `timeout` and `log_after` (seconds), `arena_bytes`
    (0: the machine's memory), `host_id` (str: makes several hosts of one; "" for one). All are needed.
    """

    def __init__(self, rank: int, size: int, options: dict[str, Any]) -> None: ...
    def address(self) -> bytes:
        """Opaque bytes, less than 4 KiB, that every other rank needs."""

    def hosts(self, addresses: Sequence[bytes]) -> list[int]:
        """The host of each rank, numbered from 0 in the order of ranks. `addresses` by rank."""

    def on_one_network(self, addresses: Sequence[bytes]) -> bool:
        """Whether the hosts are parts of one machine, whose loopback interface reaches them all."""

    def listen(self, options: dict[str, Any]) -> bytes:
        """Listens for ranks of other hosts. Opaque bytes, at most 256, that every other rank needs.

        `options`: `interface` (str: name, prefix or address; "" is loopback), `sockets` (int: connections a peer),
        `checksum` (bool), `secret` and `secret_file` (str: "" for none). All are needed.
        """

    def connect(
        self,
        addresses: Sequence[bytes],
        timeout: float,
        global_ranks: Sequence[int] | None = None,
        network_addresses: Sequence[bytes] | None = None,
        mover: Mover | None = None,
    ) -> Communicator:
        """The communicator of all ranks. `addresses` by rank, the own one among them; `timeout` in seconds. Once.

        `global_ranks` is what messages call the ranks; None: as they are. Where there are several hosts it needs either
        `network_addresses`, what listen() gave, by rank, or a `mover`.
        """

class Mover:
    """What moves packets between hosts, for one LocalBootstrap.connect()."""

def python_mover(mover: object, by: str, checksum: bool) -> Mover:
    """By an object with two methods, called on one thread of the engine's; what they raise loses all peers.

    `step(posts: list[tuple[int, int, bool, memoryview]]) -> list[tuple[int, str]]` posts packets, each with its number,
    the peer's rank in the job, whether it is sent (else received), and its memory; and says which of all have ended,
    with an error or "". It never blocks. Packets between two ranks stay in order; those that meet have the same size.
    `close(in_order: bool)` comes last; if not `in_order`, packets are still under way.

    `by` names the mover in errors. `checksum`: of all data.
    """

def torch_mover(
    group: ProcessGroup,
    ranks: Sequence[int],
    tag: int,
    closed: Callable[[], object],
    by: str,
    checksum: bool,
    open_device_backend: Callable[[list[int], str], _Backend] | None = None,
) -> Mover:
    """By a process group on whose CPU tensors send and recv work.

    `ranks`: in the group, of each rank of the job. Nobody else uses `tag` there. `closed` is called once it is not
    needed any more. `open_device_backend(ranks, name)` makes a c10d backend that moves CUDA tensors between these ranks
    of the job, for a `name` that is not used twice; any thread calls it, on all of these ranks. Else as python_mover.
    """

def end_movers() -> None:
    """Says goodbye to all ranks that movers reach, within a second. Before the interpreter ends."""

class Backend(_Backend):
    """The torch.distributed backend "syncengine": a communicator with c10d's face. Made by init_process_group.

    What c10d offers of a backend is inherited: monitored_barrier(), abort(), shutdown(), set_timeout(), ...
    """

    def __init__(self, communicator: Communicator) -> None: ...
    @property
    def communicator(self) -> Communicator:
        """The engine's communicator below."""

    def split(self, ranks: Sequence[int]) -> Backend | None:
        """The backend of `ranks` of this group, in ascending order; None on a rank that is not among them.

        Every rank must call it.
        """

    def perform_nocolor_split(self, device: torch.device) -> None:
        """Nothing. torch asks it of ranks that a new group leaves out, if the default group is bound to a CPU."""

    @property
    def options(self) -> _Backend.Options:
        """What torch keeps of its settings."""

class Reducer:
    """Averages the gradients of one model while its backward still runs. Used by `Parallel`.

    `parameters` and `parameter_names` are the same on all ranks, whether they require a gradient now or not;
    `model_name` is for messages. `sparse` says of each parameter whether its gradients are of sparse layout. The
    options are those of DDP. Parameters on CUDA get flat buckets; `flat_buckets` is for tests of these on the CPU, in a
    build with test hooks.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        model_name: str,
        parameter_names: Sequence[str],
        communicator: Communicator,
        sparse: Sequence[bool],
        *,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        skip_all_reduce_unused_params: bool = False,
        gradient_as_bucket_view: bool = False,
        batched_grad_copy: bool = False,
        gradients_in_arena: bool = True,
        flat_buckets: bool = False,
    ) -> None: ...
    def begin_forward(self, synchronize: bool) -> bool:
        """A forward with gradients enabled begins; `synchronize`: its backward will average.

        True if a plan must be installed before such a forward runs.
        """

    def prepare_for_backward(self, outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The forward has ended with these outputs.

        Where unused parameters are looked for, and one is: the leaves that the outputs depend on and that are none of
        the parameters.
        """

    def prepare_for_local_backward(self, outputs: Sequence[torch.Tensor]) -> None:
        """A forward whose backward will not average has ended with these outputs."""

    def install_plan(self, buckets: Sequence[Sequence[int]], provisional: bool) -> None:
        """Sets the buckets: indices of parameters, in the order in which they are expected to be ready.

        `provisional`: another plan is wanted once the order of readiness is known.
        """

    def ready_order(self) -> list[int]:
        """Parameters in the order in which the last synchronized backward brought their gradients."""

    def average_over(self, divisor: float, weight: float) -> None:
        """The next synchronized backward gives the sum over ranks of weight * gradient, divided by `divisor`.

        `divisor` is the same on all ranks; by default it is their number.
        """

    def expect_shadows(self) -> None:
        """In the next synchronized backward some rank has no batch: no bucket is skipped."""

    def shadow_backward(self) -> None:
        """Takes part in a synchronized backward of the others without a gradient of its own."""

    def set_comm_hook(self, state: Any, hook: Any) -> None:
        """All buckets go through `hook(state, bucket)` instead of the engine. At most one of these three, once."""

    def set_compression(self, dtype: torch.dtype, divides_first: bool = True) -> None:
        """Gradients travel as `dtype`: float16 or bfloat16; each is divided by the number of ranks, or their sum is."""

    def set_all_reduce_hook(self) -> None:
        """As without a hook, but rounded as torch's all-reduce hook does, which divides."""

    def set_static_graph(self) -> None:
        """As the option; before the first backward."""

    def install_futures(self, futures: Sequence[torch.futures.Future[Any]]) -> None:
        """Waited for at the end of the next synchronized backward."""

    def has_averaged(self) -> bool:
        """Whether the last backward has averaged: for hooks that run after it."""

    def check_finalized(self) -> None:
        """Raises InvalidUsage, naming the parameters, if a synchronized backward is not complete."""

    def remove_hooks(self) -> None:
        """Stops listening to autograd."""

    def timeline(self) -> dict[str, Any]:
        """When things happened in the last timed step, in nanoseconds.

        `steps`: how many were timed. Since the epoch: `forward_start`, `backward_start`, `backward_end` (the last
        gradient), `comm_start` (the first bucket), `comm_end`, and `ready`, a list in the order of readiness. How
        long: `forward`, `backward`, `comm` and `overlap` (of the last two), each a pair of last one and average.
        """

    def set_sample_rate(self, rate: int) -> None:
        """Times the first 10 steps, and then one of `rate`."""

    def statistics(self) -> dict[str, Any]:
        """What the last synchronized backward moved.

        `backwards` (so far), `buckets`, `reduced_bytes`, and `copied_bytes`: a dict by reason.
        """
