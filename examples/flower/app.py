"""Flower's app for examples/with_flower.py: a server with FedAvg or FedBuff, and clients that ask their host."""

import json
import time
from collections.abc import Callable, Iterable
from multiprocessing.connection import Client
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg, Result

EXAMPLES = "num-examples"  # FedAvg's name for a reply's weight


def origins(replies: Iterable[RecordDict], _: str = "") -> MetricRecord:
    """The hosts whose answers make a version, in this order, and the version from which each began."""
    metrics = [reply["metrics"] for reply in replies]
    return MetricRecord({name: [each[name] for each in metrics] for name in ("host", "began")})


class FedBuff(FedAvg):
    """Buffered asynchronous aggregation (https://arxiv.org/abs/2106.06639): nobody waits for anybody.

    A node that is free trains from the newest weights. Whenever `buffer` replies are there, the weights move by the
    mean of the changes in these, each times (1 + n) ** -0.5 if it began n versions ago. A round is a version.
    A node that answers with an error is asked again when there is a new version, or nobody else is at work.
    """

    def __init__(self, buffer: int, **settings: object) -> None:
        super().__init__(**settings)
        self.buffer = buffer

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Runs all rounds, as Strategy.start does, but `timeout`, in seconds, is for all of them.

        Clients evaluate nothing.
        """
        result, version, newest = Result(), 0, initial_arrays.to_numpy_ndarrays()
        sent: dict[str, tuple[int, int, list[np.ndarray]]] = {}  # by message: the node, from which version, its arrays
        replies: list[RecordDict] = []
        changes: list[list[np.ndarray]] = []
        failed: set[int] = set()
        end = time.monotonic() + timeout
        while version < num_rounds and time.monotonic() < end:
            failed = failed if sent else set()
            for node in {*grid.get_node_ids()} - failed - {node for node, _, _ in sent.values()}:
                config = ConfigRecord({**(train_config or {}), "server-round": version + 1})
                content = RecordDict({self.arrayrecord_key: ArrayRecord(newest), self.configrecord_key: config})
                (name,) = grid.push_messages([Message(content, dst_node_id=node, message_type=MessageType.TRAIN)])
                sent[name] = node, version, newest
            for reply in grid.pull_messages([*sent]):
                node, began, base = sent.pop(reply.metadata.reply_to_message_id)
                if reply.has_error():
                    failed.add(node)
                    continue
                factor = np.float32((1 + version - began) ** -0.5 / self.buffer)
                arrays = reply.content[self.arrayrecord_key].to_numpy_ndarrays()
                changes.append([factor * (new - old) for new, old in zip(arrays, base, strict=True)])
                replies.append(reply.content)
                if len(replies) == self.buffer:
                    newest, version = [sum(parts) for parts in zip(newest, *changes, strict=True)], version + 1
                    result.arrays = ArrayRecord(newest)
                    result.train_metrics_clientapp[version] = origins(replies)
                    if evaluate_fn is not None and (found := evaluate_fn(version, result.arrays)) is not None:
                        result.evaluate_metrics_serverapp[version] = found
                    replies, changes, failed = [], [], set()
            time.sleep(0.1)
        return result


server = ServerApp()


@server.main()
def serve(grid: Grid, context: Context) -> None:
    """Runs the server. Leaves each version's weights in the folder `out`, and at the end their origins in log.json."""
    config = context.run_config
    out = Path(config["out"])

    def keep(version: int, arrays: ArrayRecord) -> None:
        np.savez(out / "new.npz", *arrays.to_numpy_ndarrays())
        (out / "new.npz").rename(out / f"version{version}.npz")  # whole as soon as it is there

    settings = {"fraction_evaluate": 0.0, "min_train_nodes": 1, "min_available_nodes": 1}
    settings |= {"train_metrics_aggr_fn": origins}
    strategy = FedBuff(2, **settings) if config["strategy"] == "fedbuff" else FedAvg(**settings)
    with np.load(out / "version0.npz") as first:
        arrays = ArrayRecord([first[name] for name in first.files])
    while len(list(grid.get_node_ids())) < config["hosts"]:
        time.sleep(0.1)
    result = strategy.start(grid, arrays, num_rounds=config["versions"], timeout=300, evaluate_fn=keep)
    log = [dict(result.train_metrics_clientapp[version]) for version in sorted(result.train_metrics_clientapp)]
    (out / "new.json").write_text(json.dumps(log))
    (out / "new.json").rename(out / "log.json")


client = ClientApp()


@client.train()
def train(message: Message, context: Context) -> Message:
    """Trains on the host's ranks, which listen at a socket: they outlive a message, and this process does not."""
    began = message.content["config"]["server-round"] - 1
    with Client(context.node_config["socket"]) as host:
        host.send((began, message.content["arrays"].to_numpy_ndarrays()))
        number, examples, arrays = host.recv()
    metrics = MetricRecord({EXAMPLES: examples, "host": number, "began": began})
    return Message(RecordDict({"arrays": ArrayRecord(arrays), "metrics": metrics}), reply_to=message)
