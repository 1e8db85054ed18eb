"""What Prometheus gets: the numbers of Parallel.stats(), in OpenMetrics' names and units."""

import re
import socket
import urllib.request

import pytest
import torch
from pool import run_on_ranks
from ports import unused_ports
from repository import ROOT

import syncengine

prometheus_client = pytest.importorskip("prometheus_client", reason="make test installs prometheus-client")


def names_of(text: str) -> set[str]:
    return {line.split("{")[0] for line in text.splitlines() if line and not line.startswith("#")}


@run_on_ranks(world=2)
def test_each_rank_serves_its_numbers():
    from syncengine.prometheus import export

    registry = prometheus_client.CollectorRegistry()
    model = syncengine.Parallel(torch.nn.Linear(8, 8))
    (port,) = unused_ports()
    with socket.create_server(("0.0.0.0", 0)) as taken, pytest.raises(OSError, match="in use"):
        export(model, port=taken.getsockname()[1], registry=registry)
    export(model, port=port, registry=registry)
    for _ in range(3):
        model(torch.ones(2, 8)).sum().backward()
    numbers = model.stats()
    request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics")
    request.add_header("Accept", "application/openmetrics-text")
    text = urllib.request.urlopen(request, timeout=60).read().decode()
    assert text.count("# UNIT syncengine_step_seconds seconds") == 1
    label = f'{{rank="{syncengine.rank()}"}}'
    found = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(found[f"syncengine_steps_total{label}"]) == 3
    assert float(found[f"syncengine_reduced_bytes_total{label}"]) == 3 * 4 * (8 * 8 + 8)
    assert float(found[f"syncengine_step_seconds{label}"]) == pytest.approx(numbers["step_ms"] / 1000)
    table = (ROOT / "docs" / "monitoring.md").read_text()
    assert names_of(text) == set(re.findall(r"^\| `(syncengine_\w+)`", table, re.MULTILINE))
    del model
    assert names_of(urllib.request.urlopen(request, timeout=60).read().decode()) == set()
