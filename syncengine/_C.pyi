"""syncengine's engine: collectives, communicators and the gradient reducer (csrc/bindings/).

Calls that may wait release the GIL and react to Ctrl-C within about 50 ms. Errors are those of `syncengine.errors`.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NoReturn, overload

import torch
from numpy.typing import NDArray
from torch._C._distributed_c10d import Backend as _Backend
from torch._C._distributed_c10d import ProcessGroup

from syncengine.config import Numerics, Op

build_id: str  # of the sources that define what ranks share: 16 hexadecimal digits
has_cuda: bool
"""Whether this build has a CUDA side. Without one, asking for CUDA raises InvalidUsage."""

has_test_hooks: bool
"""Whether this build has the fault-injection hooks that the tests use."""

def instruction_set() -> str:
    """The instruction set of reductions (set by SYNCENGINE_ISA): "avx512", "avx2", "neon-bf16", "neon" or "scalar"."""

def machine() -> dict[str, Any]:
    """The resources that this process may use, as the engine sees them.

    `available_cores`, by affinity and the cgroups' quotas; `available_memory`, the bytes that the machine and the
    cgroups' limits leave before the OOM killer acts; `total_memory`, the machine's, in bytes; `open_descriptors`, how
    many this process has open; `most_descriptors` (`ulimit -n`); `best_instruction_set`.
    """

def start_trace(path: str, events: int, about: str, steps: int) -> None:
    """Begins a trace: the last `events` events of this process are kept in the file `path`, which outlives the process.

    `about`, the first text in the file, describes this rank. After so many `steps` the trace stops by itself; with 0 it
    does not. Raises `InvalidUsage` if this process has a trace already, or if the file can't be made.
    """

def stop_trace() -> None:
    """Ends this rank's trace, and notes in its file that the rank has ended it. Does nothing without a trace."""

def trace_path() -> str:
    """The path of this process's trace, also if it has stopped by itself; empty without one and after stop_trace()."""

def trace_now() -> int:
    """The time as traces have it: nanoseconds of a clock that all processes of a machine share."""

def begin_optimizer(*args: Any) -> None:
    """Notes, for times of steps, that an optimizer's step begins. Ignores arguments, in which torch's hooks differ."""

def end_optimizer(*args: Any) -> None:
    """Notes, for times of steps, that an optimizer's step has ended."""

def network_interfaces() -> list[tuple[str, str]]:
    """Name and address of each network interface that is up, in the order in which Linux lists them."""

def host_key(host_id: str) -> str:
    """A key that is equal on ranks that share a host, and so memory. `host_id`: SYNCENGINE_HOST_ID, or ""."""

def death_notices() -> list[str]:
    """The ways in which ranks of this machine notice each other's deaths: "robust futexes", "process handles" (pidfd).

    The quickest comes first. A way that Linux or a sandbox refuses is left out.
    """

def throw_system_error(text: str, code: int, call: str) -> NoReturn:
    """Raises InvalidUsage. Its text: `text` (what has failed), the system's message for errno `code`, and a remedy.

    `call`: the name of the system call that Linux or a sandbox has refused, for the remedy.
    """

def probe_shared_memory(bytes: int) -> None:
    """Makes and maps shared memory as ranks do, and frees it. Raises the error that ranks would raise."""

class JobOptions:
    """A communicator's settings, mostly of `syncengine.config`. Only tests set `algorithm` and `host_algorithm`."""

    def __init__(self) -> None: ...
    numerics: str
    algorithm: str
    host_algorithm: str
    gradient_memory: str
    timeout: float  # seconds, as log_after
    timeout_call: str  # what sets it, for errors: "init(timeout=...)"
    log_after: float
    arena_bytes: int  # 0: the machine's memory
    host_id: str  # makes several hosts of one; "" for one

class NetworkOptions:
    """The settings of TCP: where to listen for ranks of other hosts, and how to talk to them."""

    def __init__(self) -> None: ...
    interface: str  # name, prefix or address; "" is loopback
    sockets: int  # connections a peer
    checksum: bool
    log_after: float  # seconds, as in JobOptions
    silence: float  # seconds without a sign of life after which a peer is lost
    secret: str  # "" for none, as in secret_file
    secret_file: str

