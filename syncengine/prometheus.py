"""Numbers of training for Prometheus: `pip install prometheus-client`, then one call on each rank.

from syncengine.prometheus import export

export(model, port=9400 + syncengine.local_rank())
"""

import weakref
from collections.abc import Iterator

from prometheus_client import REGISTRY, CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from syncengine.parallel import Parallel

# Key of Parallel.stats(), name, unit, factor from the key's unit, and help. docs/monitoring.md has the same table.
GAUGES = (
    ("step_ms", "syncengine_step", "seconds", 1e-3, "Median time of the last 1024 steps"),
    ("exposed_sync_ms", "syncengine_exposed_sync", "seconds", 1e-3, "Median wait for averages after backward"),
    ("late_ms", "syncengine_late", "seconds", 1e-3, "Median lateness of this rank in the last 100 steps"),
    ("latest_rank", "syncengine_latest_rank", "", 1, "Rank that is latest"),
    ("latest_rank_ms", "syncengine_latest_rank_late", "seconds", 1e-3, "Median lateness of the latest rank"),
    ("buckets", "syncengine_buckets", "", 1, "Buckets of the last step"),
    ("copied_bytes", "syncengine_copied", "bytes", 1, "Bytes of gradients copied in the last step"),
    ("staged_bytes", "syncengine_staged", "bytes", 1, "Bytes of gradients staged in the last step"),
)
COUNTERS = (
    ("steps", "syncengine_steps", "", "Synchronized backwards that ended well"),
    ("total_reduced_bytes", "syncengine_reduced_bytes", "bytes", "Bytes of gradients reduced"),
)


class Collector:
    """Gives the numbers of one model when Prometheus asks, with the label `rank`. Does not keep the model alive."""

    def __init__(self, model: Parallel) -> None:
        self._model = weakref.ref(model)
        self._rank = str(model.communicator.global_ranks[model.communicator.rank])

    def describe(self) -> list[GaugeMetricFamily]:
        """Returns no metric, so that registering this does not read all numbers from the model."""
        return []

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        """Yields each metric, or none once the model is gone."""
        if (model := self._model()) is None:
            return
        numbers = model.stats()
        for key, name, unit, factor, text in GAUGES:
            gauge = GaugeMetricFamily(f"{name}_{unit}" if unit else name, text, labels=["rank"], unit=unit)
            gauge.add_metric([self._rank], numbers[key] * factor)
            yield gauge
        for key, name, unit, text in COUNTERS:
            counter = CounterMetricFamily(name, text, labels=["rank"], unit=unit)
            counter.add_metric([self._rank], numbers[key])
            yield counter


def export(model: Parallel, port: int | None = None, registry: CollectorRegistry = REGISTRY) -> Collector:
    """Registers the numbers of ``model``; with a ``port``, also serves them there.

    Each rank of a host needs a port of its own. Without one, `prometheus_client.write_to_textfile` writes the numbers
    to a file for node_exporter, or the program serves the registry itself.
    """
    collector = Collector(model)
    registry.register(collector)
    try:
        if port is not None:
            start_http_server(port, registry=registry)
    except BaseException:
        registry.unregister(collector)
        raise
    return collector