def solo(options: JobOptions, global_rank: int = 0) -> Communicator:
    """The communicator of one rank, which messages call `global_rank`: no thread, no shared memory."""

def backend_communicators() -> list[Communicator]:
    """The communicators of this process's torch.distributed backends, without backends that were shut down."""

def end_backends() -> None:
    """Closes the communicators of all backends, and completes their futures. Called before the interpreter ends."""

class Work:
    """The future of one asynchronous collective. Dropping it does not cancel the collective."""

    def wait(self, timeout: float | None = None) -> None:
        """Blocks until the collective has ended; raises its error.

        `timeout` in seconds: past it Timeout is raised and the communicator fails, since the tensor is in use.
        """

    def is_completed(self) -> bool:
        """Whether the collective has ended, well or not.

        A tensor that is copied to be reduced (because it has gaps, say) has the result once somebody has waited, or
        this method has said that the collective has ended.
        """

    def exception(self) -> Exception | None:
        """The error with which the collective ended; None if it ended well or has not ended."""

class Communicator:
    """A group of ranks that run collectives together.

    `syncengine.init` and `split` make communicators. They may be used from any thread; all ranks must make the same
    calls in the same order. A communicator stays failed after an error in a collective (except InvalidUsage, which is
    raised before the collective begins): each later call raises the first error.
    """

    @property
    def rank(self) -> int:
        """This process's rank in the group."""

    @property
    def size(self) -> int:
        """The number of ranks in the group."""

    @property
    def global_ranks(self) -> list[int]:
        """The rank of each member in the whole job."""

    @property
    def numerics(self) -> Numerics:
        """The order of summation: "rank_order", "ring" or "fast"."""

    @property
    def timeout(self) -> float:
        """Seconds after which a collective gives up."""

    @property
    def links(self) -> str:
        """The sizes from which on collectives between hosts go by chain or relay, as a text. Empty on one host.

        An example: "all_reduce by chain from 256 KiB (16-bit never), broadcast by relay never".
        """

    @overload
    def all_reduce(self, tensor: torch.Tensor, op: Op = "sum", async_op: Literal[False] = False) -> None: ...
    @overload
    def all_reduce(self, tensor: torch.Tensor, op: Op = "sum", *, async_op: Literal[True]) -> Work: ...
    @overload
    def all_reduce(self, tensor: torch.Tensor, op: Op = "sum", async_op: bool = False) -> Work | None:
        """Reduces `tensor` in place over all ranks: the same shape, strides and dtype on each.

        `op`: "sum", "avg" (floating dtypes), "product", "min", "max". Returns a Work if `async_op`, otherwise waits.
        """

    @overload
    def broadcast(self, tensor: torch.Tensor, src: int, async_op: Literal[False] = False, layout: str = "") -> None: ...
    @overload
    def broadcast(self, tensor: torch.Tensor, src: int, async_op: Literal[True], layout: str = "") -> Work: ...
    @overload
    def broadcast(self, tensor: torch.Tensor, src: int, async_op: bool = False, layout: str = "") -> Work | None:
        """Overwrites `tensor` on every rank with the tensor of rank `src` of the group.

        `layout`, if any, says what the bytes mean: it must be the same on all ranks, and errors name this call by it.
        """

    @overload
    def reduce_scatter(
        self, output: torch.Tensor, input: torch.Tensor, op: Op = "sum", async_op: Literal[False] = False
    ) -> None: ...
    @overload
    def reduce_scatter(
        self, output: torch.Tensor, input: torch.Tensor, op: Op = "sum", *, async_op: Literal[True]
    ) -> Work: ...
    @overload
    def reduce_scatter(
        self, output: torch.Tensor, input: torch.Tensor, op: Op = "sum", async_op: bool = False
    ) -> Work | None:
        """Reduces `input` (size * output.numel() elements) over all ranks; rank r keeps its part r in `output`."""

    @overload
    def all_gather(self, output: torch.Tensor, input: torch.Tensor, async_op: Literal[False] = False) -> None: ...
    @overload
    def all_gather(self, output: torch.Tensor, input: torch.Tensor, async_op: Literal[True]) -> Work: ...
    @overload
    def all_gather(self, output: torch.Tensor, input: torch.Tensor, async_op: bool = False) -> Work | None:
        """Collects every rank's `input` in `output` (size * input.numel() elements), in rank order."""

    @overload
    def barrier(self, async_op: Literal[False] = False, device: torch.device | None = None) -> None: ...
    @overload
    def barrier(self, async_op: Literal[True], device: torch.device | None = None) -> Work: ...
    @overload
    def barrier(self, async_op: bool = False, device: torch.device | None = None) -> Work | None:
        """Blocks until every rank has called it; with a CUDA `device`, its current stream waits instead."""

    def split(self, ranks: Sequence[int]) -> Communicator | None:
        """A communicator of `ranks` of this one, this rank among them; None for an empty list.

        Every rank must call it, and all members must name the same ranks. New ranks are in the order of the old ones.
        """

    def shrink(self, patience: float = 30.0) -> Communicator:
        """Makes a communicator of the members that are left after a failure, in their order.

        The communicator itself has failed for good. Each member that is left must call this, whether it has noticed the
        failure or not; pending calls of others end with ``Aborted``. Nothing is connected anew, and no launcher's store
        is needed. Members that have not called it after ``patience`` seconds, because they are stopped, are left out:
        they raise ``Aborted`` when they do.

        Over several hosts it raises ``PeerLost`` on members that are too few to go on without those that can't be
        reached, and ``InvalidUsage`` where tcp does not connect the hosts. Raises ``InvalidUsage`` on a communicator
        that was closed or has been shrunk before.
        """

    def empty(self, sizes: Sequence[int], dtype: torch.dtype, device: torch.device | None = None) -> torch.Tensor:
        """An uninitialized tensor in memory that the local peers read and write: collectives on it copy nothing.

        With a CUDA `device`, all ranks make the same tensors in the same order.
        """

    def abort(self, text: str, error: str = "Aborted") -> None:
        """Fails everything pending, here and on all peers, which raise `error` with `text`.

        `error` is "PeerLost", "Timeout", "Mismatch", "Aborted" or "InvalidUsage".
        """

    def check_peers(self) -> None:
        """Looks for ended or failed peers. Raises the error with which this communicator has failed, if it has."""

    @property
    def hosts(self) -> list[int]:
        """The host of each member, numbered from 0."""

    def ended(self) -> list[int]:
        """Ranks in the job of the members whose processes are known to have ended."""

    def close_devices(self) -> None:
        """Closes a failed communicator's queues on CUDA devices, which would keep the communicator alive.

        Waits for the devices. Memory that a peer may still have mapped stays allocated until the process ends. Not
        collective.
        """

    def exception(self) -> BaseException | None:
        """The error with which the communicator has failed, and which each later call raises; None if it has not."""

    def close(self) -> None:
        """Disconnects in good order. Peers that still wait for it get PeerLost; later calls here raise InvalidUsage."""

    def counters(self) -> dict[str, int]:
        """Counts of this rank's operations, bytes and messages so far.

        `operations`; with several ranks also bytes of inputs, by their path within a host: `staged_bytes` by copies in
        shared memory, `direct_bytes` in place, `one_shot_bytes` of small all-reduces; `messages` that have succeeded;
        `interhost_bytes`, sent to other hosts, without headers; and `sleeps` of this process's threads, for all its
        communicators together. Counts of CUDA tensors begin with `cuda_`.
        """

class LocalBootstrap:
    """The way in which the ranks of a new communicator find each other.

    They exchange addresses; then, if there are several hosts, the bytes that listen() returns; then they connect.
    """

    def __init__(self, rank: int, size: int, options: JobOptions, global_ranks: Sequence[int] | None = None) -> None:
        """`global_ranks` has the numbers by which errors and log lines name the ranks; None stands for 0, 1, 2, ..."""

    def address(self) -> bytes:
        """The address of this rank, for every other rank: opaque, less than 4 KiB."""

    def hosts(self, addresses: Sequence[bytes]) -> list[int]:
        """The host of each rank, numbered from 0 in the order of ranks. `addresses` by rank."""

    def on_one_network(self, addresses: Sequence[bytes]) -> bool:
        """Whether the hosts are parts of one machine, whose loopback interface reaches them all."""

    def unseen(self, addresses: Sequence[bytes]) -> list[int]:
        """The global ranks on this host whose processes can't be watched from here."""

    def listen(self, options: NetworkOptions) -> bytes:
        """Listens for ranks of other hosts. Returns an address for every other rank: opaque, at most 256 bytes."""

    def connect(
        self,
        addresses: Sequence[bytes],
        timeout: float,
        network_addresses: Sequence[bytes] | None = None,
        transport: PacketTransport | None = None,
        lost: Callable[[], str] | None = None,
    ) -> Communicator:
        """Connects all ranks; called once. `addresses` are by rank, this rank's included; `timeout` is in seconds.

        With several hosts it needs either `network_addresses`, which listen() has returned, by rank, or a `transport`.
        `lost` is called now and then. If it returns a text, which says why some ranks will not come, the wait ends by
        PeerLost.
        """

class PacketTransport:
    """A transport that moves packets between hosts, for one LocalBootstrap.connect()."""

def python_packet_transport(transport: object, by: str, checksum: bool) -> PacketTransport:
    """Makes a packet transport of an object with two methods, which one of the engine's threads calls.

    `step(posts: list[tuple[int, int, bool, memoryview]]) -> list[tuple[int, str]]` posts packets, each with its number,
    the peer's rank as connect() numbers them, whether it is sent (else received), and its memory. It never blocks, and
    returns the numbers of packets that have completed since the last call, each with an error or "". Packets between
    two ranks stay in order; a send and its receive have the same size. `close(in_order: bool)` is the last call; if not
    `in_order`, packets are still in flight. If either method raises, all peers are lost.

    `by` names the transport in errors. `checksum` adds checksums to all data.
    """

def torch_packet_transport(
    group: ProcessGroup,
    ranks: Sequence[int],
    tag: int,
    closed: Callable[[], object],
    by: str,
    checksum: bool,
    silence: float,
) -> PacketTransport:
    """Makes a packet transport of a process group whose send and recv take CPU tensors.

    `ranks`: for each rank, as connect() numbers them, its rank in the group. Nobody else may use `tag` in that group.
    `closed` is called once the transport is not needed any more. `silence`: seconds without a heartbeat after which a
    rank is lost; 0: never. `by` and `checksum` are as in python_packet_transport.
    """

def announce_end() -> None:
    """Lets other hosts know, when this rank leaves them, that its process ends: so no init() there waits for it."""

def end_packet_transports() -> None:
    """Disconnects from all ranks that packet transports (of MPI or torch.distributed) reach, within a second.

    Called before the interpreter ends, since the threads of these transports may take the GIL.
    """

class Backend(_Backend):
    """The torch.distributed backend "syncengine": a communicator with c10d's interface. Made by init_process_group.

    c10d's own methods are inherited: monitored_barrier(), abort(), shutdown(), set_timeout(), ...
    """

    def __init__(self, communicator: Communicator) -> None: ...
    @property
    def communicator(self) -> Communicator:
        """The engine's communicator below this backend."""

    def split(self, ranks: Sequence[int]) -> Backend | None:
        """The backend of `ranks` of this group, in ascending order; None on a rank that is not among them.

        Every rank must call it.
        """

    def perform_nocolor_split(self, device: torch.device) -> None:
        """Does nothing. torch calls it on ranks that a new group leaves out, if the default group is bound to a CPU."""

    @property
    def options(self) -> _Backend.Options:
        """The options of this backend, such as its timeout, in torch's class for them."""

class ReducerOptions:
    """The options of a Reducer: DDP's options first, then our own."""

    def __init__(self) -> None: ...
    find_unused_parameters: bool
    static_graph: bool
    skip_all_reduce_unused_params: bool
    gradient_as_bucket_view: bool
    batched_grad_copy: bool
    waits_in_between: bool  # ranks wait in forward or backward, too: an error there is the end of the communicator
    nonfinite: str  # "raise" or "warn": ranks say who brings NaN or Inf into a gradient; "" by default
    flat_buckets: bool  # on the CPU, too, as on CUDA: for tests

class StepTimes:
    """The times of one model's steps. They may outlive the model."""

    def __init__(self) -> None: ...
    def summary(self) -> tuple[int, int, NDArray[Any], list[list[int]]]:
        """A tuple of two counts, a table of times, and stamps (csrc/steps/step_times.h).

        The counts are of synchronized backwards that have ended well, and of bytes that they have reduced. The table
        has a row for each of the last 1024 of these, in no order, of times by `trace_now()`: when the step before
        ended; when the forward, the backward, the first bucket and the wait for averages began; when the step ended. A
        time is 0 if there was no such moment. The stamps are a list for each of the last 100 steps in which two ranks
        or more have times: each rank's own times, packed into one number; 0 for a rank without.
        """

class CommonMemory:
    """Memory that the ranks of a host have in common, with notes of how far each rank is with updates of it.

    A forked child maps the memory copy-on-write: it reads the ranks' bytes, and its own writes stay its own. An update
    is a step of a ShardedOptimizer, whose weights lie here; updates are numbered from 1.
    """

    @property
    def bytes(self) -> int:
        """How many bytes there are for tensors."""

    def tensor(self, offset: int, sizes: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """The tensor at `offset` (bytes), with a storage of its own. Raises InvalidUsage if it is not inside."""

    def decide(self, number: int, proceeds: bool) -> bool:
        """Returns whether update `number` is made. The first rank that calls this decides that, by its `proceeds`."""

    def complete(self, rank: int, number: int) -> None:
        """Notes for the other ranks that rank `rank` of this host has made its part of update `number`."""

    def completed(self, ranks: int) -> list[int]:
        """For each rank of the host, the number of its last completed update. `ranks`: how many ranks the host has."""

    def tear(self, number: int) -> None:
        """Notes for all ranks that update `number` will never be complete, so that they do not use the weights."""

    @property
    def torn(self) -> int:
        """The number of the update that a rank has left half done, so that it will never be complete; 0 for none."""

    def detach(self) -> bool:
        """Makes the memory a private copy at its addresses. Nobody may write meanwhile. False if memory is short."""

class MemoryExchange:
    """The way in which the ranks of a host come to have memory in common.

    One rank makes the memory, all exchange addresses, then all call exchange(). `bytes` is 0 on all ranks but the
    maker. Raises InvalidUsage, with the bytes wanted and available, if memory is short.
    """

    def __init__(self, bytes: int) -> None: ...
    def address(self) -> bytes:
        """The address of this rank, with a secret, for the others: less than 144 bytes."""

    def exchange(
        self, rank: int, addresses: Sequence[bytes], maker: int, timeout: float, global_ranks: Sequence[int]
    ) -> CommonMemory:
        """The memory that rank `maker` has made. All ranks of the host call it, once.

        `addresses`: each rank's address(), empty for ranks of other hosts. Messages call the ranks by `global_ranks`.
        """

def storage_references(tensor: torch.Tensor) -> int:
    """How many tensors, views and other objects hold this tensor's memory."""

def is_borrowed(tensor: torch.Tensor) -> bool:
    """Whether other code than torch has made this tensor's memory, and may hold it: numpy, DLPack, a buffer."""

def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the tensor's elements lie without gaps and do not share memory."""

def return_free_memory() -> None:
    """Returns memory that was freed, but that malloc keeps, to Linux, where the C library can do that."""

def say(lines: str) -> None:
    """Has `lines`, each with its newline, written to stderr by a thread that nobody waits for."""

def await_said() -> None:
    """Waits until the lines given to say() are written to stderr, a second at most."""

def fault_point(name: str) -> None:
    """Marks a point at which tests kill, stop or delay this process. Does nothing in a build without test hooks."""

class WatchedWeights:
    """Finds out whether parameters were written to or moved. One call looks at all, since many calls are slow."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        """Notes the parameters' addresses, for good, and their versions."""

    def note(self) -> None:
        """Notes the parameters' present versions, as those of weights to which nobody has written."""

    def note_update(self) -> None:
        """Raises the parameters' versions after an update by all ranks, and notes them."""

    def moved(self) -> int | None:
        """The index of the first parameter that has other memory, shape or strides than at first; None if none has."""

    def written(self) -> int | None:
        """The index of the first parameter that has another version than noted; None if none has."""

    def gradients(self) -> bytes:
        """A byte for each parameter: 0 if it has no gradient, 1 if a dense one, 2 if one of another layout."""

class WeightSlices:
    """Parts of parameters, as the tensors that an optimizer updates."""

    def __init__(self, slices: Sequence[tuple[torch.Tensor, torch.Tensor, int]]) -> None:
        """A slice is (parameter, tensor, begin): the tensor has all elements, or as a vector some from `begin` on."""

    def take_gradients(self) -> None:
        """Sets each tensor's `.grad` to its part of the parameter's, or None: a view, or a copy if strides need it."""

    def drop_gradients(self) -> None:
        """Sets each tensor's `.grad` to None: the gradients belong to the parameters alone."""

def note_incoming(parameters: Sequence[torch.Tensor]) -> None:
    """Notes, from now on, which tensors autograd brings to these leaves, for `owns_gradient`.

    This ends for a leaf to which somebody adds a hook by `register_hook`. Call it between backwards; a second call does
    no harm.
    """

def owns_gradient(parameter: torch.Tensor) -> bool:
    """Whether nobody else can read or write the memory of the dense `.grad`, in a post-accumulate hook or later.

    False if anything else holds that memory, except a tensor that `note_incoming` has noted and nobody else keeps.
    """

class NodeNumber:
    """A moment on this thread, which separates the autograd nodes that the thread makes before it and after it."""

    def __init__(self) -> None: ...

def cut_tree(leaves: int, ranks: int) -> tuple[list[int], list[int]]:
    """Cuts the binary tree over micro-batches (`leaves`) into one node for each rank. Returns two lists.

    The first list has the first leaf of each rank's node, then the number of all leaves. The second has, for each node,
    a number of merges: to add up all nodes, put their sums on a stack, one after another, and after each replace the
    two sums at the top by their sum that many times. Raises InvalidUsage if there are fewer `leaves` than `ranks`.
    """

class TreeSums:
    """Sums of gradients of this rank's micro-batches in one step, until each is added to another: see `cut_tree`."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None: ...
    def take(self, merges: int) -> bool:
        """Moves the gradients of one micro-batch out of `.grad`; then, `merges` times, the last two sums become one.

        Returns whether there was any gradient.
        """

    def deliver(self, divisor: float) -> None:
        """Puts the one sum that is left, divided by `divisor`, into `.grad`."""

class Reducer:
    """Averages the gradients of one model while its backward still runs. Used by `Parallel`.

    `parameters` and `parameter_names` are the same on all ranks, whether they require a gradient now or not;
    `model_name` is for messages. `sparse` says of each parameter whether its gradients are of sparse layout.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        model_name: str,
        parameter_names: Sequence[str],
        communicator: Communicator,
        sparse: Sequence[bool],
        options: ReducerOptions,
    ) -> None: ...
    def begin_forward(self, synchronize: bool) -> bool:
        """Begins a forward with gradients enabled. `synchronize`: its backward will average.

        Returns True if a bucket plan must be installed before a forward runs whose backward will average.
        """

    def follow_parameters(self) -> bool:
        """Adapts the reducer's hooks to parameters that the module has frozen, unfrozen or changed within its forward.

        Returns True if another plan must be installed before the backward.
        """

    def prepare_for_backward(
        self, outputs: Sequence[torch.Tensor], began: NodeNumber | None = None
    ) -> list[torch.Tensor]:
        """Ends the forward. Hooks on `outputs` will notice its backward: on none whose graph is older than `began`.

        If a parameter is unused, and unused parameters are looked for or the last backward has brought no gradient,
        returns leaves of their graph that are not parameters of the model: one may have replaced the unused parameter.
        """

    def prepare_for_local_backward(self, outputs: Sequence[torch.Tensor], began: NodeNumber) -> None:
        """Takes the outputs of a forward whose backward will not average."""

    def knows_order(self) -> bool:
        """Whether the plan is provisional, and a backward has shown the order of readiness. The same on all ranks."""

    def refuse_forward(self, text: str, voted: bool = False) -> None:
        """Refuses the forward: it raised, as `text` says ("raised in forward: ..."), or a parameter was replaced.

        `voted`: the other ranks call `vote_on_forward` behind this forward.
        The other ranks lose this step of the model, too: they raise `Aborted` with `text` where they wait for it.
        """

    def can_refuse(self) -> bool:
        """Whether a forward can be refused without failing the communicator: not with SyncBatchNorm, for example."""

    def vote_on_forward(self) -> None:
        """Waits for all ranks, which call it after a forward. Raises `Aborted` if one has refused the forward."""

    def is_undecided(self) -> bool:
        """Whether the other ranks still decide what becomes of .grad, since this rank has refused a forward."""

    def decide(self) -> None:
        """Blocks while is_undecided(). Then .grad is as before the forward if all ranks raised in it, else None."""

    def reserve_slots(self, copy_of: int | None = None) -> int:
        """Agrees with the other ranks on the buckets' slots: numbers by which a rank announces that a bucket is ready.

        All ranks call it once, before the first plan. Returns the first slot's number, which also numbers the model.
        `copy_of`: the number of the model of which this one is a copy.
        """

    def wanted(self) -> list[int]:
        """Parameters that a plan is to cover: those that require a gradient, and, where unused ones are looked for,
        those that have ever required one. All ranks have the same."""

    def install_plan(self, buckets: Sequence[Sequence[int]], provisional: bool) -> None:
        """Sets the buckets: indices of parameters, in the order in which they are expected to be ready.

        A `provisional` plan is replaced once the order of readiness is known.
        """

    def ready_order(self) -> list[int]:
        """Parameters in the order in which their gradients became ready in the last synchronized backward."""

    def average_over(self, divisor: float, weight: float) -> None:
        """Sets how the backward of the forward that has begun averages, and only that backward.

        An average is the sum of weight * gradient over all ranks, divided by `divisor`. The divisor is the same on all
        ranks, by default their number.
        """

    def expect_shadows(self) -> None:
        """Says that some rank has no batch in the coming backward, so that no rank skips a bucket there."""

    def shadow_backward(self) -> None:
        """Takes part, without gradients of this rank's own, in a synchronized backward of the other ranks. Blocks."""

    def set_comm_hook(self, state: Any, hook: Any) -> None:
        """Sends all buckets through `hook(state, bucket)` instead of the engine.

        The reducer holds both, which Python's garbage collector does not see: a cycle through them is never freed. Only
        one of set_comm_hook, set_compression and set_all_reduce_hook may be called, once.
        """

    def set_compression(self, dtype: torch.dtype, divides_first: bool = True) -> None:
        """Averages gradients in `dtype`, float16 or bfloat16. `divides_first`: each is divided by the number of ranks
        before they are summed, as torch's compressing hooks do; otherwise as without compression."""

    def set_all_reduce_hook(self) -> None:
        """Averages as without a hook, but rounds as torch's all-reduce hook, which divides first."""

    def set_static_graph(self) -> None:
        """Makes the graph static, as the option `static_graph` does. Call it before the first backward."""

    def complete_step(self, sums: TreeSums, total: int, number: int) -> None:
        """Says that the next synchronized backward is that of this rank's last micro-batch in step `number`.

        It averages over all `total` micro-batches of all ranks: `sums`, of this rank's other micro-batches, are added
        while it runs.
        """

    def end_step(self) -> bool:
        """Ends a step of micro-batches. Returns whether a backward has completed it; if none has, forgets which
        parameters the step used."""

    def drop_step(self) -> None:
        """Drops a step of micro-batches, and expects no backward of its last forward any more."""

    def backwards(self) -> int:
        """How many backwards have begun through outputs of this model, averaged or this rank's own."""

    def install_futures(self, futures: Sequence[torch.futures.Future[Any]]) -> None:
        """Makes the end of the next synchronized backward wait for these futures."""

    def has_averaged(self) -> bool:
        """Whether the user's post-accumulate hooks on parameters are running now, with averages in `.grad`."""

    def check_finalized(self) -> None:
        """Raises InvalidUsage, naming the parameters, if a synchronized backward is not complete."""

    def graph_is_static(self) -> bool:
        """Whether each synchronized backward so far has brought gradients of the same parameters on this rank."""

    def last_error(self) -> str:
        """The error of the last forward or backward that was given up; empty if there was none."""

    def not_averaged(self) -> str:
        """Why `.grad` does not hold the averages of the last backward; empty if it does."""

    def remove_hooks(self) -> None:
        """Removes the hooks on parameters. Later backwards do not average; synchronized forwards raise InvalidUsage."""

    def step_times(self) -> StepTimes:
        """The times of the model's steps."""

    def statistics(self) -> dict[str, Any]:
        """Counts of the last synchronized backward.

        `backwards` (so far), `buckets`, `reduced_bytes`; `copied_bytes` and `staged_bytes`: dicts by reason; and
        `shortage`: why the memory for gradients could not grow, or "".
        """
